"""Where a parallel run leaves one device: the first torch call whose value differs, else the first wrong gradient.

One forward and backward pass is watched in both runs, call by call, as user code makes them. Calls are matched by address:
(module, which call of that module, function, occurrence). What only one of the runs does is left out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from meshwright_dtensor.parameter import MeshParameter, layout_of_dtensor
from meshwright_dtensor.tensor.global_tensor import GlobalTensor
from meshwright_dtensor.trace.graph import function_name
from meshwright_parallel.verification.compare import TOLERANCES, apart, magnitude, whole
from meshwright_parallel.verification.report import Fault

Address = tuple[str, int, str, int, int]
"""Module, its call, function, occurrence in that call, which tensor of the result."""

NOISE = 1e-7
"""Values below this part of the largest value of the pass are no measure of anything."""


@dataclass
class _Seen:
    """What one call made, whole."""

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


class _Watch(TorchFunctionMode):
    """Notes the result of every torch call that a module's own forward makes."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[Address, _Seen] = {}
        self.frames: list[_Frame] = []
        self.calls: Counter[str] = Counter()
        self.gradients = 0

    def enter(self, name: str) -> None:
        """A module's forward begins."""
        self.frames.append(_Frame(name, self.calls[name]))
        self.calls[name] += 1

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
            inputs = tuple(
                _lies(x) for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)
            )
            for place, result in enumerate(results):
                self._note((frame.module, frame.call, name, occurrence, place), result, inputs)
        return out

    def _note(self, address: Address, result: torch.Tensor, inputs: tuple[str, ...]) -> None:
        value = whole(result)
        assert value is not None
        seen = self.seen[address] = _Seen(value.clone(), _lies(result), inputs)
        if torch.is_grad_enabled() and result.requires_grad and not result.is_leaf:

            def gradient(g: torch.Tensor) -> None:
                found = whole(g)
                assert found is not None
                seen.gradient = found.clone() if seen.gradient is None else seen.gradient + found
                seen.order = self.gradients
                self.gradients += 1

            result.register_hook(gradient)


def _lies(x: torch.Tensor) -> str:
    if isinstance(x, GlobalTensor):
        return repr(x._layout)
    if isinstance(x, MeshParameter):
        return f"parameter {layout_of_dtensor(x)!r}"
    kind = "DTensor" if isinstance(x, DTensor) else "plain"
    return f"{kind} {list(x.shape)} {str(x.dtype).removeprefix('torch.')}"


@contextmanager
def _watching(model: nn.Module) -> Iterator[_Watch]:
    """Watch calls inside the forwards of the modules of `model`; hooks of others do not count as such calls."""
    watch = _Watch()
    handles: list[Any] = []

    def begin(name: str) -> Callable[..., None]:
        return lambda module, args: watch.enter(name)

    def end(module: nn.Module, args: Any, output: Any) -> None:
        watch.frames.pop()

    for name, module in model.named_modules():
        handles.append(module.register_forward_pre_hook(begin(name)))
        handles.append(module.register_forward_hook(end, prepend=True, always_call=True))
    try:
        yield watch
    finally:
        for handle in handles:
            handle.remove()


def locate(
    one: nn.Module,
    many: nn.Module,
    run: Callable[[nn.Module], torch.Tensor],
    seed: int,
    tolerance: float | None = None,
) -> Fault | None:
    """The first place at which two models of equal parameters differ; None where no call does. A collective call.

    Args:
        one, many: the model on one device, and the parallel one; neither has run.
        run: a forward pass, to the loss.
        seed: of the generator, for both.
    """
    found: list[Mapping[Address, _Seen]] = []
    for model in (one, many):
        torch.manual_seed(seed)
        with _watching(model) as watch:
            with watch:
                loss = run(model)
            loss.backward()
        found.append(watch.seen)
    expected, parallel = found
    counts = [Counter(address[:3] for address in seen) for seen in found]
    common = [a for a in expected if a in parallel and counts[0][a[:3]] == counts[1][a[:3]]]
    values = [(a, expected[a].value, parallel[a].value) for a in common]
    fault = _first("forward", values, parallel, tolerance)
    if fault is not None:
        return fault
    backward = sorted(
        (a for a in common if expected[a].gradient is not None), key=lambda a: expected[a].order
    )
    gradients = [(a, expected[a].gradient, parallel[a].gradient) for a in backward]
    return _first("backward", gradients, parallel, tolerance)


def _first(
    phase: Literal["forward", "backward"],
    pairs: Sequence[tuple[Address, torch.Tensor | None, torch.Tensor | None]],
    parallel: Mapping[Address, _Seen],
    tolerance: float | None,
) -> Fault | None:
    largest = max((magnitude(want) for _, want, _ in pairs), default=0.0)
    for address, want, got in pairs:
        assert want is not None
        scale = magnitude(want)
        difference, note = apart(want, got)
        limit = TOLERANCES.get(want.dtype, 0.0) if tolerance is None else tolerance
        if not note and difference <= max(
            limit * scale, NOISE * largest if want.is_floating_point() else 0.0
        ):
            continue
        relative = difference / scale if scale else float("inf")
        module, _, function, occurrence, _ = address
        seen = parallel[address]
        return Fault(phase, module, function, occurrence, relative, seen.layout, seen.inputs)
    return None
