"""python -m integration_tests.fuzzing [--inputs 100000] [--only FORMAT] [--seed 1]: damaged files of every format."""

from __future__ import annotations

import argparse
import sys
import time

from .formats import formats
from .sweep import fuzz


def main() -> int:
    """Exit code 0 when nothing but our errors was raised, in bounded memory and time."""
    parser = argparse.ArgumentParser(prog="python -m integration_tests.fuzzing", description=__doc__)
    parser.add_argument("--inputs", type=int, default=100_000, help="of each format")
    parser.add_argument(
        "--only", action="append", default=[], help="formats whose name contains this; repeatable"
    )
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    wrong = 0
    with formats() as all_formats:
        for name, form in all_formats.items():
            if arguments.only and not any(part in name for part in arguments.only):
                continue
            start = time.monotonic()
            outcome = fuzz(form, arguments.inputs, arguments.seed)
            fine = f"{outcome.counts['read']} read, {outcome.counts['refused']} refused, slowest {outcome.slowest:.2f} s"
            print(
                f"{name}: {fine}, {len(outcome.wrong)} kinds of failures; {time.monotonic() - start:.0f} s",
                flush=True,
            )
            for kind, (count, data, trace) in outcome.wrong.items():
                print(f"  {count} x {kind}\n  first: {data[:300]!r}\n{trace[-1500:]}", flush=True)
            wrong += len(outcome.wrong)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
