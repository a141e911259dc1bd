"""GPUs that are not there: fake tensors of the type cuda with autograd, on a machine without any, and with a torch without CUDA.

Torch's autograd asks the guard and the hooks of a device which stream a tensor is on, and torch without CUDA has neither. A few
lines of C++ give it both, as torch's own `_ensureCUDADeviceGuardSet` does for a torch with CUDA on a machine without GPUs.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensor

_SOURCE = """
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <new>
namespace {
using c10::Device; using c10::DeviceIndex; using c10::DeviceType; using c10::Stream;
const Device here(DeviceType::CUDA, 0);
bool there = false;
struct Hooks : at::CUDAHooksInterface {
  bool isBuilt() const override { return there; }
  bool isAvailable() const override { return there; }
  bool hasCUDA() const override { return there; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  void init() const override {}
  DeviceIndex deviceCount() const override { return 1; }
  DeviceIndex getCurrentDevice() const override { return 0; }
  bool isPinnedPtr(const void*) const override { return false; }
};
struct Guard : c10::impl::NoOpDeviceGuardImpl<DeviceType::CUDA> {
  Device getDevice() const override { return here; }
  Device exchangeDevice(Device) const override { return here; }
  Stream getStream(Device) const noexcept override { return Stream(Stream::DEFAULT, here); }
  Stream getNewStream(Device, int) const override { return Stream(Stream::DEFAULT, here); }
  Stream exchangeStream(Stream) const noexcept override { return Stream(Stream::DEFAULT, here); }
};
}
extern "C" void show_fake_gpu(bool shown) {
  there = shown;
}
extern "C" void install_fake_gpu() {
  static Guard guard;
  c10::impl::device_guard_impl_registry[static_cast<size_t>(DeviceType::CUDA)].store(&guard);
  new (const_cast<at::CUDAHooksInterface*>(&at::detail::getCUDAHooks())) Hooks();
}
"""


def compiler() -> str | None:
    """The C++ compiler of this machine."""
    return shutil.which("c++") or shutil.which("g++")


@contextmanager
def guarded() -> Iterator[None]:
    """Inside, autograd takes fake tensors of cuda. The first time in a process it needs a C++ compiler, for a second."""
    if torch.cuda.is_available():
        yield
        return
    library = _library()
    library.show_fake_gpu(True)
    try:
        yield
    finally:
        library.show_fake_gpu(False)


@cache
def _library() -> Any:
    include = Path(torch.__file__).parent / "include"
    libraries = Path(torch.__file__).parent / "lib"
    with tempfile.TemporaryDirectory() as folder:
        source, built = Path(folder) / "fake_gpu.cpp", Path(folder) / "fake_gpu.so"
        source.write_text(_SOURCE)
        command = [str(compiler()), "-std=c++20", "-O0", "-fPIC", "-shared", f"-I{include}", str(source)]
        command += ["-o", str(built), f"-L{libraries}", "-lc10", "-ltorch_cpu"]
        subprocess.run(command, check=True, capture_output=True, text=True)
        library = ctypes.CDLL(str(built))
    library.show_fake_gpu.argtypes = [ctypes.c_bool]
    library.install_fake_gpu()
    return library


def lift_on_cpu() -> None:
    """In this thread, `torch.tensor(..., device="cuda")` copies a tensor of the CPU, which a dispatch mode sees."""
    torch._C._set_only_lift_cpu_tensors(True)


@contextmanager
def pretended_module(synchronize: Callable[..., None], stream: torch.Generator) -> Iterator[None]:
    """Inside, `torch.cuda` says that there is one GPU, and starts nothing.

    `synchronize`: in place of its own. `stream`: the GPU's default generator.
    """
    answers: dict[str, Any] = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "_initialized": True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "set_device": lambda device: None,
        "device": lambda index: nullcontext(),
        "synchronize": synchronize,
        "_lazy_init": lambda: None,
        "default_generators": (stream,),
        "get_rng_state": lambda device="cuda": stream.get_state(),
        "set_rng_state": lambda state, device="cuda": stream.set_state(state),
        "get_device_capability": lambda device=None: (9, 0),
        "is_current_stream_capturing": lambda: False,
        "is_bf16_supported": lambda including_emulation=True: True,
    }
    before = torch._C._only_lift_cpu_tensors()
    lift_on_cpu()
    try:
        # one copy, as of a tensor with values; fake tensors read each number
        one_copy = mock.patch.object(FakeTensor, "tolist", lambda tensor: tensor.to("cpu").tolist())
        with mock.patch.multiple(torch.cuda, **answers), one_copy:
            yield
    finally:
        torch._C._set_only_lift_cpu_tensors(before)
