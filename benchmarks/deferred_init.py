"""Time, memory and disk of deferred initialisation when the ranks of a host build together, and when each builds alone.

    python benchmarks/deferred_init.py --size 0.5b --ranks 1 2 4 8 --alone 2 4
    python benchmarks/deferred_init.py --size 8b --ranks 1 8

The model is a Llama of transformers in bfloat16, built by `from_config` inside `deferred_init`. Each row: the time until the last
rank is done, the processor time of all ranks together, the most ordinary memory that the ranks took together, the bytes of the
files that they have mapped (each file once), and how many ranks have filled large tensors. Values are compared with those of one
rank that has built alone: 64 elements of each parameter and buffer, and the state of the generator.
"""

from __future__ import annotations

import argparse
import os
import sys
import threading
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from meshwright_dtensor.deferred.materialize import MIN_BYTES, deferred_init, local_values
from meshwright_dtensor.sharding.boxes import chunk_box
from meshwright_dtensor.testing.rank_pool import RankPool
from meshwright_dtensor.utils.checksum import checksum

SIZES: dict[str, dict[str, int]] = {
    "tiny": {"hidden_size": 256, "num_hidden_layers": 2, "intermediate_size": 512, "vocab_size": 1024},
    "0.5b": {"hidden_size": 1024, "num_hidden_layers": 28, "intermediate_size": 4096, "vocab_size": 32000},
    "8b": {"hidden_size": 4096, "num_hidden_layers": 32, "intermediate_size": 14336, "vocab_size": 128256},
}
GIB = 1 << 30


@dataclass
class Measured:
    """Of one rank: seconds, processor seconds, bytes, mapped files (inode -> bytes), fills of large tensors, sums of values."""

    seconds: float
    processor: float
    take: float
    anonymous: int
    files: dict[str, int]
    fills: int
    sums: dict[str, int]


class Fills(TorchDispatchMode):
    """Counts the random fills of large tensors that this rank computes."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        if name in ("aten::normal_", "aten::uniform_") and args[0].nbytes >= MIN_BYTES:
            self.calls[name] += 1
        return func(*args, **(kwargs or {}))


def anonymous_bytes() -> int:
    """Ordinary memory of this process: resident, and not of files."""
    _, resident, of_files, *_ = Path("/proc/self/statm").read_text().split()
    return (int(resident) - int(of_files)) * os.sysconf("SC_PAGE_SIZE")


def mapped_files() -> dict[str, int]:
    """The files of deferred tensors that this process has mapped: inode -> bytes."""
    files: dict[str, int] = {}
    for line in Path("/proc/self/maps").read_text().splitlines():
        if "meshwright-init-" in line:
            addresses, _, _, _, inode, *_ = line.split()
            start, end = (int(number, 16) for number in addresses.split("-"))
            files[inode] = max(files.get(inode, 0), end - start)
    return files


def measure(rank: int, size: int, name: str, shared: bool) -> Measured:
    """Build on this rank, take this rank's rows of each parameter, one after the other, and sample the values."""
    import transformers

    config = transformers.LlamaConfig(**SIZES[name], num_attention_heads=32, num_key_value_heads=8)
    # imports the code of the model
    with torch.device("meta"):
        transformers.AutoModelForCausalLM.from_config(config)
    torch.manual_seed(0)
    dist.barrier()
    start, processor, before = time.perf_counter(), time.process_time(), anonymous_bytes()
    peak, done = [before], threading.Event()

    def watch() -> None:
        while not done.wait(0.02):
            peak[0] = max(peak[0], anonymous_bytes())

    watching = threading.Thread(target=watch, daemon=True)
    watching.start()
    with Fills() as fills, deferred_init(shared=shared):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    seconds, used = time.perf_counter() - start, time.process_time() - processor
    done.set()
    watching.join()
    files = mapped_files()
    dist.barrier()
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    sums = {key: checksum(tensor, samples=64) for key, tensor in tensors.items()}
    sums["generator"] = checksum(torch.get_rng_state())
    start = time.perf_counter()
    for tensor in tensors.values():
        if tensor.dim() > 1:
            local_values(tensor, chunk_box(tensor.shape, (size,), (rank,), (0,)))
    taken = time.perf_counter() - start
    return Measured(seconds, used, taken, peak[0] - before, files, sum(fills.calls.values()), sums)


def row(name: str, size: int, shared: bool, results: list[Measured], want: dict[str, int]) -> str:
    """One line of the table."""
    files: dict[str, int] = {}
    for result in results:
        files |= result.files
    equal = all(result.sums == want for result in results)
    cells = [
        name,
        str(size),
        "one rank" if shared else "each rank",
        f"{max(r.seconds for r in results):.1f}",
        f"{sum(r.processor for r in results):.1f}",
        f"{max(r.take for r in results):.1f}",
        f"{sum(r.anonymous for r in results) / GIB:.2f}",
        f"{sum(files.values()) / GIB:.2f}",
        f"{sum(r.fills > 0 for r in results)} ({sum(r.fills for r in results)})",
        "equal" if equal else "DIFFERENT",
    ]
    return f"| {' | '.join(cells)} |"


HEAD = """\
| model | ranks | built by | s | processor s, all ranks | s to take the parts | ordinary memory, all ranks, GiB | files, GiB | \
ranks that filled (fills) | values |
|---|---|---|---|---|---|---|---|---|---|"""


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--size", choices=SIZES, default="tiny")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument(
        "--alone", type=int, nargs="*", default=[], help="ranks that also build each on its own"
    )
    given = parser.parse_args()
    print(HEAD)
    want: dict[str, int] = {}
    different = False
    for size, shared in [*((size, True) for size in given.ranks), *((size, False) for size in given.alone)]:
        # memory that ranks have freed before would hide what is taken here
        with RankPool(preload=["transformers"]) as pool:
            results = pool.run(size, measure, given.size, shared, timeout=3600)
        want = want or results[0].sums
        line = row(given.size, size, shared, results, want)
        different |= "DIFFERENT" in line
        print(line, flush=True)
    sys.exit(1 if different else 0)


if __name__ == "__main__":
    main()
