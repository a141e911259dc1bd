"""Copies of torch's Python functions: the same results, and the functions inside are seen."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from meshwright_dtensor._torch.line_by_line import LINE_BY_LINE
from meshwright_dtensor.rules.book import RuleBook
from meshwright_dtensor.trace.graph import Recorder


class Seen(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.__name__)
        if func in LINE_BY_LINE:
            with self:
                return LINE_BY_LINE[func](*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def test_functions_inside_of_attention_are_seen() -> None:
    layer, x = nn.MultiheadAttention(8, 2, dropout=0.5), torch.randn(5, 3, 8)
    torch.manual_seed(0)
    expected = layer(x, x, x, need_weights=False)[0]
    torch.manual_seed(0)
    with Seen() as seen:
        result = layer(x, x, x, need_weights=False)[0]
    assert torch.equal(result, expected)
    assert seen.names.count("linear") == 2 and "scaled_dot_product_attention" in seen.names


def test_replaced_function_of_torch_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, x = nn.MultiheadAttention(8, 2), torch.randn(5, 3, 8)
    monkeypatch.setattr(F, "scaled_dot_product_attention", lambda q, k, v, *rest: torch.zeros_like(q))
    with Seen():
        assert torch.equal(layer(x, x, x, need_weights=False)[0], layer.out_proj.bias.expand(5, 3, 8))


def test_recorded_attention_has_nodes_of_the_functions_inside() -> None:
    layer, x = nn.MultiheadAttention(8, 2), torch.randn(5, 3, 8)
    recorder = Recorder(RuleBook.default().composites, [x])
    with recorder:
        layer(x, x, x, need_weights=False)
    called = [(node.name, node.call) for node in recorder.nodes if node.name in ("linear", "sdpa")]
    assert [name for name, _ in called] == ["linear", "sdpa", "linear"]
    assert [call.occurrence for name, call in called if call and name == "linear"] == [0, 1]
