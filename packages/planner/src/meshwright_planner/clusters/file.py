"""Clusters as JSON files: those of this package (folder `profiles`), a user's own, and what `meshwright calibrate` writes.

The fields are those of `meshwright_dtensor.cluster.Cluster`; what a file leaves out has that class's default.  Points of
measured curves are [size, seconds] pairs, sizes ascending.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from itertools import islice, pairwise
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, ValidationError, model_validator

from meshwright_dtensor.cluster import Cluster, LinkLevel
from meshwright_dtensor.errors import UsageError

FORMAT = "meshwright-cluster/1"


def _fits(cluster: Cluster) -> Cluster:
    """Check that nodes and levels fit each other. Raises ValueError."""
    names = [level.name for level in cluster.links]
    if len(set(names)) < len(names):
        text = ", ".join(names)
        raise ValueError(f"links: two levels have the same name ({text}); names of levels must be unique")
    for slow in cluster.slow_nodes:
        if slow.link == names[0] and cluster.collectives:
            raise ValueError(
                f"slow_nodes: node {slow.node} has a share of {slow.link!r}, whose collectives were measured, slow node and all; "
                "leave the share out, or the measurements"
            )
    inner = cluster.links[0]
    if inner.sizes and max(inner.sizes) != cluster.devices_per_node:
        raise ValueError(
            f"links: the nodes of {inner.name!r} have up to {max(inner.sizes)} ranks (sizes), and devices_per_node is "
            f"{cluster.devices_per_node}; make that the largest"
        )
    ends = [level.size for level in cluster.links]
    if inner.size and not inner.sizes and cluster.devices_per_node not in ends:
        raise ValueError(
            f"links: no level ends where nodes do: devices_per_node is {cluster.devices_per_node}, and {inner.name!r} joins "
            f"{inner.size} ranks; give that level, or one around it, the size {cluster.devices_per_node}"
        )
    if cluster.reserved_bytes >= cluster.memory_bytes:
        raise ValueError(
            f"reserved_bytes is {cluster.reserved_bytes}, and memory_bytes {cluster.memory_bytes}: nothing is left for a model; "
            "reserved_bytes must be less than memory_bytes"
        )
    _check_nested(cluster.links)
    return cluster


class _File(BaseModel):
    """A cluster file. A field that the format or the cluster does not have, in any of its parts, is an error."""

    model_config = ConfigDict(extra="forbid")

    format: Literal["meshwright-cluster/1"]
    cluster: Annotated[Cluster, AfterValidator(_fits)]

    @model_validator(mode="before")
    @classmethod
    def _parts(cls, data: Any) -> Any:
        """The format, and the fields of the cluster; `ranks` is of a running job."""
        if not isinstance(data, dict):
            return data
        outside = {name: data[name] for name in ("format", "ranks") if name in data}
        fields = {name: value for name, value in data.items() if name not in outside}
        if isinstance(fields.get("links"), list):
            fields["links"] = [_sized(level) for level in fields["links"]]
        return {**outside, "cluster": fields}


def _sized(level: Any) -> Any:
    """A level without a size has that of its largest group."""
    if not isinstance(level, dict) or level.get("size") is not None:
        return level
    sizes = level.get("sizes")
    if not sizes:
        raise ValueError(
            f"links: {level.get('name')!r} has neither size nor sizes; give the number of ranks that it joins, or 0 for all ranks"
        )
    whole = isinstance(sizes, list) and all(isinstance(size, int) for size in sizes)
    return {**level, "size": max(sizes) if whole else 0}


def _check_nested(levels: Sequence[LinkLevel]) -> None:
    """Check that every group of an outer level consists of whole groups of the inner level. Raises ValueError."""
    for inner, outer in pairwise(levels):
        if not (outer.size or outer.sizes):
            continue
        # sizes repeat their last, so a few of the outer groups are enough
        until = sum(outer.sizes) + 2 * (outer.sizes[-1] if outer.sizes else outer.size)
        cut = [rank for rank in outer.groups(until)[:-1] if not inner.begins_at(rank)]
        if cut:
            raise ValueError(
                f"links: a group of {outer.name!r} begins at rank {cut[0]}, inside of a group of {inner.name!r} (those begin at "
                f"{', '.join(map(str, islice(inner.starts(), 4)))}, ...); a level must hold whole groups of the one inside of it"
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
        cluster = _File.model_validate_json(text, strict=False).cluster
    except UsageError as error:
        raise UsageError(f"cluster file {str(path)!r}: {error}") from None
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"] if part != "cluster") or "the file"
        raise UsageError(
            f"cluster file {str(path)!r}: {where}: {first['msg']}; see docs/planner.md for the fields of a cluster"
        ) from None
    if "float32" not in cluster.flops:
        raise UsageError(
            f"cluster file {str(path)!r}: flops has no 'float32', the rate of every dtype that it does not name; add it"
        )
    return cluster


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
