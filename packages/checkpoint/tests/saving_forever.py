"""For every line on stdin: fork a process that saves one step after the other until it is killed, and print its pid.

python saving_forever.py FOLDER.  A fork costs milliseconds, a process that imports torch seconds.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch

from meshwright_checkpoint import latest, save
from meshwright_checkpoint.io import direct_write


def save_steps(folder: str, number: int) -> None:
    """Print the pid, then save until killed."""
    path = latest(folder)
    assert path is not None
    step = int(Path(path).name.removeprefix("step-"))
    if number % 3:  # else files are too short to be written around the page cache
        direct_write.CHUNK, direct_write.LARGE = 256 << 10, 64 << 10
    print(os.getpid(), flush=True)
    while True:
        step += 1
        model = torch.nn.ParameterDict(
            {"w": torch.full((1 << 20,), float(step)), "v": torch.full((3,), float(step))}
        )
        save(f"{folder}/step-{step}", model=model, asynchronous=number % 2 == 0)


def main(folder: str) -> None:
    for number, _ in enumerate(sys.stdin):
        child = os.fork()
        if child == 0:
            save_steps(folder, number)
        os.waitpid(child, 0)
        print("over", flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
