"""What fused kernels of a GPU would draw is drawn by operations that a replay can reach; on the CPU the numbers agree."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright_dtensor._torch.modes import with_function_modes
from meshwright_dtensor.devices.cpu import Cpu
from meshwright_dtensor.devices.registry import replaced
from meshwright_pipeline._torch import TorchDispatchMode
from meshwright_pipeline.trace.explicit_draws import ExplicitDraws


class Fused(Cpu):
    """As if dropout of the CPU were fused."""

    fused_dropout = True


class RandomOps(TorchDispatchMode):
    """The names of the random operations that run inside."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags:
            self.names.append(str(func))
        return func(*args, **(kwargs or {}))


ATTENTION = nn.MultiheadAttention(16, 4, dropout=0.3, batch_first=True)
CASES = {
    "dropout": (lambda x: F.dropout(x, 0.3), "meshwright.dropout_noise_.default"),
    "view with gaps": (lambda x: F.dropout(x[..., ::2], 0.3), "meshwright.dropout_noise_.default"),
    "attention": (
        lambda x: F.scaled_dot_product_attention(x, x, x, dropout_p=0.3),
        "meshwright.attention_noise_.default",
    ),
    "layer": (lambda x: ATTENTION(x, x, x, need_weights=False)[0], "meshwright.attention_noise_.default"),
    "layer with weights": (lambda x: ATTENTION(x, x, x)[0], "meshwright.dropout_noise_.default"),
}


def test_a_second_run_draws_so_too() -> None:
    """Autograd has no function modes in a backward pass, where recomputation runs a forward again."""
    x = torch.randn(3, 5, 16)
    with ExplicitDraws("cpu"):
        again = with_function_modes(lambda: F.dropout(x, 0.3))
    with RandomOps() as random_ops, replaced(Fused()):
        again()
        F.dropout(x, 0.3)
    assert random_ops.names[0] == "meshwright.dropout_noise_.default"
    assert "meshwright.dropout_noise_.default" not in random_ops.names[1:]


@pytest.mark.parametrize("name", CASES)
def test_the_numbers_are_drawn_by_an_operation_of_its_own(name: str) -> None:
    function, op = CASES[name]
    x = torch.randn(3, 5, 16)
    torch.manual_seed(0)
    expected: Tensor = function(x)
    end = torch.get_rng_state()
    torch.manual_seed(0)
    with RandomOps() as random_ops, replaced(Fused()), ExplicitDraws("cpu"):
        result = function(x)
    assert torch.allclose(result, expected)
    assert torch.equal(torch.get_rng_state(), end)
    assert random_ops.names == [op]
