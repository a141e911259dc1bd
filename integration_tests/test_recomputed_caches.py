"""Models of transformers fill a cache of keys and values by default: recomputed layers find it as they first found it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from plan_once import plan_once
from torch import Tensor
from zoo import CASES

import meshwright as mw
from meshwright_dtensor.errors import UnsupportedError
from meshwright_dtensor.testing.rank_pool import RankPool
from meshwright_parallel import verify
from meshwright_parallel.verification.compare import compare, one_rounding_away

TP, DP, ZERO = {"dp": 1, "tp": 2}, {"dp": 2, "tp": 1}, {"dp": 2, "tp": 1, "zero": 3}
RUNS = [
    ("llama", {**TP, "recompute": "full"}),
    ("llama", {**DP, "recompute": "selective"}),
    ("gpt2", {**TP, "recompute": "alternate"}),
    ("gpt2", {**ZERO, "recompute": "full"}),
    ("mixtral", {**TP, "recompute": "full"}),
    ("mixtral", {**DP, "recompute": "full"}),
    ("t5", {**TP, "recompute": "decoder.block.*"}),
    ("t5", {**DP, "recompute": "full"}),
    ("llama", {"dp": 1, "tp": 1, "cp": 2, "recompute": "full"}),
    ("mixtral", {"dp": 1, "tp": 1, "ep": 2, "recompute": "full"}),
    ("qwen3", {**TP, "sequence_parallel": True, "recompute": "selective"}),
]


def entries(cache: Any) -> dict[str, Tensor]:
    """Keys and values of every layer, those of an encoder and a decoder too."""
    if hasattr(cache, "cross_attention_cache"):
        parts = {"self": cache.self_attention_cache, "cross": cache.cross_attention_cache}
        return {f"{part} {n}": x for part, of in parts.items() for n, x in entries(of).items()}
    return {
        f"{what} {n}": getattr(layer, what)
        for n, layer in enumerate(cache.layers)
        for what in ("keys", "values")
    }


def step(model: Any, batch: Any) -> dict[str, Tensor | None]:
    """Loss, gradients, and the cache after the backward pass."""
    torch.manual_seed(4)
    output = model(**batch)
    assert output.past_key_values is not None
    output.loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters()}
    return {"loss": output.loss, **entries(output.past_key_values), **gradients}


def differences(rank: int, world_size: int, name: str, options: dict[str, Any]) -> tuple[list[str], int, int]:
    """What is not as on one device; how many values were compared; how many modules run again."""
    case = CASES[name]
    batch = case.batch()
    models = []
    for _ in range(3):
        torch.manual_seed(3)
        models.append(case.model())
    plan = plan_once(models[1], batch, **options)
    many = mw.parallelize(models[1], plan, batch=batch)
    one_rounding_away(models[2].parameters())
    want, got, near = (step(model, batch) for model in (models[0], many, models[2]))
    assert want.keys() == got.keys()
    comparisons = compare(0, "gradient", want, got, 1e-5, perturbed=near)
    again = sum(any(rule.matches(n) for rule in plan.recompute) for n, _ in many.named_modules())
    return (
        [f"{c.name} {c.difference:.1e} of {c.scale:.1e} {c.note}" for c in comparisons if not c.ok],
        len(comparisons),
        again,
    )


@pytest.mark.slow
@pytest.mark.parametrize(("case", "options"), RUNS)
def test_loss_gradients_and_cache_are_those_of_one_device(
    rank_pool: RankPool, case: str, options: dict[str, Any]
) -> None:
    for wrong, compared, again in rank_pool.run(2, differences, case, options):
        assert not wrong
        assert compared > 20 and again >= 2


def static(rank: int, world_size: int) -> None:
    from transformers import StaticCache

    case = CASES["llama"]
    torch.manual_seed(3)
    model: Any = case.model()
    plan = plan_once(model, case.batch(), **TP, recompute="full")
    model = mw.parallelize(model, plan, batch=case.batch())
    cache = StaticCache(config=model.config, max_cache_len=16)
    output = model(**case.batch(), past_key_values=cache)
    with pytest.raises(UnsupportedError, match=r"StaticLayer .* modified in place"):
        output.loss.backward()


def test_a_cache_that_is_written_to_in_place_is_refused(rank_pool: RankPool) -> None:
    rank_pool.run(2, static)


def piped(rank: int, world_size: int, name: str) -> tuple[list[str], Any]:
    """What two steps of two stages make otherwise than one device, and the cache that is returned."""
    case = CASES[name]
    torch.manual_seed(3)
    pins = {"pp": 2, "dp": 1, "tp": 1, "cp": 1, "microbatches": 2, "recompute": "full"}
    plan: Any = plan_once(case.model(), case.batch(), cluster="laptop-cpu", **pins)
    assert plan.recompute
    report = verify(
        case.model, case.batch(), plan, optimizer=lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)
    )
    everything = plan.pipeline.model_copy(update={"outputs": "all"})
    torch.manual_seed(3)
    model: Any = mw.parallelize(
        case.model(), plan.model_copy(update={"pipeline": everything}), batch=case.batch()
    )
    output = model(**case.batch())
    return [f"{f.kind} {f.name} {f.difference}" for f in report.failures], output.past_key_values


@pytest.mark.slow
@pytest.mark.parametrize("case", ["llama", "t5"])
def test_stages_of_a_pipeline_run_again_with_caches_of_their_own(rank_pool: RankPool, case: str) -> None:
    """No stage has the whole cache, so none is returned."""
    for wrong, cache in rank_pool.run(2, piped, case):
        assert not wrong and cache is None
