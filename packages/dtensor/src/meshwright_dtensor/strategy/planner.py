"""What a planner is asked, and what it is: `PlanRequest` and `Planner`.  Torch-free.

`meshwright_planner.plan` and `meshwright_parallel.auto_parallelize` build the same request from the same keywords and
hand it to the planner that the plugin host knows by `request.planner`.
"""

from __future__ import annotations

import math
import os
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar

from meshwright_dtensor.cluster.cluster import Cluster
from meshwright_dtensor.errors import UsageError
from meshwright_dtensor.utils.bytesize import parse_size
from meshwright_dtensor.utils.names import did_you_mean, suggestion

if TYPE_CHECKING:
    from torch import nn

    from meshwright_dtensor.plan.plan import ParallelPlan

DEGREES = ("pp", "dp", "cp", "ep", "tp")
KEYWORDS: Mapping[str, str] = MappingProxyType({**{axis: axis for axis in DEGREES}, "zero": "zero_degree"})
"""Axes that have a keyword of their own, and which."""
PRECISIONS = ("fp32", "bf16", "fp16")

_CHOICES: Mapping[str, tuple[str, ...]] = {
    "context_attention": ("all_gather", "ring", "all_to_all"),
    "context_balance": ("none", "zigzag"),
}

_PIPELINE = ("microbatches", "schedule")

# Options of the API that nothing executes yet, with the value that asks for nothing and what would have to exist.
_NOT_BUILT: Mapping[str, tuple[Any, str]] = {
    "compile": (None, "compiled regions"),
}


@dataclass(frozen=True)
class PlanRequest:
    """The keywords of `plan`, checked.

    Args:
        cluster: name of a registered cluster, path of a `.json` file of one (kept as text), a Cluster, or None for the machine at
            hand.
        world_size: number of ranks, or None for that of the running job (1 when there is none).
        planner: name of a registered planner.
        cost_model: name of a registered cost model; None takes what was measured of the cluster, else its datasheet.
        optimizer: "adamw", "adam", "sgd" or "sgd-momentum": decides the memory of its state.
        global_batch_size: rows of the global batch when the example batch has another number, else None.
        top_k: how many plans to return, best first.
        memory_limit: bytes per rank that a plan may use (kept as a number; text such as "40GiB" will do), or None for what the
            cluster has.
        time_budget: seconds after which no further configuration is looked at, once one is known that fits; None for as
            long as it takes.
        tp, pp, cp, ep: degrees pinned by the user; None is searched.
        dp: pins the data ranks: the product of the axes dp and zero.
        degrees: axis -> degree, pinned by the user, for axes that have no keyword of their own (those of plugins).
        context_attention: "all_gather", "ring" or "all_to_all", pinned; None takes the cheapest.
        context_balance: "none" or "zigzag", pinned; None takes zig-zag for causal models whose sequence it divides.
        zero: pins the ZeRO stage, 1 to 3, or 0 for none; None is searched, with `dp` given only where nothing else fits.
        zero_degree: pins how many of the data ranks share one copy of the training state; by default all of them.
        precision: "bf16", "fp16" or "fp32": dtype that a float32 model is computed in; None is its own.
        recompute: "full", "alternate" or "selective" for every repeated block (see plan.RecomputeRule), or a pattern of module
            names (recomputed in full); None takes it up where nothing else fits the memory, in a pipeline stage by stage.
        sequence_parallel: True has tp split the sequence between blocks (norms, dropout, residual), False forbids it,
            None takes what is cheaper.
        microbatches: equal parts that a pipeline cuts the batch into; None is searched.
        schedule: name of a registered schedule; None searches all that are installed.
        keep_user_sharding: respect placements that the user marked (`mark_sharding`); False searches freely.
        the rest: options for which see DESIGN; whatever nothing executes yet is refused by `check`.
    """

    cluster: str | os.PathLike[str] | Cluster | None = None
    world_size: int | None = None
    planner: str = "eager"
    cost_model: str | None = None
    optimizer: str = "adamw"
    global_batch_size: int | None = None
    precision: str | None = None
    top_k: int = 1
    memory_limit: int | str | None = None
    time_budget: float | None = None
    tp: int | None = None
    pp: int | None = None
    dp: int | None = None
    cp: int | None = None
    ep: int | None = None
    degrees: Mapping[str, int] = field(default_factory=dict)
    context_attention: str | None = None
    context_balance: str | None = None
    zero: int | None = None
    zero_degree: int | None = None
    sequence_parallel: bool | None = None
    microbatches: int | None = None
    schedule: str | None = None
    recompute: str | None = None
    compile: str | bool | None = None
    keep_user_sharding: bool = True

    def __post_init__(self) -> None:
        if isinstance(self.cluster, os.PathLike):
            object.__setattr__(self, "cluster", os.fspath(self.cluster))
        if self.memory_limit is not None:
            object.__setattr__(self, "memory_limit", parse_size(self.memory_limit, "memory_limit"))

    @property
    def limit_bytes(self) -> int | None:
        """`memory_limit` as the number that it is."""
        return None if self.memory_limit is None else int(self.memory_limit)

    @property
    def pins(self) -> dict[str, int]:
        """The degrees that the user pinned, by axis; of dp and zero what follows for each of the two."""
        pins = dict(self.degrees)
        pins.update({axis: getattr(self, axis) for axis in DEGREES if getattr(self, axis) is not None})
        data, shards = pins.pop("dp", None), self.zero_degree
        if self.zero == 0:
            shards = 1
        elif self.zero is not None and shards is None:  # all data ranks share
            pins["dp"] = 1
            if data is not None:
                pins["zero"] = data
            return pins
        if shards is not None:
            pins["zero"] = shards
        if data is not None:
            pins["dp"] = data // (shards or 1)
        return pins

    def given(self) -> dict[str, Any]:
        """The keywords that were given, as plain data; `PlanRequest(**given)` asks for the same.

        A Cluster is no plain data; ranks and plans to return are the plan's own.
        """
        own = {one.name: getattr(self, one.name) for one in fields(self)}
        left_out = {"world_size", "top_k"} | ({"cluster"} if isinstance(self.cluster, Cluster) else set())
        before = {one.name: one.default for one in fields(self)} | {"degrees": {}}
        found = {n: v for n, v in own.items() if n not in left_out and v != before[n]}
        return {n: dict(v) if isinstance(v, Mapping) else v for n, v in found.items()}

    @property
    def shares(self) -> bool:
        """Whether the user asks for shared training state."""
        return bool(self.zero) or self.zero_degree is not None

    @property
    def options(self) -> dict[str, Any]:
        """The keywords that strategies know by name, those that were given."""
        names = (*_CHOICES, *_PIPELINE)
        return {name: getattr(self, name) for name in names if getattr(self, name) is not None}

    def check(self, axes: Collection[str]) -> None:
        """Refuse what cannot be done; `axes` are those that installed strategies own.

        Raises:
            UsageError: for a number out of range, a degree on an axis that no installed strategy owns, or an option
                that nothing executes yet.
        """
        numbers = ("world_size", "global_batch_size", "top_k", "zero_degree", "microbatches")
        for name in (*numbers, *DEGREES):
            _check_count(name, getattr(self, name))
        budget = self.time_budget
        number = isinstance(budget, (int, float)) and not isinstance(budget, bool)
        if budget is not None and not (number and 0 < budget < math.inf):
            raise UsageError(
                f"time_budget={budget!r} is no time; give seconds as a number greater than 0, or leave it out"
            )
        for name, nothing in (("keep_user_sharding", ""), ("sequence_parallel", ", or leave it out")):
            value = getattr(self, name)
            if not isinstance(value, bool) and not (value is None and nothing):  # any text is true
                raise UsageError(f"{name}={value!r} is neither True nor False; give one of them{nothing}")
        self._check_degrees(axes)
        for name, choices in _CHOICES.items():
            value = getattr(self, name)
            if value is not None and value not in choices:
                raise UsageError(unknown(name, value, choices))
        if self.zero is not None and (isinstance(self.zero, bool) or self.zero not in (0, 1, 2, 3)):
            number = isinstance(self.zero, (int, float)) and not isinstance(self.zero, bool)
            nearest = f"; the nearest is {3 if self.zero > 0 else 0}" if number else ""
            raise UsageError(f"zero={self.zero!r} is no stage; give 1, 2 or 3, or 0 for none{nearest}")
        if self.zero_degree is not None and self.zero == 0 and self.zero_degree > 1:
            raise UsageError(
                f"zero_degree={self.zero_degree} with zero=0: nothing is shared; leave one of them out"
            )
        if self.zero_degree is not None and self.dp is not None and self.dp % self.zero_degree:
            raise UsageError(
                f"zero_degree={self.zero_degree} does not divide dp={self.dp}, the data ranks; give a divisor"
            )
        if self.zero and self.dp == 1 and (self.world_size or 1) > 1:
            raise UsageError(
                f"zero={self.zero} with dp=1: one data rank has nobody to share with; give dp more, or leave zero out"
            )
        for name in ("context_attention", "context_balance"):
            if getattr(self, name) is not None and self.cp == 1 and (self.world_size or 1) > 1:
                raise UsageError(
                    f"{name}={getattr(self, name)!r} with cp=1: no rank has a part of the sequence; give cp more, or "
                    f"leave {name} out"
                )
        if self.precision is not None and self.precision not in PRECISIONS:
            raise UsageError(unknown("precision", self.precision, PRECISIONS))
        if self.shares and "zero" not in axes:
            raise UsageError(
                f"zero={self.zero!r}, zero_degree={self.zero_degree!r}: no installed strategy owns the axis 'zero'; "
                "install a distribution that registers one (meshwright-parallel does), or leave them out"
            )
        if self.recompute is not None and (not isinstance(self.recompute, str) or not self.recompute):
            raise UsageError(
                f"recompute={self.recompute!r} is none of 'full', 'alternate', 'selective' and a pattern of module names; give "
                "one, or leave it out: it is taken up where memory asks for it"
            )
        for name, (default, missing) in _NOT_BUILT.items():
            if getattr(self, name) != default:
                raise UsageError(
                    f"{name}={getattr(self, name)!r}: nothing executes it yet, it needs {missing}; leave it out"
                )
        if self.cost_model is not None and (not isinstance(self.cost_model, str) or not self.cost_model):
            raise UsageError(
                f"cost_model={self.cost_model!r} is no name; give that of a registered cost model"
            )
        if self.schedule is not None and (not isinstance(self.schedule, str) or not self.schedule):
            raise UsageError(f"schedule={self.schedule!r} is no name; give that of a registered schedule")
        for name in _PIPELINE:
            if getattr(self, name) is not None and self.pp in (None, 1):
                raise UsageError(
                    f"{name}={getattr(self, name)!r} needs a pipeline; give pp a degree greater than 1 too"
                )
        for axis, degree in self.pins.items():
            if degree > 1 and axis not in axes:
                known = ", ".join(sorted(axes)) or "none"
                raise UsageError(
                    f"{axis}={degree}: no installed strategy owns the axis {axis!r} (installed axes: {known}); "
                    f"install a distribution that registers one, or leave {axis} out"
                )

    def _check_degrees(self, axes: Collection[str]) -> None:
        if not isinstance(self.degrees, Mapping):
            raise UsageError(f"degrees={self.degrees!r} is no mapping; give a dict of axis -> degree")
        for axis, degree in self.degrees.items():
            shown = f"degrees={{{axis!r}: {degree!r}}}"
            if axis in KEYWORDS:
                raise UsageError(
                    f"{shown}: the axis {axis!r} has a keyword of its own; give {KEYWORDS[axis]}={degree!r} instead"
                )
            if axis not in axes:
                close = did_you_mean(str(axis), axes)
                known = ", ".join(sorted(a for a in axes if a not in KEYWORDS)) or "none"
                raise UsageError(
                    f"{shown}: no installed strategy owns the axis {axis!r} (axes without a keyword: {known}); "
                    + (f"did you mean {close!r}?" if close else "install its distribution, or leave it out")
                )
            if degree is None:
                raise UsageError(
                    f"{shown}: give a whole number >= 1, or leave the axis out to have it searched"
                )
            _check_count(f"degrees[{axis!r}]", degree)


def unknown(name: str, value: object, choices: Collection[str]) -> str:
    """The message for a keyword whose value is none of its choices, with the one that was probably meant."""
    return f"{name}={value!r} is unknown; give one of {', '.join(choices)}{suggestion(value, choices)}"


def _check_count(name: str, value: object) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int):
        raise UsageError(f"{name}={value!r} is not an integer; give a whole number >= 1")
    if value < 1:
        raise UsageError(f"{name}={value} is less than 1; give a whole number >= 1")


class Planner(ABC):
    """Finds plans. Registered by a PlannerSpec; `name` is that of the record."""

    name: ClassVar[str]

    @abstractmethod
    def plan(self, model: nn.Module, batch: Any, request: PlanRequest) -> list[ParallelPlan]:
        """At most `request.top_k` plans for `model`, best first. The model is left as it was.

        Raises:
            InfeasibleError: no candidate fits, with by how much, and what would.
            UsageError: the request or the batch is at fault.
        """
