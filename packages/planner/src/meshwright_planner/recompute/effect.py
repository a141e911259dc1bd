"""The effect of recompute on a placement: saved tensors, seconds and communication."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from meshwright_dtensor.plan import RecomputeRule
from meshwright_planner.cost.prices import more_forward
from meshwright_planner.placement.ilp import Conversion
from meshwright_planner.placement.problem import Placement, PlacementProblem
from meshwright_planner.placement.saved_bytes import kept_bytes
from meshwright_planner.recompute.live_again import alive_again, dropped
from meshwright_planner.recompute.region import Region


def recomputed(
    problem: PlacementProblem, placement: Placement, rules: Sequence[RecomputeRule]
) -> tuple[PlacementProblem, Placement, dict[int, float]]:
    """The same placement where the modules of `rules` are recomputed, and their live bytes during recompute.

    A module keeps its inputs. "selective" also keeps the results of products and attention, "alternate" those of attention
    and of every other product. The forward pass and its communication run once more, as far as torch recomputes (see
    `Region.repeated`). The last result: representative node -> bytes that its module has alive in addition to kept tensors.
    """
    region = _region(problem, rules)
    kept = region.saved(problem.tape)
    tape = replace(problem.tape, saved=kept, recompute=tuple(rules))
    other = problem.on(tape)
    blocks = problem.quotient.once_for(
        problem.tape, ("dropped", tuple(rules)), lambda _: dropped(problem, region.block, kept)
    )
    again = region.again
    options = {}
    for k, option in placement.options.items():
        seconds, forward = more_forward(option.seconds, option.forward, again[k])
        inner_seconds = option.inner_seconds * (1 + again[k])
        options[k] = replace(option, seconds=seconds, forward=forward, inner_seconds=inner_seconds)
    conversions = _communicated(placement, again)
    counts, costs = problem.quotient.node_count, problem.costs
    between = sum(costs.collective(c.collective) * c.count for c in conversions)
    inner = sum(option.inner_seconds * counts[k] for k, option in options.items())
    recomputed_placement = replace(
        placement,
        options=options,
        conversions=conversions,
        compute_seconds=sum(option.seconds * counts[k] for k, option in options.items()),
        communication_seconds=between + inner,
        saved_bytes=kept_bytes(other, placement),
        again=again,
    )
    return other, recomputed_placement, alive_again(problem, placement, blocks, again)


def communicated(
    problem: PlacementProblem, placement: Placement, rules: Sequence[RecomputeRule]
) -> list[Conversion]:
    """The conversions of a placement where the modules of `rules` are recomputed."""
    return _communicated(placement, _region(problem, rules).again)


def _communicated(placement: Placement, again: Mapping[int, float]) -> list[Conversion]:
    return [
        replace(
            c,
            count=c.count + round(c.count * max((again[n] for n, _ in c.consumers if n in again), default=0)),
        )
        if c.phase == "forward"
        else c
        for c in placement.conversions
    ]


def _region(problem: PlacementProblem, rules: Sequence[RecomputeRule]) -> Region:
    tape, quotient = problem.tape, problem.quotient
    return quotient.once(
        ("recomputed", tuple(rules)), lambda: Region(tape, quotient, problem.legality.flops, rules)
    )
