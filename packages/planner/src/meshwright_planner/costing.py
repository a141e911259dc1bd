"""What a combination of degrees costs, once the placements on its searched axis are known."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import nn

from meshwright_dtensor.plan import PlannedCollective
from meshwright_dtensor.strategy import StrategyCost
from meshwright_planner.attention import attention_uses
from meshwright_planner.basis import Basis
from meshwright_planner.candidate import Candidate
from meshwright_planner.costs import OPTIMIZERS, optimizer_seconds
from meshwright_planner.legal import Rules
from meshwright_planner.memory import memory_parts, parameter_bytes
from meshwright_planner.placement import Placement, PlacementProblem
from meshwright_planner.setting import SHARED
from meshwright_planner.surveys import placements
from meshwright_planner.work import inside_of, module_work, parameter_sizes

SUMS = "dp"
"""The axis whose strategy costs the sum of gradients, over every axis that defers it."""


def cost(
    basis: Basis,
    rules: Rules,
    degrees: Mapping[str, int],
    axis: str | None,
    problem: PlacementProblem,
    placement: Placement,
) -> Candidate:
    """The candidate with these degrees (of every axis) and these placements on the searched `axis`."""
    setting, tape = basis.setting, problem.tape
    memory = memory_parts(setting.model, problem, placement, setting.optimizer)
    exposed: dict[str, float] = {}
    hidden: dict[str, float] = {}
    collectives: list[PlannedCollective] = []
    shards = degrees.get(SHARED, 1)
    if setting.dtype is not None and shards == 1:  # the copies that are computed with
        memory["parameters"] += math.ceil(memory["parameters"] * setting.dtype.itemsize / 4)
    own = {
        axis: parameter_bytes(setting.model, problem, placement, survey.parameters)
        for axis, survey in basis.surveys.items()
        if degrees[axis] > 1
    }
    # communication hides behind compute only where it does not take the cores that compute needs
    hides = setting.cluster.hides_communication
    common = replace(
        basis.request(),
        batch_size=max(1, math.ceil(setting.batch.size / basis.batch_factor(degrees))),
        parameter_bytes=memory["parameters"],
        gradient_bytes=memory["gradients"],
        activation_bytes=memory["activations"],
        flops=3.0 * tape.flops / problem.costs.degree,
        layers=max((len(g) for g in problem.quotient.groups), default=1),
        backward_seconds=placement.compute_seconds * 2 / 3 * hides,
        attention=attention_uses(tape, problem.costs, rules.composites.values()),
        forward_seconds=placement.compute_seconds / 3 * hides,
        stage=setting.stage,
        units=parameter_sizes(setting.model, setting.dtype, problem, placement) if shards > 1 else (),
        degrees=dict(degrees),
    )
    outer = next((a for a, s in setting.strategies.items() if s.divides and degrees[a] > 1), None)
    divided = StrategyCost()
    if outer is not None:  # what it leaves to one rank is what all others see
        asked = replace(common, survey=basis.surveys.get(outer), work=module_work(problem, placement))
        divided = setting.strategies[outer].cost(asked, degrees[outer], basis.link(degrees, outer))
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
        axes, degree, link = name, degrees[name], basis.link(degrees, name)
        if name == SUMS and summed:  # one sum over all axes on which gradients are partial
            axes, degree = "+".join(summed), math.prod(degrees[axis] for axis in summed)
            link = basis.link(degrees, summed[0])
        request = common if strategy.gathers else parted
        survey = basis.surveys.get(name)
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
        found = divided if name == outer else strategy.cost(asked, degree, link)
        exposed[axes] = exposed.get(axes, 0.0) + found.exposed_seconds
        hidden[axes] = hidden.get(axes, 0.0) + found.overlapped_seconds
        fields.update(found.fields)
        for part in ("parameters", "gradients", "optimizer", "activations"):
            memory[part] = math.ceil(memory[part] * getattr(found, part))
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
            for u in found.collectives
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
            setting.cluster,
            memory["gradients"],
            OPTIMIZERS[setting.optimizer],
            _trained(setting.model, divided.holds),
        ),
        memory=memory,
        limit=setting.limit,
        collectives=collectives,
        fields=fields,
        placements=placements(basis.setting.strategies, basis.surveys, degrees),
        apart=tuple(m for a, survey in basis.surveys.items() if degrees[a] > 1 for m in survey.modules),
        notes=tuple(n for a, survey in basis.surveys.items() if degrees[a] > 1 for n in survey.notes),
    )


def _trained(model: nn.Module, holds: frozenset[str] | None) -> int:
    """How many parameters an optimizer steps on one rank; `holds`: names of those that it has, None for all."""
    return sum(p.requires_grad and (holds is None or n in holds) for n, p in model.named_parameters())
