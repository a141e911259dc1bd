"""What goes wrong at the border of a parallel model works, or is refused in one readable line, under every plan."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import meshwright as mw
from meshwright_dtensor.errors import MeshwrightError
from meshwright_dtensor.plan import ParallelPlan, ParameterRule, PipelineRule
from meshwright_dtensor.testing.rank_pool import RankPool

ROWS, LENGTH, WIDTH, VOCABULARY = 4, 5, 8, 12


class Small(nn.Module):
    """An embedding and two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(VOCABULARY, WIDTH)
        self.a = nn.Linear(WIDTH, 12)
        self.b = nn.Linear(12, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.b(torch.relu(self.a(self.emb(x))))
        return h


RULES = {"a.weight": "S(0)", "a.bias": "S(0)", "b.weight": "S(1)"}
PLANS: dict[str, dict[str, Any]] = {
    "dp": {"degrees": {"dp": 2}},
    "tp": {"degrees": {"dp": 1, "tp": 2}},
    "zero3": {"degrees": {"zero": 2}, "zero": {"stage": 3}},
    "pp": {"degrees": {"pp": 2, "dp": 1}},
}


def small() -> Small:
    torch.manual_seed(0)
    return Small()


def ids() -> Tensor:
    return torch.randint(0, VOCABULARY, (ROWS, LENGTH), generator=torch.Generator().manual_seed(1))


def parallel(model: nn.Module, name: str, rules: dict[str, str] | None = None, **options: Any) -> nn.Module:
    if name == "tp":
        rules = RULES if rules is None else rules
        options["parameters"] = tuple(
            ParameterRule(pattern=key, placement={"tp": value}) for key, value in rules.items()
        )
    if name == "pp":
        options["pipeline"] = PipelineRule(stages=(("emb", "a"), ("b",)), microbatches=2)
    return mw.parallelize(model, ParallelPlan(world_size=2, **PLANS[name], **options))


def told(call: Callable[[], Any]) -> str:
    """The line of our error that a call raises."""
    try:
        call()
    except MeshwrightError as error:
        return f"{type(error).__name__}: {error}"
    except Exception as error:
        return f"not ours: {type(error).__name__}: {error}"
    return "nothing"


def compiled_models() -> Iterator[tuple[str, nn.Module]]:
    yield "torch.compile", torch.compile(small(), backend="eager")  # type: ignore[misc]
    yield "torch.jit", torch.jit.script(small())
    yield "torch.jit", torch.jit.trace(small(), ids())
    model = small()
    model.compile(backend="eager")
    yield "module.compile()", model
    model = small()
    model.a.compile(backend="eager")
    yield "module 'a'", model
    model = small()
    model.a = torch.compile(model.a, backend="eager")  # type: ignore[assignment]
    yield "module 'a'", model
    model = small()
    model.b = torch.jit.script(model.b)
    yield "module 'b'", model
    model = small()
    model.forward = torch.compile(model.forward, backend="eager")  # type: ignore[method-assign]
    yield "torch.compile", model


def compiled(rank: int, size: int, name: str) -> list[tuple[str, str]]:
    """Expected words and errors of compiled models, and of parallel models that are compiled."""
    errors = [(words, told(functools.partial(parallel, model, name))) for words, model in compiled_models()]
    model: Any = parallel(small(), name)
    x = ids()
    for call in (
        lambda: torch.compile(model, backend="eager")(x),
        lambda: torch.compile(model.b, backend="eager"),
        lambda: model.compile(backend="eager"),
        lambda: model.a.compile(backend="eager"),
        lambda: torch.compile(lambda x: model(x), backend="eager")(x),
        lambda: torch.jit.script(model),
        lambda: torch.jit.trace(model, x),
    ):
        errors.append(("was given a parallel model", told(call)))
    # the model still runs
    torch.testing.assert_close(model(x).full_tensor(), small()(x))
    return errors


@pytest.mark.slow
@pytest.mark.parametrize("name", list(PLANS))
def test_compiled_and_scripted_modules_are_refused_in_one_line(rank_pool: RankPool, name: str) -> None:
    for errors in rank_pool.run(2, compiled, name, timeout=100):
        for words, error in errors:
            assert error.startswith("UnsupportedError: ") and words in error and "\n" not in error
            assert "use the ordinary module, without torch.compile and torch.jit" in error
