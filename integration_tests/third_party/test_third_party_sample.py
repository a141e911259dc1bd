"""The sample of third-party models: loss, every gradient and every buffer are those of one device."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

import pytest
from architectures.attempts import attempt

from meshwright_dtensor.testing.rank_pool import RankPool

from .catalogue import Model, models
from .layouts import LAYOUTS
from .sample import sample

CASES = [pytest.param(model, layout, id=f"{model.package}-{layout}") for model, layout in sample()]


def test_the_catalogue_is_large() -> None:
    names = [model.key for model in models()]
    assert len(set(names)) == len(names) >= 150 and len({model.package for model in models()}) >= 50
    assert len({model.package for model, _ in sample()}) == 20


@pytest.mark.slow
@pytest.mark.parametrize(("model", "layout"), CASES)
def test_a_model_is_that_of_one_device(rank_pool: RankPool, model: Model, layout: str) -> None:
    try:
        version(model.package)
    except PackageNotFoundError:
        pytest.skip("pip install --no-deps -r integration_tests/third_party/sample.txt")
    verdict = attempt(rank_pool, model, LAYOUTS[layout])
    assert verdict.passed, verdict.reason
