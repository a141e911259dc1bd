"""Users of torchdata, webdataset and datasets (streaming) train in a plain loop, stop within an epoch, and go on."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from .accelerate_script import LENGTH, ROWS, VOCABULARY, model
from .plans import plan_of

COUNT, SHARDS, STEPS, STOP = 32, 2, 6, 3


def rows() -> Tensor:
    return torch.randint(0, VOCABULARY, (COUNT, LENGTH), generator=torch.Generator().manual_seed(2))


def torchdata_loader(folder: Path, state: Any) -> tuple[Any, Callable[[int], Any]]:
    """Of a map-style dataset, shuffled."""
    from torchdata.stateful_dataloader import StatefulDataLoader

    loader = StatefulDataLoader(rows(), batch_size=ROWS, shuffle=True)
    if state is not None:
        loader.load_state_dict(state)
    return loader, lambda step: loader.state_dict()


def datasets_loader(folder: Path, state: Any) -> tuple[Any, Callable[[int], Any]]:
    """Of a stream of several shards in random order. A buffer of shuffled rows is not in the states of datasets."""
    from datasets import Dataset

    stream = Dataset.from_dict({"ids": rows().tolist()}).to_iterable_dataset(num_shards=4)
    stream = stream.shuffle(seed=3, buffer_size=1).with_format("torch")
    if state is not None:
        stream.load_state_dict(state)
    loader = DataLoader(
        stream, batch_size=ROWS, collate_fn=lambda batch: torch.stack([x["ids"] for x in batch])
    )
    return loader, lambda step: stream.state_dict()


def write_shards(folder: Path) -> list[str]:
    """Tar files with a row of numbers in each member; rank 0 writes them."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for shard, part in enumerate(rows().chunk(SHARDS)):
        paths.append(str(folder / f"{shard}.tar"))
        with tarfile.open(paths[-1], "w") as tar:
            for number, row in enumerate(part):
                data = bytes(row.tolist())
                member = tarfile.TarInfo(f"{shard}-{number:03}.ids")
                member.size = len(data)
                tar.addfile(member, io.BytesIO(data))
    return paths


def numbers(sample: Any) -> Tensor:
    return torch.tensor(list(sample["ids"]))


def webdataset_loader(folder: Path, state: Any) -> tuple[Any, Callable[[int], Any]]:
    """Of tar files, all of which every rank reads; webdataset has no states, so batches are skipped."""
    import webdataset

    data = webdataset.WebDataset(write_shards(folder), shardshuffle=False, nodesplitter=None).map(numbers)
    loader = webdataset.WebLoader(data, batch_size=ROWS)
    return islice(loader, state or 0, None), lambda step: step


LOADERS = {"torchdata": torchdata_loader, "datasets": datasets_loader, "webdataset": webdataset_loader}


def script(
    make_parallel: Callable[[nn.Module, Any], nn.Module],
    loader: Iterable[Any],
    save: Callable[[int, nn.Module, Any], None],
    load: Callable[[nn.Module, Any], int],
) -> dict[str, Any]:
    net = make_parallel(model(), {"input_ids": rows()[:ROWS], "labels": rows()[:ROWS]})
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2, eps=1e-4)
    begin = load(net, optimizer)
    losses = []
    batches: Iterator[Any] = iter(loader)
    for step in range(begin, STEPS):
        ids = next(batches)
        torch.manual_seed(step)
        loss = net(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if step + 1 == STOP:
            save(STOP, net, optimizer)
    return {"losses": losses}


def one_device(name: str, folder: Path) -> dict[str, Any]:
    """The script as its user wrote it, on one device."""
    torch.manual_seed(1)
    loader, _ = LOADERS[name](folder, None)
    return script(lambda net, batch: net, loader, lambda *_: None, lambda *_: 0)


def on_rank(
    rank: int, size: int, plan: str, name: str, folder: Path, resume: Path | None = None
) -> dict[str, Any]:
    """The same with the lines that make it parallel. It saves into the folder; `resume`: the folder of another run."""
    import meshwright as mw

    torch.manual_seed(1)
    # one folder of data for each rank
    place = folder / f"data-{rank}"
    loader, state = LOADERS[name](place, None)

    def save(step: int, net: nn.Module, optimizer: Any) -> None:
        extra = {"step": step, "data": state(step)}
        mw.save(folder / "state", model=net, optimizer=optimizer, extra=extra).wait()

    def load(net: nn.Module, optimizer: Any) -> int:
        nonlocal loader, state
        if resume is None:
            return 0
        extra = mw.load(resume / "state", model=net, optimizer=optimizer)
        loader, state = LOADERS[name](place, extra["data"])
        return int(extra["step"])

    net: Any = None

    def make_parallel(given: nn.Module, batch: Any) -> nn.Module:
        nonlocal net
        net = mw.auto_parallelize(given, batch, **plan_of(plan, size))
        return net

    class Loader:
        """Looks the loader up when the loop begins, after the load."""

        def __iter__(self) -> Iterator[Any]:
            return iter(mw.shard_loader(loader, model=net))

    return script(make_parallel, Loader(), save, load)
