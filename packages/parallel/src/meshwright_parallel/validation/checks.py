"""What must hold before a plan is applied; every check comes before any memory is taken."""

from __future__ import annotations

import gc
import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from meshwright_dtensor.deferred.materialize import has_values
from meshwright_dtensor.errors import PlanError, UnsupportedError, UsageError
from meshwright_dtensor.model.batch_size import call_arguments
from meshwright_dtensor.model.tied_parameters import all_names, with_ties
from meshwright_dtensor.plan import ParallelPlan
from meshwright_dtensor.sharding.intervals import IntervalShard
from meshwright_dtensor.sharding.states import State, format_state
from meshwright_dtensor.strategy import Strategy
from meshwright_dtensor.strategy.resolve import parameter_states
from meshwright_dtensor.utils.fingerprint import fingerprint
from meshwright_dtensor.utils.names import did_you_mean, listing
from meshwright_parallel._torch.core import gradient_hooks, map_tensors
from meshwright_parallel.placement.inputs import input_states, placement_of, size_of
from meshwright_parallel.validation.composition import check_composition

_FINGERPRINT = re.compile(r"(.+)-([0-9a-f]{16})")


def check_model(model: nn.Module) -> None:
    """Refuse what cannot be spread.

    Raises:
        UsageError: the model, or a part of it, is parallel already, or carries what would be lost.
        UnsupportedError: a parameter has no values, or hooks that would see parts of gradients.
    """
    if placement_of(model) is not None:
        raise UsageError(
            f"this {type(model).__name__} is parallel already; build the model anew to apply another plan to it"
        )
    for name, module in model.named_modules():
        if name and placement_of(module) is not None:
            raise UsageError(
                f"module {name!r} is parallel already; call parallelize() on the whole model only, once"
            )
    for name, parameter in model.named_parameters():
        if isinstance(parameter, DTensor):
            raise UsageError(
                f"parameter {name!r} is a DTensor already; parallelize() takes a model of plain parameters"
            )
        if parameter.is_meta:
            raise UnsupportedError(
                f"parameter {name!r} is on the meta device and has no values; "
                "build the model inside deferred_init(), which takes no memory either"
            )
        _check_filled("parameter", name, parameter)
        if gradient_hooks(parameter):
            raise UnsupportedError(
                f"parameter {name!r} has gradient hooks, which would be lost; register them after parallelize()"
            )
    for name, buffer in model.named_buffers():
        _check_filled("buffer", name, buffer)


def _check_filled(kind: str, name: str, tensor: torch.Tensor) -> None:
    """Refuse a tensor of `deferred_init(values=False)`."""
    if not tensor.is_meta and not has_values(tensor):
        raise UnsupportedError(
            f"{kind} {name!r} was never given values, since deferred_init(values=False) builds models to plan for; "
            "build it again inside deferred_init()"
        )


def check_dense(model: nn.Module) -> None:
    """Refuse tables whose gradients are sparse: those over a mesh are DTensors, which are dense.

    Raises:
        UnsupportedError: naming the module.
    """
    for name, module in model.named_modules():
        if (
            isinstance(module, (nn.Embedding, nn.EmbeddingBag))
            and module.sparse
            and module.weight.requires_grad
        ):
            raise UnsupportedError(
                f"module {name!r} makes sparse gradients, which cannot be summed and sharded; build it with sparse=False, and "
                "use a dense optimizer (Adam for SparseAdam)"
            )


def check_optimizers(model: nn.Module) -> None:
    """Refuse an optimizer made too early: it would go on stepping the parameters that are about to be replaced.

    Raises:
        UsageError: a live optimizer holds a parameter of the model.
    """
    names = {id(p): name for name, p in model.named_parameters()}
    for thing in gc.get_objects():
        if issubclass(
            type(thing), torch.optim.Optimizer
        ):  # not isinstance, which would ask lazy objects to load
            for group in thing.__dict__.get("param_groups", ()):
                held = next((names[id(p)] for p in group["params"] if id(p) in names), None)
                if held is not None:
                    raise UsageError(
                        f"a {type(thing).__name__} optimizer holds parameter {held!r}, which parallelize() replaces; "
                        "make the optimizer afterwards, from model.parameters()"
                    )


def stored_states(
    model: nn.Module, plan: ParallelPlan, strategies: Sequence[Strategy]
) -> dict[str, tuple[State, ...]]:
    """Name -> state per mesh axis of every parameter, tied ones under each of their names.

    Raises:
        PlanError: two names of one parameter are placed differently, or a placement does not fit its shape.
    """
    found: dict[str, tuple[State, ...]] = {}
    gathered = frozenset(strategy.axis for strategy in strategies if strategy.gathers)
    for aliases, parameter in all_names(model):
        ruled = [name for name in aliases if plan.parameter_rule(name) is not None] or aliases[:1]
        shape = tuple(parameter.shape)
        by_name = {name: parameter_states(name, shape, plan, strategies) for name in ruled}
        first = ruled[0]
        for name, states in by_name.items():
            if states != by_name[first]:
                rule = (
                    f"{name!r} and {first!r} are one tied parameter and must be placed alike, "
                    f"but {first!r} is {_show(by_name[first])}"
                )
                raise PlanError("parameters", f"{name}: {_show(states)}", rule)
        _check_shape(aliases, first, shape, plan, by_name[first], gathered)
        found.update(dict.fromkeys(aliases, by_name[first]))
    return found


def check_plan(
    model: nn.Module,
    plan: ParallelPlan,
    strategies: Sequence[Strategy],
    batch: Any,
    states: Mapping[str, tuple[State, ...]],
) -> None:
    """That the plan speaks of this model, and of this batch where one is given, and that its parts go together.

    `states` are those of `stored_states`.

    Raises:
        PlanError: the plan was made for another model, a pattern matches nothing, or it combines what cannot be.
        UsageError: the batch holds no tensor, or cannot be divided.
    """
    _check_fingerprint(model, plan)
    fqns = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    for index, rule in enumerate(plan.parameters):
        if not any(rule.matches(fqn) for fqn in fqns):
            raise PlanError(
                f"parameters[{index}].pattern",
                rule.pattern,
                f"no parameter of this {type(model).__name__} matches; its parameters are {listing(fqns, 4)}",
                did_you_mean(rule.pattern, fqns),
            )
    modules = [name for name, _ in model.named_modules(remove_duplicate=False)]
    for index, call in enumerate(plan.activations):
        if not any(call.matches(name, call.function, call.occurrence) for name in modules):
            raise PlanError(
                f"activations[{index}].module",
                call.module,
                f"no module of this {type(model).__name__} matches",
                did_you_mean(call.module, [name for name in modules if name]),
            )
    check_composition(model, plan, strategies, states)
    if batch is not None:
        _check_batch(plan, strategies, batch)


def _check_batch(plan: ParallelPlan, strategies: Sequence[Strategy], batch: Any) -> None:
    """That the batch has rows, and that every strategy can divide it."""
    args, kwargs = call_arguments(batch)
    size = size_of(args, kwargs)
    if size.rows is None:
        raise UsageError(
            "batch holds no tensor with dims; give one example of what model(...) is called with, its tensors in dicts, tuples, "
            "lists or classes that are registered with torch.utils._pytree"
        )

    def look(name: str, tensor: torch.Tensor) -> torch.Tensor:
        input_states(plan, strategies, name, tensor.shape, size)
        return tensor

    map_tensors(look, args, kwargs)


def _check_shape(
    aliases: Sequence[str],
    fqn: str,
    shape: tuple[int, ...],
    plan: ParallelPlan,
    states: tuple[State, ...],
    gathered: frozenset[str],
) -> None:
    """A shard needs a dim that exists and at least one row for every rank (chunks as torch.chunk cuts them).

    On axes of which shards are `gathered` for use, some ranks may have none.
    """
    shown = with_ties(fqn, {aliases[0]: aliases[1:]})
    rule = plan.parameter_rule(fqn)
    where = "parameters" if rule is None else f"parameters[{plan.parameters.index(rule)}].placement"
    left = list(shape)
    for (axis, degree), state in zip(plan.degrees.items(), states, strict=True):
        if not isinstance(state, int):
            continue
        if state >= len(shape):
            text = f"{shown} has shape {shape}, so its dims are 0..{len(shape) - 1}"
            raise PlanError(
                f"{where}.{axis}", format_state(state), text, f"S({len(shape) - 1})" if shape else "I"
            )
        if isinstance(state, IntervalShard):
            if state.total != left[state] or len(state.intervals) != degree:
                text = (
                    f"its runs cover {state.total} rows on {len(state.intervals)} ranks, dim {int(state)} of {shown} has "
                    f"{left[state]} on {degree}"
                )
                raise PlanError(f"{where}.{axis}", format_state(state), text, f"S({int(state)})")
            left[state] = state.lengths[0]
            continue
        step = -(-left[state] // degree)
        if degree > 1 and axis not in gathered and -(-left[state] // step) != degree:
            text = f"dim {state} of {shown} has {left[state]} rows, which leaves some of the {degree} ranks empty"
            raise PlanError(f"{where}.{axis}", format_state(state), text, "I")
        left[state] = step


def _check_fingerprint(model: nn.Module, plan: ParallelPlan) -> None:
    known = _FINGERPRINT.fullmatch(plan.provenance.model or "")
    if known is None or known[0] == fingerprint(model):
        return
    here = type(model).__name__
    what = (
        f"it was made for a {known[1]}, this is a {here}"
        if known[1] != here
        else f"it was made for a {here} with other modules, parameter shapes or dtypes (another configuration?)"
    )
    raise PlanError(
        "provenance.model",
        known[0],
        f"{what}; plan again for this model, or remove the field",
        fingerprint(model),
    )


def _show(states: tuple[State, ...]) -> str:
    return "(" + ", ".join(format_state(state) for state in states) + ")"
