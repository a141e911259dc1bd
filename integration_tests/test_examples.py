"""Every example is one file, for one device and for many, and trains alike on both."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest
from doc_blocks import run_script

from meshwright_dtensor.testing.rank_pool import RankPool

ROOT = Path(__file__).parent.parent
EXAMPLES = ROOT / "examples"

ARGUMENTS = {"nanogpt": [str(ROOT / "LICENSE")], "llama_finetune": ["source", "target"]}
APART = {"train_gpt2", "elastic"}
"""Examples with a test of their own."""

NEEDS = {"lora_trl": ("trl", "peft", "datasets", "accelerate")}


def losses(pool: RankPool, ranks: int, folder: Path, name: str, *arguments: str) -> list[float]:
    folder.mkdir(exist_ok=True)
    script = [str(EXAMPLES / f"{name}.py"), *arguments]
    printed = pool.run(ranks, run_script, str(folder), script)[0]
    return [float(loss) for loss in re.findall(r"step +\d+  loss (\S+)", printed)]


def alike(single: list[float], several: list[float]) -> bool:
    # printed with four digits: the last may fall on either side
    return len(single) == len(several) and all(
        abs(a - b) < 1.5e-4 for a, b in zip(single, several, strict=True)
    )


NAMES = sorted(path.stem for path in EXAMPLES.glob("*.py") if path.stem not in APART)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_an_example_is_the_same_on_one_device_and_on_two(
    rank_pool: RankPool, tmp_path: Path, name: str
) -> None:
    for package in NEEDS.get(name, ()):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    arguments = ARGUMENTS.get(name, [])
    single = losses(rank_pool, 1, tmp_path / "one", name, *arguments)
    two = losses(rank_pool, 2, tmp_path / "two", name, *arguments)
    assert len(single) > 2 and alike(single, two), (single, two)
    assert single[-1] < single[0]


@pytest.mark.slow
def test_the_elastic_example_goes_on_with_other_ranks(rank_pool: RankPool, tmp_path: Path) -> None:
    whole = losses(rank_pool, 1, tmp_path / "whole", "elastic")
    # lost in the middle of a checkpoint's interval: the step after the last checkpoint is done again
    first = losses(rank_pool, 2, tmp_path / "parts", "elastic", "5")
    second = losses(rank_pool, 1, tmp_path / "parts", "elastic")
    assert len(first) == 5 and alike(whole, first[:4] + second), (whole, first, second)


def test_examples_are_told_in_the_readme() -> None:
    page = (EXAMPLES / "README.md").read_text()
    missing = [path.name for path in EXAMPLES.glob("*.py") if f"]({path.name})" not in page]
    assert not missing
