"""generate() of transformers gives the text of one device with each cache, and refuses caches under pp in one line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import meshwright as mw
from meshwright_dtensor.testing.rank_pool import RankPool

from .generate_script import on_rank, one_device
from .plans import LIMITS, gap

CASES = {
    "tp2": ["sampling", "beams", "static", "static sliding", "quantized", "prompt lookup"],
    "zero3": ["dynamic", "sliding", "sampled beams"],
    "pp2": ["none", "dynamic"],
}


def generated(rank: int, size: int, plan: str, options: list[str], folder: Path) -> list[Any]:
    results: list[Any] = []
    for option in options:
        try:
            results.append(on_rank(rank, size, plan, option, folder))
        except mw.errors.UnsupportedError as error:
            results.append(str(error))
    return results


@pytest.mark.parametrize("plan", CASES)
def test_generated_text_is_that_of_one_device(rank_pool: RankPool, tmp_path: Path, plan: str) -> None:
    for results in rank_pool.run(2, generated, plan, CASES[plan], tmp_path):
        for option, result in zip(CASES[plan], results, strict=True):
            if plan == "pp2" and option == "dynamic":
                assert "generate with use_cache=False" in result
                continue
            exact = one_device(option, tmp_path)
            assert result["tokens"] == exact["tokens"], option
            assert gap(result["losses"], exact["losses"]) < LIMITS["no"], option
