"""Messages between ranks, and which of them a save sends: only where ranks differ do all of them get what each has."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn

from meshwright_checkpoint import load, save
from meshwright_checkpoint.errors import MismatchError
from meshwright_checkpoint.rank_messages import Ranks
from meshwright_dtensor.errors import UsageError
from meshwright_dtensor.testing.rank_pool import RankPool


def messages(rank: int, size: int) -> dict[str, Any]:
    """Each kind of message once, over all ranks and over all but the first."""
    others = dist.new_group(list(range(1, size)))
    ranks, without = Ranks(), None if rank == 0 else Ranks(others)
    long = "x" * (3000 * rank)
    results = {
        "most": ranks.most([rank, -rank]),
        "numbers": ranks.gather_numbers(rank - (1 << 62)),
        "same": [ranks.same(["a", 1]), ranks.same(rank)],
        "digest": [ranks.digest("a"), ranks.digest("a"), ranks.digest(f"a{rank // (size - 1)}")],
        "first": ranks.first({"of": rank}),
        "to first": ranks.to_first([rank, long]),
        "from first": ranks.from_first([[i, "y" * i] for i in range(size)] if rank == 0 else None),
    }
    if without is not None:
        results["of others"] = [without.first(rank), without.to_first(rank), without.most([rank])]
        results["of others"].append(without.from_first([7, 8] if rank == 1 else None))
    return results


def in_another_order(rank: int, _: int) -> tuple[list[int], float]:
    """A message, which on rank 0 comes after a collective of the user and on rank 1 before it."""
    number = torch.ones(2)
    work = dist.all_reduce(number, async_op=True) if rank == 0 else None
    most = Ranks().most([rank])
    work = work or dist.all_reduce(number, async_op=True)
    work.wait()
    return most, number.tolist()[0]


def test_a_message_is_no_collective_of_the_user(rank_pool: RankPool) -> None:
    """gloo would abort, or both would get wrong numbers; ranks that miss a collective are to wait, and say where."""
    assert rank_pool.run(2, in_another_order) == [([1], 2.0)] * 2


def test_messages_of_three_ranks(rank_pool: RankPool) -> None:
    results = rank_pool.run(3, messages)
    for rank, result in enumerate(results):
        assert result["most"] == [2, 0] and result["same"] == [True, False] and result["first"] == {"of": 0}
        assert result["numbers"] == [r - (1 << 62) for r in range(3)]
        first, again, other = result["digest"]
        assert first == again != other and result["digest"] == results[0]["digest"]
        assert result["from first"] == [rank, "y" * rank]
    assert [result["to first"] for result in results] == [[[r, "x" * 3000 * r] for r in range(3)], None, None]
    assert [result["of others"] for result in results[1:]] == [[1, [1, 2], [2], 7], [1, None, [2], 8]]


def failing(rank: int, size: int) -> str:
    """Work that fails on rank 1 alone."""

    def work() -> None:
        if rank == 1:
            raise UsageError("no work")

    with pytest.raises(UsageError) as raised:
        Ranks().run_checked(work)
    return str(raised.value)


def test_work_that_fails_on_a_rank_fails_on_all(rank_pool: RankPool) -> None:
    told = "rank 1 failed: UsageError: no work"
    assert rank_pool.run(3, failing) == [told, "no work", told]


def gathers(rank: int, size: int, folder: Path, differ: bool) -> int:
    """How often a save makes all ranks get what each of them has."""
    model = nn.Linear(2, 2)
    with patch.object(Ranks, "gather", autospec=True, side_effect=Ranks.gather) as gather:
        if differ:
            with pytest.raises(UsageError, match="different paths"):
                save(folder / str(rank), model=model)
        else:
            save(folder / "same", model=model, extra={"step": 1} if rank == 0 else None).wait()
        return gather.call_count


def loads(rank: int, size: int, folder: Path, differ: bool) -> list[Any]:
    """The longest text that a load makes all ranks get of each, and the error where rank 1 has another model."""
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(40)))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    save(folder / "same", model=model, optimizer=optimizer, asynchronous=False)
    if differ and rank:
        model.add_module("more", nn.Linear(1, 1))
        optimizer.add_param_group({"params": model.more.parameters()})
    texts: list[str] = []

    def gather(ranks: Ranks, value: Any) -> list[Any]:
        texts.append(json.dumps(value))
        return real(ranks, value)

    real, error = Ranks.gather, ""
    with patch.object(Ranks, "gather", gather):
        try:
            load(folder / "same", model=model, optimizer=optimizer)
        except MismatchError as caught:
            error = str(caught)
    return [max(map(len, texts)), error]


@pytest.mark.parametrize("differ", [False, True])
def test_a_load_gathers_names_only_where_they_differ(
    rank_pool: RankPool, tmp_path: Path, differ: bool
) -> None:
    missing = "missing (4): more.weight, more.bias, optimizer/more.weight, optimizer/more.bias."
    told = rank_pool.run(2, loads, tmp_path, differ)
    # the keys of the checkpoint are some 5,000 characters
    assert max(longest for longest, _ in told) < 400
    for _, error in told:
        assert (missing in error) == differ and "unexpected (" not in error


@pytest.mark.parametrize("differ", [False, True])
def test_a_save_gathers_only_what_differs(rank_pool: RankPool, tmp_path: Path, differ: bool) -> None:
    assert rank_pool.run(2, gathers, tmp_path, differ) == [int(differ)] * 2
