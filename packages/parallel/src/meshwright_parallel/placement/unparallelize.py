"""Take a model off its plan: the modules as they were, with parameters that have shapes and no values.

Everything that applying a plan does to a model, whichever strategy does it, it does to attributes, hooks, parameters and
buffers of modules.  So what they were before and after is noted, and only what still is as the plan left it is set back:
hooks, flags and attributes that users have changed since stay.
"""

from __future__ import annotations

import mmap
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from meshwright_dtensor.errors import UsageError
from meshwright_dtensor.mesh.mesh import live_process_groups
from meshwright_parallel._torch.core import buffers_of, module_parts, parameters_of

_ATTRIBUTE = "_meshwright_before"
_BLANK = "_meshwright_blank"
_OURS = "_meshwright_"


@dataclass(frozen=True, eq=False)
class TensorForm:
    """A parameter or buffer without its values."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool

    @staticmethod
    def of(tensor: torch.Tensor) -> TensorForm:
        """The form of a tensor."""
        return TensorForm(tensor.shape, tensor.stride(), tensor.dtype, tensor.requires_grad)

    def tensor(self) -> torch.Tensor:
        """Zeros that take no memory until they are written to."""
        elements = 1 + sum((n - 1) * step for n, step in zip(self.shape, self.stride, strict=True))
        if 0 in self.shape:
            return torch.empty_strided(self.shape, self.stride, dtype=self.dtype)
        pages = mmap.mmap(-1, elements * self.dtype.itemsize)
        return torch.frombuffer(pages, dtype=self.dtype).as_strided(self.shape, self.stride)

    def parameter(self, requires_grad: bool) -> nn.Parameter:
        """The same as a parameter, which `parallelize` gives memory and no values."""
        made = nn.Parameter(self.tensor(), requires_grad)
        setattr(made, _BLANK, True)
        return made


def drop_values(model: nn.Module) -> Unparallelized:
    """Take the values from the parameters of a model without a plan: they are to come from other ranks."""
    was = [_ModuleSnapshot.of(module) for module in model.modules()]
    made: dict[int, nn.Parameter] = {}
    for module in model.modules():
        part = parameters_of(module_parts(module))
        for name, parameter in part.items():
            if parameter is not None:
                if id(parameter) not in made:
                    made[id(parameter)] = TensorForm.of(parameter).parameter(parameter.requires_grad)
                part[name] = made[id(parameter)]
    return Unparallelized(was)


def has_no_values(model: nn.Module) -> bool:
    """Whether the parameters of a model have no values yet."""
    return any(getattr(parameter, _BLANK, False) for parameter in model.parameters())


@dataclass
class _ModuleSnapshot:
    """Attributes and parts (dicts and sets of torch's own) of one module."""

    module: nn.Module
    attributes: dict[str, Any]
    parts: dict[str, Any]

    @staticmethod
    def of(module: nn.Module) -> _ModuleSnapshot:
        """As they are now."""
        parts = module_parts(module)
        attributes = {name: value for name, value in vars(module).items() if name not in parts}
        return _ModuleSnapshot(module, attributes, {name: part.copy() for name, part in parts.items()})

    def restore(self) -> None:
        """Make them so again; the parts stay the same objects, which handles of hooks refer to."""
        own = vars(self.module)
        for name in [name for name in own if name not in self.parts and name not in self.attributes]:
            del own[name]
        own.update(self.attributes)
        for name, part in module_parts(self.module).items():
            part.clear()
            part.update(self.parts[name])


def _nothing() -> None:
    """What is left of it in a pickled model."""


class PlanUndo:
    """What a model was before a plan is applied to it; `settle` notes what it is afterwards.

    Parameters and buffers are remembered by their form only.
    """

    def __init__(self, model: nn.Module, groups: frozenset[dist.ProcessGroup]) -> None:
        self.groups = groups
        self.modules = [_ModuleSnapshot.of(module) for module in model.modules()]
        known: dict[int, TensorForm] = {}
        kept: list[torch.Tensor] = []  # while ids are looked up
        for one in self.modules:
            for part in (parameters_of(one.parts), buffers_of(one.parts)):
                for name, tensor in part.items():
                    if tensor is not None:
                        kept.append(tensor)
                        part[name] = known.setdefault(id(tensor), TensorForm.of(tensor))
        self.after: list[_ModuleSnapshot] = []

    def settle(self, model: nn.Module) -> None:
        """The plan has been applied."""
        model.__dict__[_ATTRIBUTE] = self
        self.groups = live_process_groups() - self.groups
        self.after = [_ModuleSnapshot.of(one.module) for one in self.modules]

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        return None  # a copied model cannot be taken off its plan

    def __reduce__(self) -> tuple[Any, ...]:
        return (_nothing, ())  # nor one that was pickled


@dataclass
class Unparallelized:
    """A model off its plan.

    Attributes:
        lost: names of parameters and buffers that this rank did not hold: they are zeros, and `requires_grad` is as it was.
        groups: the process groups that applying the plan has made.
    """

    was: list[_ModuleSnapshot]
    lost: frozenset[str] = field(default_factory=frozenset)
    groups: frozenset[dist.ProcessGroup] = field(default_factory=frozenset)

    def restore(self) -> None:
        """The model on its plan again, exactly as it was; its parameters must have been left as they are."""
        for one in self.was:
            one.restore()


def unparallelize(model: nn.Module) -> Unparallelized:
    """Make `model` what it was before its plan was applied, in place, but for the values of its parameters.

    Buffers keep their values. Nothing is freed here: who holds the old parameters still has them.

    Raises:
        UsageError: `model` is not parallel, is a copy of a parallel model, or has got other parameters since.
    """
    before = model.__dict__.get(_ATTRIBUTE)
    if not isinstance(before, PlanUndo):
        raise UsageError(
            f"this {type(model).__name__} has not been parallelized, or is a copy of a model that has; give the model itself"
        )
    was = [_ModuleSnapshot.of(module) for module in model.modules()]
    made: dict[int, torch.Tensor] = {}
    lost: set[str] = set()
    names = {id(module): prefix for prefix, module in model.named_modules()}
    try:
        for old, new in zip(before.modules, before.after, strict=True):
            _take_off(old, new, names.get(id(old.module), ""), made, lost)
    except BaseException:
        for one in was:
            one.restore()
        raise
    return Unparallelized(was, frozenset(lost), before.groups)


def _take_off(
    old: _ModuleSnapshot, new: _ModuleSnapshot, prefix: str, made: dict[int, torch.Tensor], lost: set[str]
) -> None:
    own = vars(old.module)
    parts = module_parts(old.module)
    parameters, buffers = parameters_of(old.parts), buffers_of(old.parts)
    for name in [name for name in own if name not in parts]:
        ours = name.startswith(_OURS) or name in parameters or name in buffers
        left_alone = name in new.attributes and own[name] is new.attributes[name]
        if name in old.attributes:
            if left_alone:
                own[name] = old.attributes[name]
        elif ours or left_alone:
            del own[name]
    for name, value in old.attributes.items():
        if name not in new.attributes:
            own.setdefault(name, value)
    for name, part in parts.items():
        if part is parameters_of(parts) or part is buffers_of(parts):
            continue
        if isinstance(part, set):
            part |= old.parts[name] - new.parts[name]
            part -= new.parts[name] - old.parts[name]
        else:
            _take_off_entries(part, old.parts[name], new.parts[name])
    dot = f"{prefix}." if prefix else ""
    _blank_parameters(parameters_of(parts), parameters, parameters_of(new.parts), dot, made, lost)
    _keep_buffers(buffers_of(parts), buffers, dot, made, lost)


def _take_off_entries(part: dict[Any, Any], old: Mapping[Any, Any], new: Mapping[Any, Any]) -> None:
    for key, value in new.items():
        if key in part and part[key] is value and old.get(key) is not value:
            del part[key]
            if key in old:
                part[key] = old[key]
    for key, value in old.items():
        if key not in new:
            part.setdefault(key, value)


def _blank_parameters(
    part: dict[str, Any],
    old: Mapping[str, Any],
    new: Mapping[str, Any],
    dot: str,
    made: dict[int, torch.Tensor],
    lost: set[str],
) -> None:
    added = [name for name in part if name not in old]
    other = [name for name, value in new.items() if name in part and part[name] is not value]
    for name in added + other:
        raise UsageError(
            f"parameter {dot + name!r} was put in after the model was parallelized; another plan cannot be applied to it"
        )
    now = dict(part)
    part.clear()
    for name, blank in old.items():
        if blank is None:
            part[name] = None
            continue
        parameter = now.get(name)
        if parameter is None:
            lost.add(dot + name)
        if id(blank) not in made:
            trained = blank.requires_grad if parameter is None else parameter.requires_grad
            fresh = made[id(blank)] = blank.parameter(trained)
            for key, value in vars(parameter).items() if parameter is not None else ():
                if not key.startswith("_"):  # what users hang on a parameter
                    setattr(fresh, key, value)
        part[name] = made[id(blank)]


def _keep_buffers(
    part: dict[str, Any], old: Mapping[str, Any], dot: str, made: dict[int, torch.Tensor], lost: set[str]
) -> None:
    now = dict(part)
    part.clear()
    for name, blank in old.items():
        held = now.pop(name, None)
        if blank is None or (held is not None and held.dtype == blank.dtype):
            part[name] = held
            continue
        if held is None:
            lost.add(dot + name)
        if id(blank) not in made:
            made[id(blank)] = blank.tensor() if held is None else held.to(blank.dtype)
        part[name] = made[id(blank)]
    part.update(now)  # those that users have added
