"""Run every client under every plan, and print the table of docs/frameworks.md: python -m integration_tests.clients"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import suppress
from itertools import product
from pathlib import Path
from typing import Any

from meshwright_dtensor.errors import MeshwrightError
from meshwright_dtensor.testing.rank_pool import RankPool

from . import accelerate_script, peft_script, trainer_script
from .plans import LIMITS, PLANS, gap

RESUMED: dict[str, Any] = {
    "accelerate": accelerate_script,
    "transformers' Trainer": trainer_script,
    "PEFT with Trainer": peft_script,
}
"""Scripts that take a precision and resume."""


def main() -> None:
    """Print a row for each client."""
    print(f"| script | {' | '.join(PLANS)} | resumed |\n|---|{'---|' * (len(PLANS) + 1)}")
    with RankPool() as pool, tempfile.TemporaryDirectory() as folder:
        for (name, script), option in product(RESUMED.items(), LIMITS):
            place = Path(folder) / name / option
            cells = _cells(
                pool, script, option, script.one_device(option, place / "one"), place, resumes=True
            )
            print(f"| {name}, {'float32' if option == 'no' else option} | {' | '.join(cells)} |", flush=True)
        with suppress(ImportError):
            from . import fabric_script

            for option in LIMITS:
                place = Path(folder) / f"fabric {option}"
                exact = fabric_script.one_device(option, place)
                cells = _cells(pool, fabric_script, option, exact, place, resumes=False)
                print(
                    f"| Lightning Fabric, {'float32' if option == 'no' else option} | {' | '.join(cells)} |",
                    flush=True,
                )
        with suppress(ImportError):
            from . import trl_script

            for method, name in {"SFT": "TRL SFTTrainer", "DPO": "TRL DPOTrainer with LoRA"}.items():
                place = Path(folder) / method
                exact = trl_script.one_device(method, place / "one")
                cells = _cells(pool, trl_script, method, exact, place, resumes=False)
                print(f"| {name}, float32 | {' | '.join(cells)} |", flush=True)


def _cells(
    pool: RankPool, script: Any, option: str, exact: Any, folder: Path, resumes: bool
) -> Iterator[str]:
    def cell(plan: str, *start: str) -> str:
        resume = [folder / place for place in start]
        try:
            into = folder / "-".join((plan, *start))
            losses = pool.run(2, script.on_rank, plan, option, into, *resume)[0]["losses"]
        except MeshwrightError:
            return "refused"
        return f"{gap(losses, exact['losses'][-len(losses) :]):.0e}"

    names = list(PLANS)
    yield from map(cell, names)
    later = [cell(name, names[place - 1]) for place, name in enumerate(names) if resumes]
    yield max(later, key=float) if later else ""


if __name__ == "__main__":
    main()
