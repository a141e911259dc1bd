"""Real models on real ranks: loss and every gradient are those of one device, initial values equal bit for bit."""

from __future__ import annotations

import re

import pytest
from comparing import Difference, compare

from meshwright_dtensor.testing.rank_pool import RankPool
from meshwright_parallel.verification.report import Comparison

LAYOUTS = {"tp2": {"dp": 1, "tp": 2}, "dp2": {"dp": 2, "tp": 1}, "dp2-tp2": {"dp": 2, "tp": 2}}
EVERYWHERE = ("llama", "gpt2", "bert", "vit", "t5", "mixtral", "opt", "plain")
TENSOR_ONLY = (
    "llama-eager",
    "llama-one-kv-head",
    "llama-odd-heads",
    "llama-odd-vocabulary",
    "llama-tied",
    "qwen3",
)
WHOLE = ("plain",)
"""So small that at tp 2 nothing need be shared."""
RUNS = [(case, layout) for case in EVERYWHERE for layout in LAYOUTS] + [
    (case, layout) for case in TENSOR_ONLY for layout in ("tp2", "dp2-tp2")
]


def check(difference: Difference) -> None:
    assert not difference.unequal
    assert difference.loss <= 1e-6 * max(1.0, difference.single_loss)
    assert not difference.wrong()
    noise = {c.name for c in difference.gradients if not c.measured}
    assert all(re.search(r"(key|k_proj)\.bias$", name) for name in noise), noise


@pytest.mark.slow
@pytest.mark.parametrize(("case", "layout"), RUNS)
def test_a_model_is_that_of_one_device(rank_pool: RankPool, case: str, layout: str) -> None:
    degrees = LAYOUTS[layout]
    world_size = degrees["dp"] * degrees["tp"]
    for difference in rank_pool.run(world_size, compare, case, degrees):
        assert {axis: difference.degrees.get(axis, 1) for axis in degrees} == degrees
        check(difference)
        # a plan that replicates everything would pass every comparison
        assert difference.sharded or degrees["tp"] == 1 or case in WHOLE


@pytest.mark.slow
def test_four_way_tensor_parallelism_with_two_key_value_heads(rank_pool: RankPool) -> None:
    for difference in rank_pool.run(4, compare, "qwen3", {"dp": 1, "tp": 4}):
        check(difference)


def test_the_comparison_sees_a_wrong_gradient() -> None:
    right = Comparison(0, "gradient", "right", "float32", difference=1e-6, scale=1.0, tolerance=1e-5)
    wrong = Comparison(0, "gradient", "small", "float32", difference=1e-9, scale=1e-5, tolerance=1e-5)
    difference = Difference(0.0, 1.0, [right, wrong])
    assert difference.wrong() == {"small": (1e-9, 1e-5)}
