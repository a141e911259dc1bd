"""shard_loader: every rank reads its rows, and the batch is still the batch of one device."""

from __future__ import annotations

import multiprocessing
import random
from collections import UserDict, namedtuple
from typing import Any

import numpy as np
import pytest
import torch
from parallel_models import make, plan_of
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, TensorDataset

from meshwright_dtensor.errors import UnsupportedError, UsageError
from meshwright_dtensor.tensor.global_tensor import GlobalTensor
from meshwright_dtensor.testing.on_device import random_state
from meshwright_dtensor.testing.rank_pool import RankPool
from meshwright_parallel import parallelize, shard_loader

Pair = namedtuple("Pair", "x y")


class Words(Dataset[Any]):
    """23 rows; records which were read."""

    def __init__(self, draws: str = "", kind: str = "dict") -> None:
        self.read: list[int] = []
        self.draws, self.kind = draws, kind

    def __len__(self) -> int:
        return 23

    def __getitem__(self, index: int) -> Any:
        self.read.append(index)
        if self.draws == "torch":
            torch.rand(1)
        if self.draws == "random":
            random.random()
        ids = torch.arange(5) * index
        return {"ids": ids, "name": str(index)} if self.kind == "text" else {"ids": ids, "labels": ids + 1}


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(torch.arange(22.0).view(11, 2))


def pad(rows: list[Any]) -> Any:
    """Dynamic padding to the longest row: differs from rank to rank."""
    longest = max(int(row["ids"][1]) + 1 for row in rows)
    return {"ids": torch.stack([torch.ones(longest) * row["ids"][1] for row in rows])}


def as_pair(rows: list[Any]) -> Any:
    stacked = torch.stack([row["ids"] for row in rows])
    return Pair(stacked, [stacked + 1, None])


def full(batch: Any) -> Any:
    if isinstance(batch, torch.Tensor):
        return batch.full_tensor() if isinstance(batch, GlobalTensor) else batch
    if isinstance(batch, dict):
        return {key: full(value) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*[full(value) for value in batch])
    return type(batch)(full(value) for value in batch) if isinstance(batch, (list, tuple)) else batch


def equal(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b) and a.dtype == b.dtype
    if isinstance(a, dict):
        return list(a) == list(b) and all(equal(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return type(a) is type(b) and len(a) == len(b) and all(equal(x, y) for x, y in zip(a, b, strict=True))
    return bool(a == b)


def read_rows(rank: int, world_size: int, degrees: dict[str, int], workers: int) -> Any:
    if workers:  # the ranks of the pool are daemons, which may have no children
        multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    # ranks are spawned, and would spawn: to import torch anew in every worker is slow
    how: dict[str, Any] = {"num_workers": workers, "multiprocessing_context": "fork" if workers else None}
    loader = DataLoader(Words(), batch_size=4, shuffle=True, **how)
    torch.manual_seed(5)
    expected = [list(loader) for _ in range(2)]
    state = random_state()
    torch.manual_seed(5)
    model = parallelize(make(), plan_of(degrees=degrees))
    torch.manual_seed(5)
    local = DataLoader(Words(), batch_size=4, shuffle=True, **how)
    sharded = shard_loader(local)
    assert len(sharded) == len(loader) == 6
    assert sharded.batch_size == 4
    kept = [list(sharded) for _ in range(2)]
    assert torch.equal(random_state(), state)  # dropout masks that follow are those of one device
    for got, want in zip(kept, expected, strict=True):
        assert equal([full(b) for b in got], want)
    first = kept[0][0]["ids"]
    assert isinstance(first, GlobalTensor)
    assert first.shape == (4, 5)
    assert model.parallel_plan is not None
    return local.dataset.read, first.to_local().shape[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world_size", "degrees", "share"),
    [(2, {"dp": 2}, 2), (4, {"dp": 2, "tp": 2}, 2), (2, {"dp": 1, "tp": 2}, 4)],
)
def test_each_rank_reads_its_rows(
    rank_pool: RankPool, world_size: int, degrees: dict[str, int], share: int
) -> None:
    results = rank_pool.run(world_size, read_rows, degrees, 0)
    # a data rank that does not have the first row of a batch reads it too, in the three batches that are compared
    more = [3 * (rank * degrees["dp"] // world_size) for rank in range(world_size)]
    for (read, local_rows), extra in zip(results, more, strict=True):
        assert local_rows == share
        # 5 batches of 4, and the last of 3, which does not divide by 2 and is read whole
        assert len(read) == 2 * (5 * share + 3) + extra
    if degrees["dp"] == 2:
        (first, _), (last, _) = results[0], results[-1]
        fourth_and_fifth = [set(first[3 * share : 5 * share]), set(last[3 * share + 3 : 5 * share + 3])]
        assert not set.intersection(*fourth_and_fifth)  # no row is read twice


@pytest.mark.slow
def test_workers(rank_pool: RankPool) -> None:
    for _, local_rows in rank_pool.run(2, read_rows, {"dp": 2}, 2):
        assert local_rows == 2


def other_loaders(rank: int, world_size: int) -> None:
    stream = shard_loader(DataLoader(Stream(), batch_size=4))
    with pytest.raises(UsageError, match="no model is parallel"):
        next(iter(stream))
    model = parallelize(make(), plan_of(degrees={"dp": 2}))
    batches = list(stream)
    assert [b.shape[0] for b in batches] == [4, 4, 3]
    assert [b.to_local().shape[0] for b in batches] == [2, 2, 3]
    assert torch.equal(full(torch.cat(batches)), torch.arange(22.0).view(11, 2))

    plain = [
        {"x": torch.arange(6.0).view(2, 3)},
        [torch.ones(4), torch.ones(3, 2)],
        Pair(torch.ones(2), torch.zeros(())),
    ]
    actual = list(shard_loader(plain, model=model))
    assert equal([full(b) for b in actual], plain)
    assert actual[0]["x"].to_local().shape == (1, 3)
    assert actual[1][1].to_local().shape == (3, 2)  # its dim 0 is not the rows of the batch

    pairs = shard_loader(DataLoader(Words(), batch_size=4, collate_fn=as_pair))
    want = next(iter(DataLoader(Words(), batch_size=4, collate_fn=as_pair)))
    got = next(iter(pairs))
    assert isinstance(got, Pair)
    assert got.x.to_local().shape[0] == 2
    assert equal(full(got), want)
    tensors = shard_loader(DataLoader(TensorDataset(torch.arange(8.0)), batch_size=8))
    assert equal(full(next(iter(tensors))), [torch.arange(8.0)])
    it = iter(tensors)
    next(it)
    assert len(list(tensors)) == 1  # a loop that was left early does not disturb the next


@pytest.mark.slow
def test_other_loaders_and_containers(rank_pool: RankPool) -> None:
    rank_pool.run(2, other_loaders)


def refused(rank: int, world_size: int) -> None:
    model = parallelize(make(), plan_of(degrees={"dp": 2}))

    def refuse(error: type[Exception], match: str, loader: Any) -> None:
        with pytest.raises(error, match=match):
            list(shard_loader(loader, model=model))

    for draws in ("torch", "random"):
        refuse(
            UnsupportedError,
            f"Words draws from the default generator of {draws}",
            DataLoader(Words(draws), batch_size=4),
        )
        list(DataLoader(Words(draws), batch_size=4))
    torch.manual_seed(0)
    refuse(UnsupportedError, "the batch holds a str", DataLoader(Words(kind="text"), batch_size=4))
    refuse(UsageError, "pad to a length", DataLoader(Words(), batch_size=4, collate_fn=pad))
    refuse(
        UnsupportedError,
        r"'0' has shape \(\)",
        DataLoader(Words(), batch_size=4, collate_fn=lambda rows: torch.ones(())),
    )
    refuse(UsageError, "DistributedSampler", DataLoader(Words(), sampler=DistributedSampler(Words())))
    torch.manual_seed(rank)
    refuse(
        UsageError,
        r"rank 1 has another order of rows than rank 0 \(4 rows: .* against",
        DataLoader(Words(), batch_size=4, shuffle=True),
    )
    refuse(UsageError, r"rank 1 was given another batch than rank 0 \(the values of 0", [torch.rand(4, 2)])
    with pytest.raises(UsageError, match="not parallel"):
        shard_loader([], model=make())


def test_unsafe_loaders_are_refused(rank_pool: RankPool) -> None:
    rank_pool.run(2, refused)


def two_models(rank: int, world_size: int) -> None:
    first = parallelize(make(), plan_of(degrees={"dp": 2, "tp": 2}))
    second = parallelize(make(), plan_of(degrees={"dp": 4, "tp": 1}))
    batches = [torch.arange(8.0)]
    with pytest.raises(UsageError, match="model=model"):
        list(shard_loader(batches))
    assert [b.to_local().numel() for m in (first, second) for b in shard_loader(batches, model=m)] == [4, 2]
    del second
    assert [b.to_local().numel() for b in shard_loader(batches)] == [4]  # a dropped model is forgotten


@pytest.mark.slow
def test_models_with_different_meshes(rank_pool: RankPool) -> None:
    rank_pool.run(4, two_models)


class Rows(Dataset[Any]):
    """Rows of numbers, whose mean depends on every row."""

    def __init__(self, count: int) -> None:
        self.values = torch.arange(1.0, count + 1)[:, None] * torch.tensor([1.0, -0.5, 2.0, 0.25])

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"x": self.values[index], "index": torch.tensor(index)}


def own_rows(rank: int, size: int, degrees: dict[str, int], counts: list[int], batch_size: int) -> Any:
    """What `rows="local"` gives where data rank `i` has `counts[i]` rows of its own, and what one device would have."""
    model = parallelize(make(), plan_of(degrees=degrees))
    data_rank = rank * degrees["dp"] // size
    offsets = [sum(counts[:i]) for i in range(len(counts) + 1)]
    everything = Rows(offsets[-1])
    rank_rows = [everything[i] for i in range(offsets[data_rank], offsets[data_rank + 1])]
    sharded = shard_loader(DataLoader(rank_rows, batch_size=batch_size), rows="local", model=model)  # type: ignore[arg-type]
    got = [(full(batch), batch["x"].to_local().shape[0]) for batch in sharded]
    expected = []
    for step in range(max(-(-count // batch_size) for count in counts)):
        indices = [
            i
            for d, count in enumerate(counts)
            for i in range(offsets[d] + step * batch_size, offsets[d] + min(count, (step + 1) * batch_size))
        ]
        rows = [everything[i] for i in indices]
        expected.append({name: torch.stack([row[name] for row in rows]) for name in ("x", "index")})
    assert equal([batch for batch, _ in got], expected)
    return [local for _, local in got]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "degrees", "counts", "locals_"),
    [
        (2, {"dp": 2}, [6, 6], [3, 3]),
        # the last batches have 3 and 1 rows, which is not what each rank computes with
        (2, {"dp": 2}, [6, 4], [3, 2]),
        # a loader that ends a whole batch earlier, and rows that do not divide
        (2, {"dp": 2}, [6, 2], [5, 3]),
        (4, {"dp": 2, "tp": 2}, [5, 5], [3, 2]),
        (2, {"dp": 1, "tp": 2}, [7], [3, 3, 1]),
    ],
)
def test_local_rows_are_the_global_batch(
    rank_pool: RankPool, size: int, degrees: dict[str, int], counts: list[int], locals_: list[int]
) -> None:
    for local_rows in rank_pool.run(size, own_rows, degrees, counts, 3):
        assert local_rows == locals_


def refused_local_rows(rank: int, size: int) -> list[str]:
    model = parallelize(make(), plan_of(degrees={"dp": 1, "tp": 2}))
    errors = []

    def breaks() -> Any:
        yield torch.ones(2, 3)
        if rank == 1:
            raise OSError("disk is gone")
        yield torch.ones(2, 3)

    dataset = TensorDataset(torch.arange(8.0).view(8, 1))
    by_rank = DataLoader(dataset, batch_size=2, sampler=DistributedSampler(dataset, shuffle=False))
    for loader in (by_rank, breaks(), [{"x": torch.ones(2), "y": torch.ones(3)}], [{"x": "text"}]):
        with pytest.raises((UsageError, UnsupportedError, OSError)) as caught:
            list(shard_loader(loader, rows="local", model=model))
        errors.append(f"{type(caught.value).__name__} {caught.value}")
    with pytest.raises(UsageError, match='rows="local"'):
        shard_loader(by_rank)
    with pytest.raises(UsageError, match="rows='mine'"):
        shard_loader(by_rank, rows="mine")  # type: ignore[arg-type]
    return errors


def test_local_rows_that_cannot_be_put_together_are_refused(rank_pool: RankPool) -> None:
    for rank, (same, breaks, sizes, text) in enumerate(rank_pool.run(2, refused_local_rows)):
        assert "ranks 0 and 1 are both data rank 0 of 1" in same and "num_replicas=1, rank=0" in same
        assert ("disk is gone" if rank == 1 else "the loader of rank 1 has failed") in breaks
        assert "'y' has shape [3] for 2 rows" in sizes
        assert "holds a str" in text


class Rich(Dataset[Any]):
    """Rows with tensors, arrays, texts and bytes; `change` is what one rank has instead."""

    def __init__(self, change: str = "") -> None:
        self.change, self.generator = change, random.Random(3)

    def __len__(self) -> int:
        return 24 if self.change != "length" else 25

    def __getitem__(self, index: int) -> Any:
        row = {
            "ids": torch.arange(3) * index,
            "area": np.ones(2, np.float32),
            "name": f"row {index}",
            "raw": b"x" * 300,
        }
        if self.change == "tensor":
            row["ids"] += 1
        if self.change == "array":
            row["area"] *= 2
        if self.change == "text":
            row["name"] += "?"
        if self.change == "bytes":
            row["raw"] = b"y" * 300
        if self.change == "mapping":
            row["area"] = UserDict(ids=index)
        if self.change == "last row" and index == 7:
            row["ids"] += 1
        if self.change == "generator":
            row["ids"] = row["ids"] + self.generator.randrange(10**6)
        return row


def stacked(rows: list[Any]) -> Any:
    return {"ids": torch.stack([row["ids"] for row in rows])}


def other_data(rank: int, size: int, degrees: dict[str, int], changes: list[str]) -> list[str]:
    """The error of each kind of data that the last rank has."""
    model = parallelize(make(), plan_of(degrees=degrees))
    told = []
    for change in changes:
        dataset = Rich(change if rank == size - 1 or change == "generator" else "")
        loader = shard_loader(DataLoader(dataset, batch_size=8, collate_fn=stacked), model=model)
        try:
            told.append(str(len(list(loader))))
        except UsageError as error:
            told.append(str(error))
    return told


def test_other_data_in_the_same_order_is_refused(rank_pool: RankPool) -> None:
    changes = ["", "tensor", "array", "text", "bytes", "mapping", "length", "generator"]
    same, *errors = rank_pool.run(2, other_data, {"dp": 2}, changes)[0]
    assert same == "3"
    tensor, array, text, raw, mapping, length, generator = errors
    start = "rank 1 reads other data than rank 0 (row 0: "
    assert tensor.startswith(f"{start}the values of 0.ids [3] int64 differ); give every rank the same data")
    assert array.startswith(f"{start}the values of 0.area [2] float32 differ)")
    assert text.startswith(f"{start}0.name=row 0 against 0.name=row 0?)")
    assert raw.startswith(f"{start}0.raw=300 characters, ")
    assert mapping.startswith(f"{start}0.area [2] float32 against 0.area.ids=0)")
    assert length.startswith(
        "rank 1 has a dataset of 25 rows, rank 0 one of 24; give every rank the same data"
    )
    assert generator.startswith(f"{start}the values of 0.ids") and "depend on its index alone" in generator


def test_ranks_of_one_data_rank_compare_all_their_rows(rank_pool: RankPool) -> None:
    same, error = rank_pool.run(2, other_data, {"dp": 1, "tp": 2}, ["", "last row"])[0]
    assert same == "3"
    assert error.startswith(
        "rank 1 reads other data than rank 0 (rows from place 0 of the batch on: the values of ids [8, 3]"
    )
    _, error = rank_pool.run(4, other_data, {"dp": 2, "tp": 2}, ["", "last row"])[3]
    assert error.startswith("rank 3 reads other data than rank 2 (rows from place 4 of the batch on: ")
