"""Checks of a model, a plan and a batch before the plan is applied and any memory is allocated."""

from __future__ import annotations

import gc
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from meshwright_dtensor.deferred.materialize import has_values
from meshwright_dtensor.errors import PlanError, UnsupportedError, UsageError
from meshwright_dtensor.model.batch_size import call_arguments
from meshwright_dtensor.model.compiled import check_not_compiled
from meshwright_dtensor.model.tied_parameters import all_names, with_ties
from meshwright_dtensor.plan import ParallelPlan
from meshwright_dtensor.plugins import PluginHost
from meshwright_dtensor.sharding.intervals import IntervalShard
from meshwright_dtensor.sharding.ragged import can_gather
from meshwright_dtensor.sharding.states import States, format_state
from meshwright_dtensor.strategy import Strategy
from meshwright_dtensor.strategy.resolve import parameter_states, resolve_strategies
from meshwright_dtensor.utils.fingerprint import fingerprint
from meshwright_dtensor.utils.names import did_you_mean, listing
from meshwright_parallel._torch.core import gradient_hooks, map_tensors
from meshwright_parallel.compile.install import compiled_modules
from meshwright_parallel.placement.inputs import input_states, placement_of, size_of
from meshwright_parallel.placement.stage_plan import StagePlan, split_plan
from meshwright_parallel.recompute.checkpoint import recomputed_modules
from meshwright_parallel.validation.composition import check_composition

_FINGERPRINT = re.compile(r"(.+)-([0-9a-f]{16})")


@dataclass(frozen=True)
class Fit:
    """A plan that fits.

    Attributes:
        whole: the plan, with an axis for the mesh of the parameters.
        part: the same, with the pipeline axis separated.
        states: parameter name -> state per mesh axis of `part`.
    """

    whole: ParallelPlan
    part: StagePlan
    states: Mapping[str, States]


def check_fit(model: nn.Module, plan: ParallelPlan, batch: Any, host: PluginHost, world_size: int) -> Fit:
    """Check that a plan fits a model and a batch: all checks of `parallelize` that need neither ranks nor values.

    Args:
        model: a plain module; its parameters need no values.
        batch: an example of what the model is called with, or None.
        world_size: ranks of the run.

    Raises PlanError, UsageError, UnsupportedError, PluginError: as `parallelize`.
    """
    # parameters need a mesh: a plan whose only axis is "pp" gets a data axis of degree 1
    whole = plan if tuple(plan.degrees) != ("pp",) else plan.replace(degrees={**plan.degrees, "dp": 1})
    part = split_plan(whole, resolve_strategies(whole, host, world_size))
    states = _stored_states(model, part.plan, part.strategies)
    _check_plan(model, part, batch, states)
    recomputed_modules(model, part.plan)
    compiled_modules(model, part.plan)
    if part.outer is None or any(degree > 1 for degree in part.plan.degrees.values()):
        check_dense(model)
    if part.outer is not None:
        part.outer.check(model, whole)
    return Fit(whole, part, states)


def check_model(model: nn.Module) -> None:
    """Refuse models that cannot be made parallel.

    Raises:
        UsageError: the model, or a part of it, is parallel already.
        UnsupportedError: a module is compiled; a parameter has no values, or gradient hooks.
    """
    check_not_compiled(model)
    if placement_of(model) is not None:
        text = f"this {type(model).__name__} is parallel already; build the model anew to apply another plan to it"
        raise UsageError(text)
    for name, module in model.named_modules():
        if name and placement_of(module) is not None:
            text = f"module {name!r} is parallel already; call parallelize() on the whole model only, once"
            raise UsageError(text)
    for name, parameter in model.named_parameters():
        if isinstance(parameter, DTensor):
            text = f"parameter {name!r} is a DTensor already; parallelize() takes a model of plain parameters"
            raise UsageError(text)
        if parameter.is_meta:
            raise UnsupportedError(
                f"parameter {name!r} is on the meta device and has no values; "
                "build the model inside deferred_init(), which takes no memory either"
            )
        _check_filled("parameter", name, parameter)
        if gradient_hooks(parameter):
            text = f"parameter {name!r} has gradient hooks, which would be lost; register them after parallelize()"
            raise UnsupportedError(text)
    for name, buffer in model.named_buffers():
        _check_filled("buffer", name, buffer)


def _check_filled(kind: str, name: str, tensor: torch.Tensor) -> None:
    """Refuse a tensor of `deferred_init(values=False)`, and one of a quantized dtype."""
    if tensor.is_quantized:
        raise UnsupportedError(
            f"{kind} {name!r} is {tensor.dtype}, and such tensors cannot be sharded; keep its integers and its scales as two "
            "ordinary tensors, or dequantize() it"
        )
    if not tensor.is_meta and not has_values(tensor):
        raise UnsupportedError(
            f"{kind} {name!r} was never given values, since deferred_init(values=False) builds models to plan for; "
            "build it again inside deferred_init()"
        )


def check_dense(model: nn.Module) -> None:
    """Refuse embeddings with sparse gradients: gradients over a mesh are DTensors, which are dense. Raises UnsupportedError."""
    for name, module in model.named_modules():
        embeds = isinstance(module, (nn.Embedding, nn.EmbeddingBag))
        if embeds and module.sparse and module.weight.requires_grad:
            raise UnsupportedError(
                f"module {name!r} makes sparse gradients, which cannot be summed and sharded; build it with sparse=False, and "
                "use a dense optimizer (Adam for SparseAdam)"
            )


def check_optimizers(model: nn.Module) -> None:
    """Raises UsageError for an optimizer made too early: it would step parameters that are about to be replaced."""
    names = {id(p): name for name, p in model.named_parameters()}
    for candidate in _live_optimizers():
        for group in candidate.__dict__.get("param_groups", ()):
            name = next((names[id(p)] for p in group["params"] if id(p) in names), None)
            if name is not None:
                raise UsageError(
                    f"this {type(candidate).__name__} optimizer holds parameter {name!r}, which parallelize() replaces; "
                    "make the optimizer afterwards, from model.parameters()"
                )


def _live_optimizers() -> Iterator[torch.optim.Optimizer]:
    """Every optimizer of this process.

    A process that has imported transformers has millions of objects, so the filter runs in C. It compares types:
    isinstance() would also make lazy objects load.
    """
    kinds: set[type] = set()
    waiting: list[type] = [torch.optim.Optimizer]
    while waiting:
        kind = waiting.pop()
        if kind not in kinds:
            kinds.add(kind)
            waiting += type.__subclasses__(kind)
    objects = gc.get_objects()
    return itertools.compress(objects, map(kinds.__contains__, map(type, objects)))


def _stored_states(model: nn.Module, plan: ParallelPlan, strategies: Sequence[Strategy]) -> dict[str, States]:
    """Name -> state per mesh axis of every parameter, tied ones under each of their names, which must agree."""
    stored: dict[str, States] = {}
    gathered = frozenset(strategy.axis for strategy in strategies if strategy.gathers)
    for aliases, parameter in all_names(model):
        planned = [name for name in aliases if plan.names(name)] or aliases[:1]
        shape = tuple(parameter.shape)
        by_name = {name: parameter_states(name, shape, plan, strategies) for name in planned}
        first = planned[0]
        for name, states in by_name.items():
            if states != by_name[first]:
                rule = (
                    f"{name!r} and {first!r} are one tied parameter and must have the same placement, "
                    f"but {first!r} is {_show(by_name[first])}"
                )
                raise PlanError("parameters", f"{name}: {_show(states)}", rule)
        shown = with_ties(first, {aliases[0]: aliases[1:]})
        _check_shape(shown, first, shape, plan, by_name[first], gathered)
        stored.update(dict.fromkeys(aliases, by_name[first]))
    return stored


def _check_plan(model: nn.Module, part: StagePlan, batch: Any, states: Mapping[str, States]) -> None:
    """Check that the plan fits this model, and this batch if one is given, and that its parts can be combined."""
    plan = part.plan
    _check_fingerprint(model, plan)
    fqns = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    for index, rule in enumerate(plan.parameters):
        if not any(rule.matches(fqn) for fqn in fqns):
            kind, near = type(model).__name__, did_you_mean(rule.pattern, fqns)
            text = f"no parameter of this {kind} matches; its parameters are {listing(fqns, 4)}"
            raise PlanError(f"parameters[{index}].pattern", rule.pattern, text, near)
    for name, owner in ({} if plan.zero is None else plan.zero.owners).items():
        if name not in fqns:
            text = f"this {type(model).__name__} has no such parameter; its parameters are {listing(fqns, 4)}"
            raise PlanError(f"zero.owners.{name}", owner, text, did_you_mean(name, fqns))
    modules = [name for name, _ in model.named_modules(remove_duplicate=False)]
    for index, call in enumerate(plan.activations):
        if not any(call.matches(name, call.function, call.occurrence, call.forward or 0) for name in modules):
            text = f"no module of this {type(model).__name__} matches"
            near = did_you_mean(call.module, filter(None, modules))
            raise PlanError(f"activations[{index}].module", call.module, text, near)
    check_composition(model, plan, part.strategies, states)
    if batch is not None:
        _check_batch(plan, part.strategies, batch)


def _check_batch(plan: ParallelPlan, strategies: Sequence[Strategy], batch: Any) -> None:
    """Check that the batch has rows, and that every strategy can shard it."""
    args, kwargs = call_arguments(batch)
    size = size_of(args, kwargs)
    if size.rows is None:
        raise UsageError(
            "batch holds no tensor with dims; give one example of what model(...) is called with, its tensors in dicts, tuples, "
            "lists or classes that are registered with torch.utils._pytree"
        )

    def check(name: str, tensor: torch.Tensor) -> torch.Tensor:
        input_states(plan, strategies, name, tensor.shape, size)
        return tensor

    map_tensors(check, args, kwargs)


def _check_shape(
    shown: str, fqn: str, shape: tuple[int, ...], plan: ParallelPlan, states: States, gathered: frozenset[str]
) -> None:
    """Check that sharded dims exist and that every rank has at least one row (with the chunks of torch.chunk).

    On `gathered` axes, whose shards are gathered for use, some ranks may have no row.
    """
    rule = plan.parameter_rule(fqn)
    where = "parameters" if rule is None else f"parameters[{plan.parameters.index(rule)}].placement"
    local = list(shape)
    for (axis, degree), state in zip(plan.degrees.items(), states, strict=True):
        if not isinstance(state, int):
            continue
        if state >= len(shape):
            text = f"{shown} has shape {shape}, so its dims are 0..{len(shape) - 1}"
            last = f"S({len(shape) - 1})" if shape else "I"
            raise PlanError(f"{where}.{axis}", format_state(state), text, last)
        if isinstance(state, IntervalShard):
            if state.total != local[state] or len(state.intervals) != degree:
                text = (
                    f"its intervals cover {state.total} rows on {len(state.intervals)} ranks, but dim {int(state)} of {shown} "
                    f"has {local[state]} rows on {degree} ranks"
                )
                raise PlanError(f"{where}.{axis}", format_state(state), text, f"S({int(state)})")
            local[state] = max(state.lengths)
            continue
        step = -(-local[state] // degree)
        if degree > 1 and axis not in gathered and -(-local[state] // step) != degree:
            text = f"dim {state} of {shown} has {local[state]} rows, which leaves some of the {degree} ranks empty"
            raise PlanError(f"{where}.{axis}", format_state(state), text, "I")
        local[state] = step
    for place, axis in enumerate(plan.degrees):
        ragged = axis in gathered and isinstance(states[place], IntervalShard)
        if ragged and not can_gather(shape, tuple(plan.degrees.values()), states, place):
            text = (
                f"shards of {shown} along {axis} are gathered into the value that a rank computes with, so each rank has one "
                "interval of that value"
            )
            raise PlanError(f"{where}.{axis}", format_state(states[place]), text, f"S({int(states[place])})")


def _check_fingerprint(model: nn.Module, plan: ParallelPlan) -> None:
    planned = _FINGERPRINT.fullmatch(plan.provenance.model or "")
    if planned is None or planned[0] == fingerprint(model):
        return
    name = type(model).__name__
    difference = f"it was made for a {planned[1]}, this is a {name}"
    if planned[1] == name:
        difference = f"it was made for a {name} with other modules, parameter shapes or dtypes (another configuration?)"
    text = f"{difference}; plan again for this model, or remove the field"
    raise PlanError("provenance.model", planned[0], text, fingerprint(model))


def _show(states: States) -> str:
    return "(" + ", ".join(format_state(state) for state in states) + ")"
