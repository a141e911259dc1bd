"""The records of this distribution: the CPU and cuda. Imports without torch."""

from __future__ import annotations

from collections.abc import Iterator

from meshwright_dtensor.plugins import DeviceSpec, hookimpl

meshwright_hook_api = "1.1"


@hookimpl
def meshwright_devices() -> Iterator[DeviceSpec]:
    """The types of devices that meshwright was written for."""
    yield DeviceSpec(
        name="cpu",
        target="meshwright_dtensor.devices.cpu:Cpu",
        summary="the processor of this host, over gloo",
    )
    yield DeviceSpec(
        name="cuda",
        target="meshwright_dtensor.devices.cuda:Cuda",
        summary="GPUs of NVIDIA and AMD, over NCCL and RCCL",
    )
