"""Saving and loading against raw writes and reads of the same bytes, torch's DCP, torch.save and safetensors by hand.

    python benchmarks/checkpoint.py [--gigabytes 2] [--ranks 2] [--rounds 5] [--folder DIR]
        [--only save load stall train] [--unprepared]

All take turns in the same processes, and every rank holds (and writes) its half of each tensor; times are until the slowest
rank is done, bytes on the disk (fsync) included. Before a read the system forgets the files. What is compared with a raw read, a
memcpy or training alone takes turns with it twice in a round (A B A B), and times of a round are added up. What is printed is the
median over rounds, as GB/s of the whole state and as speed relative to the raw one of the same round, and each round's.

The memcpy is of the same local bytes into memory that is there already, tensor by tensor, by as many threads, on all ranks at once.
Stalls are those after `prepare_save`, called once at the start; `--unprepared` leaves it out:
the first round then shows the stall that it avoids.
Training is timed only while a save goes on: as many steps as are done until it is over, and as many alone before and after.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import shutil
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from meshwright_checkpoint import load, prepare_save, save
from meshwright_dtensor.testing.rank_pool import RankPool

CHUNK = 16 << 20
ROWS, COLUMNS = 4096, 4096  # 64 MiB in float32


def state(gigabytes: float, ranks: int, dim: int) -> nn.Module:
    """Tensors of 64 MiB, sharded on `dim` over all ranks."""
    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("tp",))
    model = nn.ParameterDict()
    for number in range(max(round(gigabytes * 1e9 / (ROWS * COLUMNS * 4)), 1)):
        full = torch.arange(ROWS * COLUMNS, dtype=torch.float32).view(ROWS, COLUMNS) + number
        model[f"w{number}"] = nn.Parameter(distribute_tensor(full, mesh, [Shard(dim)], src_data_rank=None))
    return model


def locals_of(model: nn.Module) -> list[torch.Tensor]:
    return [p.to_local().detach() for p in model.parameters()]  # type: ignore[attr-defined]


def raw_write(model: nn.Module, path: Path, rank: int) -> None:
    fd = os.open(path / f"raw-{rank}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for tensor in locals_of(model):
        view = memoryview(tensor.contiguous().view(-1).view(torch.uint8).numpy())
        for at in range(0, len(view), CHUNK):
            os.write(fd, view[at : at + CHUNK])
    os.fsync(fd)
    os.close(fd)


def raw_read(model: nn.Module, path: Path, rank: int) -> None:
    fd = os.open(path / f"raw-{rank}", os.O_RDONLY)
    at = 0
    for tensor in locals_of(model):
        view = memoryview(tensor.view(-1).view(torch.uint8).numpy())
        for start in range(0, len(view), CHUNK):
            at += os.preadv(fd, [view[start : start + CHUNK]], at)
    os.close(fd)


def direct_read(model: nn.Module, path: Path, rank: int) -> None:
    """As the raw read, with O_DIRECT, into memory in small pages next to the model."""
    fd = os.open(path / f"raw-{rank}", os.O_RDONLY | os.O_DIRECT)
    nbytes = os.fstat(fd).st_size
    memory = mmap.mmap(-1, CHUNK)
    for at in range(0, nbytes, CHUNK):
        os.preadv(fd, [memory], at)
    os.close(fd)


def torch_write(model: nn.Module, path: Path, rank: int) -> None:
    with open(path / f"torch-{rank}.pt", "wb") as file:
        torch.save(locals_of(model), file)
        file.flush()
        os.fsync(file.fileno())


def safetensors_write(model: nn.Module, path: Path, rank: int) -> None:
    from safetensors.torch import save_file

    name = path / f"hand-{rank}.safetensors"
    save_file({f"w{i}": t for i, t in enumerate(locals_of(model))}, name)
    fd = os.open(name, os.O_RDONLY)
    os.fsync(fd)
    os.close(fd)


def safetensors_read(model: nn.Module, path: Path, rank: int) -> None:
    from safetensors import safe_open

    with safe_open(path / f"hand-{rank}.safetensors", "pt") as file:
        for i, tensor in enumerate(locals_of(model)):
            tensor.copy_(file.get_tensor(f"w{i}"))


def dcp_write(model: nn.Module, path: Path, rank: int) -> None:
    import torch.distributed.checkpoint as dcp

    dcp.save(dict(model.named_parameters()), checkpoint_id=str(path / "dcp"))


def dcp_read(model: nn.Module, path: Path, rank: int) -> None:
    import torch.distributed.checkpoint as dcp

    dcp.load(dict(model.named_parameters()), checkpoint_id=str(path / "dcp"))


def our_write(model: nn.Module, path: Path, rank: int) -> None:
    save(path / "ours", model=model, asynchronous=False)


def our_read(model: nn.Module, path: Path, rank: int) -> None:
    load(path / "ours", model=model, random=False)


WRITES = {
    "raw write": raw_write,
    "meshwright": our_write,
    "dcp.save": dcp_write,
    "torch.save per rank": torch_write,
    "safetensors by hand": safetensors_write,
}
OTHER_READS = {
    "raw read around the cache": direct_read,
    "dcp.load": dcp_read,
    "safetensors by hand": safetensors_read,
}
SECTIONS = ("save", "load", "stall", "train")


def slowest(number: float) -> float:
    """The largest of all ranks'."""
    largest = torch.tensor(number, dtype=torch.float64)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    return float(largest)


def seconds(work: Callable[[], object]) -> float:
    """Of the slowest rank."""
    dist.barrier()
    start = time.perf_counter()
    work()
    return slowest(time.perf_counter() - start)


def drop_cache(path: Path) -> None:
    """Let the system forget the files, which are on the disk."""
    for file in path.rglob("*"):
        if file.is_file():
            fd = os.open(file, os.O_RDONLY)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)


@contextmanager
def folder(base: str, rank: int) -> Iterator[Path]:
    path = Path(base) / "meshwright-benchmark"
    if rank == 0:
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir(parents=True)
    dist.barrier()
    yield path
    dist.barrier()
    if rank == 0:
        shutil.rmtree(path, ignore_errors=True)


Times = dict[str, list[float]]
"""Name -> seconds, a number for each round."""


def measure(
    rank: int, ranks: int, base: str, gigabytes: float, rounds: int, only: list[str], unprepared: bool
) -> Times:
    """All that is asked for."""
    warnings.simplefilter("ignore")
    times: Times = {}
    model, other = state(gigabytes, ranks, 0), state(gigabytes, ranks, 1)
    if not unprepared:
        prepare_save(model, wait=True)
    for number in range(rounds):
        results: Times = {}
        with folder(base, rank) as path:
            if "save" in only or "load" in only:
                saves(results, model, path, rank, number)
            if "load" in only:
                loads(results, model, other, path, rank)
            if "stall" in only:
                stalls(results, model, path)
            if "train" in only:
                trains(results, model, path)
        for name, some in results.items():
            times.setdefault(name, []).append(sum(some) / len(some))
        if rank == 0:  # a run that is ended early has said something
            print(json.dumps(results), file=sys.stderr, flush=True)
    return times


def saves(results: Times, model: nn.Module, path: Path, rank: int, number: int) -> None:
    """Disks that take a burst favour who writes first, so each round another one does.

    Where a file system tells the disk which blocks are free (ext4's `discard`), the next commit does so: what the round before
    has removed is settled first, else whoever begins pays for it.
    """
    if rank == 0:
        os.sync()
    dist.barrier()
    for name, write in [*WRITES.items()][number % len(WRITES) :] + [*WRITES.items()][: number % len(WRITES)]:
        results.setdefault(f"save: {name}", []).append(seconds(lambda w=write: w(model, path, rank)))


def loads(results: Times, model: nn.Module, other: nn.Module, path: Path, rank: int) -> None:
    """Raw, same layout, other dim, and again; then the others."""

    def cold(name: str, read: Callable[[nn.Module, Path, int], None], into: nn.Module) -> None:
        dist.barrier()
        drop_cache(path)
        results.setdefault(name, []).append(seconds(lambda: read(into, path, rank)))

    for _ in range(2):
        cold("load: raw read", raw_read, model)
        cold("load: meshwright", our_read, model)
        cold("load, other dim: meshwright", our_read, other)
    for name, read in OTHER_READS.items():
        cold(f"load: {name}", read, model)
    cold("load, other dim: dcp.load", dcp_read, other)


def stalls(results: Times, model: nn.Module, path: Path) -> None:
    """A copy of the local bytes into memory that is there, an asynchronous save, and again."""
    copies = [(t.clone(), t) for t in locals_of(model)]
    for turn in range(2):
        results.setdefault("stall: memcpy", []).append(seconds(lambda: [a.copy_(b) for a, b in copies]))
        handles: list[Any] = []
        stall = seconds(lambda t=turn, h=handles: h.append(save(path / f"async-{t}", model=model)))
        results.setdefault("stall: meshwright", []).append(stall)
        handles[0].wait()


def trains(results: Times, model: nn.Module, path: Path) -> None:
    """Seconds a step of what training does, products, while a save goes on and alone; of the slowest rank."""
    for turn in range(2):
        handle = save(path / f"background-{turn}", model=model)
        dist.barrier()
        steps, start = 0, time.perf_counter()
        while not steps or not handle.done:
            step()
            steps += 1
        with_save = (time.perf_counter() - start) / steps
        handle.wait()
        results.setdefault("train: while meshwright saves", []).append(slowest(with_save))
        dist.barrier()
        start = time.perf_counter()
        for _ in range(steps):
            step()
        results.setdefault("train: alone", []).append(slowest((time.perf_counter() - start) / steps))


def step() -> None:
    """Some 20 ms of training."""
    a = torch.full((768, 768), 0.5)
    for _ in range(2):
        a = (a @ a).clamp_(0, 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--gigabytes", type=float, default=2.0)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", default=".")
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=list(SECTIONS))
    parser.add_argument("--unprepared", action="store_true")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    arguments = (options.folder, options.gigabytes, options.rounds, options.only, options.unprepared)
    with RankPool() as pool:
        times = pool.run(options.ranks, measure, *arguments, timeout=3600)[0]
    nbytes = max(round(options.gigabytes * 1e9 / (ROWS * COLUMNS * 4)), 1) * ROWS * COLUMNS * 4
    rows = []
    for name, results in times.items():
        kind = name.split(":")[0].split(",")[0]
        base = times[
            {
                "save": "save: raw write",
                "load": "load: raw read",
                "stall": "stall: memcpy",
                "train": "train: alone",
            }[kind]
        ]
        ratios = [b / t for b, t in zip(base, results, strict=True)]
        speed = None if kind == "train" else nbytes / statistics.median(results) / 1e9
        rows.append(
            {
                "name": name,
                "GB/s": speed,
                "of raw": statistics.median(ratios),
                "rounds": ratios,
                "seconds": results,
            }
        )
    if options.json:
        print(json.dumps({"bytes": nbytes, "ranks": options.ranks, "rows": rows}))
        return
    print(f"{nbytes / 1e9:.2f} GB, {options.ranks} ranks, {options.rounds} rounds")
    for row in rows:
        speed = f"{row['GB/s']:6.2f} GB/s" if row["GB/s"] else " " * 11
        rounds = " ".join(f"{ratio:.2f}" for ratio in row["rounds"])
        print(f"{row['name']:34} {speed}  {row['of raw']:5.2f} of raw  ({rounds})")


if __name__ == "__main__":
    main()
