"""torch.distributed as the code of a parallel model sees it: one device.

A value of a parallel model is that of the whole batch, so what the model's own code would exchange is there already.
Inside of its forward, and of the backward of an autograd.Function that was applied there, the default process group has
one rank, whose collectives copy. Who asks is read off the call stack: one thread runs the code of the model, of its user
and of this framework in turns. The framework are the packages of meshwright and of the strategies of the plan. A call of the
model that names another group is refused.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from functools import partial
from types import FrameType
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.function import BackwardCFunction

from meshwright_dtensor._torch.core import ENGINE, MODULE_CALL, on_checkpointing
from meshwright_dtensor._torch.one_rank import ONE_DEVICE, OneRank, has_group, install_world
from meshwright_dtensor.errors import UnsupportedError
from meshwright_dtensor.trace.graph import leaves

T = TypeVar("T")

OF_A_GROUP = (
    "{} calls torch.distributed ({}) with a process group that it keeps. Inside of a parallel model there is nothing to exchange "
    "(values are those of all rows), and ranks may be at different places of the model. Leave the group out: then the call "
    "sees one device, of world size 1; or leave the call out"
)

_MARK = "_meshwright_one_device"
"""Attribute of what sees one device: the packages whose code does not, each with the dot after its name."""
_FRAMEWORK = ("meshwright_",)
_BETWEEN = (
    "meshwright_dtensor.dispatch.",
    "meshwright_dtensor.trace.",
    "meshwright_planner.trace.",
    "meshwright_pipeline.trace.",
    "torch.",
)
"""Modules whose frames may be between a model and the function of torch.distributed that it calls."""
_LOGGER = "torch.distributed.c10d_logger"
_COLLECTIVES = frozenset(
    {
        "torch.distributed.distributed_c10d",
        "torch.distributed.nn.functional",
        "torch.distributed._functional_collectives",
    }
)
_OF_GROUPS = frozenset(
    "new_group new_subgroups new_subgroups_by_enumeration split_group destroy_process_group".split()
)


def on_one_device(function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
    """``function(*args, **kwargs)``, in which the code of a model sees one device."""
    install_world(_asked_by_model, _refuse_group)
    return function(*args, **kwargs)


def show_one_device(model: nn.Module, strategies: Iterable[object] = ()) -> None:
    """Let all modules of a parallel model see one device in their forward.

    strategies: the code of their packages (`a.b.` of a class of `a.b.c`) communicates, as that of this framework does.
    """
    install_world(_asked_by_model, _refuse_group)
    on_checkpointing(_resumed)
    homes = {type(strategy).__module__ for strategy in strategies}
    packages = {f"{home.rpartition('.')[0] or home}." for home in homes}
    for module in model.modules():
        module.__dict__[_MARK] = (*_FRAMEWORK, *packages)


def in_model() -> bool:
    """Whether this is called inside of a parallel model's forward, or the backward of a Function applied there."""
    return has_group() and bool(_mark(sys._getframe(1), direct=False))


def mark_function(result: Any) -> None:
    """Let the backward of an ``autograd.Function`` with this result see one device, if it was applied in a model."""
    if has_group() and (mark := _mark(sys._getframe(1), direct=False)):
        for tensor in leaves(result, torch.Tensor):
            if isinstance(tensor.grad_fn, BackwardCFunction):
                setattr(tensor.grad_fn, _MARK, mark)


def collective_of(op: Any, args: Any) -> str:
    """The name of a collective over a group of its own among operations and their packets; empty for all others."""
    if getattr(op, "__module__", None) not in ("torch._ops.c10d", "torch._ops._c10d_functional"):
        return ""
    alone = any(isinstance(argument, str) and argument == ONE_DEVICE for argument in args)
    name = str(op.__name__).partition(".")[0].strip("_")
    return "" if alone or name in ("wait_tensor", "wrap_tensor_autograd") else name


def _resumed(function: Callable[..., Any]) -> Callable[..., Any]:
    return partial(on_one_device, function) if in_model() else function


_DECIDES = (on_one_device.__code__, MODULE_CALL, BackwardCFunction.apply.__code__, ENGINE)
_HERE, _MODULE, _BACKWARD, _ENGINE = _DECIDES


def _entry(frame: FrameType | None) -> tuple[FrameType | None, FrameType | None]:
    """The function of torch.distributed that runs at this frame, if it uses process groups, and its caller."""
    entry = None
    while frame is not None and (module := _module_of(frame)).startswith("torch.distributed"):
        if module in _COLLECTIVES:
            entry = frame
        elif module != _LOGGER:
            # meshes and DTensors
            return None, frame
        frame = frame.f_back
    return entry, frame


def _module_of(frame: FrameType) -> str:
    # `exec` with globals of the caller: no name
    return str(frame.f_globals.get("__name__") or "")


def _asked_by_model() -> bool:
    """Whether a function of torch.distributed that uses the default group was called by code of a model."""
    # this function, and what asks it
    entry, frame = _entry(sys._getframe(2))
    if entry is None:
        return False
    group = entry.f_locals.get("group")
    if (isinstance(group, dist.ProcessGroup) and not isinstance(group, OneRank)) or not _mark(
        frame, direct=True
    ):
        return False
    if entry.f_code.co_name in _OF_GROUPS:
        raise UnsupportedError(
            f"torch.distributed.{entry.f_code.co_name} is called inside of a parallel model, where its ranks count as one "
            "device; make and destroy process groups outside of forward"
        )
    return True


def _refuse_group(group: Any) -> None:
    """Raise UnsupportedError if the code of a parallel model exchanges over this group, which it keeps.

    Questions (`get_rank(group)`) are answered. While a model is recorded, the recorder refuses, which names the module.
    """
    if group is not dist.GroupMember.NON_GROUP_MEMBER and (
        not isinstance(group, dist.ProcessGroup) or group.size() == 1
    ):
        return
    entry, frame = _entry(sys._getframe(2))
    if entry is None or entry.f_code.co_name.startswith("get_"):
        return
    if _mark(frame, direct=True, here=()):
        raise UnsupportedError(OF_A_GROUP.format("the model", entry.f_code.co_name))


def _mark(frame: FrameType | None, direct: bool, here: tuple[str, ...] = _FRAMEWORK) -> tuple[str, ...]:
    """The mark of what a call at this frame is made inside of; empty outside of models.

    direct: empty also if it is not made by the code of the model, but by the packages of the mark.
    here: the mark of `on_one_device`.
    """
    caller = ""
    while frame is not None:
        code = frame.f_code
        if code in _DECIDES:
            if code is _HERE or code is _ENGINE:
                mark = here if code is _HERE else ()
                break
            owner = frame.f_locals["self"]
            mark = getattr(owner, _MARK, ()) if code is _BACKWARD else owner.__dict__.get(_MARK, ())
            if mark or code is _BACKWARD:
                break
        # a mode of the user that passes the call on
        passed_on = code.co_name in ("__torch_function__", "__torch_dispatch__")
        if direct and not passed_on and not (module := _module_of(frame)).startswith(_BETWEEN):
            if module.startswith(_FRAMEWORK):
                return ()
            caller, direct = f"{module}.", False
        frame = frame.f_back
    else:
        return ()
    return () if caller.startswith(mark) else mark
