"""python -m integration_tests.failures [--only KIND] [--plan PLAN] [--out FILE]: one of four ranks fails, in each way and plan."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from .jobs import CAUSES, Ended, run_job, write_plans


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m integration_tests.failures", description=__doc__)
    parser.add_argument("--only", action="append", choices=sorted(CAUSES))
    parser.add_argument("--plan", action="append")
    parser.add_argument("--out", type=Path, help="write the table here")
    parser.add_argument("--screens", type=Path, help="write what was on the screen into this folder")
    arguments = parser.parse_args()
    jobs: list[Ended] = []
    with tempfile.TemporaryDirectory() as folder:
        for plan, file in write_plans(Path(folder)).items():
            for kind in CAUSES:
                if (arguments.only and kind not in arguments.only) or (
                    arguments.plan and plan not in arguments.plan
                ):
                    continue
                jobs.append(run_job(plan, file, kind))
                ended = jobs[-1]
                print(
                    f"{plan:6} {kind:18} {ended.seconds:5.1f} s, code {ended.code}, {len(ended.screen)} lines: "
                    f"{'; '.join(ended.faults) or 'as it should be'}",
                    flush=True,
                )
                if arguments.screens:
                    arguments.screens.mkdir(exist_ok=True, parents=True)
                    (arguments.screens / f"{plan}-{kind}".replace(" ", "-")).write_text(
                        "\n".join(ended.screen)
                    )
    if arguments.out:
        arguments.out.write_text("\n".join(table(jobs)) + "\n")
    wrong = [job for job in jobs if job.faults]
    print(f"{len(jobs)} jobs, {len(wrong)} with faults")


def table(jobs: Sequence[Ended]) -> Iterator[str]:
    """Seconds by failure and plan; what is not as it should be after them."""
    plans = list(dict.fromkeys(job.plan for job in jobs))
    yield f"| one of four ranks | {' | '.join(plans)} |"
    yield "|---" * (1 + len(plans)) + "|"
    for kind in dict.fromkeys(job.kind for job in jobs):
        cells = {job.plan: job for job in jobs if job.kind == kind}
        texts = [
            f"{cells[plan].seconds:.0f} s{'; ' * bool(cells[plan].faults)}{'; '.join(cells[plan].faults)}"
            for plan in plans
            if plan in cells
        ]
        yield f"| {kind} | {' | '.join(texts)} |"


if __name__ == "__main__":
    main()
