"""Options that several commands share."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import click

from meshwright.sources import ROWS, TOKENS
from meshwright_dtensor.errors import UsageError
from meshwright_dtensor.plugins import PluginHost
from meshwright_dtensor.strategy import PlanRequest
from meshwright_dtensor.strategy.plan_request import DEGREES, KEYWORDS, PRECISIONS
from meshwright_dtensor.utils.names import did_you_mean, suggestion

if TYPE_CHECKING:
    from torch import nn

    from meshwright.sources import Source
    from meshwright_dtensor.plan import ParallelPlan

F = TypeVar("F", bound=Callable[..., Any])
Option = Callable[[Any], Any]

MODEL = "gpt2, llama, bert, vit; a transformers config.json; or file.py:function returning (model, batch)."


def number(*names: str, **settings: Any) -> Callable[[F], F]:
    """An option whose value is a whole number; None where it is not given."""
    return click.option(*names, type=int, **settings)


def file(*names: str, **settings: Any) -> Callable[[F], F]:
    """An option whose value is a Path; None where it is not given."""
    return click.option(*names, type=click.Path(path_type=Path), **settings)


def check_folder(option: str, path: Path | None) -> None:
    """Check, before any work is done, that there is a folder to write `path` into. Raises UsageError."""
    if path is not None and not path.parent.is_dir():
        raise UsageError(f"{option} {path}: there is no folder {path.parent}; make it, or write elsewhere")


IMAGES = (".png", ".svg", ".pdf", ".jpg")
"""File name suffixes of the picture formats that can be drawn."""


def check_image(option: str, path: Path | None) -> None:
    """Check that the suffix of `path` is that of a picture format. Raises UsageError."""
    if path is not None and path.suffix.lower() not in IMAGES:
        end = repr(path.suffix) if path.suffix else "nothing"
        raise UsageError(
            f"{option} {path}: a name that ends in {end} says no kind of picture that can be drawn; end it in "
            f"{', '.join(IMAGES[:-1])} or {IMAGES[-1]}"
        )


def check_alone(option: str, given: bool, others: Mapping[str, object]) -> None:
    """Refuse each of `others` that was given (neither None nor False) with `option`, and would have no effect."""
    for other, value in others.items():
        if given and value is not None and value is not False:
            raise UsageError(f"{other} has no effect together with {option}; leave one of them out")


def check_needs(option: str, given: bool, others: Mapping[str, object]) -> None:
    """Refuse each of `others` that was given (neither None nor empty) without `option`, and would have no effect."""
    for other, value in others.items():
        if not given and value not in (None, ()):
            raise UsageError(f"{other} has no effect without {option}; give both, or neither")


def check_rows(option: str, given: bool, rows: int | None) -> None:
    """Refuse --global-batch-size (`rows`) for commands that run the batch itself."""
    if given and rows is not None:
        raise UsageError(
            f"--global-batch-size {rows}: {option} runs the batch itself, whose rows are those of --batch-size; give "
            f"--batch-size {rows} in its place"
        )


def model_options(function: F) -> F:
    """--model (required) and `batch_options`; the command takes one `chosen: ModelChoice`."""

    @functools.wraps(function)
    def command(
        *args: Any, model: str, batch_size: int | None, sequence_length: int | None, seed: int, **given: Any
    ) -> Any:
        return function(*args, chosen=ModelChoice(model, batch_size, sequence_length, seed), **given)

    model = click.option("--model", required=True, metavar="MODEL", help=MODEL)
    return cast("F", model(batch_options(number("--seed", default=0, show_default=True)(command))))


def batch_options(function: F) -> F:
    """--batch-size, --sequence-length; None where they are not given."""
    chosen = "or what the function says]"
    rows = number("--batch-size", help=f"Rows of the global batch. [default: {ROWS}, {chosen}")
    return rows(number("--sequence-length", help=f"Tokens of a row. [default: {TOKENS}, {chosen}")(function))


@dataclass(frozen=True)
class ModelChoice:
    """--model and its options. `defaults`: sizes to use where they give none (see `resolve`)."""

    model: str
    batch_size: int | None = None
    sequence_length: int | None = None
    seed: int = 0
    defaults: Mapping[str, int] = field(default_factory=dict)

    def source(self) -> Source:
        """Where the model and its batch come from. Raises UsageError."""
        from meshwright.sources import resolve

        given = {field.name: getattr(self, field.name) for field in fields(self)}
        return resolve(given.pop("model"), **given)

    def arguments(self) -> list[str]:
        """The options again, for another command."""
        given = {name: getattr(self, name) for name in ("model", "batch_size", "sequence_length", "seed")}
        return [t for name, x in given.items() if x is not None for t in (option_name(name), str(x))]


class Named(click.ParamType):
    """One of a few names; the error for a wrong name suggests the nearest."""

    name = "name"

    def __init__(self, *names: str) -> None:
        self.names = names

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if value not in self.names:
            hint = suggestion(value, self.names)
            self.fail(f"{value!r} is not one of {', '.join(self.names)}{hint}", param, ctx)
        return value

    def get_metavar(self, param: click.Parameter, ctx: click.Context) -> str:
        return f"[{'|'.join(self.names)}]"


_PIN = "Pin the degree of a mesh axis, as tp=2."
DEGREE = click.option("--degree", "degrees", multiple=True, metavar="AXIS=N", help=_PIN)

COMPILE = click.option(
    "--compile",
    metavar="WHAT",
    callback=lambda context, option, value: True if value == "blocks" else value,
    help="Run modules as compiled graphs: blocks for the repeated blocks, auto for those that it makes faster, or a name pattern.",
)

SHARING: tuple[Option, ...] = (
    number("--zero", help="ZeRO stage, 1 to 3; 0 for none. [default: what memory asks for]"),
    number(
        "--zero-degree",
        help="How many data ranks share one copy of the training state. [default: all of them]",
    ),
    click.option(
        "--precision",
        type=Named(*PRECISIONS),
        help="What a float32 model is computed in; its parameters stay float32. [default: their own]",
    ),
)

UNIT = click.option(
    "--zero-unit",
    metavar="UNIT",
    callback=lambda context, option, value: int(value) if value and value.lstrip("-").isdigit() else value,
    help="What no shard of zero cuts: so many elements, row or tensor. [default: what the optimizer needs]",
)


def optimizer_option(names: str) -> Option:
    """The option --optimizer of a command that knows these."""
    return click.option("--optimizer", default="adamw", show_default=True, help=names)


OPTIMIZER = optimizer_option("adamw, adam, sgd, sgd-momentum, muon, shampoo, soap, adamw8bit or adamw4bit.")

PLANNING: tuple[Option, ...] = (
    click.option("--cluster", help="Cluster by name, or a file of one. [default: this machine]"),
    click.option("--planner", help="Planner by name. [default: eager]"),
    click.option(
        "--cost-model",
        help="Cost model by name, as roofline or measured. [default: what was measured, else the datasheet]",
    ),
    OPTIMIZER,
    number("--global-batch-size", help="Plan for so many rows, if the batch has another number."),
    DEGREE,
    *(number(f"--{axis}", help=f"As --degree {axis}=N.") for axis in DEGREES),
    *SHARING,
    UNIT,
    click.option("--schedule", help="Schedule of the pipeline by name. [default: the best]"),
    number("--microbatches", help="Equal parts that a pipeline cuts the batch into. [default: the best]"),
    click.option(
        "--sequence-parallel/--no-sequence-parallel",
        default=None,
        help="Whether tp splits the sequence between blocks. [default: what is cheaper]",
    ),
    click.option(
        "--context-attention",
        type=Named("all_gather", "ring", "all_to_all"),
        help="How ranks that share a sequence (cp) share attention. [default: the cheapest]",
    ),
    click.option(
        "--context-balance",
        type=Named("none", "zigzag"),
        help="Which parts of a sequence a rank of cp has. [default: zigzag for causal models]",
    ),
    click.option(
        "--recompute",
        metavar="WHAT",
        help="full, selective or alternate for repeated blocks, or a pattern of module names. [default: what memory asks for]",
    ),
    COMPILE,
    click.option(
        "--rng",
        metavar="NAME",
        help="exact: the random numbers of one device; fast: a stream for each shard. [default: exact]",
    ),
    click.option("--memory-limit", metavar="SIZE", help="Memory of a rank, as 16GB, 40GiB or 80e9."),
    click.option(
        "--ignore-marks",
        "keep_user_sharding",
        flag_value=False,
        type=bool,
        default=None,
        help="Search freely where mark_sharding placed parameters.",
    ),
    click.option(
        "--time-budget",
        type=float,
        metavar="SECONDS",
        help="Take the best that is known by then. [default: search to the end]",
    ),
)
"""One option for each keyword of `plan` but --world-size and --top-k; a test compares the two."""

NAMES = tuple(f.name for f in fields(PlanRequest) if f.name not in ("world_size", "top_k"))
"""The arguments that the options of PLANNING set."""


def option_name(argument: str) -> str:
    """The option that sets an argument of a command."""
    different = {"degrees": "--degree", "keep_user_sharding": "--ignore-marks"}
    return different.get(argument, f"--{argument.replace('_', '-')}")


def plan_options(optimizers: str = "") -> Callable[[F], F]:
    """The options of PLANNING; the command takes one `options: PlanOptions`.

    `optimizers`: what --help says of --optimizer in a command that knows fewer than `plan`.
    """
    named = optimizer_option(optimizers) if optimizers else OPTIMIZER
    planning = [named if option is OPTIMIZER else option for option in PLANNING]

    def decorated(function: F) -> F:
        @functools.wraps(function)
        def command(*args: Any, **given: Any) -> Any:
            options = PlanOptions({name: given.pop(name) for name in NAMES})
            return function(*args, options=options, **given)

        return with_options(*planning)(cast("F", command))

    return decorated


def with_options(*options: Option) -> Callable[[F], F]:
    """Add these options to a command; --help lists them in this order."""
    return lambda command: functools.reduce(lambda function, option: option(function), options[::-1], command)


@dataclass(frozen=True)
class PlanOptions:
    """The values of `plan_options`: keyword of PlanRequest -> value, None if not given; "degrees" as written."""

    values: Mapping[str, Any]

    @property
    def given(self) -> list[str]:
        """The options that were given. --optimizer does not change how to plan: a command takes it with a plan."""
        return [option_name(n) for n, v in self.values.items() if v not in (None, ()) and n != "optimizer"]

    def request(self, host: PluginHost, *, world_size: int, top_k: int = 1) -> PlanRequest:
        """The request to the planner. Raises UsageError where a degree is not valid, or is given twice."""
        values = {name: value for name, value in self.values.items() if value is not None}
        texts = [*values.pop("degrees", ())]
        texts += [f"{axis}={values.pop(axis)}" for axis in DEGREES if axis in values]
        pins = pinning(parse_degrees(tuple(texts), host))
        if "zero_degree" in values and "zero_degree" in pins:
            raise UsageError(
                f"--zero-degree {values['zero_degree']} is pinned as --degree zero={pins['zero_degree']} too; give one of them"
            )
        return PlanRequest(world_size=world_size, top_k=top_k, **values, **pins)


def parse_degrees(texts: tuple[str, ...], host: PluginHost) -> dict[str, int]:
    """Mesh axis -> degree, from "tp=2". Raises UsageError for another form, or an axis that no strategy works on."""
    axes = sorted({entry.record.axis for entry in host.strategies().values()})
    degrees: dict[str, int] = {}
    for text in texts:
        axis, equals, number = text.partition("=")
        if not equals or not number.isdigit() or int(number) < 1:
            raise UsageError(f"--degree {text} is not AXIS=N with N of at least 1; write for example tp=2")
        if axis not in axes:
            close = did_you_mean(axis, axes)
            fix = f"did you mean {close!r}?" if close else "use one of them, or install its strategy"
            names = ", ".join(axes) or "none"
            raise UsageError(f"--degree {text}: there is no mesh axis {axis!r} (installed: {names}); {fix}")
        if axis in degrees:
            raise UsageError(f"--degree {text}: {axis} is already pinned to {degrees[axis]}; give it once")
        degrees[axis] = int(number)
    return degrees


def pinning(pins: Mapping[str, int]) -> dict[str, Any]:
    """The keywords of PlanRequest that pin these degrees."""
    others = {axis: degree for axis, degree in pins.items() if axis not in KEYWORDS}
    return {"degrees": others} | {KEYWORDS[axis]: n for axis, n in pins.items() if axis in KEYWORDS}


def apply_request(model: nn.Module, batch: Any, request: PlanRequest) -> tuple[nn.Module, ParallelPlan]:
    """Plan as requested, once for all ranks, and apply the best plan: the model and its plan."""
    import meshwright as mw

    applied: Any = mw.auto_parallelize(model, batch, **{**request.given(), "cluster": request.cluster})
    return applied, applied.parallel_plan
