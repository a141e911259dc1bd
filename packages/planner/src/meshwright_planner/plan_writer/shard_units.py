"""What shards along `zero` do not cut: what the optimizer needs whole on a rank, unless the request says it.

Optimizers of whole matrices get an owner for each: the rank that has the parameter, gets its gradient and steps it. Owners are
balanced by what a step costs. States quantized in blocks get shards of whole blocks.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from meshwright_dtensor.plan import ParallelPlan, ZeroRule
from meshwright_dtensor.sharding.balance import least_loaded
from meshwright_dtensor.strategy import Strategy
from meshwright_dtensor.strategy.resolve import parameter_states
from meshwright_dtensor.utils.bytesize import human_bytes
from meshwright_dtensor.utils.names import count_of
from meshwright_planner.cost.optimizers import STRUCTURES, preconditioner_bytes, whole_matrices
from meshwright_planner.evaluation.candidate import Candidate
from meshwright_planner.evaluation.context import SHARED, Setting

SMALL = 4096
"""Elements below which a parameter that needs not be whole gets no owner: small ones stay whole on all ranks."""


def zero_rule(
    setting: Setting, candidate: Candidate, plan: ParallelPlan
) -> tuple[ZeroRule | None, list[str]]:
    """The rule of the plan, None without ZeRO; and notes that say why. `plan`: as it is in equal chunks."""
    if not candidate.stage:
        return None, []
    needed, unit = STRUCTURES.get(setting.optimizer), setting.unit
    owners: Mapping[str, int] = {}
    notes: list[str] = []
    if needed is not None and needed.squares:
        nbytes = human_bytes(preconditioner_bytes(setting.optimizer, setting.model))
        notes.append(
            f"{setting.optimizer}: its preconditioners take {nbytes} on every rank, which the predicted memory does not include"
        )
    if unit == "tensor":
        large = {n: p for n, p in setting.model.named_parameters() if p.numel() >= SMALL}
        choice = _owners(setting, candidate, plan, large)
        owners = choice.owners
        notes.append(f"the request asks for whole tensors: {choice.words}")
    elif unit is not None:
        if needed is not None and (needed.cost is not None or isinstance(unit, str) or unit % needed.block):
            what = f"blocks of {needed.block} elements" if needed.block else "whole matrices"
            notes.append(
                f"zero_unit={unit!r} of the request is kept: {setting.optimizer} computes with {what}, which are gathered where "
                "shards cut them"
            )
    elif needed is not None and needed.block:
        unit = needed.block
        notes.append(
            f"{setting.optimizer} quantizes its states in blocks of {unit} elements: shards along zero end at their borders, so "
            "that no step gathers any"
        )
    elif needed is not None:
        choice = _owners(setting, candidate, plan, whole_matrices(setting.model))
        room = candidate.limit - candidate.total_bytes
        if not choice.owners:
            notes.append(
                f"{setting.optimizer}: other axes shard all dims of its matrices, so each step gathers them"
            )
        elif choice.excess > room:
            notes.append(
                f"{setting.optimizer}: matrices are shared in chunks, and each step sends them to the rank that computes them: "
                f"whole on one rank each, they would take {human_bytes(int(choice.excess))} more on the fullest rank, of which "
                f"{human_bytes(max(0, room))} are left"
            )
        else:
            owners = choice.owners
            notes.append(
                f"{setting.optimizer} computes with whole matrices: {choice.words}; its gradient goes there alone, and no step "
                "gathers any"
            )
    return ZeroRule(stage=candidate.stage, unit=unit, owners=owners), notes  # type: ignore[arg-type]


@dataclass(frozen=True)
class _Choice:
    """Owners of parameters.

    Attributes:
        owners: name -> rank along zero.
        busiest: the most that a rank has to compute, by the mean.
        excess: bytes of training state that the fullest rank has more than the mean.
    """

    owners: Mapping[str, int]
    busiest: float
    excess: float

    @property
    def words(self) -> str:
        return (
            f"each of {count_of(len(self.owners), 'parameter')} is on one rank of zero; the busiest has {self.busiest:.2f} of the "
            "mean work"
        )


def _owners(
    setting: Setting,
    candidate: Candidate,
    plan: ParallelPlan,
    parameters: Mapping[str, nn.Parameter],
) -> _Choice:
    """Owners of these parameters, balanced over the ranks of zero in each stage of a pipeline."""
    degree, needed = candidate.degrees[SHARED], STRUCTURES.get(setting.optimizer)
    strategies = [setting.strategies[axis] for axis in plan.axes]
    by_stage: dict[int, dict[str, nn.Parameter]] = defaultdict(dict)
    for name, p in parameters.items():
        if _has_free_dim(plan, strategies, name, p):
            by_stage[_stage(candidate, name)][name] = p
    owners: dict[str, int] = {}
    busiest = excess = 0.0
    for held in by_stage.values():
        costs = [
            float(p.numel()) if needed is None or needed.cost is None or p.ndim != 2 else needed.cost(p.shape)
            for p in held.values()
        ]
        places = least_loaded(costs, degree)
        owners.update(zip(held, places, strict=True))
        nbytes = [float(p.numel() * p.element_size()) for p in held.values()]
        busiest = max(busiest, _unevenness(costs, places, degree))
        mean = sum(nbytes) / degree
        excess = max(excess, (_unevenness(nbytes, places, degree) - 1) * mean * setting.training_bytes)
    return _Choice({name: owners[name] for name in parameters if name in owners}, busiest, excess)


def _unevenness(loads: Sequence[float], places: Sequence[int], ranks: int) -> float:
    """The load of the rank that has most, by the mean."""
    of_ranks = [0.0] * ranks
    for load, place in zip(loads, places, strict=True):
        of_ranks[place] += load
    return max(of_ranks) * ranks / sum(of_ranks)


def _stage(candidate: Candidate, name: str) -> int:
    """The stage of a pipeline that has a parameter; -1 outside of all, and without a pipeline."""
    pipeline = candidate.fields.get("pipeline")
    for number, modules in enumerate(pipeline["stages"] if pipeline else ()):
        if any(name.startswith(f"{module}.") for module in modules):
            return number
    return -1


def _has_free_dim(plan: ParallelPlan, strategies: Sequence[Strategy], name: str, p: nn.Parameter) -> bool:
    """Whether a dim of a parameter is left to zero by other axes, and no rule shards it along zero.

    The strategies are asked: some place parameters that no rule names, such as those of an expert in a container.
    """
    rule = plan.parameter_rule(name)
    if rule is not None and SHARED in rule.placement:
        return False
    states = zip(strategies, parameter_states(name, tuple(p.shape), plan, strategies), strict=True)
    taken = {int(s) for strategy, s in states if isinstance(s, int) and not strategy.gathers}
    return any(n and dim not in taken for dim, n in enumerate(p.shape))
