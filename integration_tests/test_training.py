"""Whatever people train, on real ranks: losses, every gradient, buffers and three optimizer steps are those of one device."""

from __future__ import annotations

import pytest
from training import Planner, by_hand, planned, train
from training_zoo import SCRIPTS

from meshwright_dtensor.testing.rank_pool import RankPool

DATA, TENSOR, BOTH = {"dp": 2, "tp": 1}, {"dp": 1, "tp": 2}, {"dp": 2, "tp": 2}
RUNS = [(name, TENSOR, by_hand) for name in SCRIPTS]
RUNS += [(name, DATA, planned) for name in SCRIPTS]
RUNS += [(name, BOTH, by_hand) for name in ("gan", "cnn", "remembering", "attending", "spectral")]
RUNS += [(name, TENSOR, planned) for name in ("gan", "two-losses", "lstm", "summing", "cnn")]


def _label(value: object) -> str | None:
    if isinstance(value, dict):
        return "-".join(f"{axis}{degree}" for axis, degree in value.items() if degree > 1)
    return getattr(value, "__name__", None)


PIPELINES = [{"dp": 1, "tp": 1, "pp": 2}, {"dp": 2, "tp": 1, "pp": 2}]


@pytest.mark.slow
@pytest.mark.parametrize("degrees", PIPELINES, ids=_label)
def test_pipelined_models_train_each_other(rank_pool: RankPool, degrees: dict[str, int]) -> None:
    """The generator learns from a gradient that comes back through the whole pipeline of the critic."""
    names: dict[str, None] = {}
    for name, model in SCRIPTS["gan"].models().items():
        names |= dict.fromkeys(f"{name}.{parameter}" for parameter, _ in model.named_parameters())
    for trained in rank_pool.run(2 * degrees["dp"], train, "gan", degrees, planned):
        assert not trained.wrong()
        gradient_names = {c.name for c in trained.comparisons if c.kind == "gradient"}
        # of all stages, on every rank
        assert gradient_names == set(names)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "degrees", "planner"), RUNS, ids=_label)
def test_training_is_that_of_one_device(
    rank_pool: RankPool, name: str, degrees: dict[str, int], planner: Planner
) -> None:
    world_size = degrees["dp"] * degrees["tp"]
    for trained in rank_pool.run(world_size, train, name, degrees, planner):
        assert not trained.wrong()
        assert degrees["tp"] == 1 or trained.sharded  # what is replicated everywhere would pass everything
