"""For every line "KIND RANK" on stdin: fork two ranks that save one step after the other together, and print their pids.

python saving_ranks.py FOLDER.  KIND "full" or "error" makes RANK's writes fail after a random number of bytes, as a full disk and
a broken one do; with "kill" they go on until they are killed.  The ranks are waited for before the next line is read.
"""

from __future__ import annotations

import os
import random
import sys
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import FileStore  # type: ignore[attr-defined]
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from meshwright_checkpoint import latest, save
from meshwright_checkpoint.io import direct_write
from meshwright_dtensor.errors import MeshwrightError

ROWS = 1 << 18
CODES = {"full": (28, "No space left on device"), "error": (5, "Input/output error")}


def save_steps(folder: str, rank: int, number: int, kind: str, begun: int) -> None:
    """Save until killed, or until a save fails."""
    store_path = str(Path(folder).parent / f"meet-{number}")
    dist.init_process_group(
        "gloo", store=FileStore(store_path, 2), rank=rank, world_size=2, timeout=timedelta(seconds=20)
    )
    path = latest(folder)
    assert path is not None
    step = int(Path(path).name.removeprefix("step-"))
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    if kind in CODES:
        fail_after(random.Random(number).randrange(20 << 20), kind)
    if number % 3:  # else files are too short to be written around the page cache
        direct_write.CHUNK, direct_write.LARGE = 256 << 10, 64 << 10
    os.write(begun, b".")
    while True:
        step += 1
        whole = torch.full((ROWS, 4), float(step))
        model: Any = torch.nn.ParameterDict({"v": torch.full((1 << 18,), float(step))})
        model["w"] = torch.nn.Parameter(distribute_tensor(whole, mesh, [Shard(0)], src_data_rank=None))
        save(f"{folder}/step-{step}", model=model, asynchronous=number % 2 == 0)


def fail_after(nbytes: int, kind: str) -> None:
    """Let writes fail once so many bytes have been written."""
    write = direct_write.Writer.write
    left = nbytes

    def failing(self: Any, data: Any) -> None:
        nonlocal left
        left -= len(data)
        if left < 0:
            raise OSError(*CODES[kind])
        write(self, data)

    direct_write.Writer.write = failing  # type: ignore[method-assign]


def main(folder: str) -> None:
    for number, line in enumerate(sys.stdin):
        kind, chosen = line.split()
        read, begun = os.pipe()
        children = []
        for rank in range(2):
            child = os.fork()
            if child == 0:
                with suppress(MeshwrightError, RuntimeError, OSError):
                    save_steps(folder, rank, number, kind if rank == int(chosen) else "kill", begun)
                os._exit(1)
            children.append(child)
        os.close(begun)
        os.read(read, 1)
        os.read(read, 1)
        os.close(read)
        print(*children, flush=True)
        for child in children:
            os.waitpid(child, 0)
        print("over", flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
