"""Attention over a sequence that ranks share, in each form: results, gradients, masks, what moves, what is kept."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh

from meshwright_dtensor.api import distribute
from meshwright_dtensor.comm.log import communication
from meshwright_dtensor.errors import UnsupportedError, UsageError
from meshwright_dtensor.mesh.context import FORMS, MeshContext, share_attention
from meshwright_dtensor.rules.composites import sdpa_blocks
from meshwright_dtensor.rules.composites.sdpa_blocks import blocks
from meshwright_dtensor.sharding.intervals import Intervals
from meshwright_dtensor.testing.on_device import device_type, random_state, seeded
from meshwright_dtensor.testing.rank_pool import RankPool

B, S, E = 2, 8, 4
Make = Callable[[], list[torch.Tensor]]


def floats(*shapes: tuple[int, ...]) -> list[torch.Tensor]:
    return [torch.randn(shape) for shape in shapes]


def same(heads: int = 4, groups: int = 4, length: int = S) -> list[torch.Tensor]:
    return floats((B, heads, length, E), (B, groups, S, E), (B, groups, S, E))


def padded() -> list[torch.Tensor]:
    """One query sees nothing, one row is half padding."""
    mask = torch.ones(B, 1, S, S, dtype=torch.bool)
    mask[0, :, :, 5:] = False
    mask[1, :, 3] = False
    return [*same(), mask]


CASES: dict[str, tuple[dict[str, Any], Make]] = {
    "full": ({}, same),
    "causal": ({"is_causal": True}, same),
    "scale": ({"is_causal": True, "scale": 0.3}, same),
    "gqa": ({"is_causal": True, "enable_gqa": True}, lambda: same(8, 2)),
    "mqa": ({"enable_gqa": True}, lambda: same(4, 1)),
    "cross": ({}, lambda: same(length=12)),
    "cross causal": ({"is_causal": True}, lambda: same(length=12)),
    "mask": ({}, padded),
    "bias": ({}, lambda: [*same(), *floats((1, 4, S, S))]),
    "row bias": ({}, lambda: [*same(), *floats((1, S))]),
    "dropout": ({"dropout_p": 0.4}, same),
    "dropout causal gqa": ({"dropout_p": 0.4, "is_causal": True, "enable_gqa": True}, lambda: same(8, 4)),
    "dropout mask": ({"dropout_p": 0.2}, padded),
    "wide values": ({"is_causal": True}, lambda: floats((B, 4, S, E), (B, 4, S, E), (B, 4, S, 6))),
    "one batch of keys": ({"is_causal": True}, lambda: floats((B, 4, S, E), (1, 4, S, E), (B, 4, S, E))),
}


def run_case(
    rank: int, world_size: int, name: str, form: str, sizes: dict[str, int]
) -> tuple[float, list[tuple[str, str, str]]]:
    """Largest error of output and gradients, each relative to its own largest value; and what was communicated."""
    mesh = init_device_mesh(device_type(), tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    share_attention(mesh, "cp", form)
    options, make = CASES[name]
    torch.manual_seed(3)
    inputs = make()
    whole = [x.clone().requires_grad_(x.is_floating_point()) for x in inputs]
    torch.manual_seed(5)
    expected = F.scaled_dot_product_attention(*whole, **options)
    state = random_state()
    gradient = torch.randn(expected.shape, generator=seeded(1))
    expected.backward(gradient)
    leaves = [x.clone().requires_grad_(x.is_floating_point()) for x in inputs]
    place = {"cp": 2, "tp": 1, "dp": 0}
    given = [
        distribute(x, mesh, [place[a] if k < 3 and x.shape[place[a]] > 1 else "I" for a in sizes])
        for k, x in enumerate(leaves)
    ]
    torch.manual_seed(5)
    with communication() as log:
        result = F.scaled_dot_product_attention(*given, **options)
        assert torch.equal(random_state(), state)
        assert not MeshContext.of(mesh).report.entries, MeshContext.of(mesh).report.entries
        assert result.global_layout.states[list(sizes).index("cp")] == 2, result.global_layout
        result.backward(distribute(gradient, mesh, result.global_layout.states))
    pairs = [(result.full_tensor(), expected)]
    pairs += [(a.grad, b.grad) for a, b in zip(leaves, whole, strict=True) if b.grad is not None]
    worst = max(float((a - b).abs().max() / b.abs().max()) for a, b in pairs)
    return worst, [(e.kind, e.phase, e.why) for e in log.events if e.function]


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_context_attention_equals_one_device(form: str, rank_pool: RankPool) -> None:
    for name in CASES:
        worst, _ = rank_pool.run(2, run_case, name, form, {"cp": 2})[0]
        assert worst < 1e-5, name


def modified(rank: int, world_size: int) -> list[float]:
    """Largest error of gradients where the result of attention is scaled in place, for each form."""
    mesh = init_device_mesh(device_type(), (world_size,), mesh_dim_names=("cp",))
    torch.manual_seed(3)
    inputs = same()

    def gradients(shared: bool) -> list[torch.Tensor]:
        leaves = [x.clone().requires_grad_() for x in inputs]
        torch.manual_seed(5)
        given = [distribute(x, mesh, [2]) for x in leaves] if shared else leaves
        out = F.scaled_dot_product_attention(*given, is_causal=True, dropout_p=0.4)
        out.mul_(2)
        by_token = out.transpose(1, 2).reshape(B, S, -1)
        by_token *= 3
        (by_token * by_token).sum().backward()
        return [x.grad for x in leaves if x.grad is not None]

    exact, worst = gradients(False), []
    for form in FORMS:
        share_attention(mesh, "cp", form)
        worst.append(max(float((a - b).abs().max()) for a, b in zip(gradients(True), exact, strict=True)))
    assert float(exact[0].abs().max()) > 1
    return worst


def test_the_result_may_be_modified_in_place(rank_pool: RankPool) -> None:
    assert max(rank_pool.run(2, modified)[0]) < 1e-3


def halved(rank: int, world_size: int, form: str) -> tuple[float, float]:
    """Error of bfloat16 attention against float64, shared and on one device: the larger of output and gradients."""
    mesh = init_device_mesh(device_type(), (world_size,), mesh_dim_names=("cp",))
    share_attention(mesh, "cp", form)
    torch.manual_seed(3)
    inputs = floats(*[(1, 4, 32, 8)] * 3)
    results = []
    for kind in ("exact", "shared", "one"):
        dtype = torch.float64 if kind == "exact" else torch.bfloat16
        leaves = [x.bfloat16().to(dtype).requires_grad_() for x in inputs]
        given = [distribute(x, mesh, [2]) for x in leaves] if kind == "shared" else leaves
        out = F.scaled_dot_product_attention(*given, is_causal=True)
        out.sum().backward()
        whole = out.full_tensor() if kind == "shared" else out
        results.append([t.double() for t in (whole.detach(), *(x.grad for x in leaves))])
    exact, shared, single = results
    errors = [[float((a - b).abs().max()) for a, b in zip(r, exact, strict=True)] for r in (shared, single)]
    return max(errors[0]), max(errors[1])


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_half_precision_blocks_are_merged_in_float32(form: str, rank_pool: RankPool) -> None:
    shared, single = rank_pool.run(4, halved, form)[0]
    assert (
        shared <= 2.5 * single
    )  # kernels round what each block gives to a gradient, and the sum is rounded once more


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [{"cp": 4}, {"cp": 2, "tp": 2}, {"dp": 2, "cp": 2}], ids=str)
def test_context_attention_on_four_ranks(sizes: dict[str, int], rank_pool: RankPool) -> None:
    for form, name in itertools.product(FORMS, ("causal", "mask", "bias", "dropout causal gqa")):
        worst, _ = rank_pool.run(4, run_case, name, form, sizes)[0]
        assert worst < 1e-5, (form, name)


@pytest.mark.slow
def test_context_attention_communication(rank_pool: RankPool) -> None:
    """Per call: one gather forward, a gather and a scatter backward; n-1 sends forward, 2n-1 backward; two exchanges each."""
    counts = {}
    for form in FORMS:
        _, events = rank_pool.run(4, run_case, "causal", form, {"cp": 4})[0]
        counts[form] = {(k, p): events_of(events, k, p) for k, p, _ in events}
    assert counts == {
        "all_gather": {("all_gather", "forward"): 1, ("all_gather", "backward"): 1, ("reduce_scatter", "backward"): 1},
        "ring": {("send_recv", "forward"): 3, ("send_recv", "backward"): 7},
        "all_to_all": {("all_to_all", "forward"): 2, ("all_to_all", "backward"): 2},
    }  # fmt: skip


def events_of(events: list[tuple[str, str, str]], kind: str, phase: str) -> int:
    return sum(k == kind and p == phase for k, p, _ in events)


def kept(rank: int, world_size: int, form: str) -> int:
    """Bytes that autograd holds on this rank between forward and backward."""
    mesh = init_device_mesh(device_type(), (world_size,), mesh_dim_names=("cp",))
    share_attention(mesh, "cp", form)
    shape = (1, 4, 64, 8)
    held: dict[int, int] = {}

    def pack(t: torch.Tensor) -> torch.Tensor:
        held[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        given = [distribute(torch.randn(shape, requires_grad=True), mesh, [2]) for _ in range(3)]
        out = F.scaled_dot_product_attention(*given, is_causal=True)
    assert out.requires_grad
    return sum(held.values())


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_saved_tensors_shrink_with_the_ranks(form: str, rank_pool: RankPool) -> None:
    single, two, four = (rank_pool.run(n, kept, form)[0] for n in (1, 2, 4))
    assert single / two == pytest.approx(2, rel=0.05)
    assert single / four == pytest.approx(4, rel=0.1)


def uncovered(rank: int, world_size: int) -> float:
    """The error when a rank takes its queries for the first ones of the sequence."""
    original = sdpa_blocks._causal
    sdpa_blocks._causal = lambda row, start, *rest: original(row, 0, *rest)  # type: ignore[assignment]
    try:
        return run_case(rank, world_size, "causal", "ring", {"cp": 2})[0]
    finally:
        sdpa_blocks._causal = original


def test_wrong_offset_is_detected(rank_pool: RankPool) -> None:
    assert max(rank_pool.run(2, uncovered)) > 0.1


def attended(queries: Intervals, keys: Intervals, causal: bool) -> int:
    """The number of (query, key) pairs that a rank with these queries computes."""
    return sum(block.count for block in blocks(queries, keys, causal))


def test_blocks_cover_exactly_the_visible_pairs() -> None:
    generator = seeded(0)
    for _ in range(200):
        queries, keys = (intervals(generator) for _ in range(2))
        for causal in (True, False):
            seen = torch.zeros(sum(n for _, n in queries), sum(n for _, n in keys), dtype=torch.long)
            for block in blocks(queries, keys, causal):
                shape = (block.rows[1], block.columns[1])
                part = torch.ones(shape, dtype=torch.long)
                target = seen.narrow(0, *block.rows).narrow(1, *block.columns)
                target += part.tril() if block.triangle else part
            q, k = (torch.cat([torch.arange(s, s + n) for s, n in x]) for x in (queries, keys))
            allowed = (k[None] <= q[:, None]) if causal else torch.ones_like(seen, dtype=torch.bool)
            assert torch.equal(seen, allowed.long())
            assert attended(queries, keys, causal) == int(allowed.sum())


def intervals(generator: torch.Generator) -> tuple[tuple[int, int], ...]:
    """One to three disjoint intervals, in any order."""
    cuts = sorted(torch.randperm(24, generator=generator)[:6].tolist())
    result = [(cuts[i], cuts[i + 1] - cuts[i]) for i in (4, 0, 2)]
    return tuple(result[: 1 + int(torch.randint(3, (), generator=generator))])


def test_zigzag_makes_the_work_equal() -> None:
    n, c = 4, 16
    keys = ((0, 2 * n * c),)
    zigzag = [attended(((r * c, c), ((2 * n - 1 - r) * c, c)), keys, True) for r in range(n)]
    chunks = [attended(((2 * r * c, 2 * c),), keys, True) for r in range(n)]
    assert len(set(zigzag)) == 1
    assert max(chunks) > 1.7 * zigzag[0]
    assert sum(zigzag) == sum(chunks)


def test_masked_scores_are_computed_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = floats((1, 2, 8, 4), (1, 2, 6, 4), (1, 2, 6, 4))
    mask = torch.rand(1, 2, 8, 6) > 0.3
    monkeypatch.setattr(sdpa_blocks, "PIECE", 25)
    terms = sdpa_blocks.Terms(0.5, mask)
    into = sdpa_blocks.Merged(q, 4)
    result = blocks(((0, 8),), ((0, 6),), False)
    assert len(sdpa_blocks._pieces(result[0], q)) == 4
    sdpa_blocks.attend(q, k, v, result, terms, into)
    torch.testing.assert_close(into.out, F.scaled_dot_product_attention(q, k, v, mask, scale=0.5))


def refused(rank: int, world_size: int) -> list[str]:
    mesh = init_device_mesh(device_type(), (world_size,), mesh_dim_names=("cp",))
    messages = []
    for axis, form in (("sq", "ring"), ("cp", "rings")):
        with pytest.raises(UsageError) as error:
            share_attention(mesh, axis, form)
        messages.append(str(error.value))
    share_attention(mesh, "cp", "all_to_all")
    given = [distribute(x, mesh, [2]) for x in same(3, 3)]
    with pytest.raises(UnsupportedError) as unsupported:
        F.scaled_dot_product_attention(*given)
    return [*messages, str(unsupported.value)]


def test_errors_name_value_rule_and_fix(rank_pool: RankPool) -> None:
    axis, form, heads = rank_pool.run(2, refused)[0]
    assert "'sq'" in axis and "cp" in axis
    assert "'rings'" in form and "did you mean 'ring'" in form
    assert "3 heads" in heads and "2 ranks" in heads and "ring" in heads
