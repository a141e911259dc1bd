"""What the core costs per step where dispatch is all there is: a small Llama, one thread, collectives that do nothing.

    OMP_NUM_THREADS=1 python benchmarks/dispatch.py [--hidden 128] [--tp 4] [--repeats 15] [--json FILE]

Three models in one process, measured in turn: *plain*, a single-device model with the local shapes of one tensor-parallel
rank; *meshwright*, the full model over a fake process group with global tensors; *dtensor*, the same placements with
stock DTensor.  Forward plus backward, medians over interleaved rounds; the ratios, taken round by round, are what counts.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.experimental import implicit_replication
from torch.nn.attention import SDPBackend, sdpa_kernel

from meshwright_dtensor.api import as_mesh_parameter, distribute
from meshwright_dtensor.mesh.context import MeshContext
from meshwright_dtensor.testing.rank_pool import fake_group

LAYERS, HEADS, VOCABULARY, BATCH, SEQUENCE = 4, 8, 1024, 2, 128
COLUMN = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
ROW = ("o_proj", "down_proj")


class RMSNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        x = x.float()
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


def rotate_half(x: Tensor) -> Tensor:
    a, b = x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]
    return torch.cat((-b, a), dim=-1)


class Block(nn.Module):
    def __init__(self, width: int, heads: int, parts: int) -> None:
        super().__init__()
        self.head = width // heads
        inner, hidden = width // parts, 4 * width // parts
        for name in ("q_proj", "k_proj", "v_proj"):
            setattr(self, name, nn.Linear(width, inner, bias=False))
        self.o_proj = nn.Linear(inner, width, bias=False)
        self.gate_proj, self.up_proj = (nn.Linear(width, hidden, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(hidden, width, bias=False)
        self.norm_1, self.norm_2 = RMSNorm(width), RMSNorm(width)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        h = self.norm_1(x)
        shape = (*h.shape[:-1], -1, self.head)
        q, k, v = (p(h).view(shape).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj))
        q, k = q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin
        o = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
        x = x + self.o_proj(o.reshape(*x.shape[:-1], -1))
        h = self.norm_2(x)
        return x + self.down_proj(F.silu(self.gate_proj(h)) * self.up_proj(h))


class Llama(nn.Module):
    """``parts`` > 1 gives every block the local shapes of one of that many tensor-parallel ranks."""

    def __init__(self, width: int, parts: int = 1) -> None:
        super().__init__()
        self.head = width // HEADS
        self.embed = nn.Embedding(VOCABULARY, width)
        self.layers = nn.ModuleList(Block(width, HEADS, parts) for _ in range(LAYERS))
        self.norm = RMSNorm(width)
        self.lm_head = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(ids)
        angle = (
            torch.arange(ids.shape[1])[:, None] * (1e4 ** (-torch.arange(0, self.head, 2) / self.head))[None]
        )
        angle = torch.cat((angle, angle), -1)
        cos, sin = angle.cos()[None, None], angle.sin()[None, None]
        for layer in self.layers:
            x = layer(x, cos, sin)
        logits = self.lm_head(self.norm(x))
        return F.cross_entropy(logits.float().view(-1, logits.shape[-1]), labels.view(-1))


def shard(model: nn.Module, mesh: DeviceMesh, wrap: Callable[[DTensor, Any], nn.Parameter]) -> nn.Module:
    """Megatron's placements: column then row in attention and MLP, the rest replicated."""
    for name, module in model.named_modules():
        for key, p in list(module._parameters.items()):
            if p is None:
                continue
            state = 0 if name.endswith(COLUMN) else 1 if name.endswith(ROW) else "I"
            placement = Shard(state) if isinstance(state, int) else Replicate()
            module._parameters[key] = wrap(distribute_tensor(p.data, mesh, [placement]), (state,))
    return model


def rounds(steps: dict[str, Callable[[], None]], repeats: int, count: int) -> dict[str, list[float]]:
    """Milliseconds per step: every model in turn, ``repeats`` times, ``count`` steps each."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    for step in steps.values():
        for _ in range(4):
            step()
    for _ in range(repeats):
        for name, step in steps.items():
            start = time.perf_counter()
            for _ in range(count):
                step()
            times[name].append((time.perf_counter() - start) / count * 1e3)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--tp", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    ids, labels = (torch.randint(0, VOCABULARY, (BATCH, SEQUENCE)) for _ in range(2))
    with fake_group(options.tp):
        mesh = init_device_mesh("cpu", (options.tp,), mesh_dim_names=("tp",))
        plain = Llama(options.hidden, options.tp)
        ours = shard(Llama(options.hidden), mesh, as_mesh_parameter)
        stock = shard(Llama(options.hidden), mesh, lambda d, _: nn.Parameter(d))
        places: dict[str, tuple[nn.Module, Callable[[Tensor], Tensor], Callable[[], Any]]] = {
            "plain": (plain, lambda t: t, contextlib.nullcontext),
            "meshwright": (ours, lambda t: distribute(t, mesh, ["I"]), contextlib.nullcontext),
            "dtensor": (stock, lambda t: distribute_tensor(t, mesh, [Replicate()]), implicit_replication),
        }

        def step(name: str) -> Callable[[], None]:
            model, place, mixing = places[name]
            a, b = place(ids), place(labels)

            def kernel() -> Any:
                return sdpa_kernel(SDPBackend.MATH) if name == "dtensor" else contextlib.nullcontext()

            def run() -> None:
                for p in model.parameters():
                    p.grad = None
                with mixing(), kernel():
                    loss = model(a, b)
                    loss.to_local().backward() if isinstance(loss, DTensor) else loss.backward()

            return run

        times = rounds({name: step(name) for name in places}, options.repeats, options.steps)
        tiers = MeshContext.of(mesh).report.tiers
    medians = {name: statistics.median(t) for name, t in times.items()}
    # runs next to each other in time share the load of the machine: the ratio is taken in each round
    ratio = statistics.median(a / b for a, b in zip(times["meshwright"], times["plain"], strict=True))
    gain = statistics.median(a / b for a, b in zip(times["dtensor"], times["meshwright"], strict=True))
    print(
        f"torch {torch.__version__}, Llama {LAYERS} layers, hidden {options.hidden}, tp {options.tp} (fake), 1 thread"
    )
    for name, values in times.items():
        print(f"  {name:<11} {medians[name]:8.2f} ms/step  (min {min(values):.2f}, max {max(values):.2f})")
    print(f"  meshwright / plain     {ratio:.2f}   (goal: at most 1.10 at hidden 128, 1.03 at 512)")
    print(f"  dtensor / meshwright   {gain:.2f}   (goal: at least 4.5)")
    print(f"  programs by tier: {tiers}")
    if options.json:
        options.json.write_text(
            json.dumps({"ms": times, "over_plain": ratio, "under_dtensor": gain}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
