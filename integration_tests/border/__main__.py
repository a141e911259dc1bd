"""python -m integration_tests.border [--only TEXT] [--plan PLAN] [--write PATH]."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import json
import sys
import time
from collections import Counter
from dataclasses import asdict
from pathlib import Path

from .registry import keys_of
from .run import Outcome
from .subjects import LOOP_PLANS, PLANS
from .sweep import sweep
from .table import page

ALL = [*PLANS, *LOOP_PLANS]
GOOD = ("equal", "same error", "refused", "not tried")


def main() -> int:
    """Exit code 0 when nothing was silently wrong and nothing hung."""
    parser = argparse.ArgumentParser(prog="python -m integration_tests.border", description=__doc__)
    parser.add_argument(
        "--only", action="append", default=[], help="cases whose key contains this; repeatable"
    )
    parser.add_argument("--plan", action="append", default=[], choices=ALL, help="repeatable")
    parser.add_argument(
        "--write", type=Path, help="where the page goes; by default docs/border.md, if all is run"
    )
    parser.add_argument(
        "--store", type=Path, help="a file of outcomes: good ones in it are not run again, new ones are added"
    )
    parser.add_argument("--every", type=int, default=1, help="one case of so many")
    arguments = parser.parse_args()
    start = time.monotonic()
    plans = arguments.plan or ALL
    whole = plans == ALL and not arguments.only and arguments.every == 1
    outcome_by_case = _stored(arguments.store)
    keys_by_plan = {
        plan: [key for key in keys_of(plan) if any(part in key for part in arguments.only or [""])][
            :: arguments.every
        ]
        for plan in plans
    }
    for plan, keys in keys_by_plan.items():
        todo = [
            key
            for key in keys
            if (plan, key) not in outcome_by_case or outcome_by_case[plan, key].kind not in GOOD
        ]
        for outcome in sweep(todo, [plan]):
            outcome_by_case[plan, outcome.key] = outcome
            if arguments.store:
                with arguments.store.open("a") as file:
                    print(json.dumps(asdict(outcome)), file=file)
            if outcome.kind not in GOOD:
                print(f"{outcome.kind:9} {plan:6} {outcome.key}\n          {outcome.reason}", flush=True)
    outcomes = [
        outcome_by_case[plan, key]
        for plan, keys in keys_by_plan.items()
        for key in keys
        if (plan, key) in outcome_by_case
    ]
    counts = Counter(outcome.kind for outcome in outcomes)
    print(f"{dict(counts)} in {time.monotonic() - start:.0f} s")
    path = arguments.write
    if path is None and whole:
        path = Path(__file__).parents[2] / "docs" / "border.md"
    if path is not None:
        path.write_text(page(outcomes))
        print(f"wrote {path}")
    return 1 if counts["SILENT"] or counts["hang"] or counts["one rank"] else 0


def _stored(path: Path | None) -> dict[tuple[str, str], Outcome]:
    lines = path.read_text().splitlines() if path and path.exists() else []
    outcomes = [Outcome(**json.loads(line)) for line in lines]
    return {(outcome.plan, outcome.key): outcome for outcome in outcomes}


if __name__ == "__main__":
    sys.exit(main())
