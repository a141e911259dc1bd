"""What differs between types of devices. The base class answers for any device that follows torch's interface of accelerators."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from meshwright_dtensor._torch import accelerators
from meshwright_dtensor._torch.attention import AttentionKernels
from meshwright_dtensor.drawing.held import Held
from meshwright_dtensor.drawing.whole import Way, Whole


class Device:
    """A type of device: availability, collectives, random numbers, streams, memory. Plugins derive from it (`DeviceSpec`).

    Each method has an answer that torch's own modules give (`torch.get_device_module`, `torch.distributed`), so a device that
    follows torch's interface needs no method of its own.

    Attributes:
        name: the type, as in `torch.device(name)`.
        on_host: its tensors are in the memory of the process: they are read without a copy, and reading one waits for nothing.
        fused_dropout: `dropout` draws its mask inside of a kernel (`native_dropout`), which uses the random stream in its own way;
            otherwise it draws by `bernoulli_`. None asks torch.
        attention: torch's fused attention with its log-sum-exp; None where blocks of attention are put together by plain products.
    """

    name: str = ""
    on_host: bool = False
    fused_dropout: bool | None = None
    attention: AttentionKernels | None = None

    def __init__(self, name: str | None = None) -> None:
        if name is not None:
            self.name = name
        if self.fused_dropout is None:
            self.fused_dropout = accelerators.fuses_dropout(self.name)

    # ---- which devices there are
    def module(self) -> Any:
        """Torch's module of the type, such as `torch.xpu`."""
        return torch.get_device_module(self.name)

    def available(self) -> bool:
        """Whether this process can use one."""
        return accelerators.is_available(self.name)

    def in_use(self) -> bool:
        """Whether this process has used one: asking it for its random numbers starts nothing then."""
        started = getattr(self.module(), "is_initialized", None)
        return started is None or bool(started())

    def count(self) -> int:
        """Devices of this host."""
        return int(self.module().device_count())

    def current(self) -> torch.device:
        """The device that this process uses."""
        return torch.device(self.name, self.module().current_device())

    def select(self, index: int) -> torch.device:
        """Use this device of the host from now on; returns it."""
        self.module().set_device(index)
        return torch.device(self.name, index)

    def chip(self) -> str:
        """The name of the device's model, as its maker writes it."""
        named = getattr(self.module(), "get_device_name", None)
        return self.name if named is None else str(named())

    def processor(self) -> tuple[int, int] | None:
        """Multiprocessors, and bytes of the cache that they share; None where torch does not say."""
        read = getattr(self.module(), "get_device_properties", None)
        properties = None if read is None else read(0)
        counts = [getattr(properties, name, None) for name in ("multi_processor_count", "L2_cache_size")]
        return None if None in counts else (int(counts[0]), int(counts[1]))  # type: ignore[arg-type]

    # ---- collectives
    def backend(self) -> str | None:
        """The backend of torch.distributed for its tensors; None where there is none."""
        named = dist.Backend.default_device_backend_map.get(self.name)
        return None if named is None else str(named)

    def start_backend(self) -> str:
        """What `init_process_group` is given. Small messages between ranks are of the CPU, and do not wait for the device."""
        return f"cpu:gloo,{self.name}:{self.backend()}"

    def sends(self, backend: str | None) -> bool:
        """Whether this backend sends tensors of the device from one rank to another; gloo does so for the CPU only."""
        return backend != "gloo"

    def matches_tags(self, backend: str | None) -> bool:
        """Whether this backend matches messages by their tags. NCCL and its like match them by their order instead."""
        return backend in ("gloo", "fake")

    # ---- random numbers
    def generator(self, device: torch.device) -> torch.Generator:
        """The generator that random operations on the device draw from."""
        module = self.module()
        index = module.current_device() if device.index is None else device.index
        generator: torch.Generator = module.default_generators[index]
        return generator

    def way(self, whole: Whole, held: Held) -> Way | None:
        """How to draw this rank's part of a tensor, with the numbers of one device and without the whole; None: draw the whole."""
        return None

    def seed_stream(self, generator: torch.Generator, key: Any) -> None:
        """Put the generator at the beginning of the stream that `key` (a hash, `hashlib.shake_128`) stands for."""
        generator.manual_seed(int.from_bytes(key.digest(8), "little"))

    # ---- streams
    def synchronize(self, device: torch.device | None = None) -> None:
        """Wait for all that was launched on the device."""
        self.module().synchronize(device)

    def wait_for_stream(self) -> None:
        """Wait for what this process has launched on its device, in the stream that it uses now."""
        stream = getattr(self.module(), "current_stream", None)
        if stream is None:
            self.synchronize()
        else:
            stream().synchronize()

    # ---- memory
    def peak_bytes(self, device: torch.device) -> int | None:
        """The most bytes that tensors of this process have had there; None where torch does not count them."""
        counted = getattr(self.module(), "max_memory_allocated", None)
        return None if counted is None else int(counted(device))

    def free_and_total(self, index: int) -> tuple[int, int] | None:
        """Bytes of the device that are free, and all of them; None where torch does not say."""
        told = getattr(self.module(), "mem_get_info", None)
        if told is None:
            return None
        free, total = told(index)
        return int(free), int(total)

    def pinned(self, nbytes: int, index: int | None) -> torch.Tensor | None:
        """Host memory that the device copies to without waiting, uint8; None where it has no such memory."""
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu").pin_memory(self.name)

    # ---- optimizers
    @property
    def foreach(self) -> bool:
        """Whether torch's optimizers update lists of tensors there at once by default."""
        return accelerators.has_foreach(self.name)

    @property
    def fused(self) -> bool:
        """Whether torch's optimizers take fused=True there."""
        return accelerators.has_fused(self.name)
