"""Clusters as JSON files: those of this package (folder `profiles`), a user's own, and what `meshwright calibrate` writes.

The fields are those of `meshwright_dtensor.cluster.Cluster`; what a file leaves out has that class's default.  Points of
measured curves are [size, seconds] pairs, sizes ascending.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from meshwright_dtensor.cluster import Cluster, LinkLevel, MeasuredCollective, MeasuredWork, SlowNode
from meshwright_dtensor.errors import UsageError
from meshwright_dtensor.strategy import CollectiveKind

FORMAT = "meshwright-cluster/1"

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Share = Annotated[float, Field(gt=0, le=1)]
Count = Annotated[int, Field(ge=1)]


def _ascending(points: tuple[tuple[float, float], ...]) -> tuple[tuple[float, float], ...]:
    if any(low[0] >= high[0] for low, high in pairwise(points)):
        raise ValueError("sizes must ascend")
    return points


Curve = Annotated[tuple[tuple[Positive, Positive], ...], AfterValidator(_ascending)]


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class _Level(_Part):
    name: str
    size: Annotated[int, Field(ge=0)] | None = None
    latency_s: NotNegative
    bandwidth_Bps: Positive
    sizes: tuple[Count, ...] = ()

    @model_validator(mode="after")
    def _sized(self) -> _Level:
        if self.size is None and not self.sizes:
            raise ValueError(
                f"{self.name!r} has neither size nor sizes; give the number of ranks that it joins, or size 0 for all ranks"
            )
        return self

    def level(self) -> LinkLevel:
        """The LinkLevel; with `sizes` only, its size is the largest."""
        size = max(self.sizes) if self.size is None else self.size
        return LinkLevel(self.name, size, self.latency_s, self.bandwidth_Bps, self.sizes)


class _Work(_Part):
    kind: str
    dtype: str
    forward: Annotated[Curve, Field(min_length=1)]
    backward: Curve = ()


class _Collective(_Part):
    kind: CollectiveKind
    degree: Annotated[int, Field(ge=2)]
    ranks: Annotated[int, Field(ge=0)] = 0
    points: Annotated[Curve, Field(min_length=1)]


class _Slow(_Part):
    node: Annotated[int, Field(ge=0)]
    compute: Annotated[float, Field(ge=1, allow_inf_nan=False)] = 1.0
    link: str | None = None
    share: Share = 1.0


class ClusterFile(_Part):
    """The content of a cluster file; see `Cluster` for the fields."""

    format: Literal["meshwright-cluster/1"]
    name: Annotated[str, Field(min_length=1)]
    source: Annotated[str, Field(min_length=1)]
    devices_per_node: Count
    memory_bytes: Count
    memory_bandwidth: Positive
    flops: dict[str, Positive]
    links: Annotated[tuple[_Level, ...], Field(min_length=1)]
    compute_efficiency: Share = 0.6
    memory_efficiency: Share = 0.8
    launch_s: NotNegative = 5e-6
    launch_backward_s: NotNegative | None = None
    host_s: NotNegative = 0.0
    dispatch_s: NotNegative = 0.0
    update_s: NotNegative = 0.0
    hides_launch: bool = True
    hides_communication: bool = True
    fused_attention: bool = True
    reserved_bytes: Annotated[int, Field(ge=0)] = 0
    interference: Annotated[float, Field(ge=0, lt=1)] = 0.0
    fragmentation: Annotated[float, Field(ge=0, lt=1)] = 0.0
    cores: Annotated[int, Field(ge=0)] = 0
    crowding: tuple[tuple[Count, Annotated[float, Field(ge=1)]], ...] = ()
    work: tuple[_Work, ...] = ()
    collectives: tuple[_Collective, ...] = ()
    slow_nodes: tuple[_Slow, ...] = ()

    @model_validator(mode="after")
    def _fits(self) -> ClusterFile:
        """Nodes and levels fit each other."""
        names = [level.name for level in self.links]
        if len(set(names)) < len(names):
            text = ", ".join(names)
            raise ValueError(f"links: two levels have the same name ({text}); names of levels must be unique")
        for slow in self.slow_nodes:
            node = f"slow_nodes: node {slow.node}"
            if slow.link is not None and slow.link not in names:
                raise ValueError(f"{node} names the link {slow.link!r}; there are {', '.join(names)}")
            if slow.link is None and slow.share != 1:
                raise ValueError(f"{node} has a share {slow.share:g} of no link; name it")
            if slow.link == names[0] and self.collectives:
                raise ValueError(
                    f"{node} has a share of {slow.link!r}, whose collectives were measured, slow node and all; leave the share "
                    "out, or the measurements"
                )
        inner = self.links[0]
        if inner.sizes and max(inner.sizes) != self.devices_per_node:
            raise ValueError(
                f"links: the nodes of {inner.name!r} have up to {max(inner.sizes)} ranks (sizes), and devices_per_node is "
                f"{self.devices_per_node}; make that the largest"
            )
        ends = [level.level().size for level in self.links]
        if inner.size and not inner.sizes and self.devices_per_node not in ends:
            raise ValueError(
                f"links: no level ends where nodes do: devices_per_node is {self.devices_per_node}, and {inner.name!r} joins "
                f"{inner.size} ranks; give that level, or one around it, the size {self.devices_per_node}"
            )
        if self.reserved_bytes >= self.memory_bytes:
            raise ValueError(
                f"reserved_bytes is {self.reserved_bytes}, and memory_bytes {self.memory_bytes}: nothing is left for a model; "
                "reserved_bytes must be less than memory_bytes"
            )
        _check_nested([level.level() for level in self.links])
        return self

    def cluster(self) -> Cluster:
        """The Cluster."""
        values = {name: getattr(self, name) for name in type(self).model_fields if name != "format"}
        values["links"] = tuple(level.level() for level in self.links)
        records = {"work": MeasuredWork, "slow_nodes": SlowNode, "collectives": MeasuredCollective}
        for name, kind in records.items():
            values[name] = tuple(kind(**item.model_dump()) for item in values[name])
        return Cluster(**values)


def _check_nested(levels: Sequence[LinkLevel]) -> None:
    """Check that every group of an outer level consists of whole groups of the inner level. Raises ValueError."""
    for inner, outer in pairwise(levels):
        if not (outer.size or outer.sizes):
            continue
        # sizes repeat their last, so a few of the outer groups are enough
        until = sum(outer.sizes) + 2 * (outer.sizes[-1] if outer.sizes else outer.size)
        cut = sorted(set(outer.groups(until)[:-1]) - set(inner.groups(until)))
        if cut:
            raise ValueError(
                f"links: a group of {outer.name!r} begins at rank {cut[0]}, inside of a group of {inner.name!r} (those begin at "
                f"{', '.join(map(str, inner.groups(until)[:4]))}, ...); a level must hold whole groups of the one inside of it"
            )


def read(path: str | Path) -> Cluster:
    """The cluster of a file. Raises UsageError: no such file, or a wrong field; the message names file, field and rule."""
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise UsageError(
            f"cluster file {str(path)!r} cannot be read ({error.strerror}); give a file that `meshwright calibrate` "
            f"wrote, or the name of a registered cluster"
        ) from None
    except UnicodeDecodeError as error:
        raise UsageError(
            f"cluster file {str(path)!r} is no text in UTF-8 (byte {error.start} is {error.object[error.start]:#04x}); give a "
            "JSON file saved as UTF-8"
        ) from None
    try:
        cluster_file = ClusterFile.model_validate_json(text, strict=False)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the file"
        raise UsageError(
            f"cluster file {str(path)!r}: {where}: {first['msg']}; see docs/planner.md for the fields of a cluster"
        ) from None
    if "float32" not in cluster_file.flops:
        raise UsageError(
            f"cluster file {str(path)!r}: flops has no 'float32', the rate of every dtype that it does not name; add it"
        )
    return cluster_file.cluster()


def write(cluster: Cluster, path: str | Path) -> None:
    """Save a cluster, so that `read` gives an equal one."""
    data: dict[str, Any] = {"format": FORMAT, **asdict(cluster)}
    del data["ranks"]
    lines = []
    for name, value in data.items():
        text = json.dumps(value)
        if isinstance(value, tuple) and value and isinstance(value[0], dict):
            # one line per record
            text = "[\n" + ",\n".join(f"    {json.dumps(item)}" for item in value) + "\n  ]"
        if value is not None:
            lines.append(f"  {json.dumps(name)}: {text}")
    Path(path).write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
