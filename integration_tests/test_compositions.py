"""Some of the pairs of parallelisms, three steps each; `python integration_tests/compositions.py` runs them all."""

from __future__ import annotations

import pytest
from compositions import Composition, compositions, outcome, planned

from meshwright_dtensor.errors import PlanError
from meshwright_dtensor.testing.rank_pool import RankPool

SOME = [
    (Composition("mixtral", ("sp", "dp")), "sgd"),
    (Composition("mixtral", ("ep", "zero"), more={"recompute": "full"}), "sgd"),
    (Composition("gpt2", ("tp", "zero")), "adamw"),
    (Composition("mixtral", ("tp", "ep")), "adamw"),
    (Composition("llama", ("sp", "cp")), "sgd"),
    (Composition("llama", ("cp", "zero"), 2), "adamw"),
    (Composition("llama", ("pp", "sp")), "sgd"),
    (Composition("mixtral", ("pp", "ep"), more={"microbatches": 4, "schedule": "zbv"}), "adamw"),
    (Composition("llama-tied", ("pp", "zero"), more={"microbatches": 4, "schedule": "dualpipev"}), "adamw"),
    (Composition("llama", ("pp", "cp")), "sgd"),
]
"""Four ranks: starting eight takes longer than all of this."""


@pytest.mark.slow
@pytest.mark.parametrize(("composition", "optimizer"), SOME, ids=lambda value: getattr(value, "name", value))
def test_three_steps_are_those_of_one_device(
    rank_pool: RankPool, composition: Composition, optimizer: str
) -> None:
    result = outcome(rank_pool, composition, optimizer)
    assert result.kind == "equal", result.seen


def test_every_pair_and_triple_is_listed() -> None:
    names = [each.name for each in compositions()]
    assert len(names) == len(set(names)) == 2 * (10 + 5 * 3 + 20)


@pytest.mark.parametrize("parts", [each.parts for each in compositions() if not each.legal])
def test_what_cannot_be_is_refused(parts: tuple[str, ...]) -> None:
    with pytest.raises(PlanError, match="no module of experts that can be sharded; leave ep out"):
        planned(Composition("llama", parts))
