"""The device "shadow": torch's private backend, renamed, over the memory of the CPU, without any C++. For tests.

A tensor gets there as DLPack hands tensors over: the same memory, called another device. Every operation runs on the CPU's view of
its arguments, by one fallback for the whole dispatch key. Collectives are gloo's, on the same memory.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from functools import cache, partial
from typing import Any

import torch
import torch.distributed as dist
from torch.utils import _pytree as pytree
from torch.utils import backend_registration

from meshwright_dtensor.devices import Device

NAME, BACKEND = "shadow", "shadow_gloo"
ENABLED = "MESHWRIGHT_SHADOW_DEVICES"
"""The variable that says how many there are on this host: without it there is none, and torch is left as it is."""
_DLPACK_CPU, _DLPACK_OTHER = 1, 12


class _Handed(ctypes.Structure):
    """The beginning of DLPack's DLManagedTensor."""

    _fields_ = (("data", ctypes.c_void_p), ("device_type", ctypes.c_int32), ("device_id", ctypes.c_int32))


def _called(x: torch.Tensor, kind: int) -> torch.Tensor:
    """The memory of a tensor under the name of another device."""
    pointer: Any = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.restype, pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    capsule = torch._C._to_dlpack(x.detach())  # type: ignore[attr-defined]
    handed = _Handed.from_address(pointer(capsule, b"dltensor"))
    handed.device_type, handed.device_id = kind, 0
    result: torch.Tensor = torch._C._from_dlpack(capsule)  # type: ignore[attr-defined]
    return result


def on_cpu(x: torch.Tensor) -> torch.Tensor:
    """The CPU's view of a tensor."""
    return _called(x, _DLPACK_CPU) if x.device.type == NAME else x


def as_shadow(x: torch.Tensor) -> torch.Tensor:
    """The view of the device of a tensor of the CPU."""
    return _called(x, _DLPACK_OTHER) if x.device.type == "cpu" else x


def _fallback(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Run any operation on the CPU; a tensor that is written to is the caller's own tensor."""
    originals: dict[int, torch.Tensor] = {}
    views: list[torch.Tensor] = []

    def here(x: Any) -> Any:
        if isinstance(x, torch.device):
            return torch.device("cpu") if x.type == NAME else x
        if not isinstance(x, torch.Tensor):
            return x
        view = on_cpu(x)
        originals[id(view)] = x
        views.append(view)
        return view

    def there(x: Any) -> Any:
        if not isinstance(x, torch.Tensor):
            return x
        return originals[id(x)] if id(x) in originals else as_shadow(x)

    args, kwargs = pytree.tree_map(here, (args, kwargs))
    return pytree.tree_map(there, op(*args, **kwargs))


def _copy_from(source: torch.Tensor, target: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    on_cpu(target).copy_(on_cpu(source))
    return target


def _to_copy(source: torch.Tensor, **options: Any) -> torch.Tensor:
    target = options.pop("device", None) or source.device
    options.pop("non_blocking", None)
    copied = torch.ops.aten._to_copy(on_cpu(source), device="cpu", **options)
    return copied if target.type == "cpu" else as_shadow(copied)


class _Module(backend_registration._DummyBackendModule):
    """`torch.shadow`: what torch and DeviceMesh ask a device for."""

    def device_count(self) -> int:
        return int(os.environ.get(ENABLED, "0"))

    def set_device(self, device: Any) -> None:
        pass

    def synchronize(self, device: Any = None) -> None:
        pass

    def device(self, device: Any) -> AbstractContextManager[None]:
        return nullcontext()

    # operations draw from the CPU's generator
    def get_rng_state(self, device: Any = None) -> torch.Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, state: torch.Tensor, device: Any = None) -> None:
        torch.set_rng_state(state)


class ShadowGroup(dist.ProcessGroup):
    """Gloo, on the CPU's views."""

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self.inner: Any = dist.ProcessGroup(store, rank, size)
        gloo = dist.ProcessGroupGloo(store, rank, size, timeout)  # type: ignore[attr-defined]
        kind = dist.ProcessGroup.BackendType.GLOO
        self.inner._register_backend(torch.device("cpu"), kind, gloo)
        self.inner._set_default_backend(kind)
        self.inner._set_group_name("shadow")

        self._description = "undefined"

    def getBackendName(self) -> str:
        return BACKEND

    # torch keeps these in its own backends, of which a group in Python has none
    @property
    def group_name(self) -> str:
        return str(dist.distributed_c10d._world.pg_names[self])

    @property
    def group_desc(self) -> str:
        return self._description

    def _set_group_desc(self, description: str) -> None:
        self._description = description


_COLLECTIVES = (
    "allgather allgather_coalesced allgather_into_tensor_coalesced all_gather_single all_gather_single_coalesced allreduce "
    "allreduce_coalesced alltoall alltoall_base all_to_all_single barrier broadcast gather reduce reduce_scatter "
    "reduce_scatter_single reduce_scatter_single_coalesced reduce_scatter_tensor_coalesced scatter send recv _allgather_base "
    "_reduce_scatter_base"
).split()


def _forward(name: str) -> Any:
    def collective(self: ShadowGroup, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = pytree.tree_map_only(torch.Tensor, on_cpu, (args, kwargs))
        work = getattr(self.inner, name)(*args, **kwargs)
        if name not in ("send", "recv"):
            # torch finds what a tensor waits for by its storage, and a view of it has one of its own here
            work.wait()
        return work

    return collective


def _composites() -> Iterator[Any]:
    """The operations that torch puts together of others on any device, and that return new tensors."""
    for name in torch._C._dispatch_get_all_op_names():
        if not name.startswith("aten::") or name in ("aten::_to_copy", "aten::_fused_sdp_choice"):
            continue
        if not torch._C._dispatch_has_kernel_for_dispatch_key(name, "CompositeExplicitAutograd"):
            continue
        packet, _, overload = name.removeprefix("aten::").partition(".")
        operation = getattr(getattr(torch.ops.aten, packet), overload or "default")
        if not any(value.alias_info for value in (*operation._schema.arguments, *operation._schema.returns)):
            yield operation


@cache
def install() -> Any:
    """Make the device known to torch, in this process, once. The registrations live as long as the result."""
    backend_registration._setup_privateuseone_for_python_backend(NAME, _Module())
    library = torch.library.Library("_", "IMPL")
    library.fallback(_fallback, "PrivateUse1")
    aten = torch.library.Library("aten", "IMPL")
    aten.impl("_copy_from", _copy_from, "PrivateUse1")
    aten.impl("_to_copy", _to_copy, "PrivateUse1")
    # attention by plain products
    aten.impl("_fused_sdp_choice", lambda *args, **kwargs: 0, "PrivateUse1")
    # torch writes the results of these into an empty tensor that it resizes, which this memory cannot
    for overload in _composites():
        aten.impl(overload.name(), partial(_fallback, overload), "PrivateUse1")
    for name in _COLLECTIVES:
        setattr(ShadowGroup, name, _forward(name))
    dist.Backend.register_backend(BACKEND, ShadowGroup, devices=[NAME, "cpu"])
    return library, aten


class Shadow(Device):
    """The record: what differs from torch's own answers."""

    name = NAME

    def available(self) -> bool:
        """Where the variable says so."""
        if int(os.environ.get(ENABLED, "0")) < 1:
            return False
        install()
        return True

    def start_backend(self) -> str:
        """One backend for its tensors and those of the CPU."""
        return BACKEND

    def backend(self) -> str | None:
        """Gloo on the CPU's views."""
        return BACKEND

    def matches_tags(self, backend: str | None) -> bool:
        """Gloo does."""
        return True

    def generator(self, device: torch.device) -> torch.Generator:
        """Operations draw from the CPU's."""
        return torch.default_generator

    def pinned(self, nbytes: int, index: int | None) -> torch.Tensor | None:
        """It has no such memory."""
        return None
