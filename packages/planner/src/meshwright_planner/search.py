"""The search: every combination of degrees of the installed strategies, each with its best placements and its cost."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from meshwright_dtensor.batches import BatchSize
from meshwright_dtensor.cluster import Cluster
from meshwright_dtensor.errors import PlanError, UsageError
from meshwright_dtensor.plan import PlannedCollective, RecomputeRule
from meshwright_dtensor.precision import DTYPES
from meshwright_dtensor.states import State
from meshwright_dtensor.strategy import (
    Link,
    SearchRequest,
    Strategy,
    StrategyCost,
    Survey,
)
from meshwright_planner import sequence
from meshwright_planner._torch import is_fake
from meshwright_planner.attention import attention_uses
from meshwright_planner.batch import Batch
from meshwright_planner.candidate import Candidate
from meshwright_planner.costs import OPTIMIZERS, AxisCosts, optimizer_seconds
from meshwright_planner.legal import Legality, Rules
from meshwright_planner.memory import memory_parts, parameter_bytes, parameter_factor
from meshwright_planner.placement import Placement, PlacementProblem
from meshwright_planner.program import MemoryTerms
from meshwright_planner.quotient import quotient
from meshwright_planner.recording import record
from meshwright_planner.surveys import placements, surveys
from meshwright_planner.tape import Tape
from meshwright_planner.work import inside_of, module_work, parameter_sizes

SHARED = "zero"
"""The axis along which ranks share training state."""

SUMS = "dp"
"""The axis whose strategy costs the sum of gradients, over every axis that defers it."""

PRICE = 1e-15
"""Seconds that a byte of memory is worth when there is enough of it: only breaks ties."""


@dataclass(frozen=True)
class Setting:
    """What the search is about.

    Args:
        model, batch: the model and its example batch, of the global size.
        cluster: what it runs on.
        strategies: axis -> strategy, outermost axis first.
        optimizer: name in OPTIMIZERS.
        pins: degrees fixed by the user.
        world_size: number of ranks.
        limit: bytes that one rank has.
        stored: parameter name -> state on the searched axis, fixed by the user.
        options: keywords that strategies know by name.
        data: data ranks (the product of the axes dp and zero), fixed by the user.
        stage: what ranks along zero share, fixed by the user; 0 where they share nothing.
        shares: ranks are to share training state (the axis zero is searched).
        precision: in which the model is computed, a name of plan.PrecisionRule; None is its own.
        recompute: modules whose activations are not kept.
        sequence_parallel: whether a searched axis splits the sequence between blocks; None is searched.
    """

    model: nn.Module
    batch: Batch
    cluster: Cluster
    strategies: Mapping[str, Strategy]
    optimizer: str
    pins: Mapping[str, int]
    world_size: int
    limit: int
    stored: Mapping[str, State]
    options: Mapping[str, Any] = field(default_factory=dict)
    data: int | None = None
    stage: int = 0
    shares: bool = False
    precision: str | None = None
    sequence_parallel: bool | None = None

    @property
    def dtype(self) -> torch.dtype | None:
        """Of the copies that are computed with; None is the parameters' own."""
        return None if self.precision in (None, "fp32") else DTYPES[str(self.precision)]

    recompute: tuple[RecomputeRule, ...] = ()


class Search:
    """Evaluates candidates; a tape is recorded once per local batch, a placement problem built once per degree."""

    def __init__(
        self,
        setting: Setting,
        rules: Rules,
        tapes: dict[object, Tape] | None = None,
        surveyed: dict[str, Survey] | None = None,
    ) -> None:
        self.setting, self.rules = setting, rules
        self.tapes: dict[object, Tape] = {} if tapes is None else tapes
        self.surveys = self._surveys() if surveyed is None else surveyed
        self._problems: dict[tuple[object, ...], PlacementProblem] = {}

    def _surveys(self) -> dict[str, Survey]:
        setting = self.setting
        axes = [a for a in setting.strategies if setting.world_size > 1 and setting.pins.get(a) != 1]
        return surveys({axis: setting.strategies[axis] for axis in axes}, setting.model)

    def variant(self, **changes: object) -> Search:
        """A search of a changed setting that shares what was recorded."""
        return Search(replace(self.setting, **changes), self.rules, self.tapes, self.surveys)  # type: ignore[arg-type]

    # ---- combinations
    def combinations(self) -> list[dict[str, int]]:
        """Every legal combination of degrees: product equal to the world size, pins kept."""
        setting = self.setting
        requests = {axis: self._request(axis) for axis in setting.strategies}
        legal = {
            axis: [d for d in strategy.degrees(requests[axis]) if d == setting.pins.get(axis, d)]
            for axis, strategy in setting.strategies.items()
        }
        if SHARED in legal and not setting.shares:
            legal[SHARED] = [1]
        for axis, degree in setting.pins.items():
            if axis in legal and not legal[axis]:
                length = setting.batch.sequence_length
                rows = f"{setting.batch.size}" + (f" rows of {length} tokens" if length is not None else "")
                options = ", ".join(map(str, setting.strategies[axis].degrees(requests[axis])))
                reason = setting.strategies[axis].refusal(requests[axis], degree)
                if reason is not None:
                    raise PlanError(f"degrees.{axis}", degree, reason, options)
                raise UsageError(
                    f"{axis}={degree} is not a legal degree for world_size {setting.world_size} and a batch of "
                    f"{rows}: strategy {setting.strategies[axis].name!r} allows {options}"
                )
        found = [
            c
            for c in _products(legal, setting.world_size)
            if self._one_search(c) and self._rows_divide(c) and self._sequence_divides(c)
        ]
        if not found:
            shown = (
                "; ".join(f"{a}: {', '.join(map(str, d))}" for a, d in legal.items()) or "none is installed"
            )
            raise UsageError(
                f"no combination of degrees multiplies to world_size {setting.world_size} (legal degrees: {shown}); "
                f"change the batch size, the pinned degrees or world_size{sequence.needs(setting)}"
            )
        return found

    def _rows_divide(self, degrees: Mapping[str, int]) -> bool:
        """Whether the axes that share the rows of the batch fit it together, and what the user says of them."""
        data = degrees.get("dp", 1) * degrees.get(SHARED, 1)
        if self.setting.data not in (None, data):
            return False
        return self.setting.batch.size % self._batch_factor(degrees) == 0

    def _sequence_divides(self, degrees: Mapping[str, int]) -> bool:
        """Whether a searched axis can split the sequence between blocks, where that is asked for."""
        strategies, batch = self.setting.strategies, self.setting.batch
        degree = max((degrees[a] for a, s in strategies.items() if s.placement_search), default=1)
        lengths = {
            self._local_shape(name, tuple(t.shape), degrees)[1]
            for name, t in batch.tensors()
            if t.dim() > 1 and t.shape[1] == batch.sequence_length
        }
        return sequence.divides(self.setting, degree, lengths)

    def _one_search(self, degrees: Mapping[str, int]) -> bool:
        searched = [a for a, d in degrees.items() if d > 1 and self.setting.strategies[a].placement_search]
        return len(searched) <= 1

    def _request(self, axis: str | None = None) -> SearchRequest:
        trainable = [p for p in self.setting.model.parameters() if p.requires_grad]
        return SearchRequest(
            world_size=self.setting.world_size,
            batch_size=self.setting.batch.size,
            sequence_length=self.setting.batch.sequence_length,
            parameter_bytes=sum(p.numel() * p.element_size() for p in self.setting.model.parameters()),
            gradient_bytes=sum(p.numel() * p.element_size() for p in trainable),
            pins=self.setting.pins,
            options=self.setting.options,
            survey=self.surveys.get(axis) if axis is not None else None,
        )

    # ---- one combination
    def evaluate(self, degrees: Mapping[str, int], stage: int | None = None) -> Candidate:
        """The best candidate with these degrees; where nothing fits the memory, the one that needs least.

        `stage`: what ranks along zero share; None takes that of the setting.
        """
        setting = self.setting if stage is None else replace(self.setting, stage=stage)
        if setting is not self.setting:
            return self.variant(stage=stage).evaluate(degrees)
        degrees = {axis: degrees.get(axis, 1) for axis in setting.strategies}
        tape = self.tape(degrees)
        axis = next((a for a, s in setting.strategies.items() if s.placement_search and degrees[a] > 1), None)
        degree = degrees[axis] if axis is not None else 1
        problem = self._problem(tape, degree, self._link(degrees, axis), degrees)
        placement = self._place(problem)
        candidate = self._cost(degrees, axis, problem, placement)
        if candidate.excess_bytes and degree > 1:
            tight = problem.solve(self._tight(candidate), divide=False)
            if tight is not None:
                candidate = self._cost(degrees, axis, problem, tight)
            else:  # nothing fits: show the placement that comes closest
                least = problem.solve(MemoryTerms(1e-6, parameter_factor(setting.optimizer)), divide=False)
                closest = candidate if least is None else self._cost(degrees, axis, problem, least)
                candidate = min(candidate, closest, key=lambda c: c.total_bytes)
        return candidate

    def tape(self, degrees: Mapping[str, int]) -> Tape:
        """The tape of one rank's part of the batch under these degrees."""
        batch = self.setting.batch
        key = tuple(self._local_shape(name, tuple(t.shape), degrees) for name, t in batch.tensors())
        if key not in self.tapes:
            local = batch.map(lambda name, t: self._local(name, t, degrees))
            self.tapes[key] = record(self.setting.model, local, self.rules.composites, self.setting.dtype)
        return self.tapes[key]

    def _local_shape(self, name: str, shape: tuple[int, ...], degrees: Mapping[str, int]) -> tuple[int, ...]:
        local, sizes = list(shape), self.setting.batch.sizes
        for axis, strategy in self.setting.strategies.items():
            if degrees[axis] == 1:
                continue
            # an axis further in sees the rows that those further out have left
            seen = (local[0], *shape[1:]) if local else ()
            state = strategy.batch_state(name, seen, sizes, degrees[axis])
            if isinstance(state, int):
                local[state] = -(-local[state] // degrees[axis])
            if sizes.rows is not None:
                sizes = BatchSize(max(1, sizes.rows // strategy.batch_factor(degrees[axis])), sizes.tokens)
        return tuple(local)

    def _local(self, name: str, tensor: torch.Tensor, degrees: Mapping[str, int]) -> torch.Tensor:
        for dim, size in enumerate(self._local_shape(name, tuple(tensor.shape), degrees)):
            tensor = tensor.narrow(dim, 0, size)
        return tensor.contiguous()  # as a rank holds it: models call view on their inputs

    def _link(self, degrees: Mapping[str, int], axis: str | None) -> Link:
        stride = 1
        for name in reversed(list(degrees)):
            if name == axis:
                break
            stride *= degrees[name]
        return self.setting.cluster.link(stride if axis else 1, degrees[axis] if axis else 1)

    def _problem(self, tape: Tape, degree: int, link: Link, degrees: Mapping[str, int]) -> PlacementProblem:
        surveyed = [axis for axis in self.surveys if degrees[axis] > 1]
        key = (id(tape), degree, link, *surveyed)
        if key not in self._problems:
            costs = AxisCosts(self.setting.cluster, link, degree)
            # what a strategy places itself is not for the search to place
            held: dict[str, State] = {name: "I" for a in surveyed for name in self.surveys[a].parameters}
            pins = {**held, **self.setting.stored} if degree > 1 else {}
            legality = Legality(
                tape, quotient(tape), self.rules, costs, tape.rows, pins, self.setting.sequence_parallel
            )
            self._problems[key] = PlacementProblem(legality, pins)
        return self._problems[key]

    def _place(self, problem: PlacementProblem) -> Placement:
        """The fastest placement that makes use of the axis: weights are sharded where they can be used sharded.

        On a tiny model any communication costs more than replicated compute, and the fastest placement would be to
        shard nothing; but a degree is there to divide the model.
        """
        factor = parameter_factor(self.setting.optimizer)
        if problem.costs.degree == 1:
            return problem.replicated()
        placement = problem.solve(MemoryTerms(PRICE, factor)) or problem.solve(
            MemoryTerms(PRICE, factor), divide=False
        )
        if placement is None:
            raise UsageError(
                "the placement search found no legal placement; check the pinned parameter placements"
                + sequence.needs(self.setting)
            )
        return placement

    def _tight(self, candidate: Candidate) -> MemoryTerms:
        priced = {"parameters", "gradients", "optimizer", "activations"}
        fixed = sum(size for part, size in candidate.memory.items() if part not in priced)
        outside = sum(
            p.numel() * p.element_size()
            for name, p in self.setting.model.named_parameters()
            if name not in candidate.problem.read_parameters
        )
        factor = parameter_factor(self.setting.optimizer)
        model, problem, placement = self.setting.model, candidate.problem, candidate.placement
        own = {
            a: parameter_bytes(model, problem, placement, s.parameters)[0] for a, s in self.surveys.items()
        }
        # of what is divided along other axes, which the problem sees whole
        elsewhere = sum((1 - 1 / candidate.degrees.get(axis, 1)) * size for axis, size in own.items())
        room = candidate.limit - fixed - (outside - elsewhere) * factor
        return MemoryTerms(PRICE, factor, max(1.0, room))

    def _cost(
        self, degrees: Mapping[str, int], axis: str | None, problem: PlacementProblem, placement: Placement
    ) -> Candidate:
        setting, tape = self.setting, problem.tape
        memory = memory_parts(setting.model, problem, placement, setting.optimizer)
        exposed: dict[str, float] = {}
        hidden: dict[str, float] = {}
        collectives: list[PlannedCollective] = []
        shards = degrees.get(SHARED, 1)
        if setting.dtype is not None and shards == 1:  # the copies that are computed with
            memory["parameters"] += math.ceil(memory["parameters"] * setting.dtype.itemsize / 4)
        own = {
            axis: parameter_bytes(setting.model, problem, placement, survey.parameters)
            for axis, survey in self.surveys.items()
            if degrees[axis] > 1
        }
        common = replace(
            self._request(),
            batch_size=max(1, math.ceil(setting.batch.size / self._batch_factor(degrees))),
            parameter_bytes=memory["parameters"],
            gradient_bytes=memory["gradients"],
            activation_bytes=memory["activations"],
            flops=3.0 * tape.flops / problem.costs.degree,
            layers=max((len(g) for g in problem.quotient.groups), default=1),
            backward_seconds=placement.compute_seconds * 2 / 3,
            attention=attention_uses(tape, problem.costs, self.rules.composites.values()),
            forward_seconds=placement.compute_seconds / 3,
            stage=setting.stage,
            units=parameter_sizes(setting.model, setting.dtype, problem, placement) if shards > 1 else (),
            degrees=dict(degrees),
        )
        outer = next((a for a, s in setting.strategies.items() if s.divides and degrees[a] > 1), None)
        divided = StrategyCost()
        if outer is not None:  # what it leaves to one rank is what all others see
            asked = replace(common, survey=self.surveys.get(outer), work=module_work(problem, placement))
            divided = setting.strategies[outer].cost(asked, degrees[outer], self._link(degrees, outer))
            common = inside_of(common, divided, math.ceil)
            units = (
                parameter_sizes(setting.model, setting.dtype, problem, placement, divided.holds)
                if shards > 1
                else ()
            )
            common = replace(common, units=units)
        # what ranks share is summed over the replicas of each shard
        parted = replace(common, gradient_bytes=math.ceil(common.gradient_bytes / shards))
        fields: dict[str, Any] = {}
        summed = [
            axis
            for axis, s in setting.strategies.items()
            if s.gradient == "deferred" and not s.gathers and degrees[axis] > 1
        ]
        for name, strategy in setting.strategies.items():
            if degrees[name] <= 1 and not (name == SUMS and summed):
                continue
            axes, degree, link = name, degrees[name], self._link(degrees, name)
            if name == SUMS and summed:  # one sum over all axes on which gradients are partial
                axes, degree = "+".join(summed), math.prod(degrees[axis] for axis in summed)
                link = self._link(degrees, summed[0])
            request = common if strategy.gathers else parted
            survey = self.surveys.get(name)
            mine, mine_trained = own.get(name, (0.0, 0.0))
            others = sum((1 - 1 / degrees[a]) * trained for a, (_, trained) in own.items() if a != name)
            asked = replace(
                request,
                survey=survey,
                own_bytes=math.ceil(mine),
                own_gradient_bytes=math.ceil(mine_trained),
                gradient_bytes=max(0, request.gradient_bytes - math.ceil(others)),
                entering={} if survey is None else {m: tape.entering(m) for m in survey.modules},
            )
            cost = divided if name == outer else strategy.cost(asked, degree, link)
            exposed[axes] = cost.exposed_seconds
            hidden[axes] = cost.overlapped_seconds
            fields.update(cost.fields)
            for part in ("parameters", "gradients", "optimizer", "activations"):
                memory[part] = math.ceil(memory[part] * getattr(cost, part))
            collectives += [
                PlannedCollective(
                    axis=axes,
                    kind=u.kind,
                    nbytes=u.nbytes,
                    count=u.count,
                    phase=u.phase,
                    module=u.module,
                    why=u.why,
                )
                for u in cost.collectives
            ]
        busy = divided.compute - divided.idle
        if axis is not None:
            exposed[axis] = exposed.get(axis, 0.0) + placement.communication_seconds * busy
        return Candidate(
            degrees={a: d for a, d in degrees.items() if d > 1 or not setting.strategies[a].optional},
            stage=setting.stage if shards > 1 else 0,
            searched=axis,
            problem=problem,
            placement=placement,
            compute_seconds=placement.compute_seconds * busy,
            bubble_seconds=(placement.compute_seconds + placement.communication_seconds) * divided.idle,
            stages=divided.stages,
            exposed=exposed,
            hidden=hidden,
            optimizer_seconds=optimizer_seconds(
                setting.cluster, memory["gradients"], OPTIMIZERS[setting.optimizer]
            ),
            memory=memory,
            limit=setting.limit,
            collectives=collectives,
            fields=fields,
            placements=placements(self.setting.strategies, self.surveys, degrees),
            apart=tuple(m for a, survey in self.surveys.items() if degrees[a] > 1 for m in survey.modules),
            notes=tuple(n for a, survey in self.surveys.items() if degrees[a] > 1 for n in survey.notes),
        )

    def _batch_factor(self, degrees: Mapping[str, int]) -> int:
        return math.prod(s.batch_factor(degrees.get(a, 1)) for a, s in self.setting.strategies.items())


def scaled(batch: Batch, rows: int) -> Batch:
    """A batch of `rows` rows, from an example of another size."""
    size = batch.size

    def change(name: str, tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.dim() or tensor.shape[0] != size:
            return tensor
        if tensor.is_floating_point() or tensor.is_meta or is_fake(tensor):
            return torch.empty((rows, *tensor.shape[1:]), dtype=tensor.dtype, device="meta")
        return tensor[torch.arange(rows, device=tensor.device) % size]  # models look at integers

    return batch.map(change)


def _products(legal: Mapping[str, Sequence[int]], total: int) -> Iterator[dict[str, int]]:
    if not legal:
        if total == 1:
            yield {}
        return
    axis, *others = legal
    for degree in legal[axis]:
        if total % degree == 0:
            for rest in _products({a: legal[a] for a in others}, total // degree):
                yield {axis: degree, **rest}
