"""The sample of architectures: loss, every gradient and every buffer are those of one device."""

from __future__ import annotations

import pytest

from meshwright_dtensor.testing.rank_pool import RankPool

from .attempts import attempt
from .catalogue import Architecture
from .layouts import LAYOUTS
from .sample import sample
from .tiny import Tiny

CASES = [pytest.param(each, layout, id=f"{each.name}-{layout}") for each, layout in sample()]


def test_the_sample_covers_tasks_and_layouts() -> None:
    assert len(CASES) == 41
    assert {each.task for each, _ in sample()} == {"causal-lm", "masked-lm", "seq2seq-lm", "image"}


@pytest.mark.slow
@pytest.mark.parametrize(("architecture", "layout"), CASES)
def test_an_architecture_is_that_of_one_device(
    rank_pool: RankPool, architecture: Architecture, layout: str
) -> None:
    chosen = LAYOUTS[layout]
    verdict = attempt(rank_pool, Tiny(architecture), chosen)
    assert verdict.passed, verdict.reason
    assert verdict.microbatches == 4 if layout == "pp2" else verdict.sharded
