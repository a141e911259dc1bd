"""Simulations against closed forms: bubbles, slow ranks, faulty links, and the waits they cause."""

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
from meshwright_planner.simulation.events import (
    Join,
    Receive,
    Send,
    Span,
    Wait,
    Work,
    run,
)
from meshwright_planner.simulation.faults import (
    LinkFault,
    Straggler,
    degraded,
    parse_link_fault,
    parse_straggler,
)
from meshwright_planner.simulation.replay import Simulation, _chain
from meshwright_planner.simulation.replay import simulate as simulate_with
from meshwright_planner.simulation.schedule_steps import steps_of
from meshwright_planner.simulation.workload import Faults, Workload

BUCKET = 25 * 2**20
DGX_H100 = replace(REGISTERED, interference=0.0)
"""Compute is as fast during a collective as without one."""
FREE = replace(
    DGX_H100, links=tuple(replace(level, latency_s=0.0, bandwidth_Bps=1e30) for level in DGX_H100.links)
)
"""Links without cost."""


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
    result = simulate(plan, FREE)
    assert result.seconds == pytest.approx((microbatches + ranks - 1) * 3.0)
    waits = sum(b.seconds["wait"] for b in result.busy) / (ranks * result.seconds)
    assert waits == pytest.approx((ranks - 1) / (microbatches + ranks - 1))


def test_backwards_wait_for_a_loss_of_the_whole_batch() -> None:
    plan = pipelined(2, 4, [(1.0, 2.0)] * 2)
    assert plan.pipeline is not None
    late = plan.replace(pipeline=plan.pipeline.model_copy(update={"loss": "batch"}))
    kinds = [["".join(step.kind for step in rank) for rank in steps_of(p, HOST)] for p in (plan, late)]
    assert kinds == [["FFBFBFBB", "FBFBFBFB"], ["FFFFBBBB"] * 2]


def test_notes_name_costs_outside_the_simulation() -> None:
    plan = pipelined(2, 2, [(1.0, 2.0)] * 2)
    oversubscribed = replace(
        LAPTOP_CPU, cores=1, crowding=((1, 1.0), (2, 2.0)), hides_launch=False, devices_per_node=8
    )
    assert simulate(plan, FREE).notes == () == simulate(plan_of({"dp": 2}), oversubscribed).notes
    result = simulate(plan, oversubscribed)
    assert len(result.notes) == 2 and result.to_dict()["notes"] == list(result.notes)
    assert "ranks share cores" in result.render() and "ranks share cores" not in simulate(plan, FREE).render()
    enough_cores = simulate(plan, replace(oversubscribed, crowding=((1, 1.0), (2, 1.0))))
    assert len(enough_cores.notes) == 1 and "runtime" in enough_cores.notes[0]


@pytest.mark.parametrize(("made_for", "noted"), [(None, False), ("dgx-h100", False), ("dgx-a100", True)])
def test_note_when_the_plan_was_made_for_another_cluster(made_for: str | None, noted: bool) -> None:
    plan = pipelined(2, 2, [(1.0, 2.0)] * 2, provenance={"cluster": made_for})
    notes = simulate(plan, DGX_H100).notes
    assert (
        any(
            note.startswith("the plan was made for dgx-a100: compute, the optimizer")
            and note.endswith("Plan for dgx-h100 to predict a step on it")
            for note in notes
        )
        == noted
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
    result = simulate(plan, FREE, stragglers=[Straggler(2, 2.0)])
    assert result.seconds == pytest.approx(8 * 6.0 + 2 * 1.0 + 2 * 2.0 + 1.0)
    assert result.waiting and all(w.for_whom != () for w in result.waiting)


def test_a_slow_rank_delays_all_replicas() -> None:
    count = 4
    gradients = {"axis": "dp", "kind": "all_reduce", "nbytes": BUCKET, "count": count, "phase": "backward"}
    plan = plan_of({"dp": 8}, 3.0, collectives=[gradients])
    bucket_seconds = DGX_H100.link(1, 8).seconds("all_reduce", BUCKET, 8)
    sound = simulate(plan, DGX_H100)
    assert sound.seconds == pytest.approx(3.0 + bucket_seconds, rel=1e-9)  # the last bucket is exposed
    slow = simulate(plan, DGX_H100, stragglers=[Straggler(5, 1.5)])
    assert slow.sound_seconds == sound.seconds
    assert slow.seconds == pytest.approx(4.5 + bucket_seconds, rel=1e-9)
    (others,) = slow.waiting
    assert others.alike == 7 and others.for_whom == (5,) and others.seconds == pytest.approx(1.5, rel=1e-2)
    assert "the sum of gradients over dp" in slow.render()


def test_buckets_of_a_slow_link_are_exposed() -> None:
    """One link after the other: first bucket ready after a quarter of the backward pass, then four in a row."""
    nbytes = 10**12
    gradients = {"axis": "dp", "kind": "all_reduce", "nbytes": nbytes, "count": 4, "phase": "backward"}
    plan = plan_of({"dp": 2}, 3.0, collectives=[gradients])
    bucket_seconds = DGX_H100.link(1, 2).seconds("all_reduce", nbytes, 2)
    assert bucket_seconds > 0.5
    assert simulate(plan, DGX_H100).seconds == pytest.approx(1.0 + 0.5 + 4 * bucket_seconds)


def test_tp_ranks_are_synchronous() -> None:
    inner = {"axis": "tp", "kind": "all_reduce", "nbytes": 10**9, "count": 10}
    uses = [{**inner, "phase": phase} for phase in ("forward", "backward")]
    once = DGX_H100.link(1, 4).seconds("all_reduce", 10**9, 4)
    plan = plan_of({"dp": 2, "tp": 4}, 3.0, collectives=uses, split={"exposed": {"tp": 20 * once}})
    assert simulate(plan, DGX_H100).seconds == pytest.approx(3.0 + 20 * once)
    slow = simulate(plan, DGX_H100, stragglers=[Straggler(6, 2.0)])
    assert slow.seconds == pytest.approx(6.0 + 20 * once)  # compute doubles, communication does not
    assert {b.ranks for b in slow.busy} == {(0, 1, 2, 3), (4, 5, 6, 7)}


def test_all_reduce_over_a_slow_link() -> None:
    inner = {"axis": "tp", "kind": "all_reduce", "nbytes": 10**9, "count": 10}
    level = DGX_H100.links[0]
    free = replace(DGX_H100, links=(replace(level, latency_s=0.0, protocols=()), *DGX_H100.links[1:]))
    once = free.link(1, 8).seconds("all_reduce", 10**9, 8)
    plan = plan_of({"tp": 8}, 3.0, collectives=[inner], split={"exposed": {"tp": 10 * once}})
    weak = simulate(plan, free, link_faults=[LinkFault(3, level.name, 0.25)])
    assert weak.seconds == pytest.approx(3.0 + 4 * 10 * once)
    elsewhere = simulate(plan, free, link_faults=[LinkFault(3, free.links[1].name, 0.25)])
    assert elsewhere.seconds == pytest.approx(3.0 + 10 * once)  # tp never leaves the node
    gone = simulate(plan, free, link_faults=[LinkFault(3, level.name, 0.0)])
    outside = replace(free, links=(replace(free.links[0], bandwidth_Bps=free.links[1].bandwidth_Bps,
                                           latency_s=free.links[1].latency_s,
                                           protocols=free.links[1].protocols), free.links[1]))  # fmt: skip
    again = outside.link(1, 8).seconds("all_reduce", 10**9, 8)
    assert gone.seconds == pytest.approx(3.0 + 10 * again)
    with pytest.raises(InfeasibleError, match="never ends"):
        simulate(plan, free, link_faults=[LinkFault(3, free.links[1].name, 0.0)])


@pytest.mark.parametrize(("exposed", "left"), [(8.0, 4.0), (1.0, 0.0)])
def test_better_links_save_a_rank_of_a_pipeline_no_more_than_its_own_communication(
    exposed: float, left: float
) -> None:
    """A plan counts the collectives of all stages. The rest of those of a rank overlaps with compute."""
    level = DGX_H100.links[0]
    free = replace(DGX_H100, links=(replace(level, latency_s=0.0, protocols=()), *DGX_H100.links[1:]))
    once = free.link(1, 4).seconds("all_reduce", 10**9, 4)
    inner = {"axis": "tp", "kind": "all_reduce", "nbytes": 10**9, "count": 2 * 4}
    uses = [{**inner, "phase": phase} for phase in ("forward", "backward")]
    times, split = [(1.0, 2.0)] * 2, {"exposed": {"tp": exposed * once}}
    plan = pipelined(2, 4, times, degrees={"tp": 4}, collectives=uses, split=split)
    outcome = run(Workload(plan, free, Faults(everywhere=frozenset({(level.name, 2.0)})), HOST).programs())
    for spans in outcome.spans.values():
        sent = sum(span.seconds for span in spans if span.kind == "communication")
        assert sent == pytest.approx(left * once)
    assert outcome.seconds >= plan.predicted.compute_seconds  # type: ignore[union-attr]


@pytest.mark.parametrize(("schedule", "weights"), [("1f1b", 0.0), ("split", 1.0)])
def test_collectives_inside_of_stages_are_in_their_passes(schedule: str, weights: float) -> None:
    """Stages with unequal ones. Weight gradients have none, and a weak link makes those of its stage longer."""
    level = DGX_H100.links[0]
    free = replace(DGX_H100, links=(replace(level, latency_s=0.0, protocols=()), *DGX_H100.links[1:]))
    use = {"axis": "tp", "kind": "all_reduce", "nbytes": 10**9, "phase": "forward"}
    plan = pipelined(2, 4, [(1.0, 2.0)] * 2, degrees={"tp": 4}, collectives=[use], schedule=schedule)
    assert plan.predicted is not None and plan.predicted.split is not None
    sent = [{"tp": (0.5, 0.25)}, {"tp": (1.0, 1.5)}]
    stages = [
        time.model_copy(update={"collectives": c}) for time, c in zip(plan.predicted.split.stages, sent)
    ]
    split = plan.predicted.split.model_copy(update={"stages": tuple(stages), "exposed": {"tp": 10.0}})
    plan = plan.replace(predicted=plan.predicted.model_copy(update={"split": split}))
    # the second stage is the slower one: four microbatches, a forward before, and what the first computes after the last
    expected = 4 * 5.5 + 1.5 + 2.25
    assert simulate(plan, free).seconds == pytest.approx(expected - weights)
    weak = simulate(plan, free, link_faults=[LinkFault(4, level.name, 0.5)])
    assert weak.seconds == pytest.approx(expected - weights + 4 * 2.5)
    spans = simulate(plan, free).timelines[1]
    assert [s.seconds for s in spans if s.kind == "communication"] == [1.0, 1.5] * 4


def test_only_members_of_a_collective_wait() -> None:
    """dp 2 x zero 4: the sum over zero delays the group of the slow rank, the sum over dp all ranks."""
    shared = {"axis": "zero", "kind": "reduce_scatter", "nbytes": 8, "phase": "backward"}
    plan = plan_of({"dp": 2, "zero": 4}, 3.0, collectives=[shared], zero={"stage": 1})
    result = simulate(plan, FREE, stragglers=[Straggler(1, 2.0)])
    waiting = {w.who: w for w in result.waiting}
    assert set(waiting) == {(0,)} and waiting[0,].alike == 3
    both = plan.replace(collectives=[*plan.collectives, {**shared, "axis": "dp", "kind": "all_reduce"}])
    result = simulate(both, FREE, stragglers=[Straggler(1, 2.0)])
    assert sum(w.alike for w in result.waiting) >= 7


def test_a_thousand_nodes_are_simulated_at_once() -> None:
    """Replicas without a fault are one actor; only the replica with the fault is a second one."""
    inner = {"axis": "tp", "kind": "all_reduce", "nbytes": 8}
    plan = pipelined(16, 64, [(1.0, 2.0)] * 16, degrees={"dp": 128, "tp": 8}, collectives=[inner])
    result = simulate(plan, FREE, stragglers=[Straggler(4321, 1.25)])
    assert len(result.busy) == 2 * 16 and plan.world_size == 16384
    assert result.sound_seconds == pytest.approx((64 + 15) * 3.0)


def test_next_shard_is_gathered_during_the_current_one() -> None:
    gather = {"axis": "zero", "kind": "all_gather", "nbytes": 10**9, "count": 4, "phase": "forward"}
    plan = plan_of({"zero": 8}, 3.0, collectives=[gather], zero={"stage": 3})
    bucket_seconds = DGX_H100.link(1, 8).seconds("all_gather", 10**9, 8)
    assert bucket_seconds < 0.25
    assert simulate(plan, DGX_H100).seconds == pytest.approx(3.0 + bucket_seconds)


def test_events_of_a_small_program() -> None:
    group = frozenset("ab")
    joins = [Join(group, "s", 2.0), Join(group, "s", 1.0)]
    outcome = run(
        {
            "a": [Work(1.0, "x"), *joins, Work(0.5, "y"), Wait(group, "s", "sum")],
            "b": [Receive("m", "news"), *joins, Wait(group, "s", "sum")],
            "c": [Work(3.0, "z"), Send("m", 1.0)],
        }
    )
    assert outcome.ends == {"a": 7.0, "b": 7.0, "c": 3.0}
    waits = [(s.seconds, s.culprit) for s in outcome.spans["a"] if s.kind == "wait"]
    assert sum(seconds for seconds, _ in waits) == pytest.approx(2.5)
    with pytest.raises(UsageError, match="would hang"):
        run({"a": [Receive("never", "news")]})


def test_worst_of_several_faults_of_a_level_counts() -> None:
    level, outer = DGX_H100.links
    two = degraded(DGX_H100, frozenset({(level.name, 0.5), (level.name, 0.25), (level.name, 1.0)}))
    assert two == degraded(DGX_H100, frozenset({(level.name, 0.25)}))
    assert two.links[0].bandwidth_Bps == 0.25 * level.bandwidth_Bps
    gone = degraded(DGX_H100, frozenset({(level.name, 0.5), (level.name, 0.0), (outer.name, 0.5)}))
    # the traffic of nvlink takes infiniband, which has half its bandwidth
    assert [link.bandwidth_Bps for link in gone.links] == 2 * [0.5 * outer.bandwidth_Bps]


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
def test_gradient_sums_of_a_pipeline_start_after_all_backwards(microbatches: int) -> None:
    """Gradients are complete only then, so there is no compute left to overlap with."""
    nbytes, count = 10**9, 8
    use = {"axis": "dp", "kind": "all_reduce", "nbytes": nbytes, "count": count, "phase": "backward"}
    total = count * DGX_H100.link(1, 2).seconds("all_reduce", nbytes, 2)
    plan = pipelined(2, microbatches, [(1.0, 2.0)] * 2, degrees={"dp": 2}, collectives=[use])
    without = pipelined(2, microbatches, [(1.0, 2.0)] * 2, degrees={"dp": 2})
    result, bare = simulate(plan, DGX_H100), simulate(without, DGX_H100)
    assert result.seconds - bare.seconds == pytest.approx(total)
    # rank 1, whose last backward ends before that of rank 0, waits for it too
    ends = [max(s.end for s in spans if s.kind == "compute") for spans in result.timelines]
    begins = [min(s.start for s in spans if "sum of gradients" in s.what) for spans in result.timelines]
    assert ends[1] < ends[0] == begins[0] == begins[1]
    alone = simulate(plan_of({"dp": 2}, 3.0, collectives=[use]), DGX_H100)
    assert alone.seconds - 3.0 == pytest.approx(total / count)  # without a pipeline, the last one is left


def test_split_backward_is_whole_with_recomputation() -> None:
    plan = pipelined(2, 2, [(1.0, 2.0)] * 2, schedule="split")
    again = plan.replace(recompute=[RecomputeRule(pattern="layers.0")])
    parts = [{s.kind: s.part for s in steps_of(p, HOST)[0]} for p in (plan, again)]
    assert parts == [{"F": 1.0, "I": 0.5, "W": 0.5}, {"F": 1.0, "I": 1.0, "W": 0.0}]


def test_costs_once_per_step_are_counted() -> None:
    """The loss of the whole batch between forwards and backwards, and the host time of the runtime."""
    plan = pipelined(2, 4, [(1.0, 2.0)] * 2, split={"between_seconds": 5.0})
    assert plan.pipeline is not None and plan.predicted is not None
    late = plan.replace(pipeline=plan.pipeline.model_copy(update={"loss": "batch"}))
    late = late.replace(predicted=plan.predicted.model_copy(update={"compute_seconds": 4 * 3.0 + 5.0}))
    # four forwards and one through the other stage, the loss, and the same back
    assert simulate(late, FREE).seconds == pytest.approx(5 * 1.0 + 5.0 + 5 * 2.0)
    host = late.replace(predicted=plan.predicted.model_copy(update={"compute_seconds": 4 * 3.0 + 5.0 + 0.5}))
    assert simulate(host, FREE).seconds == pytest.approx(5 * 1.0 + 5.0 + 5 * 2.0 + 0.5)


def test_compute_is_slower_during_collectives() -> None:
    """Four buckets, the last exposed. Three overlap with the backward pass, which takes a fifth of their time longer."""
    gradients = {"axis": "dp", "kind": "all_reduce", "nbytes": BUCKET, "count": 4, "phase": "backward"}
    plan = plan_of({"dp": 8}, 3.0, collectives=[gradients])
    bucket_seconds = DGX_H100.link(1, 8).seconds("all_reduce", BUCKET, 8)
    slowed = simulate(plan, replace(DGX_H100, interference=0.2)).seconds
    assert slowed == pytest.approx(3.0 + bucket_seconds + 0.2 * 3 * bucket_seconds, rel=1e-9)
    exposed = simulate(plan, replace(DGX_H100, hides_communication=False)).seconds
    assert exposed == pytest.approx(3.0 + 4 * bucket_seconds, rel=1e-9)


def test_collectives_on_one_link_level_are_serial() -> None:
    """zero in a node and dp between nodes run concurrently; when both cross nodes, one after the other."""
    nbytes = 10**11
    uses = [
        {"axis": "zero", "kind": "reduce_scatter", "nbytes": nbytes, "phase": "backward"},
        {"axis": "dp", "kind": "all_reduce", "nbytes": nbytes, "phase": "backward", "count": 2},
    ]
    group = frozenset("ab")
    first, end = Join(group, "x", 2.0, None, "l"), Wait(group, "y", "y")
    lanes = [run({a: [first, Join(group, "y", 3.0, None, other), end] for a in "ab"}) for other in ("l", "m")]
    assert [outcome.seconds for outcome in lanes] == [5.0, 3.0]
    wide = plan_of({"dp": 2, "zero": 16}, 3.0, collectives=uses, zero={"stage": 2})
    shares = DGX_H100.link(1, 16).seconds("reduce_scatter", nbytes, 16)
    sums = DGX_H100.link(16, 2).seconds("all_reduce", nbytes, 2)
    assert simulate(wide, DGX_H100).seconds == pytest.approx(max(3.0, 2.0 + sums) + shares + sums)


def test_embedding_is_gathered_first() -> None:
    """With several stages, only on the ranks of the first or the last."""
    block = {"axis": "zero", "kind": "all_gather", "nbytes": 10**9, "count": 2, "phase": "forward"}
    rest = {**block, "nbytes": 10**10, "count": 1, "why": "parameters outside of blocks"}
    one_block, other = (DGX_H100.link(1, 8).seconds("all_gather", size, 8) for size in (10**9, 10**10))
    assert one_block < other < 0.5
    plan = plan_of({"zero": 8}, 3.0, collectives=[block, rest], zero={"stage": 1})
    assert simulate(plan, DGX_H100).seconds == pytest.approx(3.0 + other + one_block)
    staged = pipelined(
        4, 1, [(1.0, 2.0)] * 4, degrees={"zero": 8}, collectives=[block, rest], zero={"stage": 1}
    )
    # each stage waits for its first block, the first for the embedding before it, the last gathers the head meanwhile
    assert simulate(staged, DGX_H100).seconds == pytest.approx(4 * 3.0 + other + 4 * one_block)


def test_critical_path_ends_when_ranks_wait_for_each_other() -> None:
    """Both wait at the same moment, each for the other: the path continues before that, it does not loop."""
    first = [Span(0.0, 1.0, "forward", "compute"), Span(1.0, 3.0, "message", "wait", 1)]
    second = [Span(0.0, 2.0, "forward", "compute"), Span(2.0, 3.0, "message", "wait", 0)]
    outcome = SimpleNamespace(seconds=3.0, ends={0: 3.0, 1: 3.0}, spans={0: first, 1: second})
    load = SimpleNamespace(actors=lambda: [0, 1], ranks=lambda actor: [actor])
    result = _chain(load, outcome)  # type: ignore[arg-type]
    assert sum(seconds for _, _, seconds in result) == pytest.approx(3.0)
    assert ("compute" in {kind for _, kind, _ in result}) and ("wait" in {kind for _, kind, _ in result})
