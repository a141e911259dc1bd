"""Run every client under every plan, and print the table of docs/frameworks.md: python -m integration_tests.clients"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

from meshwright_dtensor.testing.rank_pool import RankPool

from . import accelerate_script, peft_script, trainer_script
from .plans import LIMITS, PLANS, gap

SCRIPTS: dict[str, Any] = {
    "accelerate": accelerate_script,
    "transformers' Trainer": trainer_script,
    "PEFT with Trainer": peft_script,
}


def main() -> None:
    """Print a row for each client."""
    print(f"| script | {' | '.join(PLANS)} | resumed |\n|---|{'---|' * (len(PLANS) + 1)}")
    with RankPool() as pool, tempfile.TemporaryDirectory() as folder:
        for (name, script), option in product(SCRIPTS.items(), LIMITS):
            place = Path(folder) / name / option
            cells = _cells(pool, script, option, script.one_device(option, place / "one"), place)
            print(f"| {name}, {'float32' if option == 'no' else option} | {' | '.join(cells)} |", flush=True)


def _cells(pool: RankPool, script: Any, option: str, exact: Any, folder: Path) -> Iterator[str]:
    def cell(plan: str, start: str | None = None) -> str:
        into, resume = (
            folder / f"{plan} from {start}",
            None if start is None else folder / f"{start} from None",
        )
        losses = pool.run(2, script.on_rank, plan, option, into, resume)[0]["losses"]
        return f"{gap(losses, exact['losses'][-len(losses) :]):.0e}"

    names = list(PLANS)
    yield from map(cell, names)
    yield max((cell(name, names[place - 1]) for place, name in enumerate(names)), key=float)


if __name__ == "__main__":
    main()
