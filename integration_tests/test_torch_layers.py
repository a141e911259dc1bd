"""torch's own attention layers under tensor parallelism: Megatron's cut, with the values of one device."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch_layers import MODELS, ROWS, TOKENS, WIDTH, Encoder

import meshwright as mw
from meshwright_dtensor.errors import MeshwrightError, UnsupportedError
from meshwright_dtensor.testing.rank_pool import RankPool


def build(make: Callable[[], nn.Module], pins: dict[str, Any]) -> tuple[nn.Module, nn.Module, Tensor]:
    """A model, the same on the ranks, and its input, in float64."""
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        model = make().double()
        for p in model.parameters():
            if p.dim() == 1:
                nn.init.normal_(p, 0.5, 0.3)
        models.append(model)
    x = torch.arange(ROWS * TOKENS * WIDTH, dtype=torch.float64).view(ROWS, TOKENS, WIDTH).sin()
    mw.auto_parallelize(models[1], x, cluster="laptop-cpu", **pins)
    return models[0], models[1], x


def whole(x: Any) -> Any:
    return x.full_tensor() if hasattr(x, "full_tensor") else x


def run(model: nn.Module, *args: Tensor) -> dict[str, Tensor]:
    """The results of one step, and of one forward pass in evaluation."""
    torch.manual_seed(3)
    model.train()
    loss = model(*args)
    loss.backward()
    results = {"loss": whole(loss).detach(), "random": torch.rand(3)}
    results |= {name: whole(p.grad) for name, p in model.named_parameters()}
    model.eval()
    with torch.no_grad():
        return results | {"evaluated": whole(model(*args))}


def differences(single: dict[str, Tensor], parallel: dict[str, Tensor]) -> list[str]:
    """Names of results that differ by more than rounding."""
    largest = max(float(v.abs().max()) for v in single.values())
    close = {n: torch.allclose(parallel[n], v, rtol=1e-9, atol=1e-11 * largest) for n, v in single.items()}
    return [name for name, same in close.items() if not same]


def share(single: nn.Module, parallel: nn.Module) -> float:
    """The part of the weights that this rank holds."""
    held = sum(p.to_local().numel() for p in parallel.parameters())  # type: ignore[attr-defined]
    return held / sum(p.numel() for p in single.parameters())


def compare(rank: int, size: int, pins: dict[str, Any]) -> list[str]:
    wrong = []
    for name, make in MODELS.items():
        single, parallel, x = build(make, pins)
        names = differences(run(single, x), run(parallel, x))
        wrong += [f"{name}: {names}"] if names else []
        part = share(single, parallel)
        wrong += [f"{name}: {part:.3f} of the weights"] if part > 0.55 else []
    return wrong


@pytest.mark.slow
def test_tensor_parallel_values(rank_pool: RankPool) -> None:
    for wrong in rank_pool.run(2, compare, {"tp": 2}):
        assert not wrong, "\n".join(wrong)


Counts = dict[tuple[str, str], int]
"""(pass, kind) -> number of collectives."""


def counts(rank: int, size: int, name: str) -> tuple[Counts, Counts, Counts]:
    """Collectives of a step as planned and as executed, and executed with a gradient of the input."""
    _, model, x = build(MODELS[name], {"tp": 2})
    planned, executed = Counter[tuple[str, str]](), list[Counts]()
    for c in model.parallel_plan.collectives:  # type: ignore[union-attr]
        planned[c.phase, c.kind] += c.count
    for given in (x, x.clone().requires_grad_()):
        with mw.debug.communication() as log:
            model(given).backward()
        executed.append(dict(Counter((e.phase, e.kind) for e in log.events)))
    return dict(planned), executed[0], executed[1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "forward", "backward"),
    # of two layers: their attention and MLP; decoders attend twice, and all of them to one memory
    [("encoder", 4, 4), ("translator", 4 + 6, 4 + 6 + 1), ("vision", 2, 2)],
)
def test_communication_is_megatrons(rank_pool: RankPool, name: str, forward: int, backward: int) -> None:
    planned, executed, with_gradient = rank_pool.run(2, counts, name)[0]
    assert with_gradient == {("forward", "all_reduce"): forward, ("backward", "all_reduce"): backward}
    assert planned == executed


def padded(rank: int, size: int, pins: dict[str, Any]) -> list[str]:
    """Encoders without gradients: torch leaves padded tokens out, if all rows have them at the end."""
    wrong = []
    lengths = torch.tensor([10, 3, 7, 1]).unsqueeze(1)
    mask = torch.arange(TOKENS) >= lengths
    single, parallel, x = build(lambda: Encoder(norm=True), pins)
    for number, given in enumerate((mask, mask.flip(1), mask.double() * -torch.inf)):
        # -inf * 0 is no number
        given = given.nan_to_num(nan=0.0, neginf=-torch.inf) if given.is_floating_point() else given
        for training in (False, True):
            single.train(training), parallel.train(training)
            with torch.no_grad():
                torch.manual_seed(3)
                a = single(x, given)
                torch.manual_seed(3)
                b = whole(parallel(x, given))
            if not torch.allclose(a, b, rtol=1e-9, atol=1e-11):
                wrong.append(f"mask {number}, training {training}: {float((a - b).abs().max())}")
    try:
        parallel.eval()
        with torch.no_grad():
            parallel(x, -1.0 * mask)
        wrong.append("a mask of other numbers was taken")
    except UnsupportedError as error:
        wrong += [] if "enable_nested_tensor=False" in str(error) else [str(error)]
    single.encoder.use_nested_tensor = parallel.encoder.use_nested_tensor = False
    single.eval()
    for number in range(2):
        with torch.no_grad():
            a, b = single(x, mask), whole(parallel(x, mask))
        wrong += [] if torch.allclose(a, b, rtol=1e-9, atol=1e-11) else [f"not nested, call {number}"]
    return wrong


@pytest.mark.slow
@pytest.mark.parametrize("pins", [{"tp": 2}, {"dp": 2}, {"pp": 2, "microbatches": 1}])
def test_padding_of_an_evaluated_encoder_is_zero(rank_pool: RankPool, pins: dict[str, Any]) -> None:
    for wrong in rank_pool.run(2, padded, pins):
        assert not wrong, "\n".join(wrong)


def divided(rank: int, size: int) -> str:
    _, parallel, x = build(Encoder, {"pp": 2, "microbatches": 2})
    mask = torch.zeros(ROWS, TOKENS, dtype=torch.bool)
    mask[0, 0] = True
    parallel.eval()
    with torch.no_grad():
        parallel(x, torch.zeros_like(mask))
        try:
            parallel(x, mask)
        except MeshwrightError as error:
            return str(error)
    return ""


@pytest.mark.slow
def test_padding_of_one_microbatch_is_refused(rank_pool: RankPool) -> None:
    for error in rank_pool.run(2, divided):
        assert "padding before a token" in error
