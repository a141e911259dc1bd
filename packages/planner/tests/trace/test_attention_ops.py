"""Attention that torch's own layers call: its operations, against torch's counter in real runs."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from operations import BOOK, counted, kept, planned, profiled
from planner_models import DGX_H100, host_of
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from meshwright_dtensor.strategy import PlanRequest
from meshwright_planner import EagerPlanner
from meshwright_planner.cost.products import attention_seconds
from meshwright_planner.trace.batch import Batch
from meshwright_planner.trace.op_kinds import kind_of
from meshwright_planner.trace.recorder.record import record


class Heads(nn.Module):
    """Layers of nn.MultiheadAttention, one after the other."""

    def __init__(self, weights: bool, layers: int = 1, first: int = 10, masked: bool = False) -> None:
        """`first`: number of attended tokens."""
        super().__init__()
        self.layers = nn.ModuleList(nn.MultiheadAttention(32, 4, batch_first=True) for _ in range(layers))
        self.weights, self.first, self.masked = weights, first, masked

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        padding = torch.zeros(x.shape[0], x.shape[1], dtype=torch.bool) if self.masked else None
        for layer in self.layers:
            seen = x[:, : self.first]
            x, _ = layer(x, seen, seen, key_padding_mask=padding, need_weights=self.weights)
        return x.square().mean()


def encoder(before: bool = False, dropout: float = 0.0) -> nn.Module:
    """Layers that torch brings; `before`: norms come first."""
    layer = nn.TransformerEncoderLayer(32, 4, 64, dropout, batch_first=True, norm_first=before)
    return nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)


class Whole(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.whole = nn.Transformer(32, 4, 3, 3, 64, 0.0, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.whole(x, x[:, :5])


MODELS: dict[str, Callable[[], nn.Module]] = {
    "attention": lambda: Heads(False),
    "attention with weights": lambda: Heads(True),
    "three of them": lambda: Heads(False, 3),
    "masked": lambda: Heads(False, masked=True),
    "masked, with weights": lambda: Heads(True, masked=True),
    "across": lambda: Heads(False, first=3),
    "across, with weights": lambda: Heads(True, first=3),
    "encoder": encoder,
    "encoder with dropout": lambda: encoder(dropout=0.1),
    "encoder, norms first": lambda: encoder(True),
    "encoder that does not drop": lambda: encoder(dropout=0.1).eval(),
    "encoder and decoder": Whole,
}


@pytest.mark.parametrize("name", MODELS)
def test_flops_of_attention_in_torch_layers(name: str) -> None:
    model, batch = MODELS[name](), Batch.of(torch.randn(2, 10, 32))
    assert planned(model, batch) == profiled(model, batch) == counted(model, batch)
    assert record(model, batch, BOOK.composites).activation_bytes == kept(model, batch)


def test_flops_of_causal_attention_in_torch_layers_are_half() -> None:
    """As where a model calls it itself: torch counts what is masked."""

    class Causal(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.MultiheadAttention(32, 4, batch_first=True)
            self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(10))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y, _ = self.layer(x, x, x, attn_mask=self.mask, is_causal=True, need_weights=False)
            return y.square().mean()

    model, batch = Causal(), Batch.of(torch.randn(2, 10, 32))
    half = 2.0 * 2 * 10 * 10 * 32  # of each of the two products what a mask leaves out
    forward, back = planned(model, batch)
    assert (forward + half, back + 2 * half) == counted(model, batch)


def test_encoder_fast_path_has_the_flops_of_the_slow_path() -> None:
    """Features of a frozen encoder: torch computes them in one operation, of which its counter knows nothing."""

    class Features(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder, self.head = encoder().eval(), nn.Linear(32, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                x = self.encoder(x)
            return self.head(x).square().mean()

    model, batch = Features().eval(), Batch.of(torch.randn(2, 10, 32))
    with FlopCounterMode(display=False) as counter:
        model(*batch.args).backward()
    head = 2.0 * 2 * 10 * 32 * 4
    assert counter.get_total_flops() == 2 * head  # forward, and for its weight
    tokens = 2 * 10
    layer = 2.0 * tokens * 32 * (3 * 32 + 32 + 2 * 64) + 2 * 2.0 * tokens * 10 * 32
    assert planned(model, batch) == profiled(model, batch) == (4 * layer + head, head)


def test_attention_of_torch_layers_has_the_seconds_of_a_direct_call() -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inside, self.out = nn.Linear(512, 1536), nn.Linear(512, 512)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            q, k, v = (t.unflatten(-1, (8, 64)).transpose(1, 2) for t in self.inside(x).chunk(3, -1))
            y = nn.functional.scaled_dot_product_attention(q, k, v)
            return self.out(y.transpose(1, 2).flatten(2)).square().mean()

    class Torch(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.MultiheadAttention(512, 8, batch_first=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x, x, x, need_weights=False)[0].square().mean()

    def seconds(model: nn.Module) -> float:
        batch = torch.empty(2, 16384, 512, device="meta")
        plan = EagerPlanner(host_of()).plan(
            model.to("meta"), batch, PlanRequest(cluster=DGX_H100, world_size=1)
        )[0]
        assert plan.predicted is not None and plan.predicted.split is not None
        (stage,) = plan.predicted.split.stages
        return stage.forward_seconds + stage.backward_seconds

    forward = 2 * 2.0 * 2 * 16384 * 16384 * 512
    attention = attention_seconds(DGX_H100, (2, 8, 16384, 64), forward, "float32") * (1 + 2.5 * 73 / 63)
    for model in (Own(), Torch()):
        assert attention < seconds(model) < 1.05 * attention


def test_attention_is_timed_by_its_measured_curve() -> None:
    tape = record(Heads(False), Batch.of(torch.randn(2, 10, 32)), BOOK.composites)
    (node,) = [n for n in tape.nodes if n.name == "sdpa"]
    width = tape.values[node.ins[0].i].shape[-1]
    assert width == 8 and kind_of(node, node.flops, width) == "attention-16"
