"""Detect the modules of a model that hold experts: candidates by parameter shapes, proved by a probe.

Values are never read, so the model may be on the meta device or inside `deferred_init()`.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from torch import nn

from meshwright_dtensor.utils.memo import Memo
from meshwright_parallel.moe.intermediate_dim import inner_states
from meshwright_parallel.moe.probe import Proved, Rejected, probe
from meshwright_parallel.moe.probe_model import Candidate

Answer: TypeAlias = tuple[Proved | Rejected, Mapping[str, str]]


@dataclass(frozen=True)
class Experts:
    """A module that was proved to hold experts. `inner`: see `intermediate_dim.inner_states`."""

    candidate: Candidate
    proved: Proved
    inner: Mapping[str, str]


@dataclass(frozen=True)
class Detection:
    """Experts of a model, and (name, reason) of modules that only look like experts. `memo`: derived values of a search."""

    experts: tuple[Experts, ...]
    rejected: tuple[tuple[str, str], ...]
    memo: Memo = field(default_factory=Memo, compare=False, repr=False)


def detect(model: nn.Module) -> Detection:
    """Find the modules of experts. Modules of one class with the same shapes and attributes are probed once."""
    answers: dict[Any, Answer] = {}
    experts: list[Experts] = []
    rejected: list[tuple[str, str]] = []
    inside: list[str] = []
    for name, module in model.named_modules():
        if any(name.startswith(f"{outer}.") for outer in inside):
            continue
        reasons: list[str] = []
        for candidate in candidates(name, module):
            answer, inner = _answer(candidate, answers)
            if isinstance(answer, Proved):
                experts.append(Experts(candidate, answer, inner))
                inside.append(name)
                reasons.clear()
                break
            if candidate.strong:
                reasons.append(answer.reason)
        rejected += [(name, reason) for reason in reasons[:1]]
    return Detection(tuple(experts), tuple(rejected))


def candidates(name: str, module: nn.Module) -> Iterator[Candidate]:
    """The forms of experts that the shapes of `module` allow."""
    if type(module).__module__.startswith("torch.nn.") or not name:
        return
    takes_routing = _argument_count(module) >= 3
    parameters = {key: p for key, p in module._parameters.items() if p is not None}
    counts = Counter(p.shape[0] for p in parameters.values() if p.ndim)
    for count in sorted({p.shape[0] for p in parameters.values() if p.ndim == 3}):
        if count > 1 and counts[count] >= 2:
            paths = tuple(key for key, p in parameters.items() if p.ndim and p.shape[0] == count)
            # a convolution has one such weight, and its bias
            strong = takes_routing or sum(parameters[key].ndim == 3 for key in paths) > 1
            yield Candidate(name, module, "fused", count, paths, strong)
    if not takes_routing:
        return
    children = _equal_children(module)
    if children:
        strong = isinstance(module, (nn.ModuleList, nn.ModuleDict))
        yield Candidate(name, module, "container", len(children), children, strong)
    yield from _flattened(name, module)


def _flattened(name: str, module: nn.Module) -> Iterator[Candidate]:
    """Experts flattened into dim 0: matrices of one shape whose rows an integer attribute divides."""
    matrices = dict(module.named_parameters())
    shapes = {tuple(p.shape) for p in matrices.values()}
    if len(matrices) < 2 or len(shapes) != 1:
        return
    (shape,) = shapes
    if len(shape) != 2:
        return
    numbers = {v for v in vars(module).values() if type(v) is int and 1 < v < shape[0] and shape[0] % v == 0}
    for count in sorted(numbers):
        yield Candidate(name, module, "fused", count, tuple(matrices), strong=False)


def _equal_children(module: nn.Module) -> tuple[str, ...]:
    """Paths of at least two children with equal parameters that together hold every parameter of `module`."""
    for prefix, holder in [("", module), *((f"{key}.", child) for key, child in module.named_children())]:
        if not isinstance(holder, (nn.ModuleList, nn.ModuleDict)):
            continue
        children = {f"{prefix}{key}": child for key, child in holder.named_children() if _signature(child)}
        signatures = [_signature(child) for child in children.values()]
        if len(children) < 2 or any(s != signatures[0] for s in signatures):
            continue
        if sum(1 for _ in module.parameters()) == sum(len(s) for s in signatures):
            return tuple(children)
    return ()


def _signature(module: nn.Module) -> tuple[tuple[str, tuple[int, ...]], ...]:
    return tuple((name, tuple(p.shape)) for name, p in module.named_parameters())


def _argument_count(module: nn.Module) -> int:
    """How many positional arguments the forward takes."""
    try:
        parameters = inspect.signature(module.forward).parameters.values()
    except (TypeError, ValueError):
        return 0
    return sum(p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in parameters)


def _answer(candidate: Candidate, answers: dict[Any, Answer]) -> Answer:
    module = candidate.module
    plain = (int, float, str)
    attributes = tuple(a for part in module.modules() for a in vars(part).items() if isinstance(a[1], plain))
    # it may choose between implementations
    config = id(getattr(module, "config", None))
    key = (type(module), candidate.kind, candidate.count, _signature(module), attributes, config)
    if key not in answers:
        if _argument_count(module) < 3:
            reason = "its forward does not take tokens, the experts of each token and their weights"
            answers[key] = Rejected(reason), {}
        else:
            answer = probe(candidate)
            answers[key] = answer, inner_states(candidate, answer) if isinstance(answer, Proved) else {}
    return answers[key]
