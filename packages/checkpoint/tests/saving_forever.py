"""Save one step after the other until killed: python saving_forever.py FOLDER."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from meshwright_checkpoint import latest, save


def main(folder: str) -> None:
    found = latest(folder)
    assert found is not None
    step = int(Path(found).name.removeprefix("step-"))
    while True:
        step += 1
        model = torch.nn.ParameterDict(
            {"w": torch.full((1 << 20,), float(step)), "v": torch.full((3,), float(step))}
        )
        print(step, flush=True)
        save(f"{folder}/step-{step}", model=model, asynchronous=step % 2 == 0)


if __name__ == "__main__":
    main(sys.argv[1])
