"""Run clients under every plan, and put their rows into the table of docs/frameworks.md.

python -m integration_tests.clients             # all that are installed
python -m integration_tests.clients lightning   # those whose script's name has this in it
"""

from __future__ import annotations

import re
import sys
import tempfile
from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from meshwright_dtensor.errors import MeshwrightError
from meshwright_dtensor.testing.rank_pool import RankPool

from .plans import LIMITS, PLANS, gap

PAGE = Path(__file__).parents[2] / "docs" / "frameworks.md"


class Client(NamedTuple):
    """`script`: its module. `options`: argument of the script -> name of the row. `resumes`: whether it saves and goes on."""

    script: str
    options: dict[str, str]
    resumes: bool = True


def of_precisions(name: str) -> dict[str, str]:
    return {option: f"{name}, {'float32' if option == 'no' else option}" for option in LIMITS}


CLIENTS = [
    Client("accelerate_script", of_precisions("accelerate")),
    Client("trainer_script", of_precisions("transformers' Trainer")),
    Client("peft_script", of_precisions("PEFT with Trainer")),
    Client("lightning_script", of_precisions("Lightning's Trainer")),
    Client("fabric_script", of_precisions("Lightning Fabric"), resumes=False),
    Client(
        "generate_script",
        {
            "dynamic": "generate(), dynamic cache",
            "none": "generate(), no cache",
            "static": "generate(), static cache",
            "sliding": "generate(), sliding window",
            "static sliding": "generate(), static sliding window",
            "quantized": "generate(), cache in float8",
            "sampling": "generate(), sampling",
            "beams": "generate(), beams",
            "prompt lookup": "generate(), prompt lookup",
            "assistant": "generate(), assistant model",
        },
        resumes=False,
    ),
    Client(
        "optimizer_script",
        {
            "torchao.AdamW8bit": "torchao AdamW8bit",
            "torchao.AdamW4bit": "torchao AdamW4bit",
            "torchao.AdamWFp8": "torchao AdamWFp8",
            "torchao.float8": "torchao float8 training (emulated)",
            "bitsandbytes.AdamW8bit": "bitsandbytes AdamW8bit",
            "schedulefree.AdamWScheduleFree": "schedulefree AdamWScheduleFree",
        },
    ),
    Client(
        "data_script",
        {
            "torchdata": "torchdata StatefulDataLoader",
            "datasets": "datasets, streaming",
            "webdataset": "webdataset",
        },
    ),
    Client(
        "trl_script",
        {"SFT": "TRL SFTTrainer, float32", "DPO": "TRL DPOTrainer with LoRA, float32"},
        resumes=False,
    ),
]


def main(chosen: Sequence[str]) -> None:
    """Print a row for each client, and put it into the page."""
    with RankPool() as pool, tempfile.TemporaryDirectory() as folder:
        for client in CLIENTS:
            if chosen and not any(name in client.script for name in chosen):
                continue
            for option, name in client.options.items():
                place = Path(folder) / client.script / option
                try:
                    script = import_module(f"{__package__}.{client.script}")
                    cells = list(_cells(pool, script, option, place, client.resumes))
                except ImportError as error:
                    print(f"{name} is left out: {error}", file=sys.stderr)
                    continue
                row = f"| {name} | {' | '.join(cells)} |"
                print(row, flush=True)
                PAGE.write_text(_with_row(PAGE.read_text(), name, row))


def _with_row(page: str, name: str, row: str) -> str:
    """The page with the row in place of the one of this name, or at the end of the table."""
    present = re.compile(rf"^\| {re.escape(name)} \|.*$", re.MULTILINE)
    if present.search(page):
        return present.sub(lambda _: row, page)
    table = page.index("| script |")
    end = page.index("\n\n", table)
    return f"{page[:end]}\n{row}{page[end:]}"


def _cells(pool: RankPool, script: Any, option: str, folder: Path, resumes: bool) -> Iterator[str]:
    exact = script.one_device(option, folder / "one")

    def cell(plan: str, *start: str) -> str:
        resume = [folder / place for place in start]
        try:
            into = folder / "-".join((plan, *start))
            losses = pool.run(2, script.on_rank, plan, option, into, *resume)[0]["losses"]
        except MeshwrightError as error:
            print(f"{plan}: {error}", file=sys.stderr)
            return "refused"
        return f"{gap(losses, exact['losses'][-len(losses) :]):.0e}"

    names = list(PLANS)
    cells = [cell(name) for name in names]
    yield from cells
    pairs = [(name, names[place - 1]) for place, name in enumerate(names)]
    ran = dict(zip(names, cells, strict=True))
    later = [cell(*pair) for pair in pairs if resumes and all(ran[plan] != "refused" for plan in pair)]
    yield max(later, key=float) if later else ""


if __name__ == "__main__":
    main(sys.argv[1:])
