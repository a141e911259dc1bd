"""Whole training steps on GPUs that are not there: nothing on the wrong device, no copy to the host, no wait for the GPU.

Two real ranks, whose messages go over gloo, hold fake tensors of cuda, whose collectives go over torch's fake process group.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from plan_once import plan_once
from zoo import CASES

import meshwright as mw
from meshwright_dtensor.devices import device_of
from meshwright_dtensor.drawing.held import Held, Target
from meshwright_dtensor.drawing.whole import Kind, Whole
from meshwright_dtensor.testing.fake_gpu import FakeGpu, Wait, fake_gpus
from meshwright_dtensor.testing.rank_pool import RankPool

PLANS: dict[str, dict[str, Any]] = {
    "dp": {"dp": 2},
    "tp": {"tp": 2},
    "zero3": {"dp": 2, "zero": 3},
    "pp": {"pp": 2, "microbatches": 2},
    "ep": {"ep": 2},
    "cp": {"cp": 2},
}
SETTINGS: dict[tuple[str, str], dict[str, Any]] = {
    ("llama", "dp"): {"precision": "bf16"},
    ("llama", "tp"): {"pins": {"sequence_parallel": True}},
    ("llama", "zero3"): {"pins": {"recompute": "full"}},
    ("llama", "pp"): {},
    ("llama", "cp"): {"default_device": True},
    ("gpt2", "dp"): {"precision": "fp16"},
    ("gpt2", "tp"): {"options": {"fused": True}},
    ("gpt2", "zero3"): {"options": {"foreach": True}},
    ("gpt2", "pp"): {"precision": "fp16", "options": {"fused": True}, "checkpointed": True},
    ("mixtral", "dp"): {},
    ("mixtral", "tp"): {},
    ("mixtral", "zero3"): {},
    ("mixtral", "pp"): {},
    ("mixtral", "ep"): {"default_device": True},
    ("vit", "dp"): {"options": {"capturable": True}},
    ("vit", "tp"): {},
    ("vit", "zero3"): {"precision": "bf16", "options": {"fused": True}},
    ("vit", "pp"): {"pins": {"recompute": "selective"}, "default_device": True},
}
"""(model, plan) -> what else the step has: each thing once, so that all stay short. `checkpointed`: by the model's own code.
`default_device`: the user has chosen the GPU for all new tensors (`torch.set_default_device`).

No compiled regions: under the dispatch mode that stands for the GPU, as under any of a user, calls run as they are.
"""
LAYERS_OF_MIXTRAL = 2
ROWS_OF_EXPERTS = ("to host", "_to_copy", "moe/dispatch.py", LAYERS_OF_MIXTRAL)
"""An all-to-all has to know on the host how many rows it sends and receives: one copy a layer."""
FOUND_INF = ("read", "_local_scalar_dense", "step", 1)
"""`GradScaler.step` of torch asks whether the optimizer has to step, once; a fused optimizer asks on the device."""


@pytest.fixture(scope="module")
def gpu_ranks() -> Iterator[RankPool]:
    with RankPool(backend="cpu:gloo,cuda:fake") as pool:
        yield pool


class Trained:
    """A model and its optimizer on fake GPUs, and one step of them."""

    def __init__(
        self,
        name: str,
        pins: Mapping[str, Any],
        precision: str = "fp32",
        options: Mapping[str, Any] | None = None,
        checkpointed: bool = False,
        default_device: bool = False,
    ) -> None:
        self.device = mw.init("cuda")
        case = CASES[name]
        model: Any = case.model()
        if checkpointed:
            model.config.use_cache = False
            model.gradient_checkpointing_enable({"use_reentrant": False})
        # torch multiplies groups of matrices in half precision on GPUs
        dtype = torch.bfloat16 if name == "mixtral" else torch.float32
        batch = {
            key: value.to(dtype) if value.is_floating_point() else value
            for key, value in case.batch().items()
        }
        plan = plan_once(model.to(dtype), batch, cluster="laptop-cpu", **pins)
        model.to(self.device)
        self.batch = {key: value.to(self.device) for key, value in batch.items()}
        self.default = self.device if default_device else contextlib.nullcontext()
        with self.default:
            self.model = mw.parallelize(model, plan, batch=self.batch)
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, **(options or {}))
        self.scaler = mw.GradScaler(device="cuda", enabled=precision == "fp16")
        self.half = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision)

    def step(self) -> None:
        with self.default, torch.autocast("cuda", self.half, enabled=self.half is not None):
            loss = self.model(**self.batch).loss
        self.scaler.scale(loss).backward()
        self.scaler.unscale_(self.optimizer)
        mw.clip_grad_norm_(self.model.parameters(), 1.0)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()

    def elsewhere(self) -> list[str]:
        """What is not on the GPU; the counts of steps of the optimizer may be."""
        tensors = {**dict(self.model.named_parameters()), **dict(self.model.named_buffers())}
        for number, state in enumerate(self.optimizer.state.values()):
            tensors |= {f"{key} of state {number}": t for key, t in state.items() if t.dim()}
        return [f"{key} on {t.device}" for key, t in tensors.items() if t.device != self.device]


def seen(rank: int, size: int, name: str, plan: str) -> tuple[list[str], list[str]]:
    """(what waits for the GPU in the second step, what is not on the GPU after it)."""
    setting = SETTINGS[name, plan]
    with fake_gpus() as gpus:
        trained = Trained(name, **{**setting, "pins": {**PLANS[plan], **setting.get("pins", {})}})
        trained.step()
        with gpus.watched() as waits:
            trained.step()
        return [str(wait) for wait in waits], trained.elsewhere()


def unexpected(waits: list[str], allowed: list[tuple[str, str, str, int]]) -> list[str]:
    """The waits that are not allowed, or fewer or more of those that are: (what, operation, place, how many)."""
    for what, operation, place, count in allowed:
        matching = [wait for wait in waits if wait.startswith(f"{what}: {operation} at ") and place in wait]
        if len(matching) != count:
            return [f"{len(matching)} of {what} at {place}, not {count}", *waits]
        waits = [wait for wait in waits if wait not in matching]
    return waits


@pytest.mark.parametrize(("name", "plan"), SETTINGS)
def test_a_step_waits_for_nothing(gpu_ranks: RankPool, name: str, plan: str) -> None:
    allowed = [ROWS_OF_EXPERTS] if plan == "ep" else []
    setting = SETTINGS[name, plan]
    if setting.get("precision") == "fp16" and "fused" not in setting.get("options", {}):
        allowed.append(FOUND_INF)
    for waits, elsewhere in gpu_ranks.run(2, seen, name, plan):
        assert not elsewhere
        assert not unexpected(waits, allowed)


def saved(rank: int, size: int, path: str) -> tuple[list[Wait], int, int]:
    """(what waits in a save, how many copies to pinned memory wait for nothing, how many parts of tensors this rank writes)."""
    with fake_gpus() as gpus:
        # the counts of steps are on the GPU too
        trained = Trained("gpt2", PLANS["zero3"], options={"fused": True}, default_device=True)
        trained.step()
        with trained.default, gpus.watched() as waits:
            mw.save(path, model=trained.model, optimizer=trained.optimizer).wait()
        held = [
            *trained.model.parameters(),
            *(t for s in trained.optimizer.state.values() for t in s.values()),
        ]
        return waits, len(gpus.asynchronous), len(held)


def test_a_snapshot_waits_once(gpu_ranks: RankPool, tmp_path: Path) -> None:
    copies = wholes = 0
    for waits, asynchronous, held in gpu_ranks.run(2, saved, str(tmp_path / "checkpoint")):
        (wait,) = waits
        # for all copies together, before the next step changes what is copied
        assert wait.what == "synchronise"
        assert "saving/staging.py" in str(wait)
        copies += asynchronous
        wholes = held
    # both ranks write the parts of divided tensors, one of them the rest
    assert wholes < copies <= 2 * wholes


DRAWS: dict[str, Any] = {
    "uniform_": (-1.0, 3.0),
    "bernoulli_": (0.3,),
    "random_": (-5, 100),
    "normal_": (1.0, 2.0),
    "dropout_noise_": (0.3,),
}


@pytest.mark.parametrize("name", DRAWS)
def test_parts_are_drawn_without_a_wait(name: str) -> None:
    """Columns of a large tensor, whose numbers are counted up to where they can be, and its rows, by waves of torch's kernel."""
    kind, shape, gpu = Kind(name, DRAWS[name]), (4096, 2051), torch.device("cuda")
    draw = getattr(torch.Tensor, name, torch.Tensor.normal_)
    with fake_gpus() as gpus, gpus.watched() as waits:
        used = set()
        for place in (((0, 4096), (100, 4)), ((1024, 512), (0, 2051))):
            for dtype in (torch.float32, torch.bfloat16):
                stream = device_of(gpu).generator(gpu)
                held = Held.of(shape, (0, 1), place)
                whole = Whole(draw, dtype, gpu, True, False, stream, kind=kind)
                way = device_of(gpu).way(whole, held)
                assert way is not None
                way(whole, held, Target((torch.empty([n for _, n in place], dtype=dtype, device=gpu),)))
                used.add(way.__qualname__.partition(".")[0])
    assert used == ({"by_waves"} if name == "normal_" else {"by_counting", "by_waves"})
    assert not waits


Noted = list[tuple[str, str]]


def noticed(rank: int, size: int) -> tuple[Noted, Noted]:
    """All that a loop can do to wait for a GPU."""
    with fake_gpus() as gpus:
        mw.init("cuda")
        x = torch.ones(3, device="cuda", requires_grad=True)
        y = (x * 2).sum()
        y.register_hook(lambda gradient: gradient * gradient.item())
        with gpus.watched() as waits:
            _wait(gpus, x.detach())
            y.backward()
            _do_not_wait(x.detach())
        with pytest.raises(RuntimeError, match=r"on the same device|two different devices"):
            torch.ones(3) + x
        return _short(waits), _short(gpus.asynchronous)


def _short(waits: list[Wait]) -> Noted:
    return [(wait.what, wait.operation) for wait in waits]


def _wait(gpus: FakeGpu, x: torch.Tensor) -> None:
    """Everything that waits, in the order of `WAITS`."""
    x[0].item()
    bool(x[0] > 0)
    torch.equal(x, x + 1)
    x.cpu()
    torch.empty(3).copy_(x)
    x.to("cpu", non_blocking=True)
    torch.empty(3, pin_memory=True).copy_(x)
    x.tolist()
    torch.tensor([1.0, 2.0], device="cuda")
    torch.ones(3).to("cuda", non_blocking=True)
    x[[0, 1]]
    x[torch.tensor([0, 1])] = 2.0
    torch.linalg.inv(x * torch.ones(3, 3, device="cuda"))
    torch.cuda.synchronize()
    for depends_on_values in (x.nonzero, lambda: x[x > 0]):
        with pytest.raises(RuntimeError):
            depends_on_values()


def _do_not_wait(x: torch.Tensor) -> None:
    """What looks like it."""
    torch.empty(3, pin_memory=True).copy_(x, non_blocking=True)
    torch.ones(3).pin_memory().to("cuda", non_blocking=True)
    x * torch.tensor(2.0)
    x[torch.ones(2, dtype=torch.int64, device="cuda")]
    x[1:] = 0.5
    torch.full((3,), 2.0, device="cuda")
    x.to(torch.float16)


WAITS = [
    *[("read", "_local_scalar_dense")] * 2,
    ("read", "equal"),
    ("to host", "_to_copy"),
    ("to host", "copy_"),
    ("to host", "_to_copy"),
    ("to host", "copy_"),
    ("to host", "_to_copy"),
    *[("to device", "_to_copy")] * 3,
    ("to device", "index_put_"),
    ("inside", "_linalg_check_errors"),
    ("synchronise", "synchronize"),
    ("shape", "nonzero"),
    ("shape", "index"),
    # of the hook, in the backward pass
    ("read", "_local_scalar_dense"),
]


def test_waits_are_noticed(gpu_ranks: RankPool) -> None:
    (result,) = gpu_ranks.run(1, noticed)
    assert result == (WAITS, [("to host", "copy_"), ("to device", "_to_copy")])
