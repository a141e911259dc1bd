"""torch.distributed as the code of a parallel model sees it: one device.

A value of a parallel model is that of the whole batch, so what the model's own code would exchange is there already.
Inside of its forward, and of the backward of an autograd.Function that was applied there, the default process group has
one rank, whose collectives copy. Who asks is read off the call stack: one thread runs the code of the model, of its user
and of this framework in turns. A call that names another group communicates.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from types import FrameType
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.function import BackwardCFunction

from meshwright_dtensor._torch.core import ENGINE, on_checkpointing
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
    install_world(_asked_by_model)
    return function(*args, **kwargs)


def show_one_device(model: nn.Module) -> None:
    """Let all modules of a parallel model see one device in their forward."""
    install_world(_asked_by_model)
    on_checkpointing(_resumed)
    for module in model.modules():
        module.__dict__[_MARK] = True


def in_model() -> bool:
    """Whether this is called inside of a parallel model's forward, or the backward of a Function applied there."""
    return has_group() and _in_model(sys._getframe(1), direct=False)


def mark_function(result: Any) -> None:
    """Let the backward of an ``autograd.Function`` with this result see one device, if it was applied in a model."""
    if in_model():
        for tensor in leaves(result, torch.Tensor):
            if isinstance(tensor.grad_fn, BackwardCFunction):
                setattr(tensor.grad_fn, _MARK, True)


def collective_of(op: Any, args: Any) -> str:
    """The name of a collective over a group of its own among operations; empty for all others."""
    alone = any(isinstance(argument, str) and argument == ONE_DEVICE for argument in args)
    if alone or op.namespace not in ("c10d", "_c10d_functional") or "wait_tensor" in op.name():
        return ""
    return str(op.overloadpacket.__name__).strip("_")


def _resumed(function: Callable[..., Any]) -> Callable[..., Any]:
    return partial(on_one_device, function) if in_model() else function


_DECIDES = (on_one_device.__code__, nn.Module._call_impl.__code__, BackwardCFunction.apply.__code__, ENGINE)
_HERE, _MODULE, _BACKWARD, _ENGINE = _DECIDES


def _asked_by_model() -> bool:
    """Whether a function of torch.distributed that uses the default group was called by code of a model."""
    # this function, and what asks it
    frame: FrameType | None = sys._getframe(2)
    entry = None
    while frame is not None and (module := frame.f_globals["__name__"]).startswith("torch.distributed"):
        if module in _COLLECTIVES:
            entry = frame
        elif module != _LOGGER:
            # meshes and DTensors
            return False
        frame = frame.f_back
    if entry is None or frame is None:
        return False
    group = entry.f_locals.get("group")
    if (isinstance(group, dist.ProcessGroup) and not isinstance(group, OneRank)) or not _in_model(
        frame, direct=True
    ):
        return False
    if entry.f_code.co_name in _OF_GROUPS:
        raise UnsupportedError(
            f"torch.distributed.{entry.f_code.co_name} is called inside of a parallel model, where its ranks count as one "
            "device; make and destroy process groups outside of forward"
        )
    return True


def _in_model(frame: FrameType | None, direct: bool) -> bool:
    """Whether a call at this frame is made inside of a model; `direct`: by its code, not by this framework."""
    while frame is not None:
        code = frame.f_code
        if code in _DECIDES:
            if code is _HERE or code is _ENGINE:
                return code is _HERE
            owner = frame.f_locals["self"]
            if code is _BACKWARD:
                return hasattr(owner, _MARK)
            if _MARK in owner.__dict__:
                return True
        if direct and not (module := frame.f_globals["__name__"]).startswith(_BETWEEN):
            if module.startswith("meshwright_"):
                return False
            direct = False
        frame = frame.f_back
    return False
