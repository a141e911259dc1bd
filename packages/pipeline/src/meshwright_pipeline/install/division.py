"""Divides a model into stages on this rank: checks the plan, frees the memory of other stages, takes over the model's calls."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from meshwright_dtensor.errors import PlanError, UsageError
from meshwright_dtensor.model.blocks import has_forward
from meshwright_dtensor.model.stage_info import StageInfo, describe_stages, stages_of
from meshwright_dtensor.plan import ParallelPlan, PipelineRule, Prediction
from meshwright_dtensor.schedule.registry import schedule_named
from meshwright_dtensor.schedule.schedule import Schedule, Shape
from meshwright_dtensor.schedule.timetable import Timetable, timetable
from meshwright_dtensor.stages.optimizers import reset_where_held
from meshwright_dtensor.stages.whole_model import WholeModel, names_of
from meshwright_dtensor.strategy import Division
from meshwright_dtensor.tensor.replaced import replace_tensor
from meshwright_pipeline._torch import hooks_of, replace_call
from meshwright_pipeline.install.fixed_modules import refuse_additions
from meshwright_pipeline.install.optimizer_guard import watch_steps
from meshwright_pipeline.install.placeholders import replace_unit
from meshwright_pipeline.partition.units import Ownership, ownership, whole_batch_module
from meshwright_pipeline.runtime.agreement import RankContext
from meshwright_pipeline.runtime.call import PipelinedCall
from meshwright_pipeline.runtime.schedule_warning import ScheduleWarning
from meshwright_pipeline.runtime.tied_grads import TiedFlags, TiedSum, ties
from meshwright_pipeline.trace.meta_model import show_first_parameters, skeleton

_ATTRIBUTE = "_meshwright_pipeline"


class StageDivision(Division):
    """The stages of a model on one rank of a pipeline.

    Args:
        model: the whole model; the memory of other stages is freed.
        rule: stages and schedule.
        group: the ranks of the axis.
        dtype: what a float32 model is computed in.
        split: run split backwards in two halves; with recomputation each half would recompute.
        predicted: the prediction of the plan.
    """

    def __init__(
        self,
        model: nn.Module,
        rule: PipelineRule,
        group: dist.ProcessGroup,
        dtype: torch.dtype = torch.float32,
        split: bool = True,
        predicted: Prediction | None = None,
    ) -> None:
        self.predicted = predicted
        self.rule, self.group, self.dtype, self.split = rule, group, dtype, split
        rank, ranks = dist.get_rank(group), dist.get_world_size(group)
        self.owned = ownership(model, rule)
        self.schedule = schedule_named(rule.schedule)
        self.shape = Shape(ranks, len(rule.stages), rule.microbatches)
        self.table = checked_timetable(self.schedule, self.shape)
        owners = _owners(self.owned, self.schedule, self.shape)
        holders = _holders(model, owners, ranks)
        self.ties = ties(model, holders)
        self.hooks_before = {module: frozenset(hooks_of(module)) for module in model.modules()}
        everything = frozenset(model.state_dict())
        self.names = names_of(model)
        self.buffers = _buffer_holders(model, owners)
        self.skeleton = skeleton(model, self.owned.units, dtype)
        tensors = {
            (module, name): tensor
            for module in model.modules()
            for name, tensor in (
                *module.named_parameters(recurse=False),
                *module.named_buffers(recurse=False),
            )
        }
        here = {unit for stage in self.schedule.own(rank, self.shape) for unit in self.owned.stages[stage]}
        inside = {
            part for unit in (*here, *self.owned.everywhere) for part in model.get_submodule(unit).modules()
        }
        for unit in self.owned.units:
            if unit not in here:
                replace_unit(model, unit, rank, holders, inside)
        kept = set(map(id, (*model.parameters(), *model.buffers())))
        for (module, name), tensor in tensors.items():
            if id(tensor) not in kept:
                replace_tensor(tensor, module.__dict__[name])
        self.elsewhere = everything - frozenset(model.state_dict())
        self._describe(model, holders, rank)

    def _describe(self, model: nn.Module, holders: Mapping[str, tuple[int, ...]], rank: int) -> None:
        aliases = {name: tie.names[0] for tie in self.ties for name in tie.names[1:]}
        describe_stages(
            model,
            StageInfo(
                group=self.group,
                rank=rank,
                ranks=self.shape.ranks,
                holders=dict(holders),
                aliases=aliases,
                repeated=frozenset(name for tie in self.ties if tie.ranks[0] != rank for name in tie.names),
            ),
        )

    def install(self, model: nn.Module, mesh: DeviceMesh | None, device: torch.device, plain: bool) -> None:
        """See Division."""
        world = dist.group.WORLD
        assert world is not None
        show_first_parameters(model, self.skeleton, self.owned.units, device)
        reports_loss = mesh is None or not any(mesh.get_coordinate() or ())
        call = PipelinedCall(
            model,
            self.skeleton,
            self.owned,
            self.table,
            TiedSum(self.ties, self.group),
            TiedFlags(model, self.ties, self.group),
            RankContext(self.group, world, mesh, plain, device, reports_loss, self.dtype),
            self.rule.outputs == "all",
            ScheduleWarning(self.rule, self.table, self.predicted, quiet=dist.get_rank() != 0),
            self.split,
        )
        call.claim_hooks(self.hooks_before)
        model.__dict__[_ATTRIBUTE] = call
        if mesh is None:
            model.register_load_state_dict_pre_hook(_IgnoreKeys(self.elsewhere))
            watch_steps(model.parameters(), self.group, device)
        else:
            info = stages_of(model)
            assert info is not None
            WholeModel(model, self.names, info, mesh, self.buffers, device)
            reset_where_held()
        replace_call(model, call)
        refuse_additions(model)


@dataclass(frozen=True)
class _IgnoreKeys:
    """Lets a state dict of the whole model load: keys of other stages are ignored."""

    names: frozenset[str]

    def __call__(self, module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        for name in self.names:
            state.pop(prefix + name, None)


def check_division(model: nn.Module, plan: ParallelPlan) -> None:
    """Check that the stages of `plan` fit the model, and its schedule the stages.

    Raises PlanError: naming field, value, rule and fix.
    """
    rule, degree = plan.pipeline, plan.degree("pp")
    if rule is None:
        text = f"the {degree} ranks of pp need stages: give the field pipeline, or leave pp out of degrees"
        raise PlanError("pipeline", None, text)
    owned = ownership(model, rule)
    shape = Shape(degree, len(rule.stages), rule.microbatches)
    checked_timetable(schedule_named(rule.schedule), shape)
    if plan.precision is not None and plan.precision.parameters == "fp16":
        text = "a step runs its backward passes before a gradient scaler can scale the loss, so small gradients would be lost"
        raise PlanError("precision.parameters", "fp16", f"{text}; take bf16", "bf16")
    reason = whole_batch_module(model) if rule.microbatches > 1 else None
    if reason is not None:
        text = f"{reason}; take 1, or eval() if it keeps running statistics"
        raise PlanError("pipeline.microbatches", rule.microbatches, text, "1")
    for index, recomputed in enumerate(plan.recompute):
        for name, module in model.named_modules():
            inside = any(unit.startswith(f"{name}.") for unit in owned.units)
            if name and inside and has_forward(module) and recomputed.matches(name):
                text = f"module {name!r} holds modules of several stages; recompute those instead"
                raise PlanError(f"recompute[{index}].pattern", recomputed.pattern, text)


def checked_timetable(schedule: Schedule, shape: Shape) -> Timetable:
    """The timetable of a schedule. Raises PlanError: the schedule cannot run this pipeline."""
    try:
        return timetable(schedule, shape)
    except UsageError as error:
        raise PlanError("pipeline.schedule", schedule.name, str(error)) from None


def call_of(model: nn.Module) -> PipelinedCall | None:
    """The PipelinedCall of a pipelined model; None of any other."""
    call = model.__dict__.get(_ATTRIBUTE)
    return call if isinstance(call, PipelinedCall) else None


def _buffer_holders(model: nn.Module, owners: Mapping[str, tuple[int, ...]]) -> dict[str, frozenset[int]]:
    """Name of a buffer in a unit, aliases included -> ranks that hold it under any name."""
    named = {
        name: (tensor, ranks)
        for unit, ranks in owners.items()
        for name, tensor in model.get_submodule(unit).named_buffers(unit, remove_duplicate=False)
    }
    held: dict[int, frozenset[int]] = {}
    for tensor, ranks in named.values():
        held[id(tensor)] = held.get(id(tensor), frozenset()) | frozenset(ranks)
    return {name: held[id(tensor)] for name, (tensor, _) in named.items()}


def _holders(
    model: nn.Module, owners: Mapping[str, tuple[int, ...]], ranks: int
) -> dict[str, tuple[int, ...]]:
    """Parameter name, aliases included -> ranks that hold it under that name."""
    modules = {module: unit for unit in owners for module in model.get_submodule(unit).modules()}
    holders: dict[str, tuple[int, ...]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        # by the name of its unit; where a module has another name outside of units, by the module
        unit = next((unit for unit in owners if f"{path}.".startswith(f"{unit}.")), modules.get(module))
        held = tuple(range(ranks)) if unit is None else owners[unit]
        for name, _ in module.named_parameters(path, recurse=False, remove_duplicate=False):
            holders[name] = held
    return holders


def _owners(owned: Ownership, schedule: Schedule, shape: Shape) -> dict[str, tuple[int, ...]]:
    """Unit -> ranks that hold it."""
    return {
        unit: tuple(sorted({schedule.owner(stage, shape) for stage in owned.allowed(unit)}))
        for unit in owned.units
    }
