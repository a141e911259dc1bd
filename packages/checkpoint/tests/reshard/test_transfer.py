"""In-memory reshard: sent bytes, freed memory, and peak memory."""

from __future__ import annotations

import pytest
import torch
from models import adam, build, differences, everything, train
from resident import extra, freed_goes_back

from meshwright_checkpoint import MismatchError
from meshwright_checkpoint.rank_messages import Ranks
from meshwright_checkpoint.reshard.in_memory import LiveState
from meshwright_checkpoint.reshard.transfer import (
    ROUND_NBYTES,
    Shards,
    TransferStats,
    deallocate,
    plan_rounds,
    run_rounds,
)
from meshwright_checkpoint.shards.local_shards import LocalShards
from meshwright_dtensor.errors import UsageError
from meshwright_dtensor.testing.rank_pool import RankPool

LAYOUTS = ("plain", "fsdp", "tp", "fsdp+tp", "runs")


def transfer(
    have: Shards, want: Shards, free: dict[str, torch.Tensor] | None = None, ranks: Ranks | None = None
) -> TransferStats:
    ranks = ranks or Ranks()
    return run_rounds(plan_rounds(have, want, ranks), have, want, free or {}, ranks)


def from_each_to_each(rank: int, size: int) -> dict[str, list[str]]:
    wrong = {}
    for source in LAYOUTS:
        for target in LAYOUTS:
            model = build(source)
            optimizer = adam(model)
            train(model, optimizer)
            optimizer.zero_grad()
            before = everything(model, optimizer)
            state = LiveState.of(model, optimizer)
            other = build(target, seed=1)
            stats = state.check(other, optimizer).fill()
            differing = differences(before, everything(other, optimizer))
            if source == target and stats.sent:
                differing.append(f"{stats.sent} bytes were sent for nothing")
            if differing:
                wrong[f"{source} -> {target}"] = differing
    return wrong


@pytest.mark.slow
def test_reshard_from_each_layout_to_each(rank_pool: RankPool) -> None:
    for wrong in rank_pool.run(4, from_each_to_each, timeout=120):
        assert not wrong


def part(values: torch.Tensor, start: int, length: int) -> LocalShards:
    """Rows `start` to `start + length` of a tensor of 8 rows of 1024 numbers."""
    box = ((start, length), (0, 1024))
    return LocalShards((8, 1024), torch.float32, values, ((box, ((0, length), (0, 1024))),))


def only_what_changes_its_owner(rank: int, size: int) -> tuple[int, bool, int]:
    whole = torch.arange(8 * 1024.0).view(8, 1024)
    # halves of the rows; then ranks 0, 1, 2, 3 have 1, 3, 0, 4 rows (rank 2 wants none)
    start = (0, 0, 4, 4)[rank]
    have = {"w": part(whole[start : start + 4].clone(), start, 4)}
    first, rows = ((0, 1), (1, 3), (0, 0), (4, 4))[rank]
    target = torch.full((rows, 1024), -1.0)
    deallocate(target)
    want = {"w": part(target, first, rows)} if rows else {}
    local = have["w"].local
    if rank == 3:
        local.numpy()  # makes the storage non-resizable
    moved = transfer(have, want, {"w": local})
    left = local.untyped_storage().nbytes()
    assert not have
    return moved.sent, bool(torch.equal(target, whole[first : first + rows])), left


def test_transfer_sends_nothing_that_target_has(rank_pool: RankPool) -> None:
    assert rank_pool.run(4, only_what_changes_its_owner) == [(0, True, 0)] * 4


def sent_to_the_other(rank: int, size: int) -> tuple[int, bool]:
    whole = torch.arange(8 * 1024.0).view(8, 1024)
    have = {"w": part(whole[4 * rank : 4 * rank + 4].clone(), 4 * rank, 4)}
    target = torch.zeros(6, 1024)
    moved = transfer(have, {"w": part(target, 2 * rank, 6)})
    return moved.sent, bool(torch.equal(target, whole[2 * rank : 2 * rank + 6]))


def test_transfer_sends_only_missing_bytes(rank_pool: RankPool) -> None:
    assert rank_pool.run(2, sent_to_the_other) == [(2 * 4096, True)] * 2


def refused(rank: int, size: int) -> list[str]:
    whole = torch.zeros(8, 1024)
    messages = []
    for have, want in (
        ({}, {"w": part(whole, 0, 8)}),
        ({"w": part(whole[:4], 0, 4)}, {"w": part(whole, 0, 8)}),
        (
            {"w": LocalShards((4,), torch.float32, whole[0, :4], ((((0, 4),), ((0, 4),)),))},
            {"w": part(whole, 0, 8)},
        ),
    ):
        with pytest.raises(MismatchError) as caught:
            transfer(have, want)
        messages.append(str(caught.value))
    model = build("plain")
    optimizer = adam(model)
    next(model.parameters()).grad = torch.zeros_like(next(model.parameters()))
    with pytest.raises(UsageError, match="has a gradient"):
        LiveState.of(model, optimizer)
    optimizer.zero_grad()
    state = LiveState.of(model, optimizer)
    other = torch.optim.SGD(model.parameters()) if rank else optimizer
    with pytest.raises(UsageError, match="different optimizers"):
        state.check(build("plain"), other).fill()
    more = build("plain")
    more.register_buffer("more", torch.zeros(1))
    with pytest.raises(MismatchError, match="model/more"):
        state.check(more, optimizer)  # before anything is freed
    return messages


def test_transfer_rejects_missing_and_mismatched_tensors(rank_pool: RankPool) -> None:
    missing, partly, other = rank_pool.run(2, refused)[0]
    assert "missing (1): w" in missing
    assert "its parts on all ranks hold 4096 of its 8192 elements" in partly
    assert "shape [4] is held, [8, 1024] is needed" in other


def large(rank: int, size: int, count: int, rows: int) -> tuple[int, int]:
    """(peak of extra memory, bytes of one new shard) of a reshard from rows to columns."""
    freed_goes_back()
    half = rows // 2
    have, want = {}, {}
    for number in range(count):
        values = torch.full((half, rows), float(number))
        target = torch.empty(rows, half)
        deallocate(target)
        box = ((rank * half, half), (0, rows))
        have[f"w{number}"] = LocalShards(
            (rows, rows), torch.float32, values, ((box, ((0, half), (0, rows))),)
        )
        box = ((0, rows), (rank * half, half))
        want[f"w{number}"] = LocalShards(
            (rows, rows), torch.float32, target, ((box, ((0, rows), (0, half))),)
        )
    transfer(have, want)  # warm up: buffers of gloo
    for held in want.values():
        deallocate(held.local)
    free = {key: held.local for key, held in have.items()}
    taken = extra(lambda: transfer(have, want, free, Ranks()))
    assert all(bool((held.local == float(key[1:])).all()) for key, held in want.items())
    return taken, 4 * rows * half


@pytest.mark.slow
def test_transfer_memory_is_bounded(rank_pool: RankPool) -> None:
    count, rows = 24, 2048  # 8 MiB a part, 192 MiB held by each rank
    for taken, nbytes in rank_pool.run(2, large, count, rows):
        assert count * nbytes > ROUND_NBYTES * 3
        assert taken < 3 * ROUND_NBYTES + nbytes  # the documented bound
