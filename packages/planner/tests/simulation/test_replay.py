"""Replays against closed forms: bubbles, slow ranks, weak links, and what waits for what."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from meshwright_dtensor.cluster import Cluster
from meshwright_dtensor.errors import InfeasibleError, UsageError
from meshwright_dtensor.plan import ParallelPlan, RecomputeRule
from meshwright_dtensor.plugins import PluginHost, ScheduleSpec
from meshwright_dtensor.plugins.host import Registered
from meshwright_dtensor.schedule.schedule import Action, Kind, Schedule, Shape
from meshwright_planner.clusters.registry import DGX_H100 as REGISTERED
from meshwright_planner.clusters.registry import LAPTOP_CPU
from meshwright_planner.simulation import (
    LinkFault,
    Simulation,
    Straggler,
    parse_link_fault,
    parse_straggler,
)
from meshwright_planner.simulation import simulate as simulate_with
from meshwright_planner.simulation.events import Drain, Post, Receive, Send, Span, Work, run
from meshwright_planner.simulation.faults import degraded
from meshwright_planner.simulation.replay import _chain
from meshwright_planner.simulation.schedule_steps import steps_of

BUCKET = 25 * 2**20
DGX_H100 = replace(REGISTERED, interference=0.0)
"""Compute takes as long beside a collective as alone."""
FREE = replace(
    DGX_H100, links=tuple(replace(level, latency_s=0.0, bandwidth_Bps=1e30) for level in DGX_H100.links)
)
"""Links that take no time."""


class InOrder(Schedule):
    """One stage per rank; forwards and backwards take turns after a warm-up."""

    warmup: int | None = None

    def actions(self, rank: int, shape: Shape) -> list[Action]:
        count = shape.microbatches
        warmup = min(count, shape.ranks - rank) if self.warmup is None else count
        actions = [Action("F", rank, m) for m in range(warmup)]
        for m in range(count):
            actions.append(Action("B", rank, m))
            if m + warmup < count:
                actions.append(Action("F", rank, m + warmup))
        return actions


class OneForwardOneBackward(InOrder):
    name = "1f1b"


class GPipe(InOrder):
    name, warmup = "gpipe", 1


class Split(InOrder):
    """Backwards in halves, one directly after the other."""

    name = "split"

    def actions(self, rank: int, shape: Shape) -> list[Action]:
        kinds: dict[str, tuple[Kind, ...]] = {"F": ("F",), "B": ("I", "W")}
        return [
            action._replace(kind=k) for action in super().actions(rank, shape) for k in kinds[action.kind]
        ]


HOST = PluginHost(
    {
        ScheduleSpec: {
            s.name: Registered(
                ScheduleSpec(name=s.name, target=f"{__name__}:{s.__name__}"), "tests", "0", "tests"
            )
            for s in (OneForwardOneBackward, GPipe, Split)
        }
    }
)


def simulate(plan: ParallelPlan, cluster: Cluster, **faults: Any) -> Simulation:
    return simulate_with(plan, cluster, host=HOST, **faults)


def plan_of(degrees: dict[str, int], compute: float = 3.0, **fields: Any) -> ParallelPlan:
    world = 1
    for degree in degrees.values():
        world *= degree
    split = {"exposed": {}, **fields.pop("split", {})}
    exposed = sum(split["exposed"].values())
    predicted = {
        "step_seconds": compute + exposed,
        "compute_seconds": compute,
        "communication_seconds": exposed,
        "split": split,
    }
    return ParallelPlan.from_dict({"world_size": world, "degrees": degrees, "predicted": predicted, **fields})


def pipelined(ranks: int, microbatches: int, times: list[tuple[float, float]], **fields: Any) -> ParallelPlan:
    stages = [{"forward_seconds": f, "backward_seconds": b} for f, b in times]
    degrees = {"pp": ranks, **fields.pop("degrees", {})}
    pipeline = {
        "stages": [[f"layers.{i}"] for i in range(len(times))],
        "microbatches": microbatches,
        "schedule": fields.pop("schedule", "1f1b"),
    }
    compute = max(f + b for f, b in times) * microbatches
    split = {"stages": stages, **fields.pop("split", {})}
    return plan_of(degrees, compute, pipeline=pipeline, split=split, **fields)


@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 2), (4, 4), (4, 16), (8, 8)])
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_uniform_bubble(ranks: int, microbatches: int, schedule: str) -> None:
    plan = pipelined(ranks, microbatches, [(1.0, 2.0)] * ranks, schedule=schedule)
    found = simulate(plan, FREE)
    assert found.seconds == pytest.approx((microbatches + ranks - 1) * 3.0)
    waits = sum(b.seconds["wait"] for b in found.busy) / (ranks * found.seconds)
    assert waits == pytest.approx((ranks - 1) / (microbatches + ranks - 1))


def test_backwards_wait_where_the_loss_is_of_the_whole_batch() -> None:
    plan = pipelined(2, 4, [(1.0, 2.0)] * 2)
    assert plan.pipeline is not None
    late = plan.replace(pipeline=plan.pipeline.model_copy(update={"loss": "batch"}))
    kinds = [["".join(step.kind for step in own) for own in steps_of(one, HOST)] for one in (plan, late)]
    assert kinds == [["FFBFBFBB", "FBFBFBFB"], ["FFFFBBBB"] * 2]


def test_a_replay_says_what_it_does_not_know() -> None:
    plan = pipelined(2, 2, [(1.0, 2.0)] * 2)
    crowded = replace(
        LAPTOP_CPU, cores=1, crowding=((1, 1.0), (2, 2.0)), hides_launch=False, devices_per_node=8
    )
    assert simulate(plan, FREE).notes == () == simulate(plan_of({"dp": 2}), crowded).notes
    found = simulate(plan, crowded)
    assert len(found.notes) == 2 and found.to_dict()["notes"] == list(found.notes)
    assert "ranks share cores" in found.render() and "ranks share cores" not in simulate(plan, FREE).render()
    apart = simulate(plan, replace(crowded, crowding=((1, 1.0), (2, 1.0))))
    assert len(apart.notes) == 1 and "runtime" in apart.notes[0]


@pytest.mark.parametrize(("made_for", "told"), [(None, False), ("dgx-h100", False), ("dgx-a100", True)])
def test_a_replay_on_another_cluster_says_what_is_not_its(made_for: str | None, told: bool) -> None:
    plan = pipelined(2, 2, [(1.0, 2.0)] * 2, provenance={"cluster": made_for})
    notes = simulate(plan, DGX_H100).notes
    assert (
        any(
            note.startswith("the plan was made for dgx-a100: compute, the optimizer")
            and note.endswith("plan for dgx-h100 to know what a step takes on it")
            for note in notes
        )
        == told
    )


def test_messages_delay_the_next_stage() -> None:
    """One microbatch through p stages: every cut is crossed twice."""
    nbytes = 10**9
    message = {"axis": "pp", "kind": "send_recv", "nbytes": nbytes}
    plan = pipelined(
        4,
        1,
        [(1.0, 2.0)] * 4,
        collectives=[
            {**message, "phase": phase, "why": f"{what} stage {i}"}
            for i in range(3)
            for phase, what in (("forward", "from"), ("backward", "gradients to"))
        ],
    )
    once = DGX_H100.link(1, 4).seconds("send_recv", nbytes, 4)
    assert once > 1e-3
    assert simulate(plan, DGX_H100).seconds == pytest.approx(4 * 3.0 + 6 * once)


def test_a_slow_stage_sets_the_pace() -> None:
    """Its own work, two forwards before its first, two backwards after its last, and once it waits a second: its two
    forwards are done at 6, and the first gradients come back at 7."""
    plan = pipelined(4, 8, [(1.0, 2.0)] * 4)
    found = simulate(plan, FREE, stragglers=[Straggler(2, 2.0)])
    assert found.seconds == pytest.approx(8 * 6.0 + 2 * 1.0 + 2 * 2.0 + 1.0)
    assert found.waiting and all(w.for_whom != () for w in found.waiting)


def test_a_slow_rank_delays_all_replicas() -> None:
    count = 4
    gradients = {"axis": "dp", "kind": "all_reduce", "nbytes": BUCKET, "count": count, "phase": "backward"}
    plan = plan_of({"dp": 8}, 3.0, collectives=[gradients])
    one = DGX_H100.link(1, 8).seconds("all_reduce", BUCKET, 8)
    sound = simulate(plan, DGX_H100)
    assert sound.seconds == pytest.approx(3.0 + one, rel=1e-9)  # the last bucket is exposed
    slow = simulate(plan, DGX_H100, stragglers=[Straggler(5, 1.5)])
    assert slow.sound_seconds == sound.seconds
    assert slow.seconds == pytest.approx(4.5 + one, rel=1e-9)
    (others,) = slow.waiting
    assert others.alike == 7 and others.for_whom == (5,) and others.seconds == pytest.approx(1.5, rel=1e-2)
    assert "the sum of gradients over dp" in slow.render()


def test_buckets_that_a_slow_link_cannot_hide() -> None:
    """One link after the other: first bucket ready after a quarter of the backward pass, then four in a row."""
    nbytes = 10**12
    gradients = {"axis": "dp", "kind": "all_reduce", "nbytes": nbytes, "count": 4, "phase": "backward"}
    plan = plan_of({"dp": 2}, 3.0, collectives=[gradients])
    one = DGX_H100.link(1, 2).seconds("all_reduce", nbytes, 2)
    assert one > 0.5
    assert simulate(plan, DGX_H100).seconds == pytest.approx(1.0 + 0.5 + 4 * one)


def test_ranks_of_tp_go_in_step() -> None:
    inner = {"axis": "tp", "kind": "all_reduce", "nbytes": 10**9, "count": 10}
    uses = [{**inner, "phase": phase} for phase in ("forward", "backward")]
    once = DGX_H100.link(1, 4).seconds("all_reduce", 10**9, 4)
    plan = plan_of({"dp": 2, "tp": 4}, 3.0, collectives=uses, split={"exposed": {"tp": 20 * once}})
    assert simulate(plan, DGX_H100).seconds == pytest.approx(3.0 + 20 * once)
    slow = simulate(plan, DGX_H100, stragglers=[Straggler(6, 2.0)])
    assert slow.seconds == pytest.approx(6.0 + 20 * once)  # compute doubles, communication does not
    assert {b.ranks for b in slow.busy} == {(0, 1, 2, 3), (4, 5, 6, 7)}


def test_an_all_reduce_over_a_weak_link() -> None:
    inner = {"axis": "tp", "kind": "all_reduce", "nbytes": 10**9, "count": 10}
    level = DGX_H100.links[0]
    free = replace(DGX_H100, links=(replace(level, latency_s=0.0), *DGX_H100.links[1:]))
    once = free.link(1, 8).seconds("all_reduce", 10**9, 8)
    plan = plan_of({"tp": 8}, 3.0, collectives=[inner], split={"exposed": {"tp": 10 * once}})
    weak = simulate(plan, free, link_faults=[LinkFault(3, level.name, 0.25)])
    assert weak.seconds == pytest.approx(3.0 + 4 * 10 * once)
    elsewhere = simulate(plan, free, link_faults=[LinkFault(3, free.links[1].name, 0.25)])
    assert elsewhere.seconds == pytest.approx(3.0 + 10 * once)  # tp never leaves the node
    gone = simulate(plan, free, link_faults=[LinkFault(3, level.name, 0.0)])
    outside = replace(free, links=(replace(free.links[0], bandwidth_Bps=free.links[1].bandwidth_Bps,
                                           latency_s=free.links[1].latency_s), free.links[1]))  # fmt: skip
    again = outside.link(1, 8).seconds("all_reduce", 10**9, 8)
    assert gone.seconds == pytest.approx(3.0 + 10 * again)
    with pytest.raises(InfeasibleError, match="never ends"):
        simulate(plan, free, link_faults=[LinkFault(3, free.links[1].name, 0.0)])


def test_only_those_who_meet_wait() -> None:
    """dp 2 x zero 4: the sum over zero holds up the group of the slow rank, that over dp everyone."""
    shared = {"axis": "zero", "kind": "reduce_scatter", "nbytes": 8, "phase": "backward"}
    plan = plan_of({"dp": 2, "zero": 4}, 3.0, collectives=[shared], zero={"stage": 1})
    found = simulate(plan, FREE, stragglers=[Straggler(1, 2.0)])
    waiting = {w.who: w for w in found.waiting}
    assert set(waiting) == {(0,)} and waiting[0,].alike == 3
    both = plan.replace(collectives=[*plan.collectives, {**shared, "axis": "dp", "kind": "all_reduce"}])
    found = simulate(both, FREE, stragglers=[Straggler(1, 2.0)])
    assert sum(w.alike for w in found.waiting) >= 7


def test_a_thousand_nodes_are_replayed_at_once() -> None:
    """Replicas that nothing sets apart are one actor, and a fault sets its own apart only."""
    inner = {"axis": "tp", "kind": "all_reduce", "nbytes": 8}
    plan = pipelined(16, 64, [(1.0, 2.0)] * 16, degrees={"dp": 128, "tp": 8}, collectives=[inner])
    found = simulate(plan, FREE, stragglers=[Straggler(4321, 1.25)])
    assert len(found.busy) == 2 * 16 and plan.world_size == 16384
    assert found.sound_seconds == pytest.approx((64 + 15) * 3.0)


def test_shards_are_gathered_one_ahead() -> None:
    gather = {"axis": "zero", "kind": "all_gather", "nbytes": 10**9, "count": 4, "phase": "forward"}
    plan = plan_of({"zero": 8}, 3.0, collectives=[gather], zero={"stage": 3})
    one = DGX_H100.link(1, 8).seconds("all_gather", 10**9, 8)
    assert one < 0.25
    assert simulate(plan, DGX_H100).seconds == pytest.approx(3.0 + one)


def test_events_by_hand() -> None:
    group = frozenset("ab")
    outcome = run(
        {
            "a": [Work(1.0, "x"), Post(group, "s", 2.0), Post(group, "s", 1.0), Work(0.5, "y"), Drain(group, "s", "sum")],
            "b": [Receive("m", "news"), Post(group, "s", 2.0), Post(group, "s", 1.0), Drain(group, "s", "sum")],
            "c": [Work(3.0, "z"), Send("m", 1.0)],
        }
    )  # fmt: skip
    assert outcome.ends == {"a": 7.0, "b": 7.0, "c": 3.0}
    waits = [(s.seconds, s.culprit) for s in outcome.spans["a"] if s.kind == "wait"]
    assert sum(seconds for seconds, _ in waits) == pytest.approx(2.5)
    with pytest.raises(UsageError, match="would hang"):
        run({"a": [Receive("never", "news")]})


def test_of_several_faults_of_a_level_the_worst_counts() -> None:
    level, outer = DGX_H100.links
    two = degraded(DGX_H100, frozenset({(level.name, 0.5), (level.name, 0.25), (level.name, 1.0)}))
    assert two == degraded(DGX_H100, frozenset({(level.name, 0.25)}))
    assert two.links[0].bandwidth_Bps == 0.25 * level.bandwidth_Bps
    gone = degraded(DGX_H100, frozenset({(level.name, 0.5), (level.name, 0.0), (outer.name, 0.5)}))
    # what nvlink carried takes infiniband, which is at half its own
    assert [one.bandwidth_Bps for one in gone.links] == 2 * [0.5 * outer.bandwidth_Bps]


def test_faults_are_checked() -> None:
    assert parse_straggler("5=1.5", DGX_H100, 16) == [Straggler(5, 1.5)]
    assert [s.rank for s in parse_straggler("node1=2", DGX_H100, 12)] == [8, 9, 10, 11]
    assert parse_link_fault("rank 3:infiniband=0", DGX_H100, 8) == [LinkFault(3, "infiniband", 0.0)]
    for text in ("5", "5=0.5", "99=2", "5=fast"):
        with pytest.raises(UsageError, match="straggler"):
            parse_straggler(text, DGX_H100, 16)
    with pytest.raises(UsageError, match="did you mean 'nvlink'"):
        parse_link_fault("0:nvlnk=0.5", DGX_H100, 16)
    with pytest.raises(UsageError, match=r"predicted\.split"):
        simulate(ParallelPlan.from_dict({"world_size": 1, "degrees": {}}), DGX_H100)
    with pytest.raises(UsageError, match="world_size"):
        simulate(ParallelPlan.from_dict({"world_size": 4, "degrees": {"dp": 2}}), DGX_H100)


@pytest.mark.parametrize("microbatches", [1, 4])
def test_sums_of_a_pipeline_start_when_all_its_ranks_have_gone_back(microbatches: int) -> None:
    """Gradients are handed over then, one microbatch or more: nothing is left to hide their sums behind."""
    nbytes, count = 10**9, 8
    use = {"axis": "dp", "kind": "all_reduce", "nbytes": nbytes, "count": count, "phase": "backward"}
    total = count * DGX_H100.link(1, 2).seconds("all_reduce", nbytes, 2)
    plan = pipelined(2, microbatches, [(1.0, 2.0)] * 2, degrees={"dp": 2}, collectives=[use])
    without = pipelined(2, microbatches, [(1.0, 2.0)] * 2, degrees={"dp": 2})
    found, bare = simulate(plan, DGX_H100), simulate(without, DGX_H100)
    assert found.seconds - bare.seconds == pytest.approx(total)
    # rank 1, whose last backward ends before that of rank 0, waits for it too
    ends = [max(s.end for s in own if s.kind == "compute") for own in found.timelines]
    begins = [min(s.start for s in own if "sum of gradients" in s.what) for own in found.timelines]
    assert ends[1] < ends[0] == begins[0] == begins[1]
    alone = simulate(plan_of({"dp": 2}, 3.0, collectives=[use]), DGX_H100)
    assert alone.seconds - 3.0 == pytest.approx(total / count)  # without a pipeline, the last one is left


def test_halves_of_a_backward_are_not_run_where_modules_run_again() -> None:
    plan = pipelined(2, 2, [(1.0, 2.0)] * 2, schedule="split")
    again = plan.replace(recompute=[RecomputeRule(pattern="layers.0")])
    parts = [{s.kind: s.part for s in steps_of(one, HOST)[0]} for one in (plan, again)]
    assert parts == [{"F": 1.0, "I": 0.5, "W": 0.5}, {"F": 1.0, "I": 1.0, "W": 0.0}]


def test_what_comes_once_a_step_is_in_it() -> None:
    """The loss of the whole batch on the last stage, between forwards and backwards, and what the runtime does."""
    plan = pipelined(2, 4, [(1.0, 2.0)] * 2, split={"between_seconds": 5.0})
    assert plan.pipeline is not None and plan.predicted is not None
    late = plan.replace(pipeline=plan.pipeline.model_copy(update={"loss": "batch"}))
    late = late.replace(predicted=plan.predicted.model_copy(update={"compute_seconds": 4 * 3.0 + 5.0}))
    # four forwards and one through the other stage, the loss, and the same back
    assert simulate(late, FREE).seconds == pytest.approx(5 * 1.0 + 5.0 + 5 * 2.0)
    host = late.replace(predicted=plan.predicted.model_copy(update={"compute_seconds": 4 * 3.0 + 5.0 + 0.5}))
    assert simulate(host, FREE).seconds == pytest.approx(5 * 1.0 + 5.0 + 5 * 2.0 + 0.5)


def test_compute_is_slower_beside_collectives() -> None:
    """Four buckets, the last exposed; three run beside the backward pass, which takes a fifth of their time longer."""
    gradients = {"axis": "dp", "kind": "all_reduce", "nbytes": BUCKET, "count": 4, "phase": "backward"}
    plan = plan_of({"dp": 8}, 3.0, collectives=[gradients])
    one = DGX_H100.link(1, 8).seconds("all_reduce", BUCKET, 8)
    taken = simulate(plan, replace(DGX_H100, interference=0.2)).seconds
    assert taken == pytest.approx(3.0 + one + 0.2 * 3 * one, rel=1e-9)
    apart = simulate(plan, replace(DGX_H100, hides_communication=False)).seconds
    assert apart == pytest.approx(3.0 + 4 * one, rel=1e-9)


def test_collectives_on_one_level_take_turns() -> None:
    """zero in a node and dp between nodes go side by side; where both cross nodes, one behind the other."""
    nbytes = 10**11
    uses = [
        {"axis": "zero", "kind": "reduce_scatter", "nbytes": nbytes, "phase": "backward"},
        {"axis": "dp", "kind": "all_reduce", "nbytes": nbytes, "phase": "backward", "count": 2},
    ]
    group = frozenset("ab")
    lanes = [
        run({a: [Post(group, "x", 2.0, None, "l"), Post(group, "y", 3.0, None, other), Drain(group, "y", "y")] for a in "ab"})
        for other in ("l", "m")
    ]  # fmt: skip
    assert [found.seconds for found in lanes] == [5.0, 3.0]
    wide = plan_of({"dp": 2, "zero": 16}, 3.0, collectives=uses, zero={"stage": 2})
    shares = DGX_H100.link(1, 16).seconds("reduce_scatter", nbytes, 16)
    sums = DGX_H100.link(16, 2).seconds("all_reduce", nbytes, 2)
    assert simulate(wide, DGX_H100).seconds == pytest.approx(max(3.0, 2.0 + sums) + shares + sums)


def test_an_embedding_is_gathered_before_all_else() -> None:
    """Of several stages, by the ranks that hold the first or the last alone."""
    block = {"axis": "zero", "kind": "all_gather", "nbytes": 10**9, "count": 2, "phase": "forward"}
    rest = {**block, "nbytes": 10**10, "count": 1, "why": "parameters outside of blocks"}
    one, other = (DGX_H100.link(1, 8).seconds("all_gather", size, 8) for size in (10**9, 10**10))
    assert one < other < 0.5
    plan = plan_of({"zero": 8}, 3.0, collectives=[block, rest], zero={"stage": 1})
    assert simulate(plan, DGX_H100).seconds == pytest.approx(3.0 + other + one)
    staged = pipelined(
        4, 1, [(1.0, 2.0)] * 4, degrees={"zero": 8}, collectives=[block, rest], zero={"stage": 1}
    )
    # each stage waits for its first block, the first for the embedding before it, the last gathers the head meanwhile
    assert simulate(staged, DGX_H100).seconds == pytest.approx(4 * 3.0 + other + 4 * one)


def test_ranks_that_wait_for_each_other_are_a_chain_that_ends() -> None:
    """Both wait at one moment, each for the other: the chain goes on behind that, it does not go round."""
    first = [Span(0.0, 1.0, "forward", "compute"), Span(1.0, 3.0, "message", "wait", 1)]
    second = [Span(0.0, 2.0, "forward", "compute"), Span(2.0, 3.0, "message", "wait", 0)]
    outcome = SimpleNamespace(seconds=3.0, ends={0: 3.0, 1: 3.0}, spans={0: first, 1: second})
    load = SimpleNamespace(actors=lambda: [0, 1], ranks=lambda actor: [actor])
    found = _chain(load, outcome)  # type: ignore[arg-type]
    assert sum(seconds for _, _, seconds in found) == pytest.approx(3.0)
    assert ("compute" in {kind for _, kind, _ in found}) and ("wait" in {kind for _, kind, _ in found})
