"""Options that several commands share."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from meshwright_dtensor.errors import UsageError
from meshwright_dtensor.planning import KEYWORDS, Planner, PlanRequest
from meshwright_dtensor.plugins import PlannerSpec, PluginHost

if TYPE_CHECKING:
    from torch import nn

    from meshwright_dtensor.plan import ParallelPlan

F = TypeVar("F", bound=Callable[..., Any])


def check_folder(option: str, path: Path | None) -> None:
    """Before any work is done for it: whether there is a folder to write `path` into.

    Raises:
        UsageError: there is none.
    """
    if path is not None and not path.parent.is_dir():
        raise UsageError(f"{option} {path}: there is no folder {path.parent}; make it, or write elsewhere")


def check_alone(option: str, given: bool, others: Mapping[str, object]) -> None:
    """That nothing was asked for beside `option` that it would not do.

    Raises:
        UsageError: one of `others` was given too (its value is neither None nor False).
    """
    for other, value in others.items():
        if given and value is not None and value is not False:
            raise UsageError(f"{other} does nothing beside {option}; leave one of them out")


def model_options(function: F) -> F:
    """--model, --batch-size, --sequence-length, --seed."""
    for option in (
        click.option("--seed", type=int, default=0, show_default=True),
        click.option("--sequence-length", type=int, default=128, show_default=True, help="Tokens of a row."),
        click.option(
            "--batch-size", type=int, default=8, show_default=True, help="Rows of the global batch."
        ),
        click.option(
            "--model",
            required=True,
            metavar="MODEL",
            help="gpt2, llama, bert, vit; a transformers config.json; or file.py:function returning (model, batch).",
        ),
    ):
        function = option(function)
    return function


def sharing_options(function: F) -> F:
    """--zero, --zero-degree, --precision."""
    for option in (
        click.option(
            "--precision",
            type=click.Choice(["fp32", "bf16", "fp16"]),
            default=None,
            help="What a float32 model is computed in; its parameters stay float32. [default: their own]",
        ),
        click.option(
            "--zero-degree",
            type=int,
            default=None,
            help="How many data ranks share one copy of the training state. [default: all of them]",
        ),
        click.option(
            "--zero",
            type=click.IntRange(0, 3),
            default=None,
            help="ZeRO stage; 0 for none. [default: what memory asks for]",
        ),
    ):
        function = option(function)
    return function


def plan_options(function: F) -> F:
    """What `plan` searches for and with: --cluster, --planner, --cost-model, --optimizer, --degree, --cp, --context-attention,
    --memory-limit, --time-budget, --recompute, and those of `sharing_options`.
    """
    for option in (
        sharing_options,
        click.option(
            "--time-budget",
            type=float,
            default=None,
            metavar="SECONDS",
            help="Take the best that is known by then. [default: search to the end]",
        ),
        click.option(
            "--recompute",
            default=None,
            metavar="WHAT",
            help="full, selective or alternate for repeated blocks, or a pattern of module names. [default: what memory asks for]",
        ),
        click.option(
            "--memory-limit", default=None, metavar="SIZE", help="Memory of a rank, as 16GB or 512MiB."
        ),
        click.option(
            "--context-attention",
            type=click.Choice(["all_gather", "ring", "all_to_all"]),
            default=None,
            help="How ranks that share a sequence (cp) share attention. [default: the cheapest]",
        ),
        click.option(
            "--cp", type=int, default=None, help="Pin the degree of context parallelism, as --degree cp=N."
        ),
        click.option(
            "--degree",
            "degrees",
            multiple=True,
            metavar="AXIS=N",
            help="Pin the degree of a mesh axis, as tp=2.",
        ),
        click.option(
            "--optimizer", default="adamw", show_default=True, help="adamw, adam, sgd or sgd-momentum."
        ),
        click.option(
            "--cost-model",
            default=None,
            help="Cost model by name, as roofline or measured. [default: what was measured, else the datasheet]",
        ),
        click.option("--planner", default="eager", show_default=True, help="Planner by name."),
        click.option("--cluster", default=None, help="Cluster by name. [default: this machine]"),
    ):
        function = option(function)
    return function


def parse_degrees(texts: tuple[str, ...], host: PluginHost) -> dict[str, int]:
    """Mesh axis -> degree, from "tp=2".

    Raises:
        UsageError: not of that form, or no installed strategy works on that axis.
    """
    axes = sorted({found.record.axis for found in host.strategies().values()})
    degrees: dict[str, int] = {}
    for text in texts:
        axis, equals, number = text.partition("=")
        if not equals or not number.isdigit() or int(number) < 1:
            raise UsageError(f"--degree {text} is not AXIS=N with N of at least 1; write for example tp=2")
        if axis not in axes:
            close = difflib.get_close_matches(axis, axes, n=1)
            fix = f"did you mean {close[0]!r}?" if close else "use one of them, or install its strategy"
            known = ", ".join(axes) or "none"
            raise UsageError(f"--degree {text}: there is no mesh axis {axis!r} (installed: {known}); {fix}")
        if axis in degrees:
            raise UsageError(f"--degree {text}: {axis} is already pinned to {degrees[axis]}; give it once")
        degrees[axis] = int(number)
    return degrees


def pinning(pins: Mapping[str, int]) -> dict[str, Any]:
    """The keywords of PlanRequest that pin these degrees."""
    own = {KEYWORDS[axis]: degree for axis, degree in pins.items() if axis in KEYWORDS}
    others = {axis: degree for axis, degree in pins.items() if axis not in KEYWORDS}
    return {**own, "degrees": others}


def plan_request(
    degrees: tuple[str, ...],
    host: PluginHost,
    *,
    cluster: str | None,
    planner: str,
    cost_model: str | None,
    optimizer: str,
    memory_limit: str | None,
    world_size: int,
    top_k: int = 1,
    cp: int | None = None,
    context_attention: str | None = None,
    zero: int | None = None,
    zero_degree: int | None = None,
    precision: str | None = None,
    recompute: str | None = None,
    time_budget: float | None = None,
) -> PlanRequest:
    """What the options of `plan_options` ask for."""
    pins = parse_degrees((*degrees, *(() if cp is None else (f"cp={cp}",))), host)
    return PlanRequest(
        cluster=cluster,
        world_size=world_size,
        planner=planner,
        cost_model=cost_model,
        optimizer=optimizer,
        top_k=top_k,
        memory_limit=None if memory_limit is None else parse_size(memory_limit),
        context_attention=context_attention,
        zero=zero,
        precision=precision,
        recompute=recompute,
        time_budget=time_budget,
        **{"zero_degree": zero_degree, **pinning(pins)},
    )


def make_plans(host: PluginHost, model: nn.Module, batch: Any, request: PlanRequest) -> list[ParallelPlan]:
    """The plans that the requested planner finds, best first; at least one."""
    planner: Planner = host.get(PlannerSpec, request.planner).load()()
    return planner.plan(model, batch, request)


def apply_request(model: nn.Module, batch: Any, request: PlanRequest) -> tuple[nn.Module, ParallelPlan]:
    """Plan as requested, once for all ranks, and apply the best plan: the model and its plan."""
    import meshwright as mw

    applied = mw.auto_parallelize(
        model,
        batch,
        cluster=request.cluster,
        planner=request.planner,
        cost_model=request.cost_model,
        optimizer=request.optimizer,
        memory_limit=request.memory_limit,
        time_budget=request.time_budget,
        dp=request.dp,
        tp=request.tp,
        pp=request.pp,
        cp=request.cp,
        ep=request.ep,
        degrees=request.degrees,
        context_attention=request.context_attention,
        context_balance=request.context_balance,
        zero=request.zero,
        zero_degree=request.zero_degree,
        precision=request.precision,
        recompute=request.recompute,
    )
    plan: Any = applied.parallel_plan
    return applied, plan


def parse_size(text: str) -> int:
    """Bytes from "80GB", "512MiB" or a number.

    Raises:
        UsageError: the text is no size.
    """
    units: Mapping[str, int] = {
        "": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 2**10, "mib": 2**20, "gib": 2**30,
    }  # fmt: skip
    number = text.strip().lower().rstrip("kmgib")
    unit = text.strip().lower()[len(number) :]
    try:
        value = float(number) * units[unit]
    except (ValueError, KeyError):
        raise UsageError(
            f"--memory-limit {text} is no size; write for example 16GB, 512MiB or bytes"
        ) from None
    if not 1 <= value < 2**63:
        raise UsageError(f"--memory-limit {text} is out of range; give at least one byte")
    return int(value)
