"""Context parallelism of unmodified models on real ranks, against one device: losses, gradients, steps, memory, log."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from plan_once import plan_once
from zoo import CASES, bert, bert_batch, gpt2, llama

import meshwright as mw
from meshwright import cli
from meshwright_dtensor.comm.log import CommEvent, communication
from meshwright_dtensor.plan import ActivationRule, ContextSharing, ParallelPlan
from meshwright_dtensor.rules.composites import sdpa_blocks, sdpa_ring
from meshwright_dtensor.testing.rank_pool import RankPool
from meshwright_parallel.verification.compare import compare

TOKENS = 16  # divides into two chunks for each of up to 8 ranks


def grouped_llama() -> torch.nn.Module:
    return llama(num_key_value_heads=2, attention_dropout=0.1)


def causal_batch(rows: int = 2, tokens: int = TOKENS) -> dict[str, torch.Tensor]:
    """Labels are ignored unevenly, and both sides of every boundary between ranks count."""
    ids = torch.randint(5, 128, (rows, tokens), generator=torch.Generator().manual_seed(7))
    labels = ids.clone()
    labels[0, : tokens // 2 - 1] = -100
    return {"input_ids": ids, "labels": labels}


def padded_batch() -> dict[str, torch.Tensor]:
    batch = {key: torch.cat([value, value[:, :4]], 1) for key, value in bert_batch().items()}
    batch["attention_mask"][1, 9:] = 0
    return batch


MODELS: dict[str, tuple[Callable[[], torch.nn.Module], Callable[[], dict[str, torch.Tensor]]]] = {
    "llama": (grouped_llama, causal_batch),
    "gpt2": (gpt2, causal_batch),
    "bert": (bert, padded_batch),
    "llama padded": (
        grouped_llama,
        lambda: {**causal_batch(4), **{"attention_mask": padded_batch()["attention_mask"]}},
    ),
}


def plan_of(degrees: dict[str, int], form: str, balance: str) -> ParallelPlan:
    world_size = 1
    for degree in degrees.values():
        world_size *= degree
    sharing = ContextSharing(attention=form, balance=balance)
    return ParallelPlan(world_size=world_size, degrees=degrees, context=sharing)


def verified(rank: int, world_size: int, name: str, plan_json: str) -> tuple[bool, str]:
    """Three steps under a plan against the same on one device, with dropout and clipped gradients."""
    make, batch = MODELS[name]
    report = mw.verify(make, batch(), ParallelPlan.from_json(plan_json), steps=3, max_norm=0.5)
    return report.ok, report.render()


def check(pool: RankPool, name: str, plan: ParallelPlan) -> None:
    ok, text = pool.run(plan.world_size, verified, name, plan.to_json())[0]
    assert ok, text


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "gpt2", "bert"])
@pytest.mark.parametrize("form", ["all_gather", "ring", "all_to_all"])
def test_two_ranks_train_as_one_device(name: str, form: str, rank_pool: RankPool) -> None:
    for balance in ("none", "zigzag"):
        check(rank_pool, name, plan_of({"cp": 2}, form, balance))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "degrees", "form", "balance"),
    [
        ("llama", {"cp": 4}, "ring", "zigzag"),
        ("gpt2", {"cp": 4}, "all_to_all", "zigzag"),
        ("bert", {"cp": 4}, "all_gather", "none"),
        ("llama", {"dp": 2, "cp": 2}, "all_gather", "zigzag"),
        ("llama padded", {"dp": 2, "cp": 2}, "ring", "none"),
    ],
)
def test_four_ranks_train_as_one_device(
    name: str, degrees: dict[str, int], form: str, balance: str, rank_pool: RankPool
) -> None:
    check(rank_pool, name, plan_of(degrees, form, balance))


@pytest.mark.slow
def test_tokens_divided_twice(rank_pool: RankPool) -> None:
    """Sequence parallelism on tp inside the part of cp: the hidden state is sharded on its tokens by both axes."""
    rules = tuple(
        ActivationRule(module=f"model.layers.*.{norm}", function="pow", inputs=({"tp": "S(1)"},))
        for norm in ("input_layernorm", "post_attention_layernorm")
    )
    check(rank_pool, "llama", plan_of({"cp": 2, "tp": 2}, "ring", "zigzag").replace(activations=rules))


@pytest.mark.slow
def test_training_state_is_sharded_over_zero_with_cp(rank_pool: RankPool) -> None:
    plan = plan_of({"zero": 2, "cp": 2}, "all_gather", "zigzag")
    check(rank_pool, "gpt2", plan.replace(zero={"stage": 2}))


def applied(
    name: str, plan: ParallelPlan, tokens: int = TOKENS
) -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    torch.manual_seed(3)
    batch = causal_batch(tokens=tokens)
    return mw.parallelize(MODELS[name][0](), plan, batch=batch), batch


def kept(rank: int, world_size: int, form: str, balance: str, padded: bool) -> int:
    """Bytes of activations that autograd holds on this rank after the forward pass of a Llama."""
    plan = plan_of({"cp": world_size}, form, balance)
    model, batch = applied("llama", plan, tokens=64)
    if padded:
        batch["attention_mask"] = (torch.arange(64) < 50).long().expand(2, 64).contiguous()
    model.eval()  # dropout is drawn whole
    pointers = {p.to_local().untyped_storage().data_ptr() for p in model.parameters()}
    held: dict[int, int] = {}

    def pack(t: torch.Tensor) -> torch.Tensor:
        storage = t.untyped_storage()
        if storage.data_ptr() not in pointers:
            held[storage.data_ptr()] = storage.nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        loss = model(**batch).loss
    assert loss.requires_grad
    return sum(held.values())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("form", "padded"), [("all_gather", False), ("ring", False), ("all_to_all", False), ("ring", True)]
)
def test_activations_shrink_with_the_ranks(form: str, padded: bool, rank_pool: RankPool) -> None:
    single, two, four = (max(rank_pool.run(n, kept, form, "zigzag", padded)) for n in (1, 2, 4))
    assert single / two == pytest.approx(2, rel=0.1)
    assert single / four == pytest.approx(4, rel=0.15)


def step_log(rank: int, world_size: int, name: str, plan_json: str) -> list[CommEvent]:
    plan = ParallelPlan.from_json(plan_json)
    model, batch = applied(name, plan)
    model(**batch).loss.backward()
    with communication() as log:
        model(**batch).loss.backward()
    return log.events


@pytest.mark.slow
@pytest.mark.parametrize(("name", "balance"), [("llama", "zigzag"), ("gpt2", "none")])
def test_only_attention_moves_activations_and_says_where(
    name: str, balance: str, rank_pool: RankPool
) -> None:
    events = rank_pool.run(2, step_log, name, plan_of({"cp": 2}, "ring", balance).to_json())[0]
    attention = [e for e in events if e.function == "scaled_dot_product_attention"]
    assert {e.kind for e in attention} == {"send_recv"}
    assert len({e.module for e in attention}) == 2
    assert all("att" in e.module and "next rank" in e.why for e in attention)
    # the rest: integers (labels are shifted), one pair of loss and count, and gradients of parameters
    rest = [e for e in events if e not in attention and e.function != "data"]
    assert sum(e.nbytes for e in rest) < 5 * 8 * 2 * TOKENS, rest


def worked(rank: int, world_size: int, balance: str) -> int:
    """(query, key) pairs that this rank attends to in the forward pass."""
    count = 0
    original = sdpa_ring.blocks

    def counting(*args: Any) -> list[sdpa_blocks.Block]:
        nonlocal count
        results = original(*args)
        count += sum(block.count for block in results)
        return results

    sdpa_ring.blocks = counting
    try:
        model, batch = applied("llama", plan_of({"cp": world_size}, "ring", balance))
        with torch.no_grad():
            model(**batch)
    finally:
        sdpa_ring.blocks = original
    return count


@pytest.mark.slow
def test_zigzag_gives_every_rank_the_same_work(rank_pool: RankPool) -> None:
    zigzag, chunks = (rank_pool.run(4, worked, balance) for balance in ("zigzag", "none"))
    layers = 2
    assert sum(zigzag) == sum(chunks) == layers * TOKENS * (TOKENS + 1) // 2
    assert len(set(zigzag)) == 1
    assert max(chunks) > 1.7 * zigzag[0]


def planned(
    rank: int, world_size: int, form: str, degrees: dict[str, int]
) -> tuple[ParallelPlan, list[CommEvent], bool, str]:
    """What the planner makes of pinned degrees, what a step executes, and whether it is that of one device."""
    batch = causal_batch()
    torch.manual_seed(3)
    plan = plan_once(grouped_llama(), batch, context_attention=form, **degrees)
    assert isinstance(plan, ParallelPlan)
    events = step_log(rank, world_size, "llama", plan.to_json())
    return plan, events, *verified(rank, world_size, "llama", plan.to_json())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("form", "degrees"),
    [
        ("all_gather", {"cp": 2, "tp": 1, "dp": 1}),
        ("ring", {"cp": 2, "tp": 2, "dp": 1}),
        ("all_to_all", {"cp": 2, "tp": 1, "dp": 1}),
    ],
)
def test_planned_is_executed(form: str, degrees: dict[str, int], rank_pool: RankPool) -> None:
    ranks = degrees["cp"] * degrees["tp"]
    plan, events, ok, text = rank_pool.run(ranks, planned, form, degrees)[0]
    assert ok, text
    # whole sequences of some heads are equal work
    balance = "none" if form == "all_to_all" else "zigzag"
    assert plan.context == ContextSharing(attention=form, balance=balance)  # type: ignore[arg-type]
    expected: dict[tuple[str, str], tuple[int, int]] = {}
    results: dict[tuple[str, str], tuple[int, int]] = {}
    for c in plan.collectives:
        if (
            c.axis == "cp" and c.kind != "all_reduce"
        ):  # gradients are summed in buckets, with those of data ranks
            count, nbytes = expected.get((c.kind, c.phase), (0, 0))
            expected[c.kind, c.phase] = count + c.count, nbytes + c.count * c.nbytes
    for e in events:
        if e.axis == "cp" and e.function == "scaled_dot_product_attention":
            count, nbytes = results.get((e.kind, e.phase), (0, 0))
            results[e.kind, e.phase] = count + 1, nbytes + e.nbytes
    assert results == expected


def refused(rank: int, world_size: int, balance: str, tokens: int) -> str:
    plan = plan_of({"cp": world_size}, "ring", balance)
    with pytest.raises(mw.errors.UsageError) as error:
        applied("llama", plan, tokens=tokens)
    return str(error.value)


def test_a_length_that_does_not_divide_is_refused_before_anything_runs(rank_pool: RankPool) -> None:
    text = rank_pool.run(2, refused, "zigzag", 14)[0]
    assert "14 tokens" in text and "multiple of 4" in text and ("12" in text or "16" in text)
    assert "15 tokens" in rank_pool.run(2, refused, "none", 15)[0]


class Shortened(torch.nn.Module):
    """Attends to one token fewer than it is given, with or without a mask that is learnt."""

    def __init__(self, masked: bool) -> None:
        super().__init__()
        self.embed, self.qkv = torch.nn.Embedding(50, 16), torch.nn.Linear(16, 48)
        self.head = torch.nn.Linear(16, 50)
        self.bias = torch.nn.Parameter(torch.randn(4, 7, 7)) if masked else None

    def forward(self, ids: torch.Tensor, labels: torch.Tensor | None = None) -> torch.Tensor:
        parts = self.qkv(self.embed(ids)[:, :-1]).chunk(3, -1)
        q, k, v = (t.unflatten(-1, (4, 4)).transpose(1, 2) for t in parts)
        y = F.scaled_dot_product_attention(q, k, v, self.bias, is_causal=self.bias is None)
        out = self.head(y.transpose(1, 2).flatten(2))
        if labels is None:
            return out
        return F.cross_entropy(out.flatten(0, 1), labels[:, 1:].flatten())


def shortened(rank: int, world_size: int, form: str, balance: str) -> list[str]:
    """What differs from one device, of a loss, every gradient, and an inference."""
    wrong = []
    for masked in (False, True):
        runs = []
        for parallel in (False, True):
            torch.manual_seed(3)
            model: torch.nn.Module = Shortened(masked)
            if parallel:
                model = mw.parallelize(model, plan_of({"cp": world_size}, form, balance))
            ids = torch.randint(50, (2, 8), generator=torch.Generator().manual_seed(7))
            model(ids, ids).backward()
            with torch.no_grad():
                results = {"inference": model(ids), "loss": model(ids, ids)}
            runs.append(results | {name: p.grad for name, p in model.named_parameters()})
        results = compare(0, "gradient", *runs, None)
        assert len(results) == len(runs[0])
        wrong += [f"{masked} {c.name} {c.relative:.1e} {c.note}" for c in results if not c.ok]
    return wrong


@pytest.mark.slow
@pytest.mark.parametrize("form", ["ring", "all_to_all", "all_gather"])
def test_a_sequence_that_the_model_shortens_may_be_of_any_length(form: str, rank_pool: RankPool) -> None:
    """Seven tokens: the ranks hold four and three (under zig-zag three and four)."""
    for balance in ("none", "zigzag"):
        assert rank_pool.run(2, shortened, form, balance) == [[], []]


def looped(rank: int, world_size: int) -> list[float]:
    """Losses of an epoch over a sharded loader, with rows and tokens divided."""
    data = causal_batch(rows=8)
    rows = [{key: value[i] for key, value in data.items()} for i in range(8)]
    model, _ = applied("llama", plan_of({"dp": 2, "cp": 2}, "ring", "zigzag"))
    model.eval()
    loader = torch.utils.data.DataLoader(rows, batch_size=4)  # type: ignore[arg-type]
    return [model(**batch).loss.item() for batch in mw.shard_loader(loader)]


@pytest.mark.slow
def test_a_sharded_loader_feeds_rows_and_tokens(rank_pool: RankPool) -> None:
    results = rank_pool.run(4, looped)
    torch.manual_seed(3)
    model = grouped_llama().eval()
    data = causal_batch(rows=8)
    expected = [model(**{key: value[i : i + 4] for key, value in data.items()}).loss.item() for i in (0, 4)]
    assert all(losses == pytest.approx(expected, rel=1e-6) for losses in results)


def test_the_command_line_pins_degree_and_form(capsys: pytest.CaptureFixture[str]) -> None:
    cases = [
        "plan",
        "--model",
        "llama",
        "--world-size",
        "2",
        "--sequence-length",
        "16",
        "--batch-size",
        "1",
        "--json",
    ]
    with pytest.raises(SystemExit) as ended:
        cli.main([*cases, "--cp", "2", "--context-attention", "ring"])
    assert ended.value.code == 0
    plan = ParallelPlan.from_json(capsys.readouterr().out)
    assert plan.degrees["cp"] == 2
    assert plan.context == ContextSharing(attention="ring", balance="zigzag")


@pytest.mark.slow
def test_the_search_shares_long_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    """One long row on two ranks that cannot hold it: only the sequence can be divided; short rows are left alone."""
    from meshwright_parallel.strategies import context

    monkeypatch.setattr(context, "LEAST_TOKENS", 128)
    ids = torch.zeros(1, 512, dtype=torch.long)
    model = llama(max_position_embeddings=512, num_attention_heads=4, num_key_value_heads=1)
    batch = {"input_ids": ids, "labels": ids}
    plans = mw.plan(model, batch, world_size=2, tp=1, top_k=4)
    assert isinstance(plans, list)
    assert plans[0].degrees["cp"] == 2
    assert plans[0].context is not None
    assert plans[0].context.balance == "zigzag"
    with pytest.raises(mw.errors.UsageError, match=r"cp=4 is not a legal degree .* 1 row of 510 tokens"):
        mw.plan(model, {key: value[:, :510] for key, value in batch.items()}, world_size=4, cp=4)
    short = mw.plan(model, {key: value[:, :64] for key, value in batch.items()}, world_size=2, top_k=8)
    assert isinstance(short, list)
    assert short and all(plan.degree("cp") == 1 for plan in short)


@pytest.mark.slow
def test_encoder_and_decoder_of_different_lengths(rank_pool: RankPool) -> None:
    ok, text = rank_pool.run(2, verified_case, "t5", plan_of({"cp": 2}, "ring", "none").to_json())[0]
    assert ok, text


def verified_case(rank: int, world_size: int, name: str, plan_json: str) -> tuple[bool, str]:
    case = CASES[name]
    report = mw.verify(case.model, case.batch(), ParallelPlan.from_json(plan_json), steps=2)
    return report.ok, report.render()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama-eager", "qwen3", "mixtral"])
def test_other_models(name: str, rank_pool: RankPool) -> None:
    ok, text = rank_pool.run(2, verified_case, name, plan_of({"cp": 2}, "all_gather", "zigzag").to_json())[0]
    assert ok, text
