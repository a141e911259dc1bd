"""Locate where a parallel run differs from one device: the first torch call with another value, else the first wrong gradient.

One forward and backward pass is recorded in both runs, call by call, as user code makes them. Calls are matched by address:
(module, which call of that module, function, occurrence). Calls that only one of the runs makes are ignored.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from meshwright_dtensor.parameter import MeshParameter, layout_of_dtensor
from meshwright_dtensor.tensor.global_tensor import GlobalTensor
from meshwright_dtensor.trace.graph import function_name
from meshwright_parallel.verification.compare import TOLERANCES, magnitude, max_difference, whole
from meshwright_parallel.verification.report import Fault

Address = tuple[str, int, str, int, int]
"""Module, number of its call, function, occurrence in that call, index of the result tensor."""

NOISE = 1e-7
"""Differences below this part of the largest value of the pass are ignored."""


@dataclass
class _Result:
    """One result tensor of a call, as its global value."""

    value: torch.Tensor
    layout: str
    inputs: tuple[str, ...]
    gradient: torch.Tensor | None = None
    order: int = -1


@dataclass
class _Frame:
    module: str
    call: int
    counts: Counter[str] = field(default_factory=Counter)


class _Recorder(TorchFunctionMode):
    """Records the result of every torch call that a module's own forward makes."""

    def __init__(self) -> None:
        super().__init__()
        self.results: dict[Address, _Result] = {}
        self.frames: list[_Frame] = []
        self.calls: Counter[str] = Counter()
        self.gradients = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        name = function_name(func)
        if not self.frames or name.startswith("__set") or name == "__get__":
            return out
        results = [x for x in pytree.tree_leaves(out) if isinstance(x, torch.Tensor)]
        if results:
            frame = self.frames[-1]
            occurrence = frame.counts[name]
            frame.counts[name] += 1
            leaves = pytree.tree_leaves((args, kwargs))
            inputs = tuple(_layout_text(x) for x in leaves if isinstance(x, torch.Tensor))
            for index, tensor in enumerate(results):
                self._record((frame.module, frame.call, name, occurrence, index), tensor, inputs)
        return out

    def _record(self, address: Address, tensor: torch.Tensor, inputs: tuple[str, ...]) -> None:
        value = whole(tensor)
        assert value is not None
        result = self.results[address] = _Result(value.clone(), _layout_text(tensor), inputs)
        if torch.is_grad_enabled() and tensor.requires_grad and not tensor.is_leaf:

            def add_gradient(local: torch.Tensor) -> None:
                gradient = whole(local)
                assert gradient is not None
                result.gradient = gradient.clone() if result.gradient is None else result.gradient + gradient
                result.order = self.gradients
                self.gradients += 1

            tensor.register_hook(add_gradient)


def _layout_text(x: torch.Tensor) -> str:
    if isinstance(x, GlobalTensor):
        return repr(x._layout)
    if isinstance(x, MeshParameter):
        return f"parameter {layout_of_dtensor(x)!r}"
    kind = "DTensor" if isinstance(x, DTensor) else "plain"
    return f"{kind} {list(x.shape)} {str(x.dtype).removeprefix('torch.')}"


@contextmanager
def _recording(model: nn.Module) -> Iterator[_Recorder]:
    """Record calls inside the forwards of the modules of `model`, without those of other forward hooks."""
    recorder = _Recorder()
    handles: list[Any] = []

    def begin(name: str, module: nn.Module, args: Any) -> None:
        recorder.frames.append(_Frame(name, recorder.calls[name]))
        recorder.calls[name] += 1

    def end(module: nn.Module, args: Any, output: Any) -> None:
        recorder.frames.pop()

    for name, module in model.named_modules():
        handles.append(module.register_forward_pre_hook(partial(begin, name)))
        handles.append(module.register_forward_hook(end, prepend=True, always_call=True))
    try:
        yield recorder
    finally:
        for handle in handles:
            handle.remove()


def locate(
    one_device: nn.Module,
    parallel: nn.Module,
    forward: Callable[[nn.Module], torch.Tensor],
    seed: int,
    tolerance: float | None = None,
) -> Fault | None:
    """The first call at which two models of equal parameters differ, or None. A collective call.

    Args:
        one_device, parallel: the two models; neither has run.
        forward: a forward pass, to the loss.
        seed: of the generator, for both.
    """
    records: list[Mapping[Address, _Result]] = []
    for model in (one_device, parallel):
        torch.manual_seed(seed)
        with _recording(model) as recorder:
            with recorder:
                loss = forward(model)
            loss.backward()
        records.append(recorder.results)
    expected, actual = records
    counts = [Counter(address[:3] for address in results) for results in records]
    common = [a for a in expected if a in actual and counts[0][a[:3]] == counts[1][a[:3]]]
    values = [(a, expected[a].value, actual[a].value) for a in common]
    fault = _first("forward", values, actual, tolerance)
    if fault is not None:
        return fault
    backward = [a for a in common if expected[a].gradient is not None]
    backward.sort(key=lambda a: expected[a].order)
    gradients = [(a, expected[a].gradient, actual[a].gradient) for a in backward]
    return _first("backward", gradients, actual, tolerance)


def _first(
    phase: Literal["forward", "backward"],
    pairs: Sequence[tuple[Address, torch.Tensor | None, torch.Tensor | None]],
    actual: Mapping[Address, _Result],
    tolerance: float | None,
) -> Fault | None:
    largest = max((magnitude(want) for _, want, _ in pairs), default=0.0)
    for address, want, got in pairs:
        assert want is not None
        scale = magnitude(want)
        difference, note = max_difference(want, got)
        limit = TOLERANCES.get(want.dtype, 0.0) if tolerance is None else tolerance
        noise = NOISE * largest if want.is_floating_point() else 0.0
        if not note and difference <= max(limit * scale, noise):
            continue
        relative = difference / scale if scale else float("inf")
        module, _, function, occurrence, _ = address
        result = actual[address]
        return Fault(phase, module, function, occurrence, relative, result.layout, result.inputs)
    return None
