"""Tests on any type of device: its meshes, generators and random states, and tensors between processes.

A test makes tensors without naming a device, which puts them on torch's default device. `use` sets that, for the tests of a
session (`--device`) and on the ranks of `RankPool(device=...)`.
"""

from __future__ import annotations

import io
import pickle
from typing import Any

import torch
import torch.distributed as dist

from meshwright_dtensor.devices import HOST, device_of, is_known, types_here
from meshwright_dtensor.errors import UsageError
from meshwright_dtensor.utils.names import listing


def use(kind: str, rank: int = 0) -> None:
    """Make new tensors of this process on a device of this type from now on; `rank` of its host says which one.

    Raises UsageError: the type is unknown, or there is no such device here.
    """
    if kind == HOST.type:
        torch.set_default_device(None)
        return
    if not is_known(kind) or not device_of(kind).available():
        raise UsageError(
            f"device {kind!r}: there is none here; use one of those here, {listing(types_here())}, or install its plugin"
        )
    record = device_of(kind)
    record.select(rank % record.count())
    torch.set_default_device(kind)


def device_type() -> str:
    """The type of device on which tests make tensors, "cpu" unless `use` has set another."""
    return torch.get_default_device().type


def backend_for(kind: str) -> str:
    """The backend of torch.distributed for ranks that share a device: gloo where it takes the type's tensors.

    NCCL refuses two ranks of one host on one GPU.
    """
    gloo = dist.Backend.backend_capability["gloo"]
    return "gloo" if kind in gloo else device_of(kind).start_backend()


def fake_backend_for(kind: str) -> str:
    """The backend whose collectives do nothing, for tensors of the CPU and of this type of device."""
    return "fake" if kind in dist.Backend.backend_capability["fake"] else f"cpu:fake,{kind}:fake"


def seeded(seed: int) -> torch.Generator:
    """A new generator for tensors that are drawn on the device of the tests."""
    here = torch.get_default_device()
    # a device may draw from the generators of another type
    return torch.Generator(device_of(here).generator(here).device).manual_seed(seed)


def random_state() -> torch.Tensor:
    """The state of the generator from which the device of the tests draws by default."""
    here = torch.get_default_device()
    return device_of(here).generator(here).get_state()


def set_random_state(state: torch.Tensor) -> None:
    """Set what `random_state` returns."""
    here = torch.get_default_device()
    device_of(here).generator(here).set_state(state)


class _Pickler(pickle.Pickler):
    """Tensors by value, also those of devices whose memory torch cannot write to a file."""

    def reducer_override(self, obj: Any) -> Any:
        if type(obj) not in (torch.Tensor, torch.nn.Parameter) or obj.device.type in ("cpu", "meta"):
            return NotImplemented
        kept = type(obj) is torch.nn.Parameter, obj.requires_grad
        return _placed, (obj.detach().cpu(), obj.device.type, *kept)


def _placed(value: torch.Tensor, kind: str, parameter: bool, requires_grad: bool) -> torch.Tensor:
    there = value.to(kind)
    return torch.nn.Parameter(there, requires_grad) if parameter else there.requires_grad_(requires_grad)


def pickled(obj: Any) -> bytes:
    """`obj` for another process, in which its tensors are on the same types of device."""
    stream = io.BytesIO()
    _Pickler(stream).dump(obj)
    return stream.getvalue()
