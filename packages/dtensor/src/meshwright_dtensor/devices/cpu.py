"""The CPU: tensors in the memory of the process, gloo, and streams of random numbers that are drawn in pieces."""

from __future__ import annotations

from typing import Any

import torch

from meshwright_dtensor._torch.attention import CpuAttention
from meshwright_dtensor.devices.device import Device
from meshwright_dtensor.drawing import cpu
from meshwright_dtensor.drawing.held import Held
from meshwright_dtensor.drawing.shard_streams import state_of_words
from meshwright_dtensor.drawing.whole import Way, Whole


class Cpu(Device):
    """The CPU. It is one device, whatever its cores."""

    name = "cpu"
    on_host = True
    fused_dropout = False
    attention = CpuAttention()

    def available(self) -> bool:
        """There always is one."""
        return True

    def in_use(self) -> bool:
        """Always."""
        return True

    def count(self) -> int:
        """One."""
        return 1

    def current(self) -> torch.device:
        """The CPU, without an index."""
        return torch.device("cpu")

    def select(self, index: int) -> torch.device:
        """Every rank of a host is on the same CPU."""
        return torch.device("cpu")

    def chip(self) -> str:
        """Its type."""
        return "cpu"

    def start_backend(self) -> str:
        """Gloo alone where no accelerator is: with one, "gloo" would take the accelerator's tensors too."""
        return "cpu:gloo" if torch.accelerator.is_available() else "gloo"

    def sends(self, backend: str | None) -> bool:
        """Every backend for the CPU does."""
        return True

    def matches_tags(self, backend: str | None) -> bool:
        """Gloo and MPI do."""
        return True

    def generator(self, device: torch.device) -> torch.Generator:
        """Torch's default one."""
        return torch.default_generator

    def way(self, whole: Whole, held: Held) -> Way | None:
        """In pieces, of which the rank's part is kept."""
        return cpu.chosen(whole)

    def seed_stream(self, generator: torch.Generator, key: Any) -> None:
        """All words of its state are those of the hash."""
        generator.set_state(state_of_words(generator.get_state(), key))

    def synchronize(self, device: torch.device | None = None) -> None:
        """An operation has ended when its call returns."""

    def wait_for_stream(self) -> None:
        """As `synchronize`."""

    def peak_bytes(self, device: torch.device) -> int | None:
        """Torch does not count them."""
        return None

    def free_and_total(self, index: int) -> tuple[int, int] | None:
        """The system counts them."""
        return None

    def pinned(self, nbytes: int, index: int | None) -> torch.Tensor | None:
        """Nothing is copied."""
        return None
