"""What people write around the loop of training: norms, penalties, averages of weights, numbers for a log, files."""

from __future__ import annotations

import copy
import io
import json
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import save as safetensors_bytes
from torch import nn
from torch.autograd import forward_ad

import meshwright as mw

from .cases import Case
from .subjects import Subject

AREA = "training loops"
Use = Callable[[Subject], Any]


def _parameters(made: Subject) -> list[Any]:
    return list(made.model.parameters())


def _trained_with(extra: Callable[[Subject], Any]) -> Use:
    """A step whose loss has this extra term: the loss and all gradients."""

    def run(made: Subject) -> Any:
        made.model.zero_grad()
        loss = made.loss() + 0.01 * extra(made)
        loss.backward()
        return loss.detach(), [p.grad for p in _parameters(made)]

    return run


def _initialised(start: Callable[[Any], Any]) -> Use:
    def run(made: Subject) -> None:
        for p in _parameters(made):
            if p.dim() > 1:
                start(p)

    return run


def _average(made: Subject) -> Any:
    averages = [p.detach().clone() for p in _parameters(made)]
    made.step()
    for average, p in zip(averages, _parameters(made), strict=True):
        average.lerp_(p.detach(), 0.1)
    return averages


def _average_swapped_in(made: Subject) -> Any:
    averages = [p.detach() * 0.5 for p in _parameters(made)]
    kept = [p.data for p in _parameters(made)]
    for p, average in zip(_parameters(made), averages, strict=True):
        p.data = average
    with torch.no_grad():
        evaluated = made.loss()
    for p, before in zip(_parameters(made), kept, strict=True):
        p.data = before
    return evaluated


def _optimizer_of_trainable(made: Subject) -> Any:
    for layer in (made.model.emb, made.model.a):
        layer.requires_grad_(False)
    optimizer = torch.optim.SGD([p for p in _parameters(made) if p.requires_grad], lr=0.1)
    made.loss().backward()
    optimizer.step()
    return [p.grad for p in _parameters(made)]


def _frozen_between_steps(made: Subject) -> Any:
    steps = [made.step()]
    made.model.a.requires_grad_(False)
    steps.append(made.step())
    made.model.a.requires_grad_(True)
    return [*steps, made.step()]


def _odd_batch(made: Subject) -> Any:
    ids = made.ids.repeat(2, 1)[:5]
    with torch.no_grad():
        evaluated = made.model(ids)
    loss = made.model(ids).square().mean()
    loss.backward()
    return evaluated, loss.detach()


def _penalty_of_gradients(made: Subject) -> Any:
    gradients = torch.autograd.grad(made.loss(), _parameters(made), create_graph=True)
    total: Any = sum(g.square().sum() for g in gradients)
    (made.loss() + total).backward()
    return total


def _backward_twice(made: Subject) -> Any:
    loss = made.loss()
    loss.backward(retain_graph=True)
    loss.backward()
    return loss


def _adapted(made: Subject) -> Any:
    """MAML: the loss after a step whose derivative counts."""
    names = [name for name, _ in made.model.named_parameters()]
    gradients = torch.autograd.grad(made.loss(), _parameters(made), create_graph=True)
    fast = {n: p - 0.1 * g for n, p, g in zip(names, _parameters(made), gradients, strict=True)}
    loss = torch.func.functional_call(made.model, fast, (made.ids,)).square().mean()
    loss.backward()
    return loss.detach()


def _written_output(made: Subject) -> Any:
    y = made.activation()
    y[:, 0] += 1
    y[y > 0.5] *= 2
    loss = y.square().mean()
    loss.backward()
    return loss.detach()


def _filled(made: Subject, key: Any, value: float = 7.0) -> Any:
    y = made.activation().detach().clone()
    y[key] = value
    return y


def _redrawn(made: Subject) -> Any:
    y = made.activation().detach().clone()
    y[:, 1].normal_()
    return y


def _merged(made: Subject) -> None:
    torch.manual_seed(3)
    made.model.b.weight.data += torch.randn(8, 2) @ torch.randn(2, 12)


def _projected(made: Subject) -> None:
    """PCGrad."""
    flat = torch.cat([p.grad.flatten() for p in _parameters(made)])
    flat, at = flat - 0.5 * flat.mean(), 0
    for p in _parameters(made):
        p.grad = flat[at : at + p.numel()].view_as(p)
        at += p.numel()


def _of_hook(made: Subject) -> Any:
    # it runs on the ranks of the stage
    handle = made.model.b.weight.register_hook(lambda g: g / float(g.norm()))
    made.loss().backward()
    handle.remove()
    return made.model.b.weight.grad


def _after_failed_trace(made: Subject) -> Any:
    x = made.model.b.weight.detach()
    try:
        with forward_ad.dual_level():
            torch.quantile(forward_ad.make_dual(x, torch.ones_like(x)), torch.tensor([0.5, 2.0]), dim=1)
    except (RuntimeError, mw.errors.MeshwrightError):
        pass
    return (torch.ones_like(x) + 3).sum()


def _through_file(value: Callable[[Subject], Any]) -> Use:
    def run(made: Subject) -> Any:
        file = io.BytesIO()
        torch.save(value(made), file)
        file.seek(0)
        return made.model.load_state_dict(torch.load(file))

    return run


def _whole(made: Subject) -> Any:
    """A state dict of whole plain tensors, on every rank."""
    if any(hasattr(p, "full_tensor") for p in made.model.parameters()):
        return mw.full_state_dict(made.model, everywhere=True)
    return {name: x.detach().clone() for name, x in made.model.state_dict().items()}


def _empty_group(made: Subject) -> Any:
    optimizer = torch.optim.SGD([{"params": [], "lr": 0.3}, {"params": _parameters(made)}], lr=0.1)
    other = torch.optim.SGD([{"params": []}, {"params": _parameters(made)}], lr=0.2)
    other.load_state_dict(optimizer.state_dict())
    return [group["lr"] for group in other.param_groups]


def _accumulated(made: Subject) -> Any:
    made.model.zero_grad()
    for half in made.ids.chunk(2):
        (made.model(half).square().mean() / 2).backward()
    return [p.grad for p in _parameters(made)]


def _log(made: Subject) -> Any:
    loss = made.loss()
    loss.backward()
    return json.loads(json.dumps({"loss": float(loss), "norm": made.model.b.weight.grad.norm().item()}))


def _sums(x: Any) -> Any:
    """Of a result of several tensors."""
    return [part.sum() for part in x]


_NORM = torch.nn.utils.clip_grad_norm_
USES: dict[str, Use] = {
    # A: over all parameters
    "clip_grad_norm_": lambda s: _NORM(_parameters(s), 0.01),
    "clip_grad_norm_ as text": lambda s: f"{_NORM(_parameters(s), 0.01):.3f}",
    "norm by hand": lambda s: sum(float(p.grad.norm()) ** 2 for p in _parameters(s)) ** 0.5,
    "norm of stacked norms": lambda s: torch.stack([p.grad.norm() for p in _parameters(s)]).norm(),
    "L2 term": _trained_with(lambda s: sum(p.square().sum() for p in _parameters(s))),
    "L1 term of one layer": _trained_with(lambda s: s.model.b.weight.abs().sum()),
    "nn.init.normal_": _initialised(nn.init.normal_),
    "nn.init.kaiming_uniform_": _initialised(nn.init.kaiming_uniform_),
    "nn.init.xavier_normal_": _initialised(nn.init.xavier_normal_),
    "nn.init.trunc_normal_": _initialised(nn.init.trunc_normal_),
    "nn.init.orthogonal_": _initialised(nn.init.orthogonal_),
    "number of parameters": lambda s: sum(p.numel() for p in _parameters(s) if p.requires_grad),
    "average of weights": _average,
    "average of weights swapped in": _average_swapped_in,
    "deepcopy for an average": lambda s: [p.sum() for p in copy.deepcopy(s.model).parameters()],
    "optimizer of trainable parameters": _optimizer_of_trainable,
    "frozen between steps": _frozen_between_steps,
    "batch of 5 rows": _odd_batch,
    "accumulated halves": _accumulated,
    "retain_graph": _backward_twice,
    "gradient penalty": _penalty_of_gradients,
    "MAML": _adapted,
    "written output": _written_output,
    # B: values
    "autograd.grad of a weight": lambda s: torch.autograd.grad(s.loss(), [s.model.b.weight])[0].norm(),
    "tensor hook": _of_hook,
    "max(1).values of a gradient": lambda s: s.model.b.weight.grad.abs().max(1).values.max(),
    "max(1) of a weight": lambda s: s.model.b.weight.detach().abs().max(1)[0].sum(),
    "aminmax": lambda s: list(torch.aminmax(s.model.b.weight.grad)),
    "topk": lambda s: list(s.model.b.weight.detach().topk(3)),
    "sort": lambda s: list(s.model.a.weight.detach().sort(0)),
    "median": lambda s: list(s.model.b.weight.detach().median(1)),
    "kthvalue": lambda s: list(s.model.b.weight.grad.kthvalue(2, 1)),
    "mode": lambda s: list(s.model.b.weight.detach().round(decimals=1).mode(1)),
    "cummax": lambda s: list(s.model.b.weight.detach().cummax(1)),
    "std_mean": lambda s: list(torch.std_mean(s.model.b.weight.grad, 1)),
    "var_mean": lambda s: list(torch.var_mean(s.model.a.weight.detach())),
    "meshgrid": lambda s: _sums(
        torch.meshgrid(s.model.a.bias.detach(), s.model.a.bias.detach(), indexing="ij")
    ),
    "broadcast_tensors": lambda s: _sums(
        torch.broadcast_tensors(s.model.b.weight.detach(), torch.ones(8, 1))
    ),
    "atleast_3d": lambda s: torch.atleast_3d(s.model.b.weight.detach()),
    "histogram in numpy": lambda s: np.histogram(s.model.b.weight.grad.detach().cpu().numpy())[0].tolist(),
    "tolist": lambda s: s.model.a.bias.grad.tolist(),
    "torch.equal": lambda s: torch.equal(s.model.b.weight, s.model.b.weight.detach().clone()),
    "allclose": lambda s: torch.allclose(s.model.b.weight, s.model.b.weight * 1.1),
    "nonzero": lambda s: s.model.b.weight.grad.gt(0).nonzero(),
    "unique": lambda s: s.model.b.weight.detach().round(decimals=1).unique(),
    "bincount": lambda s: s.model.b.weight.detach().gt(0).flatten().long().bincount(),
    "JSON of a log": _log,
    "DLPack of a gradient": lambda s: torch.from_dlpack(s.model.b.weight.grad).sum(),
    "projected gradients": _projected,
    "merged adapter": _merged,
    # C: operators
    "written mask": lambda s: _filled(s, [True, False, True, False]),
    "written numpy mask": lambda s: _filled(s, np.array([True, False, True, False])),
    "redrawn column": _redrawn,
    "circular padding": lambda s: F.pad(s.activation().detach(), (-1, 2), mode="circular"),
    "is_same_size": lambda s: s.model.b.weight.is_same_size(torch.zeros(8, 12)),
    "gathered int16": lambda s: s.activation().detach().mul(100).to(torch.int16).sum(0),
    "complex": lambda s: torch.fft.ifft(s.activation().detach()).conj().abs(),
    "sparse": lambda s: s.model.b.weight.detach().relu().to_sparse().sum(),
    "after a failed trace": _after_failed_trace,
    # D: files
    "state dict through a file": _through_file(lambda s: s.model.state_dict()),
    "whole state dict through a file": _through_file(_whole),
    "values on the CPU through a file": _through_file(
        lambda s: {k: v.cpu() for k, v in s.model.state_dict().items()}
    ),
    "whole model saved": lambda s: torch.save(s.model, io.BytesIO()),
    "safetensors": lambda s: len(safetensors_bytes({k: v.detach() for k, v in s.model.state_dict().items()})),
    "empty group": _empty_group,
    # F: errors
    "torch.compile": lambda s: torch.compile(s.model, backend="eager")(s.ids),
    "torch.jit.trace": lambda s: torch.jit.trace(s.model, s.ids),
    "torch.jit.script": lambda s: torch.jit.script(s.model.b),
}


def names() -> list[str]:
    """All of them."""
    return [f"loop.{name}" for name in USES]


def loop_cases() -> Iterator[Case]:
    """Each in a model that has gradients; a step of training follows where the model is meant to train on."""
    for name, use in USES.items():
        yield Case(AREA, f"loop.{name}", "model", use, "backward", trains="torch." not in name)
