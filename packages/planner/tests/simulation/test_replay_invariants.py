"""What a link can gain or cost in a replay, over random plans, clusters and faults.

So many cases of each invariant, in this file and in test_faults.py, with a line of how many ran and failed:

    MESHWRIGHT_RANDOM_REPLAYS=10000 python -m pytest packages/planner/tests/simulation/test_replay_invariants.py \
        packages/planner/tests/simulation/test_faults.py --hypothesis-show-statistics
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_replay import HOST, pipelined, plan_of

from meshwright_dtensor.cluster import Cluster, LinkLevel, MeasuredCollective
from meshwright_dtensor.errors import UsageError
from meshwright_dtensor.plan import ParallelPlan
from meshwright_planner.clusters.registry import DGX_H100
from meshwright_planner.reports.explain import explain
from meshwright_planner.reports.plan_view import crossed
from meshwright_planner.simulation.events import run
from meshwright_planner.simulation.faults import LinkFault, Straggler
from meshwright_planner.simulation.workload import Faults, Workload

CASES = int(os.environ.get("MESHWRIGHT_RANDOM_REPLAYS", "200"))
random_cases = settings(
    max_examples=CASES,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)

ROUNDING = 1e-9


@dataclass(frozen=True)
class Case:
    plan: ParallelPlan
    cluster: Cluster

    def seconds(self, faults: Faults | None = None, cluster: Cluster | None = None) -> float:
        load = Workload(self.plan, cluster or self.cluster, faults or Faults(), HOST)
        return run(load.programs()).seconds

    def carried(self, level: str) -> float:
        """Seconds of a step in which a rank's collectives cross a link, by the plan's list of collectives."""
        total, degrees = 0.0, dict(self.plan.degrees)
        for c in self.plan.collectives:
            axes = [a for a in c.axis.split("+") if a in degrees]
            names = list(degrees)
            spans = [(math.prod(degrees[b] for b in names[names.index(a) + 1 :]), degrees[a]) for a in axes]
            link = self.cluster.link_over(spans)
            if level in link.levels:
                total += c.count * link.seconds(c.kind, c.nbytes, math.prod(d for _, d in spans))
        return total


@st.composite
def clusters(draw: st.DrawFn) -> Cluster:
    """Two or three levels, of which an outer one may be faster than an inner one."""
    sizes = draw(st.sampled_from([(2, 0), (4, 0), (8, 0), (2, 8, 0), (4, 8, 0)]))
    speeds = st.tuples(st.floats(1e8, 1e12), st.sampled_from([0.0, 1e-6, 1e-3]))
    levels = (
        LinkLevel(f"level{i}", size, latency, bandwidth)
        for i, size in enumerate(sizes)
        for bandwidth, latency in [draw(speeds)]
    )
    measured = ()
    if draw(st.booleans()):
        measured = (MeasuredCollective("all_reduce", 2, ((1e6, 1e-3), (1e9, 0.5)), 2),)
    return replace(
        DGX_H100,
        links=tuple(levels),
        interference=draw(st.sampled_from([0.0, 0.2, 0.9])),
        hides_communication=draw(st.booleans()),
        collectives=measured,
    )


def _axis(draw: st.DrawFn, axis: str, stages: int, microbatches: int) -> list[dict[str, object]]:
    """The collectives that ranks of one axis need."""
    size, count = st.integers(1, 10**9), st.integers(1, 6)
    if axis == "pp":
        return [
            {"axis": "pp", "kind": "send_recv", "nbytes": draw(size), "count": microbatches, "phase": phase, "why": why}
            for cut in range(stages - 1)
            for phase, why in (("forward", f"from stage {cut} to {cut + 1}"), ("backward", f"gradients to stage {cut}"))
        ]  # fmt: skip
    if axis == "zero":
        gather = {"axis": "zero", "kind": "all_gather", "nbytes": draw(size)}
        return [
            {**gather, "phase": "forward", "count": 3 * microbatches},
            {**gather, "phase": "forward", "nbytes": draw(size), "why": "parameters outside of blocks"},
            {**gather, "phase": "backward", "count": 3 * microbatches},
            {**gather, "kind": "reduce_scatter", "phase": "backward", "count": draw(count)},
        ]
    if axis in ("dp", "dp+cp"):
        return [
            {
                "axis": axis,
                "kind": "all_reduce",
                "nbytes": draw(size),
                "count": draw(count),
                "phase": "backward",
            }
        ]
    kind = draw(st.sampled_from(["all_reduce", "all_gather", "all_to_all"]))
    use = {"axis": axis, "kind": kind, "nbytes": draw(size), "count": draw(count) * stages}
    return [{**use, "phase": phase} for phase in ("forward", "backward")]


@st.composite
def cases(draw: st.DrawFn, stages: tuple[int, ...] = (1, 1, 2, 4)) -> Case:
    """A plan on sixteen ranks or fewer, with the split that it might have been predicted to have."""
    pp = draw(st.sampled_from(stages))
    inner = draw(
        st.sampled_from(
            [("dp",), ("zero",), ("tp",), ("dp", "zero"), ("dp", "tp"), ("dp", "cp"), ("zero", "ep")]
        )
    )
    degrees = {axis: draw(st.sampled_from([2, 4])) for axis in inner}
    microbatches = draw(st.integers(1, 6)) if pp > 1 else 1
    axes = [a if (a, "cp") != ("dp", inner[-1]) else "dp+cp" for a in inner] + (["pp"] if pp > 1 else [])
    collectives = [c for axis in axes for c in _axis(draw, axis, pp, microbatches)]
    cluster = draw(clusters())
    exposed, hidden = {}, {}
    case = Case(
        plan_of(degrees, 1.0, collectives=collectives), cluster.running(math.prod(degrees.values()) * pp)
    )
    for axis in set(inner) & {"tp", "cp", "ep"}:
        uses = [c for c in case.plan.collectives if c.axis == axis]
        alone = Case(plan_of({**degrees, "pp": 1}, collectives=[c.model_dump() for c in uses]), case.cluster)
        total = alone.carried(_link(alone, axis)) / pp
        # overlapped in part, next to compute that only this axis needs
        hidden[axis] = total * draw(st.sampled_from([0.0, 0.5, 1.0]))
        exposed[axis] = total - hidden[axis] + draw(st.sampled_from([0.0, 0.3, 2.0])) * hidden[axis]
    zero = {"zero": {"stage": draw(st.sampled_from([1, 2, 3]))}} if "zero" in inner else {}
    split = {
        "exposed": {a: s for a, s in exposed.items() if s},
        "hidden": {a: s for a, s in hidden.items() if s},
    }
    second = st.floats(1e-3, 1.0)
    if pp == 1:
        plan = plan_of(degrees, draw(second), collectives=collectives, split=split, **zero)
    else:
        times = [(draw(second), draw(second)) for _ in range(pp)]
        schedule = draw(st.sampled_from(["1f1b", "gpipe", "split"]))
        # or known pass by pass, no more than the plan's list has
        if (sent := exposed.get("tp", 0.0)) and draw(st.booleans()):
            parts = st.tuples(st.floats(0.0, 0.5), st.floats(0.0, 0.5))
            inside = [tuple(sent * part / microbatches for part in draw(parts)) for _ in range(pp)]
            split["stages"] = [
                {"forward_seconds": f, "backward_seconds": b, "collectives": {"tp": passes}}
                for (f, b), passes in zip(times, inside)
            ]
        plan = pipelined(
            pp,
            microbatches,
            times,
            degrees=degrees,
            collectives=collectives,
            split=split,
            schedule=schedule,
            **zero,
        )
    return Case(plan, case.cluster)


def _link(case: Case, axis: str) -> str:
    """The outermost link of an axis."""
    return crossed(case.plan, axis, case.cluster)[-1]


def _levels(case: Case) -> st.SearchStrategy[str]:
    return st.sampled_from([level.name for level in case.cluster.links])


@random_cases
@given(st.data())
def test_a_better_link_gains_at_most_the_exposed_time_on_it(data: st.DataObject) -> None:
    case = data.draw(cases())
    level = data.draw(_levels(case))
    today = case.seconds()
    twice = case.seconds(Faults(everywhere=frozenset({(level, 2.0)})))
    endless = case.seconds(Faults(everywhere=frozenset({(level, 1e30)})))
    assert endless <= twice * (1 + ROUNDING) and twice <= today * (1 + ROUNDING)
    # a pipeline is as long as a chain through all its ranks
    assert today - twice <= case.carried(level) * case.plan.degree("pp") / 2 + ROUNDING * today
    (view,) = explain(case.plan, cluster=case.cluster, host=HOST).to_dict()["plans"]
    for upgrade in view["upgrades"]:
        name = upgrade["what"].split()[0]
        gain = upgrade["today_seconds"] - upgrade["seconds"]
        assert upgrade["today_seconds"] == pytest.approx(sum(view["seconds"].values()))
        if name != "devices":
            over = sum(s for axes, s in view["seconds"].items() if name in view["links"].get(axes, ()))
            assert gain <= over + ROUNDING and upgrade["seconds"] >= view["seconds"]["compute"] - ROUNDING
        assert gain + ROUNDING >= 0 and gain == pytest.approx(upgrade["saved"] * upgrade["today_seconds"])


@random_cases
@given(st.data())
def test_a_weak_link_costs_at_most_what_it_carries(data: st.DataObject) -> None:
    case = data.draw(cases())
    level, rank = data.draw(_levels(case)), data.draw(st.integers(0, case.plan.world_size - 1))
    shares = sorted(data.draw(st.lists(st.floats(0.001, 1.0), min_size=2, max_size=2)), reverse=True)
    today, carried = case.seconds(), case.carried(level)
    times = [case.seconds(Faults(links=[LinkFault(rank, level, share)])) for share in shares]
    if level != case.cluster.links[-1].name:
        times.append(case.seconds(Faults(links=[LinkFault(rank, level, 0.0)])))
    assert all(more >= less * (1 - ROUNDING) for less, more in zip([today, *times], times))
    for share, seconds in zip(shares, times):
        assert seconds - today <= carried * (1 / share - 1) + ROUNDING * seconds


@random_cases
@given(st.data())
def test_nothing_is_gained_by_several_faults(data: st.DataObject) -> None:
    case = data.draw(cases())
    ranks = st.integers(0, case.plan.world_size - 1)
    links = data.draw(st.lists(st.builds(LinkFault, ranks, _levels(case), st.floats(0.01, 1.0)), max_size=3))
    slow = data.draw(st.lists(st.builds(Straggler, ranks, st.floats(1.0, 3.0)), max_size=2))
    fewer = case.seconds(Faults(slow[1:], links[1:]))
    assert case.seconds() * (1 - ROUNDING) <= fewer <= case.seconds(Faults(slow, links)) * (1 + ROUNDING)


@random_cases
@given(
    st.integers(2, 6), st.integers(1, 8), st.floats(0.1, 1.0), st.floats(0.1, 1.0), st.integers(1, 10**9), st.floats(0.1, 4.0)
)  # fmt: skip
def test_an_all_reduce_in_a_pipeline_has_a_closed_form(
    ranks: int, microbatches: int, forward: float, backward: float, nbytes: int, factor: float
) -> None:
    """1F1B of equal stages takes as long as microbatches and ranks less one together; a ring sends 2(n-1)/n of its bytes."""
    size, bandwidth = 4, 1e9
    levels = (LinkLevel("inner", size, 0.0, bandwidth), LinkLevel("outer", 0, 0.0, 1e6))
    cluster = replace(DGX_H100, links=levels, interference=0.0)
    use = {"axis": "tp", "kind": "all_reduce", "nbytes": nbytes, "count": ranks * microbatches}
    once = 2 * (size - 1) / size * nbytes / bandwidth
    plan = pipelined(
        ranks,
        microbatches,
        [(forward, backward)] * ranks,
        degrees={"tp": size},
        collectives=[{**use, "phase": phase} for phase in ("forward", "backward")],
        split={"exposed": {"tp": 2 * microbatches * once}},
    )
    changed = Case(plan, cluster).seconds(Faults(everywhere=frozenset({("inner", factor)})))
    passes = microbatches + ranks - 1
    assert changed == pytest.approx(passes * (forward + backward + 2 * once / factor))


def test_faults_that_are_none_are_refused() -> None:
    for wrong in (
        lambda: Straggler(0, 0.5),
        lambda: LinkFault(0, "nvlink", 1.5),
        lambda: LinkFault(0, "nvlink", -0.1),
    ):
        with pytest.raises(UsageError, match="give"):
            wrong()
