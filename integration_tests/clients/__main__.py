"""Run every client under every plan, and print the table of docs/frameworks.md: python -m integration_tests.clients"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from meshwright_dtensor.testing.rank_pool import RankPool

from . import accelerate_script
from .plans import LIMITS, PLANS, gap

ROWS: dict[str, tuple[str, Any]] = {
    f"accelerate, {'float32' if precision == 'no' else precision}": (precision, accelerate_script)
    for precision in LIMITS
}


def main() -> None:
    """Print a row for each client."""
    print(f"| script | {' | '.join(PLANS)} | resumed |\n|---|{'---|' * (len(PLANS) + 1)}")
    with RankPool() as pool, tempfile.TemporaryDirectory() as folder:
        for name, (option, script) in ROWS.items():
            exact = script.one_device(option)
            cells = list(_cells(pool, script, option, exact, Path(folder) / name))
            print(f"| {name} | {' | '.join(cells)} |", flush=True)


def _cells(pool: RankPool, script: Any, option: str, exact: Any, folder: Path) -> Iterator[str]:
    def cell(run: Callable[[], list[Any]]) -> str:
        losses = run()[0]["losses"]
        return f"{gap(losses, exact['losses'][-len(losses) :]):.0e}"

    names = list(PLANS)
    for name in names:
        yield cell(lambda name=name: pool.run(2, script.on_rank, name, option, folder / name))  # type: ignore[misc]
    later = [(name, names[place - 1]) for place, name in enumerate(names)]
    worst = [
        cell(lambda a=a, b=b: pool.run(2, script.on_rank, a, option, None, folder / b)) for a, b in later
    ]  # type: ignore[misc]
    yield max(worst, key=float)


if __name__ == "__main__":
    main()
