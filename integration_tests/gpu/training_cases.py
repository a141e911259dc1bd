"""Steps of a model of the zoo in parallel and on one device, both on the device of these tests, and what differs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from operators.run_ops import generators
from plan_once import plan_once
from torch import nn
from zoo import CASES

import meshwright as mw
from meshwright_dtensor.model.stage_info import stages_of
from meshwright_parallel.verification.compare import compare, one_rounding_away

STEPS = 3
PLANS: Mapping[str, tuple[int, dict[str, Any]]] = {
    "dp2": (2, {"dp": 2}),
    "tp2": (2, {"tp": 2}),
    "zero3": (2, {"dp": 2, "zero": 3}),
    "pp2": (2, {"pp": 2}),
    "cp2": (2, {"cp": 2}),
    "ep2": (2, {"ep": 2}),
    "tp2-dp2": (4, {"tp": 2, "dp": 2}),
    "pp2-zero2": (4, {"pp": 2, "dp": 2, "zero": 2}),
}
HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}


def precise(device: str) -> None:
    """Products and convolutions in all bits of float32."""
    if device == "cuda":
        torch.backends.cudnn.allow_tf32 = False
        torch.backends.cuda.matmul.allow_tf32 = False


def differences(
    rank: int,
    size: int,
    name: str,
    pins: dict[str, Any],
    device: str,
    precision: str = "fp32",
    options: Mapping[str, Any] | None = None,
) -> list[str]:
    """A line for every loss, gradient, parameter and buffer that is not one device's.

    `precision`: fp32 or fp64, or bf16 or fp16 by autocast, fp16 with a gradient scaler. `options`: of AdamW; without them the
    optimizer is SGD.
    """
    precise(device)
    mw.init(device)
    case = CASES[name]
    batch = {key: value.to(device) for key, value in case.batch().items()}
    if precision == "fp64":
        batch = {key: t.double() if t.is_floating_point() else t for key, t in batch.items()}
    models: dict[str, nn.Module] = {}
    for run in ("one", "many", "near"):
        torch.manual_seed(3)
        models[run] = case.model().to(device)
        if precision == "fp64":
            models[run].double()
    one_rounding_away(models["near"].parameters())
    many = models["many"]
    mw.parallelize(many, plan_once(many, batch, cluster="laptop-cpu", **pins), batch=batch)
    divided = stages_of(many) is not None
    optimizers = {run: _optimizer(model, options) for run, model in models.items()}
    scalers = {run: mw.GradScaler(device=device, enabled=precision == "fp16") for run in models}
    wrong = []
    for step in range(STEPS):
        losses, ends = {}, {}
        for run, model in models.items():
            torch.manual_seed(40 + step)
            with _autocast(device, precision):
                loss = model(**batch).loss
            scalers[run].scale(loss).backward()
            losses[run], ends[run] = {"loss": loss.detach()}, generators()
        if not torch.equal(ends["one"], ends["many"]):
            wrong.append(f"step {step}: the generators end in other states")
        tolerance = {"bf16": 6e-2, "fp16": 1e-2}.get(precision)
        wrong += _differing(step, "loss", losses, tolerance, False)
        # in half precision the models part after the first step
        if precision not in HALF or step == 0:
            gradients = {r: {name: p.grad for name, p in m.named_parameters()} for r, m in models.items()}
            wrong += _differing(step, "gradient", gradients, tolerance, divided)
        for run, optimizer in optimizers.items():
            scalers[run].step(optimizer)
            scalers[run].update()
            optimizer.zero_grad()
        if precision not in HALF:
            for kind in ("parameter", "buffer"):
                values = {r: dict(getattr(m, f"named_{kind}s")()) for r, m in models.items()}
                wrong += _differing(step, kind, values, None, divided)
    wrong += [f"{key} is on {p.device}" for key, p in many.named_parameters() if p.device.type != device]
    return wrong


def _optimizer(model: nn.Module, options: Mapping[str, Any] | None) -> torch.optim.Optimizer:
    if options is None:
        return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-3, **options)


def _autocast(device: str, precision: str) -> AbstractContextManager[Any]:
    return torch.autocast(device, HALF[precision]) if precision in HALF else nullcontext()


def _differing(
    step: int, kind: Any, values: Mapping[str, Any], tolerance: float | None, divided: bool
) -> Iterator[str]:
    compared = compare(
        step,
        kind,
        values["one"],
        values["many"],
        tolerance,
        perturbed=values["near"],
        actual_only=divided,
    )
    for c in compared:
        if not c.ok:
            yield f"step {c.step} {c.kind} {c.name}: {c.relative:.1e} of {c.scale:.1e} {c.note}"
