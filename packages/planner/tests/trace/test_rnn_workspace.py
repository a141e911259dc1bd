"""What recurrent layers and writes in place keep for the backward pass, held against what autograd really keeps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from meshwright_dtensor.rules.book import RuleBook
from meshwright_planner.trace.batch import Batch
from meshwright_planner.trace.recorder.record import record
from meshwright_planner.trace.recorder.rnn_workspace import workspace_bytes
from meshwright_planner.trace.scale_batch import TapeFamily
from meshwright_planner.trace.tape import Tape

BOOK = RuleBook.first_party()


class Layer(nn.Module):
    """A recurrent layer and a loss."""

    def __init__(self, kind: type[nn.RNNBase], **options: Any) -> None:
        super().__init__()
        self.layer = kind(128, 128, batch_first=True, **options)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [rows, time, 128]."""
        return self.layer(x)[0].pow(2).mean()


class InPlace(nn.Module):
    """A product that is overwritten: the gradient of the other operand needs its old value."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [rows, 16]."""
        return self.a(x).mul_(self.b(x)).sum()


def kept(model: nn.Module, x: torch.Tensor) -> int:
    """Bytes of the storages that autograd keeps in a real run, parameters aside."""
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
    saved: dict[int, torch.Tensor] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved.setdefault(tensor.untyped_storage().data_ptr(), tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(x)
    return sum(t.untyped_storage().nbytes() for key, t in saved.items() if key not in parameters)


def recorded(model: nn.Module, rows: int) -> Tape:
    """The tape of so many rows."""
    return record(model, Batch.of(torch.randn(rows, 32, 128)), BOOK.composites)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "lstm": lambda: Layer(nn.LSTM),
    "lstm of two layers": lambda: Layer(nn.LSTM, num_layers=2),
    "lstm both ways": lambda: Layer(nn.LSTM, bidirectional=True),
    "lstm without biases": lambda: Layer(nn.LSTM, bias=False),
    "gru": lambda: Layer(nn.GRU),
    "gru both ways": lambda: Layer(nn.GRU, bidirectional=True),
    "rnn": lambda: Layer(nn.RNN),
}


@pytest.mark.parametrize("name", MODELS)
def test_saved_bytes_of_recurrent_layers(name: str) -> None:
    model = MODELS[name]()
    real = kept(model, torch.randn(16, 32, 128))
    assert recorded(model, 16).activation_bytes == pytest.approx(real, rel=2e-3)


def test_overwritten_tensor_is_saved() -> None:
    model, x = InPlace(), torch.randn(8, 16)
    assert record(model, Batch.of(x), BOOK.composites).activation_bytes == kept(model, x)


def test_workspace_is_proportional_to_rows() -> None:
    model = Layer(nn.LSTM)
    family = TapeFamily(recorded(model, 2), recorded(model, 4))
    scaled = family.at(16)
    assert family.proportional and scaled is not None
    assert scaled.activation_bytes == recorded(model, 16).activation_bytes


def test_workspace_of_a_wide_layer_follows_from_a_narrow_one() -> None:
    """Features of 2,048 are not run."""
    rest = (False, [], 2, 2048, 1, True, False, False, True)
    x, weight = torch.empty(32, 16, 512, device="meta"), torch.empty(4 * 2048, 512, device="meta")
    results = torch.ops.aten.mkldnn_rnn_layer(
        torch.zeros(32, 16, 512),
        *(torch.zeros(shape).requires_grad_() for shape in ((8192, 512), (8192, 2048), (8192,), (8192,))),
        *(torch.zeros(16, 2048), torch.zeros(16, 2048)),
        *rest,
    )
    real = results[3].untyped_storage().nbytes()
    assert workspace_bytes(x, (weight,), 2048, rest) == pytest.approx(real, rel=5e-3)
