"""The context strategy: its costs, and the placement of batches. Training on real ranks: integration_tests."""

from __future__ import annotations

from dataclasses import replace

import pytest

from meshwright_dtensor.errors import PlanError, UsageError
from meshwright_dtensor.model.batch_size import BatchSize
from meshwright_dtensor.plan import ContextSharing, ParallelPlan
from meshwright_dtensor.sharding.intervals import IntervalShard
from meshwright_dtensor.strategy import AttentionUse, Link, ModelSizes, SearchRequest, StepContext
from meshwright_parallel.strategies.context import LEAST_TOKENS, Context

LINK = Link("cable", latency_s=1e-6, bandwidth_Bps=1e9)
USE = AttentionUse(
    query_bytes=4000, key_value_bytes=2000, output_bytes=4000, heads=8, key_heads=2, causal=True, count=3
)
REQUEST = SearchRequest(world_size=8, batch_size=1, sequence_length=64, sizes=ModelSizes(attention=(USE,)))


def costed(
    form: str | None, degree: int = 4, **changes: object
) -> tuple[float, dict[tuple[str, str], tuple[int, int]]]:
    """Exposed seconds, and (kind, phase) -> (number, bytes) of collectives."""
    options = {} if form is None else {"context_attention": form}
    request = replace(REQUEST, options=options, **changes)  # type: ignore[arg-type]
    cost = Context().cost(request, degree, LINK)
    totals: dict[tuple[str, str], tuple[int, int]] = {}
    for use in cost.collectives:
        count, nbytes = totals.get((use.kind, use.phase), (0, 0))
        totals[use.kind, use.phase] = count + use.count, nbytes + use.count * use.nbytes
    return cost.exposed_seconds, totals


def test_degrees_divide_the_sequence_and_leave_each_rank_many_tokens() -> None:
    def degrees(length: int | None, **changes: object) -> list[int]:
        return list(Context().degrees(SearchRequest(12, 4, sequence_length=length, **changes)))  # type: ignore[arg-type]

    assert degrees(None) == [1]
    assert degrees(512) == [1]
    assert degrees(4 * LEAST_TOKENS) == [1, 2, 4]
    assert degrees(6 * LEAST_TOKENS) == [1, 2, 3, 4, 6]
    assert degrees(12, exhaustive=True) == [1, 2, 3, 4, 6, 12]
    assert degrees(12, pins={"cp": 2}) == [1, 2, 3, 4, 6, 12]
    assert degrees(12, pins={"cp": 2}, options={"context_balance": "zigzag"}) == [1, 2, 3, 6]


def test_collectives_of_each_form() -> None:
    assert costed("all_gather")[1] == {
        ("all_gather", "forward"): (3, 3 * 8000),
        ("all_gather", "backward"): (3, 3 * 8000),
        ("reduce_scatter", "backward"): (3, 3 * 8000),
    }
    assert costed("ring")[1] == {
        ("send_recv", "forward"): (9, 9 * 2000),
        ("send_recv", "backward"): (21, 21 * 2000),
    }
    # two key heads are repeated, so that four ranks have one each
    assert costed("all_to_all")[1] == {
        ("all_to_all", "forward"): (6, 3 * 4 * (4000 + 4000 + 2 * 2000)),
        ("all_to_all", "backward"): (6, 3 * 4 * (4000 + 4000 + 2 * 2000)),
    }


def test_the_cheapest_form_is_chosen() -> None:
    seconds = {form: costed(form)[0] for form in ("all_gather", "ring", "all_to_all")}
    assert costed(None)[0] == min(seconds.values())
    busy = replace(USE, seconds=1.0)  # sends overlap with compute
    cost = Context().cost(replace(REQUEST, sizes=replace(REQUEST.sizes, attention=(busy,))), 4, LINK)
    assert cost.fields["context"] == {"attention": "ring", "balance": "zigzag"}
    assert cost.exposed_seconds == pytest.approx(3 * 3.0)  # three times as many keys as on the tape
    assert cost.overlapped_seconds > 0
    # on the host sends take the cores that compute
    host = replace(
        REQUEST, sizes=replace(REQUEST.sizes, attention=(busy,)), step=StepContext(accelerated=False)
    )
    cost = Context().cost(host, 4, Link("memory", latency_s=0.0, bandwidth_Bps=1e9))
    assert cost.fields["context"]["attention"] != "ring" and cost.overlapped_seconds == 0
    odd = replace(USE, heads=6)
    fields = Context().cost(replace(REQUEST, sizes=replace(REQUEST.sizes, attention=(odd,))), 4, LINK).fields
    assert fields["context"]["attention"] != "all_to_all"
    pinned = replace(
        REQUEST, sizes=replace(REQUEST.sizes, attention=(odd,)), options={"context_attention": "all_to_all"}
    )
    with pytest.raises(UsageError, match=r"6 heads .* cp=4; pin cp to a divisor of 6"):
        Context().cost(pinned, 4, LINK)


def test_zigzag_is_chosen_for_causal_attention() -> None:
    def balance(use: AttentionUse = USE, **changes: object) -> tuple[str, float]:
        sizes = replace(REQUEST.sizes, attention=(use,))
        cost = Context().cost(replace(REQUEST, sizes=sizes, **changes), 4, LINK)  # type: ignore[arg-type]
        return cost.fields["context"]["balance"], cost.exposed_seconds

    assert balance()[0] == "zigzag"
    assert balance(sequence_length=60)[0] == "none"
    assert balance(replace(USE, causal=False))[0] == "none"
    busy = replace(USE, seconds=1.0)
    ring = {"context_attention": "ring"}
    chunks = balance(busy, options={**ring, "context_balance": "none"})[1]
    zigzag = balance(busy, options=ring)[1]
    assert chunks > zigzag + 3 * 2.5  # the last rank has 7/4 of the work that it has with zig-zag


def test_batch_is_sharded_on_its_sequence() -> None:
    plan = ParallelPlan(world_size=2, degrees={"cp": 2})
    context, size = Context(), BatchSize(4, 8)
    assert context.batch_state("ids", (4, 8), size, 2, plan) == 1
    assert context.batch_state("embeddings", (4, 8, 3), size, 2, plan) == 1
    assert context.batch_state("labels", (4,), size, 2, plan) == "I"
    assert context.batch_state("targets", (4, 5), size, 2, plan) == "I"
    with pytest.raises(UsageError, match=r"'ids' has a sequence of 9 .* cp=2 .* multiple of 2, such as 8"):
        context.batch_state("ids", (4, 9), BatchSize(4, 9), 2, plan)
    zigzag = plan.replace(context=ContextSharing(balance="zigzag"))
    runs = context.batch_state("ids", (4, 8), size, 2, zigzag)
    assert isinstance(runs, IntervalShard)
    assert runs.intervals == (((0, 2), (6, 2)), ((2, 4),))
    with pytest.raises(UsageError, match=r"two chunks for each of 2 ranks .* multiple of 4, such as 8"):
        context.batch_state("ids", (4, 10), BatchSize(4, 10), 2, zigzag)
    with pytest.raises(UsageError, match="no sequence"):
        context.batch_state("pixels", (4, 3, 12, 12), BatchSize(4), 2, plan)


def test_batch_size_is_read_from_its_tensors() -> None:
    ids, embeddings, images, rows = ((4, 8), False), ((4, 9, 3), True), ((4, 3, 12, 12), True), ((4,), False)
    assert BatchSize.of([rows, ids, embeddings]) == BatchSize(4, 8)
    assert BatchSize.of([embeddings, ids]) == BatchSize(4, 9)
    assert BatchSize.of([images, rows]) == BatchSize(4, None)
    assert BatchSize.of([((), True)]) == BatchSize(None, None)


def test_plan_field_context() -> None:
    plan = ParallelPlan(world_size=2, degrees={"cp": 2}, context={"attention": "ring"})  # type: ignore[arg-type]
    assert ParallelPlan.from_json(plan.to_json()) == plan
    assert "ring" in plan.explain()
    other = plan.replace(context=ContextSharing(attention="ring", balance="zigzag"))
    assert plan.diff(other) == ['context.balance: "none" -> "zigzag"']
    with pytest.raises(PlanError, match=r"context.attention.*'ringg'"):
        ParallelPlan(world_size=2, degrees={"cp": 2}, context={"attention": "ringg"})  # type: ignore[arg-type]
    with pytest.raises(PlanError, match="axis 'cp'"):
        ParallelPlan(world_size=2, degrees={"dp": 2}, context=ContextSharing()).validate_for()
