"""Operations where they are easily missed: writes to parts of tensors, recurrent layers, results that nobody uses."""

from __future__ import annotations

import pytest
import torch
from operations import BOOK, counted, kept, planned, profiled
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from meshwright_dtensor._torch.metas import FLOPS
from meshwright_planner import profile_model
from meshwright_planner.trace.batch import Batch
from meshwright_planner.trace.recorder.record import record


class Parts(nn.Module):
    """Both halves of a tensor are written by themselves, in each of its layers."""

    def __init__(self, layers: int = 1) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.ModuleList(nn.Linear(16, 16) for _ in "ab") for _ in range(layers))
        self.last = nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for first, second in self.layers:  # type: ignore[misc]
            half = x.shape[1] // 2
            out = torch.zeros_like(x)
            out[:, :half] = first(x[:, :half])
            out[:, half:] += second(x[:, half:])
            x = out
        return self.last(x).square().mean()


class PartsBlock(nn.Module):
    """The same as a block that repeats."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x)
        out[:, ::2] = self.first(x[:, ::2])
        out[:, 1::2] = self.second(x[:, 1::2])
        return x + out


class Looked(nn.Module):
    """A write to a slice has no gradient when the whole tensor is only read without gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.shown = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layer(x)
        with torch.no_grad():
            shown = torch.zeros_like(x)
            shown[:, 1:] = self.shown(y)[:, 1:]
        return (y * shown).square().mean()


@pytest.mark.parametrize(
    "make",
    [
        Parts,
        lambda: Parts(3),
        lambda: nn.Sequential(*(PartsBlock() for _ in range(5)), nn.Linear(16, 2)),
        Looked,
    ],
    ids=["once", "three times", "in blocks", "without gradients"],
)
def test_writes_to_a_slice_are_not_dead_code(make: type[nn.Module]) -> None:
    model, batch = make(), Batch.of(torch.randn(2, 10, 16))
    assert planned(model, batch) == profiled(model, batch) == counted(model, batch)
    assert record(model, batch, BOOK.composites).activation_bytes == kept(model, batch)


class Recurrent(nn.Module):
    def __init__(self, both: bool) -> None:
        super().__init__()
        self.layers = nn.LSTM(16, 24, 2, batch_first=True, bidirectional=both)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)[0].square().mean()


@pytest.mark.parametrize("both", [False, True])
def test_flops_of_an_lstm_are_its_products(both: bool) -> None:
    """Torch's counter knows nothing of the operation that each layer is; its backward makes every gradient."""
    model, batch = Recurrent(both), Batch.of(torch.randn(2, 10, 16))
    assert counted(model, batch) == (0, 0)
    weights = sum(p.numel() for p in model.parameters() if p.dim() == 2)
    forward = 2.0 * 2 * 10 * weights
    assert planned(model, batch) == profiled(model, batch) == (forward, 2 * forward)
    on_gpus = FLOPS[torch.ops.aten._cudnn_rnn.default]
    assert on_gpus(batch.args[0], list(model.parameters())) == forward


class Spare(nn.Module):
    """Two results, one of which is trained by."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.spare = nn.Linear(16, 8), nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": self.used(x).square().mean(), "more": self.spare(x)}


def test_profile_reports_unused_operations() -> None:
    model, x = Spare(), torch.randn(2, 10, 16)
    with FlopCounterMode(display=False) as counter:
        loss = model(x)["loss"]
        forward = counter.get_total_flops()
        loss.backward()
    profile = profile_model(model, x)
    assert profile.total.forward_flops == forward == 2 * 20 * 16 * (8 + 4)
    assert profile.total.backward_flops == counter.get_total_flops() - forward
    assert (profile["spare"].forward_flops, profile["spare"].backward_flops) == (2 * 20 * 16 * 4, 0)
    tape = record(model, Batch.of(x), BOOK.composites)
    assert {node.module for node in tape.nodes} == {"used", ""}  # a plan is of what is trained
