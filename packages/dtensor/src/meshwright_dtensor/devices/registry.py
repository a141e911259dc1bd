"""The record of a type of device, by name: those of plugins, ours among them, and torch's own answers for any other type."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch

from meshwright_dtensor._torch import accelerators
from meshwright_dtensor.devices.device import Device
from meshwright_dtensor.errors import PluginError
from meshwright_dtensor.plugins import DeviceSpec, PluginHost, discover

_OURS = ("cpu", "cuda")


@cache
def _records() -> dict[str, Device]:
    """Type -> its record, as far as they were asked for: the plugins of a process do not change."""
    return {}


@cache
def _host() -> PluginHost:
    return discover()


def device_of(device: torch.device | str) -> Device:
    """The record of a device, or of a type of devices.

    Raises PluginError: plugins have an error, or the one that has the CPU and cuda is turned off.
    """
    kind = device if isinstance(device, str) else device.type
    records = _records()
    record = records.get(kind)
    if record is None:
        record = records[kind] = _made(kind)
    return record


def _made(kind: str) -> Device:
    host = _host()
    if kind not in _OURS and kind not in host.devices():
        return Device(kind)
    registered = host.get(DeviceSpec, kind)
    target = registered.load()
    record = target() if isinstance(target, type) else target
    if not isinstance(record, Device) or record.name != kind:
        raise PluginError(
            f"device {kind!r} of {registered.distribution} has target {registered.record.target!r}, which is no "
            f"meshwright_dtensor.devices.Device whose name is {kind!r}; derive from it and set name = {kind!r}"
        )
    return record


def is_known(kind: str) -> bool:
    """Whether torch or a plugin has a type of device of this name."""
    return kind in _records() or kind in _host().devices() or accelerators.is_type(kind)


def on_host(device: torch.device | str) -> bool:
    """Whether tensors of the device are in the memory of the process."""
    return device_of(device).on_host


def unnamed_device() -> torch.device:
    """The device on which torch makes tensors that name none, now: `torch.set_default_device` and `with device` change it."""
    return torch.get_default_device()


@cache
def moves(method: str) -> bool:
    """Whether the method of a tensor with this name moves it: `to`, or one for a type of device, such as `cpu` or `cuda`."""
    return method == "to" or accelerators.is_type(method)


def default_device() -> Device:
    """The accelerator of this process where there is one, else the CPU.

    A plugin's device that torch does not show as an accelerator has to be named.
    """
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return device_of("cpu" if accelerator is None else accelerator.type)


def types_here() -> list[str]:
    """The types of devices that this process can use, the CPU first."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    kinds = [*_OURS, *_host().devices(), *([] if accelerator is None else [accelerator.type])]
    return [kind for kind in dict.fromkeys(kinds) if device_of(kind).available()]


def autocast_types() -> tuple[str, ...]:
    """The types for which this thread casts (`torch.autocast`), in a fixed order."""
    kinds = dict.fromkeys((*_OURS, *_records()))
    return tuple(kind for kind in kinds if _casts(kind))


def _casts(kind: str) -> bool:
    try:
        return torch.is_autocast_enabled(kind)
    except RuntimeError:
        # torch knows no autocast for the type
        return False


@contextmanager
def replaced(record: Device) -> Iterator[None]:
    """Inside, this is the record of its type: for tests of what a machine does not have."""
    records = _records()
    before = records.get(record.name)
    records[record.name] = record
    try:
        yield
    finally:
        del records[record.name]
        if before is not None:
            records[record.name] = before
