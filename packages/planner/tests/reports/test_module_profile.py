"""The table of a model's modules, against what torch counts and keeps in real runs."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from planner_models import Attention, Mlp, Transformer, tokens
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from meshwright_dtensor.errors import UsageError
from meshwright_planner import ModelProfile, profile_model


class Convolutions(nn.Module):
    """Stages of convolutions that end in a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.stages = nn.ModuleList(
            nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()) for _ in range(3)
        )
        self.head = nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for stage in self.stages:
            x = stage(x)
        return self.head(x.mean((2, 3)))


class Plain(nn.Module):
    """Attention without a mask, which torch counts as we do, and blocks whose last product saves no result."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 32)
        self.blocks = nn.ModuleList(PlainBlock() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


class PlainBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.mlp = nn.LayerNorm(32), nn.Linear(32, 96), Mlp(32, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (t.unflatten(-1, (4, 8)).transpose(1, 2) for t in self.qkv(self.norm(x)).chunk(3, -1))
        x = x + F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        return x + self.mlp(x)


class Filled(nn.Module):
    """Writes its results, step by step, to a tensor that it creates with values."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        profile, h = torch.zeros(4, *x.shape, device=x.device, dtype=x.dtype), x
        for step in range(4):
            h = self.cell(h).tanh()
            profile[step] = h
        return profile.square()


class Parts(nn.Module):
    """Writes its results to parts of earlier results."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.mlp, self.down = nn.Linear(16, 32), Mlp(8, 32), nn.Linear(32, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.up(x).clone()
        h[..., :8] = self.mlp(h[..., 8:16].clone())
        h = torch.cat([h[..., :16], torch.zeros_like(h[..., 16:])], -1)
        h[..., 16:24] = self.mlp(x[..., :8])
        gate = self.mlp(x[..., 8:])
        h[..., 24:] *= gate
        return self.down(h).square()


MODELS: dict[str, Callable[[], tuple[nn.Module, Any]]] = {
    "mlp": lambda: (nn.Sequential(nn.Linear(8, 16), nn.Tanh(), Mlp(16, 32)), (torch.randn(4, 3, 8),)),
    "convolutions": lambda: (Convolutions(), (torch.randn(2, 3, 8, 8),)),
    "attention": lambda: (Plain(), (torch.randn(2, 6, 16),)),
    "filled": lambda: (Filled(), (torch.randn(8, 16),)),
    "parts": lambda: (Parts(), (torch.randn(8, 16),)),
    "transformer": lambda: (Transformer(layers=3), tokens()),
    "tied": lambda: (Transformer(layers=2, tied=True), tokens()),
}


def called(model: nn.Module, batch: Any) -> torch.Tensor:
    out = model(**batch) if isinstance(batch, dict) else model(*batch)
    return out.sum()


@contextmanager
def checkpointed(blocks: Any) -> Iterator[None]:
    """Each of these modules runs again in the backward pass, by torch's own checkpoint."""
    for block in blocks:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    try:
        yield
    finally:
        for block in blocks:
            del block.forward


def counted(model: nn.Module, batch: Any) -> tuple[dict[str, int], int]:
    """Operations of the forward pass by module, and those of the backward pass, as torch counts them."""
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        out = called(model, batch)
        by_module = {name: sum(ops.values()) for name, ops in counter.get_flop_counts().items()}
        forward = counter.get_total_flops()
        out.backward()
    return by_module, counter.get_total_flops() - forward


def kept(model: nn.Module, batch: Any) -> Counter[str]:
    """Module -> bytes of the storages that autograd is first given in it or in one in it, parameters aside."""
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
    held: list[torch.Tensor] = []  # an address must not be used again
    seen: set[int] = set()
    inside: list[str] = [""]
    profile: Counter[str] = Counter()

    def pack(t: torch.Tensor) -> torch.Tensor:
        held.append(t)
        address = t.untyped_storage().data_ptr()
        if address not in parameters and address not in seen:
            seen.add(address)
            for name in {"", *_above(inside[-1])}:
                profile[name] += t.untyped_storage().nbytes()
        return t

    with ExitStack() as stack:
        for name, module in model.named_modules():
            enter = module.register_forward_pre_hook(lambda m, args, name=name: inside.append(name))
            leave = module.register_forward_hook(lambda m, args, out: _left(inside))
            stack.callback(enter.remove)
            stack.callback(leave.remove)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            called(model, batch)
    return profile


def _left(inside: list[str]) -> None:
    inside.pop()


def _above(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[:depth]) for depth in range(1, len(parts) + 1)]


@pytest.mark.parametrize("name", MODELS)
def test_operations_and_parameters_match_torch(name: str) -> None:
    model, batch = MODELS[name]()
    profile = profile_model(model, batch)
    by_module, back = counted(model, batch)
    causal = isinstance(model, Transformer)  # torch counts what a causal mask leaves out
    if not causal:
        assert profile.total.backward_flops == back and profile.total.again_flops == 0
    for module_name, module in model.named_modules():
        row = profile[module_name]
        assert (row.name, row.kind, row.copies) == (module_name, type(module).__name__, 1)
        parameters = list(module.parameters())
        assert row.parameters == sum(p.numel() for p in parameters)
        assert row.parameter_bytes == sum(p.numel() * p.element_size() for p in parameters)
        attends = causal and any(isinstance(m, Attention) for m in module.modules())
        if not attends and not isinstance(module, nn.ModuleList):  # nobody calls a list
            full = f"{type(model).__name__}.{module_name}" if module_name else "Global"
            assert row.forward_flops == by_module.get(full, 0), module_name


@pytest.mark.parametrize("name", MODELS)
def test_saved_bytes_match_autograd(name: str) -> None:
    model, batch = MODELS[name]()
    profile, real = profile_model(model, batch), kept(model, batch)
    assert profile.total.saved_bytes == pytest.approx(real[""], rel=0.01)
    for row in profile.modules:
        assert row.saved_bytes == pytest.approx(real[row.name], rel=0.01), row.name


@pytest.mark.parametrize(("name", "blocks"), [("attention", "blocks"), ("convolutions", "stages")])
def test_recompute_matches_torch_checkpoints(name: str, blocks: str) -> None:
    model, batch = MODELS[name]()
    profile = profile_model(model, batch, recompute=f"{blocks}.*" if name == "convolutions" else "full")
    with checkpointed(getattr(model, blocks)):
        by_module, back = counted(model, batch)
        real = kept(model, batch)
    assert profile.total.forward_flops == by_module["Global"]
    assert profile.total.backward_flops + profile.total.again_flops == back
    assert profile.total.again_flops > 0
    assert profile.total.saved_bytes == pytest.approx(real[""], rel=0.01)
    assert profile.total.saved_bytes < 0.7 * profile_model(model, batch).total.saved_bytes


def test_kept_results_are_not_recomputed() -> None:
    model, batch = Transformer(layers=3), tokens()
    full, some, selective = (
        profile_model(model, batch, recompute=p) for p in ("full", "alternate", "selective")
    )
    assert selective.total.again_flops == 0 < some.total.again_flops < full.total.again_flops
    results = (4 * 64 + 64 + 256 + 64) * 2 * 32 * 4  # of q, k, v and o, of attention, of the two of the MLP
    assert selective["layers.0"].saved_bytes - full["layers.0"].saved_bytes == results
    # attention and every other product: q, v and up of q, k, v, o, up, down
    assert some["layers.0"].again_flops == 2 * 2 * 32 * 64 * 64 * 2


def test_folded_blocks_keep_the_sums() -> None:
    profile = profile_model(Transformer(layers=5), tokens())
    rows = {row.name: row for row in profile.blocks}
    assert rows["layers.0"].copies == rows["layers.0.mlp.up"].copies == 5
    assert "layers.1" not in rows and rows[""] == profile.total
    for field in ("forward_flops", "backward_flops", "parameters", "parameter_bytes", "saved_bytes"):
        copies = [getattr(profile[f"layers.{n}.mlp"], field) for n in range(5)]
        assert getattr(rows["layers.0.mlp"], field) == sum(copies) > 0


def test_profile_as_data_and_as_table() -> None:
    with torch.device("meta"):
        model = Transformer(layers=3)
    profile = profile_model(model, tokens(), precision="bf16", recompute="full")
    assert isinstance(profile, ModelProfile)
    data = json.loads(json.dumps(profile.to_dict()))
    assert (data["precision"], data["recompute"]) == ("bf16", "full")
    assert data["total"] == data["modules"][0] and data["total"]["parameters"] == profile.total.parameters
    lines = str(profile).splitlines()
    assert len(lines) == 1 + len(profile.blocks)
    assert lines[0].split() == "module class copies parameters bytes forward backward again kept".split()
    assert next(line for line in lines if "Block" in line).split()[:4] == ["0", "Block", "3", "149,184"]
    whole = profile_model(model, tokens(), recompute="full")
    assert (
        profile.total.saved_bytes < 0.75 * whole.total.saved_bytes
    )  # the loss is computed in float32 either way
    assert profile.total.forward_flops == whole.total.forward_flops


def test_wrong_arguments_name_a_fix() -> None:
    model = Mlp()
    x = (torch.randn(2, 64),)
    with pytest.raises(UsageError, match=r"model is a list; give a torch\.nn\.Module"):
        profile_model([model], x)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"precision='bf61' is unknown.*bf16"):
        profile_model(model, x, precision="bf61")
    with pytest.raises(UsageError, match=r"recompute='full'.*no repeated blocks"):
        profile_model(model, x, recompute="full")
    with pytest.raises(UsageError, match=r"recompute=3 is neither a policy"):
        profile_model(model, x, recompute=3)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"module='upp' is unknown.*up"):
        profile_model(model, x)["upp"]
