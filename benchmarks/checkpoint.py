"""Saving and loading against raw writes and reads of the same bytes, torch's DCP, torch.save and safetensors by hand.

    python benchmarks/checkpoint.py [--gigabytes 2] [--ranks 2] [--rounds 3] [--folder DIR] [--cold]

All take turns in the same processes, and every rank holds (and writes) its half of each tensor; times are until the slowest
rank is done, bytes on the disk (fsync) included. What is printed is the median over rounds, as GB/s of the whole state and
relative to the raw write or read of the same round. --cold drops the page cache of the files before they are read.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
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

from meshwright_checkpoint import load, save
from meshwright_dtensor.testing import RankPool

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
READS = {
    "raw read": raw_read,
    "meshwright": our_read,
    "dcp.load": dcp_read,
    "safetensors by hand": safetensors_read,
}


def seconds(work: Callable[[], object]) -> float:
    """Of the slowest rank."""
    dist.barrier()
    start = time.perf_counter()
    work()
    took = torch.tensor(time.perf_counter() - start)
    dist.all_reduce(took, dist.ReduceOp.MAX)
    return float(took)


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


def measure(
    rank: int, ranks: int, base: str, gigabytes: float, rounds: int, cold: bool
) -> dict[str, list[float]]:
    """Name -> seconds, a number for each round."""
    warnings.simplefilter("ignore")
    times: dict[str, list[float]] = {}
    model, other = state(gigabytes, ranks, 0), state(gigabytes, ranks, 1)
    for number in range(rounds):
        with folder(base, rank) as path:
            # disks that take a burst favour who writes first
            turns = [*WRITES.items()][number % len(WRITES) :] + [*WRITES.items()][: number % len(WRITES)]
            for name, write in turns:
                times.setdefault(f"save: {name}", []).append(seconds(lambda w=write: w(model, path, rank)))
            for name, read in READS.items():
                if cold:
                    drop_cache(path)
                times.setdefault(f"load: {name}", []).append(seconds(lambda r=read: r(model, path, rank)))
            for name, read in (("meshwright", our_read), ("dcp.load", dcp_read)):
                if cold:
                    drop_cache(path)
                times.setdefault(f"load, other dim: {name}", []).append(
                    seconds(lambda r=read: r(other, path, rank))
                )
            buffers = [t.clone() for t in locals_of(model)]
            copies = [(a, b) for a, b in zip(buffers, locals_of(model), strict=True)]
            times.setdefault("stall: memcpy", []).append(seconds(lambda c=copies: [a.copy_(b) for a, b in c]))
            del buffers, copies
            handles: list[Any] = []
            stall = seconds(lambda h=handles: h.append(save(path / "async", model=model)))
            times.setdefault("stall: meshwright", []).append(stall)
            handles[0].wait()
            times.setdefault("train: alone", []).append(seconds(lambda: train(rank)))
            handle = save(path / "behind", model=model)
            times.setdefault("train: while meshwright saves", []).append(seconds(lambda: train(rank)))
            handle.wait()
    return times


def train(rank: int) -> None:
    """Two seconds or so of what training does: products on all cores."""
    a = torch.full((768, 768), 0.5)
    for _ in range(200):
        a = (a @ a).clamp_(0, 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--gigabytes", type=float, default=2.0)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", default=".")
    parser.add_argument("--cold", action="store_true")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    arguments = (options.folder, options.gigabytes, options.rounds, options.cold)
    with RankPool() as pool:
        times = pool.run(options.ranks, measure, *arguments, timeout=3600)[0]
    nbytes = max(round(options.gigabytes * 1e9 / (ROWS * COLUMNS * 4)), 1) * ROWS * COLUMNS * 4
    rows = []
    for name, found in times.items():
        kind = name.split(":")[0].split(",")[0]
        base = times[
            {
                "save": "save: raw write",
                "load": "load: raw read",
                "stall": "stall: memcpy",
                "train": "train: alone",
            }[kind]
        ]
        ratios = [b / t for b, t in zip(base, found, strict=True)]
        speed = nbytes / statistics.median(found) / 1e9
        rows.append({"name": name, "GB/s": speed, "of raw": statistics.median(ratios), "seconds": found})
    if options.json:
        print(json.dumps({"bytes": nbytes, "ranks": options.ranks, "rows": rows}))
        return
    print(f"{nbytes / 1e9:.2f} GB, {options.ranks} ranks, {options.rounds} rounds{', cold' * options.cold}")
    for row in rows:
        print(f"{row['name']:34} {row['GB/s']:6.2f} GB/s  {row['of raw']:5.2f} of raw")


if __name__ == "__main__":
    main()
