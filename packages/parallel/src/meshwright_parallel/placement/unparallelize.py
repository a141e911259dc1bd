"""Undo `parallelize`: restore the modules of a model, with parameters that have shapes and no values.

Applying a plan changes attributes, hooks, parameters and buffers of modules only. Snapshots record them before and after.
Undoing restores an entry only if it still is as the plan left it, so hooks, flags and attributes that users have changed
since are kept.
"""

from __future__ import annotations

import mmap
import weakref
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from meshwright_dtensor.devices import HOST
from meshwright_dtensor.errors import UsageError
from meshwright_dtensor.mesh.mesh import live_process_groups
from meshwright_dtensor.stages.whole_model import show_all_stages
from meshwright_dtensor.tensor.replaced import replace_tensor
from meshwright_parallel._torch.core import BUFFERS, PARAMETERS, module_parts

_ATTRIBUTE = "_meshwright_before"
_BLANK = "_meshwright_blank"
_OURS = "_meshwright_"


@dataclass(frozen=True, eq=False)
class TensorForm:
    """Shape, strides and dtype of a parameter or buffer, without its values."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool

    @staticmethod
    def of(tensor: torch.Tensor) -> TensorForm:
        """The form of a tensor."""
        return TensorForm(tensor.shape, tensor.stride(), tensor.dtype, tensor.requires_grad)

    def tensor(self) -> torch.Tensor:
        """Zeros whose memory is allocated when they are written to."""
        elements = 1 + sum((n - 1) * step for n, step in zip(self.shape, self.stride, strict=True))
        if 0 in self.shape:
            return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=HOST)
        pages = mmap.mmap(-1, elements * self.dtype.itemsize)
        return torch.frombuffer(pages, dtype=self.dtype).as_strided(self.shape, self.stride)

    def parameter(self, requires_grad: bool) -> nn.Parameter:
        """The same as a parameter, marked as one without values."""
        parameter = nn.Parameter(self.tensor(), requires_grad)
        setattr(parameter, _BLANK, True)
        return parameter


def drop_values(model: nn.Module) -> Unparallelized:
    """Drop the values of the parameters of a model without a plan; they will come from other ranks."""
    snapshots = [_ModuleSnapshot.of(module) for module in model.modules()]
    replacements: dict[int, nn.Parameter] = {}
    for module in model.modules():
        part = module_parts(module)[PARAMETERS]
        for name, parameter in part.items():
            if parameter is not None:
                if id(parameter) not in replacements:
                    form = TensorForm.of(parameter)
                    replacements[id(parameter)] = form.parameter(parameter.requires_grad)
                part[name] = replacements[id(parameter)]
    return Unparallelized(snapshots)


def has_no_values(model: nn.Module) -> bool:
    """Whether the values of the model's parameters were dropped."""
    return any(getattr(parameter, _BLANK, False) for parameter in model.parameters())


@dataclass
class _ModuleSnapshot:
    """Attributes of one module, and its parts: torch's dicts and sets of parameters, buffers, hooks and children."""

    module: nn.Module
    attributes: dict[str, Any]
    parts: dict[str, Any]

    @staticmethod
    def of(module: nn.Module) -> _ModuleSnapshot:
        """Record the current state."""
        parts = module_parts(module)
        attributes = {name: value for name, value in vars(module).items() if name not in parts}
        return _ModuleSnapshot(module, attributes, {name: part.copy() for name, part in parts.items()})

    def restore(self) -> None:
        """Restore the recorded state. The parts stay the same objects, because handles of hooks refer to them."""
        current = vars(self.module)
        for name in [name for name in current if name not in self.parts and name not in self.attributes]:
            del current[name]
        current.update(self.attributes)
        for name, part in module_parts(self.module).items():
            part.clear()
            part.update(self.parts[name])


class PlanUndo:
    """Snapshots of a model before and after a plan is applied. Of parameters and buffers only the form is kept."""

    def __init__(self, model: nn.Module, groups: frozenset[dist.ProcessGroup]) -> None:
        self.groups = groups
        self.modules = [_ModuleSnapshot.of(module) for module in model.modules()]
        forms: dict[int, TensorForm] = {}
        # so that ids are not reused
        alive: list[torch.Tensor] = []
        for snapshot in self.modules:
            for part in (snapshot.parts[PARAMETERS], snapshot.parts[BUFFERS]):
                for name, tensor in part.items():
                    if tensor is not None:
                        alive.append(tensor)
                        part[name] = forms.setdefault(id(tensor), TensorForm.of(tensor))
        self.after: list[_ModuleSnapshot] = []
        # id of a mesh parameter -> the parameter that it has replaced, which others may refer to
        self.replaced: dict[int, weakref.ref[torch.Tensor]] = {}

    def replace(self, pairs: Iterable[tuple[nn.Parameter, nn.Parameter]]) -> None:
        """Note the parameters before and after the plan was applied."""
        self.replaced = {id(new): weakref.ref(old) for old, new in pairs}

    def finish(self, model: nn.Module) -> None:
        """Record the model after the plan was applied."""
        model.__dict__[_ATTRIBUTE] = self
        self.groups = live_process_groups() - self.groups
        self.after = [_ModuleSnapshot.of(snapshot.module) for snapshot in self.modules]

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        # the plan of a copied model cannot be undone
        return None

    def __reduce__(self) -> tuple[Any, ...]:
        # nor that of a pickled one, which holds None in its place
        return (type(None), ())


@dataclass
class Unparallelized:
    """A model whose plan was undone.

    Attributes:
        lost: names of parameters and buffers that this rank did not hold. They are zeros, with the original `requires_grad`.
        groups: the process groups that applying the plan has made.
    """

    parallel: list[_ModuleSnapshot]
    lost: frozenset[str] = field(default_factory=frozenset)
    groups: frozenset[dist.ProcessGroup] = field(default_factory=frozenset)
    replaced: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)

    def restore(self) -> None:
        """Make the model parallel again, exactly as before; its parameters must be unchanged."""
        for earlier, parameter in self.replaced:
            replace_tensor(earlier, parameter)
        for snapshot in self.parallel:
            snapshot.restore()
        show_all_stages(self.parallel[0].module)


def unparallelize(model: nn.Module) -> Unparallelized:
    """Undo the plan of `model` in place. Its parameters get no values; buffers keep theirs.

    Nothing is freed here: the old parameters live as long as they are referenced.

    Raises UsageError: `model` is not parallel, is a copy of a parallel model, or a parameter was replaced since.
    """
    before = model.__dict__.get(_ATTRIBUTE)
    if not isinstance(before, PlanUndo):
        raise UsageError(
            f"this {type(model).__name__} has not been parallelized, or is a copy of a model that has; give the model itself"
        )
    show_all_stages(model, False)
    result = Unparallelized([_ModuleSnapshot.of(module) for module in model.modules()], groups=before.groups)
    restoration = _Restoration(before.replaced, result.replaced)
    names = {id(module): prefix for prefix, module in model.named_modules()}
    try:
        for old, new in zip(before.modules, before.after, strict=True):
            restoration.undo(old, new, names.get(id(old.module), ""))
    except BaseException:
        result.restore()
        raise
    result.lost = frozenset(restoration.lost)
    return result


@dataclass
class _Restoration:
    """What was made anew so far, by the form of the old value, and the names of values that this rank did not hold."""

    earlier: Mapping[int, weakref.ref[torch.Tensor]]
    replaced: list[tuple[torch.Tensor, torch.Tensor]]
    replacements: dict[int, torch.Tensor] = field(default_factory=dict)
    lost: set[str] = field(default_factory=set)

    def undo(self, old: _ModuleSnapshot, new: _ModuleSnapshot, prefix: str) -> None:
        """Undo the changes of one module from `old` to `new`."""
        current = vars(old.module)
        parts = module_parts(old.module)
        parameters, buffers = old.parts[PARAMETERS], old.parts[BUFFERS]
        for name in [name for name in current if name not in parts]:
            ours = name.startswith(_OURS) or name in parameters or name in buffers
            unchanged = name in new.attributes and current[name] is new.attributes[name]
            if name in old.attributes:
                if unchanged:
                    current[name] = old.attributes[name]
            elif ours or unchanged:
                del current[name]
        for name, value in old.attributes.items():
            if name not in new.attributes:
                current.setdefault(name, value)
        for name, part in parts.items():
            if name in (PARAMETERS, BUFFERS):
                continue
            if isinstance(part, set):
                part |= old.parts[name] - new.parts[name]
                part -= new.parts[name] - old.parts[name]
            else:
                _undo_entries(part, old.parts[name], new.parts[name])
        dot = f"{prefix}." if prefix else ""
        self._restore_parameters(parts[PARAMETERS], parameters, new.parts[PARAMETERS], dot)
        self._restore_buffers(parts[BUFFERS], buffers, dot)

    def _restore_parameters(
        self, part: dict[str, Any], old: Mapping[str, Any], new: Mapping[str, Any], dot: str
    ) -> None:
        added = [name for name in part if name not in old]
        other = [name for name, value in new.items() if name in part and part[name] is not value]
        for name in added + other:
            raise UsageError(
                f"parameter {dot + name!r} was added or replaced after the model was parallelized, so another plan cannot be "
                "applied to it; build the model anew"
            )
        current = dict(part)
        part.clear()
        for name, form in old.items():
            if form is None:
                part[name] = None
                continue
            parameter = current.get(name)
            if parameter is None:
                self.lost.add(dot + name)
            if id(form) not in self.replacements:
                trained = form.requires_grad if parameter is None else parameter.requires_grad
                replacement = self.replacements[id(form)] = form.parameter(trained)
                for key, value in vars(parameter).items() if parameter is not None else ():
                    # attributes that users set on a parameter
                    if not key.startswith("_"):
                        setattr(replacement, key, value)
                earlier = self.earlier.get(id(parameter), lambda: None)()
                if parameter is not None and earlier is not None:
                    self.replaced.append((earlier, parameter))
                    replace_tensor(earlier, replacement)
            part[name] = self.replacements[id(form)]

    def _restore_buffers(self, part: dict[str, Any], old: Mapping[str, Any], dot: str) -> None:
        current = dict(part)
        part.clear()
        for name, form in old.items():
            buffer = current.pop(name, None)
            if form is None or (buffer is not None and buffer.dtype == form.dtype):
                part[name] = buffer
                continue
            if buffer is None:
                self.lost.add(dot + name)
            if id(form) not in self.replacements:
                self.replacements[id(form)] = form.tensor() if buffer is None else buffer.to(form.dtype)
            part[name] = self.replacements[id(form)]
        # buffers that users have added
        part.update(current)


def _undo_entries(part: dict[Any, Any], old: Mapping[Any, Any], new: Mapping[Any, Any]) -> None:
    for key, value in new.items():
        if key in part and part[key] is value and old.get(key) is not value:
            del part[key]
            if key in old:
                part[key] = old[key]
    for key, value in old.items():
        if key not in new:
            part.setdefault(key, value)
