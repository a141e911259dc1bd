"""Checks of a type of device."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from meshwright_dtensor.devices import HOST, Device, device_of
from meshwright_dtensor.plugins import Registered
from meshwright_dtensor.testing.conformance.report import Check, NotChecked, Tools, instance, require, told


def device_record(plugin: Registered[Any]) -> Device:
    """The record. NotChecked where no such device is."""
    record: Device = instance(plugin, Device, "meshwright_dtensor.devices")
    # the one that all code uses
    record = device_of(plugin.name)
    if not told(plugin, "available()", "return whether this process can use one", record.available):
        raise NotChecked(f"there is no {plugin.name} device here")
    return record


def check_class(plugin: Registered[Any], tools: Tools) -> None:
    """The target is a Device of that name, which says whether one is here."""
    record: Device = instance(plugin, Device, "meshwright_dtensor.devices")
    there = told(plugin, "available()", "return whether this process can use one", record.available)
    require(isinstance(there, bool), plugin, f"available() returned {there!r}", "return True or False")


def check_tensors(plugin: Registered[Any], tools: Tools) -> None:
    """Tensors are made on the selected device, computed with, and copied back."""
    record = device_record(plugin)
    count = told(plugin, "count()", "return the devices of this host", record.count)
    require(count >= 1, plugin, f"count() is {count!r} where available() is True", "return at least 1")
    device = told(plugin, "select(0)", "use the first device, and return it", record.select, 0)
    fix = "return torch.device(name, index), or torch.device(name) where there is one alone"
    require(device.type == plugin.name, plugin, f"select(0) returned {device!r}", fix)
    x = torch.arange(6.0, device=HOST).reshape(2, 3)
    fix = "let torch compute there, or say in available() that it cannot"
    y = told(plugin, "a product there", fix, lambda: (x.to(device) @ x.to(device).T).to(HOST))
    require(torch.equal(y, x @ x.T), plugin, f"a product of {x.tolist()} there is {y.tolist()}", fix)
    told(plugin, "synchronize()", "wait for all that was launched", record.synchronize, device)


def check_random(plugin: Registered[Any], tools: Tools) -> None:
    """The generator is the one that draws: its state brings the same numbers back."""
    record = device_record(plugin)
    device = record.current()
    fix = (
        "return the generator that operations there draw from, which get_state and set_state save and restore"
    )
    generator = told(plugin, "generator()", fix, record.generator, device)
    state = generator.get_state()
    first = torch.rand(64, device=device).to(HOST)
    moved = not torch.equal(state, generator.get_state())
    require(moved, plugin, "torch.rand there does not advance generator()", fix)
    generator.set_state(state)
    again = torch.rand(64, device=device).to(HOST)
    require(torch.equal(first, again), plugin, "the numbers after set_state() differ from those before", fix)


def check_collectives(plugin: Registered[Any], tools: Tools) -> None:
    """There is a backend of torch.distributed for its tensors, and `start_backend` names it."""
    record = device_record(plugin)
    backend, started = record.backend(), record.start_backend()
    fix = "register a backend (torch.distributed.Backend.register_backend), and return its name"
    backends = {str(name).lower() for name in dist.Backend.backend_list}
    require(
        backend and backend.lower() in backends,
        plugin,
        f"backend() is {backend!r}, which torch does not know",
        fix,
    )
    fix = "return what init_process_group takes, with that backend"
    require(
        str(backend) in started, plugin, f"start_backend() is {started!r} and backend() is {backend!r}", fix
    )


def check_memory(plugin: Registered[Any], tools: Tools) -> None:
    """Pinned memory is bytes of the host, and figures of memory are figures."""
    record, nbytes = device_record(plugin), 4096
    index = record.current().index
    fix = "return uint8 memory of the host with one dim and at least nbytes elements, or None"
    memory = told(plugin, "pinned()", fix, record.pinned, nbytes, index)
    if memory is not None:
        shown = f"pinned({nbytes}, {index}) is {list(memory.shape)} of {memory.dtype} on {memory.device}"
        right = memory.dtype == torch.uint8 and memory.device == HOST and memory.dim() == 1
        require(right and memory.numel() >= nbytes, plugin, shown, fix)
    fix = "return (free, total) in bytes, or None"
    figures = told(plugin, "free_and_total()", fix, record.free_and_total, index or 0)
    right = figures is None or 0 <= figures[0] <= figures[1]
    require(right, plugin, f"free_and_total({index or 0}) is {figures!r}", fix)
    fix = "return the most bytes that tensors have had there, or None"
    peak = told(plugin, "peak_bytes()", fix, record.peak_bytes, record.current())
    require(peak is None or peak >= 0, plugin, f"peak_bytes() is {peak!r}", fix)


CHECKS: tuple[Check, ...] = (check_class, check_tensors, check_random, check_collectives, check_memory)
