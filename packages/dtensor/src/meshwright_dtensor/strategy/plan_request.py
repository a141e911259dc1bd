"""The keywords of `plan`: their names, types, defaults and documentation, and the checks of their values. Torch-free.

`meshwright_planner.plan` and `meshwright_parallel.auto_parallelize` take these keywords (`with_plan_keywords`), build a
`PlanRequest` and pass it to the planner that the plugin host knows by `request.planner`.
"""

from __future__ import annotations

import functools
import inspect
import math
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import chain
from types import MappingProxyType
from typing import Any, TypedDict, TypeVar, cast

from meshwright_dtensor.cluster.cluster import Cluster
from meshwright_dtensor.errors import UsageError
from meshwright_dtensor.strategy.optimizer_names import optimizer_name
from meshwright_dtensor.utils.bytesize import parse_size
from meshwright_dtensor.utils.names import did_you_mean, suggestion

F = TypeVar("F", bound=Callable[..., Any])

DEGREES = ("pp", "dp", "cp", "ep", "tp")
KEYWORDS: Mapping[str, str] = MappingProxyType({**{axis: axis for axis in DEGREES}, "zero": "zero_degree"})
"""Axis -> the keyword that pins its degree, for axes that have one."""
PRECISIONS = ("fp32", "bf16", "fp16")
RANDOM_NUMBERS = ("exact", "fast")
UNITS = ("row", "tensor")
AUTO = "auto"
"""The value of `compile` that lets the planner choose."""

_CHOICES: Mapping[str, tuple[str, ...]] = {
    "context_attention": ("all_gather", "ring", "all_to_all"),
    "context_balance": ("none", "zigzag"),
}
_PIPELINE = ("microbatches", "schedule")
_COUNTS = ("world_size", "global_batch_size", "top_k", "zero_degree", "microbatches", *DEGREES)


class PlanKeywords(TypedDict, total=False):
    """The keywords of `plan` for type checkers; `PlanRequest` documents them and has their defaults."""

    cluster: str | os.PathLike[str] | Cluster | None
    world_size: int | None
    planner: str
    cost_model: str | None
    optimizer: str | type[Any] | functools.partial[Any]
    global_batch_size: int | None
    precision: str | None
    top_k: int
    memory_limit: int | str | None
    time_budget: float | None
    tp: int | None
    pp: int | None
    dp: int | None
    cp: int | None
    ep: int | None
    degrees: Mapping[str, int] | None
    context_attention: str | None
    context_balance: str | None
    zero: int | None
    zero_degree: int | None
    zero_unit: int | str | None
    sequence_parallel: bool | None
    microbatches: int | None
    schedule: str | None
    recompute: str | None
    compile: bool | str | Sequence[str] | None
    rng: str
    keep_user_sharding: bool


@dataclass(frozen=True)
class PlanRequest:
    """The keywords of `plan`.

    Args:
        cluster: name of a registered cluster, path of a `.json` file of one, a Cluster, or None for the local
            machine.
        world_size: number of ranks; None takes that of the running job, 1 if there is none.
        planner: name of a registered planner.
        cost_model: name of a registered cost model ("roofline", "measured", or of a plugin); None takes the measurements of the
            cluster, else its datasheet.
        optimizer: "adamw", "adam", "sgd", "sgd-momentum", "muon", "shampoo", "soap", "adamw8bit" or "adamw4bit"; or the class
            of such an optimizer, also in a functools.partial. It decides the memory of its states, and what shards along zero
            leave whole. "muon", "shampoo" and "soap" step the matrices of repeated blocks, and AdamW the rest.
        global_batch_size: rows of the global batch, if the example has another number.
        precision: "bf16", "fp16" or "fp32": dtype that a float32 model is computed in; None is its own.
        top_k: the most plans to return, best first.
        memory_limit: bytes per rank that a plan may use, or text such as "40GiB" (kept as a number); None takes what the
            cluster has.
        time_budget: seconds after which no further configuration is tried, once one is known that fits. Equal requests then
            need not give equal plans. None searches to the end.
        tp, pp, cp, ep: degrees to keep; None is searched.
        dp: data ranks to keep: the product of the axes dp and zero.
        degrees: axis -> degree to keep, for axes without a keyword here (those of plugins).
        context_attention: how ranks of cp share attention: "all_gather", "ring" or "all_to_all"; None takes the cheapest.
        context_balance: "none" or "zigzag"; None takes zig-zag for causal models whose sequence it divides.
        zero: ZeRO stage, 1 to 3, or 0 for none; None is searched, with `dp` given only if nothing else fits.
        zero_degree: data ranks that share one copy of the training state; all of them by default.
        zero_unit: what no border of their shards cuts: a number of elements of a parameter (a block that an optimizer quantizes
            states in), "row" or "tensor"; None takes what the optimizer needs, else equal chunks. Costs are those of chunks.
        sequence_parallel: True shards the sequence over tp between blocks (norms, dropout, residual), False forbids it, None
            takes what is cheaper.
        microbatches: equal parts that a pipeline (pp) cuts the batch into; None is searched.
        schedule: name of a registered pipeline schedule; None searches all that are installed.
        recompute: "full", "alternate" or "selective" for every repeated block (see plan.RecomputeRule), or a pattern of module
            names, recomputed in full; None recomputes only if nothing else fits the memory, in a pipeline stage by stage.
        compile: True runs the calls of every repeated block as compiled graphs (torch's inductor); or a pattern of module names,
            or several. "auto" compiles those repeated blocks in which fused operations are predicted to save 1% of the step; the
            plan lists them, and its notes say what each saves. What cannot be compiled runs as it is, and `regions` says why. None
            or False compiles nothing.
        rng: "exact" draws the random numbers of one device, on any layout; "fast" gives each shard a stream of its own, so that a
            rank draws its part alone: independent numbers, the same again on the same layout, others than one device's.
        keep_user_sharding: keep parameters as `mark_sharding` placed them and plan around that; False searches freely.
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
    zero_unit: int | str | None = None
    sequence_parallel: bool | None = None
    microbatches: int | None = None
    schedule: str | None = None
    recompute: str | None = None
    compile: bool | str | Sequence[str] | None = None
    rng: str = "exact"
    keep_user_sharding: bool = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "optimizer", optimizer_name(self.optimizer))
        if isinstance(self.cluster, os.PathLike):
            object.__setattr__(self, "cluster", os.fspath(self.cluster))
        if self.memory_limit is not None:
            object.__setattr__(self, "memory_limit", parse_size(self.memory_limit, "memory_limit"))

    @classmethod
    def of(cls, keywords: PlanKeywords) -> PlanRequest:
        """The request of these keywords; `degrees=None` is no degrees."""
        values = {name: value for name, value in keywords.items() if (name, value) != ("degrees", None)}
        return cls(**cast("dict[str, Any]", values))

    @property
    def limit_bytes(self) -> int | None:
        """`memory_limit` as a number."""
        return None if self.memory_limit is None else int(self.memory_limit)

    @property
    def pins(self) -> dict[str, int]:
        """The pinned degrees by axis; `dp`, `zero` and `zero_degree` give those of the axes dp and zero."""
        pins = dict(self.degrees)
        pins.update({axis: getattr(self, axis) for axis in DEGREES if getattr(self, axis) is not None})
        data, shards = pins.pop("dp", None), 1 if self.zero == 0 else self.zero_degree
        if self.zero and shards is None:
            # all data ranks share
            degrees = {"dp": 1, "zero": data}
        else:
            degrees = {"zero": shards, "dp": data and data // (shards or 1)}
        if self.rng == "fast":
            # what a pipeline replays are numbers of whole batches
            pins.setdefault("pp", 1)
        return pins | {axis: degree for axis, degree in degrees.items() if degree is not None}

    def given(self) -> dict[str, Any]:
        """The keywords that differ from their defaults, as plain data; `PlanRequest(**given)` is the same request.

        A Cluster object is left out, since it is no plain data; so are `world_size` and `top_k`, which the plan has itself.
        """
        left_out = {"world_size", "top_k"} | ({"cluster"} if isinstance(self.cluster, Cluster) else set())
        defaults = _defaults() | {"degrees": {}}
        values = {name: getattr(self, name) for name in defaults if name not in left_out}
        return {
            name: dict(value) if isinstance(value, Mapping) else value
            for name, value in values.items()
            if value != defaults[name]
        }

    @property
    def shares(self) -> bool:
        """Whether the user asks for sharded training state (ZeRO)."""
        return bool(self.zero) or self.zero_degree is not None

    @property
    def options(self) -> dict[str, Any]:
        """The keywords for strategies that were given."""
        names = (*_CHOICES, *_PIPELINE)
        return {name: getattr(self, name) for name in names if getattr(self, name) is not None}

    def check(self, axes: Collection[str]) -> None:
        """Raise UsageError for the first value that is out of range or contradicts others; `axes`: of installed strategies."""
        # a check may rely on those before it
        for message in chain(_values(self, axes), _data_and_context(self), _names(self, axes)):
            if message is not None:
                raise UsageError(message)


def _defaults() -> dict[str, Any]:
    """The default of each keyword, as `plan` shows it."""
    return {f.name: None if f.name == "degrees" else f.default for f in fields(PlanRequest)}


def with_plan_keywords(function: F) -> F:
    """Give a function that takes `**keywords: Unpack[PlanKeywords]` the signature and documentation of each keyword.

    An unknown keyword is a TypeError. In the docstring, the line `{keywords}` becomes the documentation of the keywords.
    """
    signature = inspect.signature(function)
    positional = [p for p in signature.parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
    others = [p for p in signature.parameters.values() if p.kind is p.KEYWORD_ONLY]
    types = {name: annotation.__forward_arg__ for name, annotation in PlanKeywords.__annotations__.items()}
    keywords = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=types[name])
        for name, default in _defaults().items()
    ]
    signature = signature.replace(parameters=[*positional, *keywords, *others])

    @functools.wraps(function)
    def checked(*args: Any, **given: Any) -> Any:
        try:
            signature.bind(*args, **given)
        except TypeError as error:
            raise TypeError(f"{function.__name__}() {error}") from None
        return function(*args, **given)

    checked.__signature__ = signature  # type: ignore[attr-defined]
    documented = inspect.getdoc(PlanRequest) or ""
    entries = "\n".join(" " * 4 + line for line in documented.partition("Args:\n")[2].splitlines())
    checked.__doc__ = (function.__doc__ or "").replace("        {keywords}", entries)
    return cast("F", checked)


def unknown(name: str, value: object, choices: Collection[str]) -> str:
    """The message for a keyword whose value is not one of its choices, with the closest choice."""
    return f"{name}={value!r} is unknown; give one of {', '.join(choices)}{suggestion(value, choices)}"


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _is_name(value: object) -> bool:
    return isinstance(value, str) and bool(value)


def _count_error(name: str, value: object) -> str | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int):
        return f"{name}={value!r} is not an integer; give a whole number >= 1"
    return f"{name}={value} is less than 1; give a whole number >= 1" if value < 1 else None


def _values(request: PlanRequest, axes: Collection[str]) -> Iterator[str | None]:
    """Each keyword by itself."""
    yield from (_count_error(name, getattr(request, name)) for name in _COUNTS)
    budget = request.time_budget
    if budget is not None and not (_is_number(budget) and 0 < budget < math.inf):
        yield f"time_budget={budget!r} is no time; give seconds as a number greater than 0, or leave it out"
    kept, sequence = request.keep_user_sharding, request.sequence_parallel
    if not isinstance(kept, bool):
        yield f"keep_user_sharding={kept!r} is neither True nor False; give one of them"
    if sequence is not None and not isinstance(sequence, bool):
        yield f"sequence_parallel={sequence!r} is neither True nor False; give one of them, or leave it out"
    if not isinstance(request.degrees, Mapping):
        yield f"degrees={request.degrees!r} is no mapping; give a dict of axis -> degree"
    yield from (_plugin_degree(axis, degree, axes) for axis, degree in request.degrees.items())
    for name, choices in _CHOICES.items():
        value = getattr(request, name)
        if value is not None and value not in choices:
            yield unknown(name, value, choices)
    zero = request.zero
    if zero is not None and (isinstance(zero, bool) or zero not in (0, 1, 2, 3)):
        nearest = f"; the nearest is {3 if zero > 0 else 0}" if _is_number(zero) else ""
        yield f"zero={zero!r} is no stage; give 1, 2 or 3, or 0 for none{nearest}"
    yield _unit_error(request.zero_unit)


def _unit_error(unit: object) -> str | None:
    if unit is None or unit in UNITS:
        return None
    if isinstance(unit, str):
        return f"{unknown('zero_unit', unit, UNITS)}; or a number of elements"
    return _count_error("zero_unit", unit)


def _plugin_degree(axis: str, degree: object, axes: Collection[str]) -> str | None:
    text = f"degrees={{{axis!r}: {degree!r}}}"
    if axis in KEYWORDS:
        return f"{text}: the axis {axis!r} has a keyword of its own; give {KEYWORDS[axis]}={degree!r} instead"
    if axis not in axes:
        close = did_you_mean(str(axis), axes)
        installed = ", ".join(sorted(a for a in axes if a not in KEYWORDS)) or "none"
        fix = f"did you mean {close!r}?" if close else "install its distribution, or leave it out"
        return f"{text}: no installed strategy owns the axis {axis!r} (axes without a keyword: {installed}); {fix}"
    if degree is None:
        return f"{text}: give a whole number >= 1, or leave the axis out to have it searched"
    return _count_error(f"degrees[{axis!r}]", degree)


def _data_and_context(request: PlanRequest) -> Iterator[str]:
    """Contradictions of `zero`, `zero_degree`, `dp` and `cp`."""
    degree, several = request.zero_degree, (request.world_size or 1) > 1
    if degree is not None and request.zero == 0 and degree > 1:
        yield f"zero_degree={degree} with zero=0: nothing is shared; leave one of them out"
    if request.zero_unit is not None and request.zero == 0:
        yield f"zero_unit={request.zero_unit!r} with zero=0: nothing is sharded; leave one of them out"
    if degree is not None and request.dp is not None and request.dp % degree:
        yield f"zero_degree={degree} does not divide dp={request.dp}, the data ranks; give a divisor"
    if request.zero and request.dp == 1 and several:
        yield (
            f"zero={request.zero} with dp=1: there is one data rank, so nothing can be sharded; give dp more, or leave "
            "zero out"
        )
    for name in _CHOICES:
        value = getattr(request, name)
        if value is not None and request.cp == 1 and several:
            yield f"{name}={value!r} with cp=1: the sequence is not sharded; give cp more, or leave {name} out"


def _random_numbers(request: PlanRequest) -> Iterator[str]:
    if request.rng not in RANDOM_NUMBERS:
        yield unknown("rng", request.rng, RANDOM_NUMBERS)
    if request.rng == "fast" and (request.pp or 1) > 1:
        yield (
            f"rng='fast' with pp={request.pp}: a pipeline replays the random numbers of whole batches for its microbatches, which "
            "shards have no streams for; leave rng out, or pp"
        )


def _names(request: PlanRequest, axes: Collection[str]) -> Iterator[str]:
    """Names and patterns, and what no installed distribution carries out."""
    if request.precision is not None and request.precision not in PRECISIONS:
        yield unknown("precision", request.precision, PRECISIONS)
    if request.shares and "zero" not in axes:
        yield (
            f"zero={request.zero!r}, zero_degree={request.zero_degree!r}: no installed strategy owns the axis 'zero'; "
            "install a distribution that registers one (meshwright-parallel does), or leave them out"
        )
    if request.recompute is not None and not _is_name(request.recompute):
        yield (
            f"recompute={request.recompute!r} is none of 'full', 'alternate', 'selective' and a pattern of module names; give "
            "one, or leave it out: then blocks are recomputed only if memory requires it"
        )
    if not _says_what_to_compile(request.compile):
        yield (
            f"compile={request.compile!r} is neither True, for every repeated block, nor 'auto', for those where it saves "
            "time, nor a pattern of module names, nor a list of patterns; give one, or leave it out"
        )
    yield from _random_numbers(request)
    for name, kind in (("cost_model", "cost model"), ("schedule", "schedule")):
        value = getattr(request, name)
        if value is not None and not _is_name(value):
            yield f"{name}={value!r} is no name; give that of a registered {kind}"
    for name in _PIPELINE:
        value = getattr(request, name)
        if value is not None and request.pp in (None, 1):
            yield f"{name}={value!r} needs a pipeline; give pp a degree greater than 1 too"
    for axis, degree in request.pins.items():
        if degree > 1 and axis not in axes:
            yield (
                f"{axis}={degree}: no installed strategy owns the axis {axis!r} (installed axes: "
                f"{', '.join(sorted(axes)) or 'none'}); install a distribution that registers one, or leave {axis} out"
            )


def _says_what_to_compile(value: Any) -> bool:
    """Whether it is a bool, None, a pattern of module names, or several."""
    patterns = value if isinstance(value, (list, tuple)) else (value,)
    return isinstance(value, bool | None) or (bool(patterns) and all(map(_is_name, patterns)))
