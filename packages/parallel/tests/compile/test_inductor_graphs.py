"""Graphs that inductor compiles: it ends, and the numbers are those of eager, in lower precision too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx

from meshwright_parallel._torch.compiler import AotFunction
from meshwright_parallel.compile.compiled_graphs import CompiledGraphs

ROWS, COLUMNS = 8, 16


def shifted(scores: torch.Tensor, scale: torch.Tensor) -> list[torch.Tensor]:
    """A relative attention (Transformer-XL, appendix B) that is scaled in place, as Funnel's is."""
    scores = scores * 1.5
    by_distance = scores.view(2, COLUMNS, ROWS)[:, 1:].view(2, ROWS, COLUMNS - 1)[..., :ROWS]
    by_distance *= scale
    return [by_distance.tanh()]


def always_compiled(graph: Any, examples: Any, backward: bool, compiler: Callable[[], Any]) -> Any:
    """No graph is there already."""
    return compiler()


def inductor_function(
    function: Callable[..., Any], take: Callable[..., Any] = always_compiled
) -> tuple[AotFunction, list[fx.GraphModule]]:
    """The function, to be compiled, and the graphs of its passes."""
    graphs: list[fx.GraphModule] = []
    compiled = AotFunction(
        function,
        "inductor",
        graphs.append,
        lambda graph: None,
        take,
        lambda gradients: gradients,
    )
    return compiled, graphs


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_part_that_is_written_in_place_and_reshaped_compiles() -> None:
    compiled, graphs = inductor_function(shifted)
    scores, scale = torch.randn(2, ROWS, COLUMNS, requires_grad=True), torch.rand(ROWS, ROWS)
    compiled.compile([scores, scale])
    (result,), (expected,) = compiled([scores, scale]), shifted(scores, scale)
    torch.testing.assert_close(result, expected)
    grads = [torch.autograd.grad(value.square().sum(), scores)[0] for value in (result, expected)]
    torch.testing.assert_close(*grads)
    for graph in graphs:
        written = [n for n in graph.graph.nodes if n.target is torch.ops.aten.slice_scatter.default]
        # what is reshaped is in memory first
        reshaped = {user.target for node in written for user in node.users}
        assert written and torch.ops.aten.view.default not in reshaped


def streaming(x: torch.Tensor, weight: torch.Tensor) -> list[torch.Tensor]:
    """Operations that round one after the other in lower precision, with a norm in float32 between them."""
    h = torch.tanh(x * 1.1 + 0.3) * x
    wide = h.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
    return [F.silu(weight * wide.to(x.dtype)) * h - x]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_fused_operations_round_as_they_do_uncompiled() -> None:
    torch.manual_seed(0)
    x, weight = (torch.randn(n, dtype=torch.bfloat16, requires_grad=True) for n in ((16, 64), (64,)))
    compiled, _ = inductor_function(streaming)
    compiled.compile([x, weight])
    results = [compiled([x, weight]), streaming(x, weight), torch.compile(streaming)(x, weight)]
    ours, eager, default = (result for (result,) in results)
    differing = [float((value != eager).float().mean()) for value in (ours, default)]
    # the negative control: torch's own default keeps more digits between fused operations
    assert 2 * differing[0] < differing[1], differing


def convolutions(
    x: torch.Tensor, first: torch.Tensor, second: torch.Tensor, scale: torch.Tensor
) -> list[torch.Tensor]:
    """A block of a ResNet. Its convolutions run, and save their results, with the channels last."""
    h = F.batch_norm(F.conv2d(x, first, padding=1), None, None, scale, None, True)
    return [F.conv2d(h.relu(), second, padding=1).relu() + 1]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_backward_passes_take_what_is_saved_with_other_strides() -> None:
    torch.manual_seed(0)
    graphs = CompiledGraphs(8, AssertionError)
    shapes = ((4, 8, 6, 6), (16, 8, 3, 3), (16, 16, 3, 3), (16,))
    inputs = [torch.randn(shape, requires_grad=True) for shape in shapes]
    (expected,) = convolutions(*inputs)
    for _ in range(2):
        # the second finds the graphs of the first
        compiled, recorded = inductor_function(convolutions, graphs.take)
        compiled.compile(inputs)
        (result,) = compiled(inputs)
        torch.testing.assert_close(result, expected)
        assert result.stride() == expected.stride()
        ours, theirs = (
            torch.autograd.grad(r.square().sum(), inputs, retain_graph=True) for r in (result, expected)
        )
        for mine, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-5 * float(other.abs().max()))
    assert graphs.count == 1 and len(graphs.graphs) == len(recorded) == 2


def masked_sums(x: torch.Tensor, mask: torch.Tensor) -> list[torch.Tensor]:
    """Sums of what a mask has and has not, as attention over two types of tokens makes them."""
    zero = x.new_zeros(())
    return [torch.stack([torch.where(mask, a, b).sum(-1) for a, b in ((x, zero), (zero, x))], -1)]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("heads", [2, 17])
def test_reductions_over_a_dim_that_is_not_contiguous(heads: int) -> None:
    """torch's own code for it writes beyond the result, which ends the process (see `_reductions_in_one_dim`)."""
    torch.manual_seed(0)
    mask = torch.rand(4, 8, 8, heads).permute(0, 3, 1, 2) > 0.5
    x = torch.randn(4, heads, 8, 8)
    compiled, _ = inductor_function(masked_sums)
    compiled.compile([x, mask])
    (result,), (expected,) = compiled([x, mask]), masked_sums(x, mask)
    torch.testing.assert_close(result, expected)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_parts_of_one_memory_are_written_in_place() -> None:
    def write(first: torch.Tensor, second: torch.Tensor) -> list[torch.Tensor]:
        first.mul_(2)
        return [first.sin() * second.cos() + second]

    (memory, expected), results = (torch.arange(8.0), torch.arange(8.0)), []
    compiled, _ = inductor_function(write)
    compiled.compile([memory[:4], memory[4:]])
    for call, values in ((compiled, memory), (lambda parts: write(*parts), expected)):
        results.append(call([values[:4], values[4:]])[0])
    torch.testing.assert_close(*results)
    assert torch.equal(memory, expected)
