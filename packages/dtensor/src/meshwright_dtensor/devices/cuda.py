"""GPUs of NVIDIA and AMD, which torch calls cuda: NCCL, Philox streams that are drawn by waves, fused attention."""

from __future__ import annotations

import torch

from meshwright_dtensor._torch.attention import FlashAttention
from meshwright_dtensor.devices.device import Device
from meshwright_dtensor.drawing import gpu
from meshwright_dtensor.drawing.held import Held
from meshwright_dtensor.drawing.whole import Way, Whole


class Cuda(Device):
    """A GPU. Torch built for ROCm calls its devices cuda too."""

    name = "cuda"
    fused_dropout = True
    attention = FlashAttention()

    def available(self) -> bool:
        """Whether torch sees a GPU."""
        return torch.cuda.is_available()

    def way(self, whole: Whole, held: Held) -> Way | None:
        """The waves of the stream in which the rank has elements, or single numbers; nothing while a graph is captured."""
        # the offset of the stream is not known during a capture
        return None if torch.cuda.is_current_stream_capturing() else gpu.chosen(whole, held)

    def wait_for_stream(self) -> None:
        """Nothing is waited for while a graph is captured."""
        if not torch.cuda.is_current_stream_capturing():
            super().wait_for_stream()

    def pinned(self, nbytes: int, index: int | None) -> torch.Tensor | None:
        """Memory that the driver has locked for this GPU."""
        with torch.cuda.device(index):
            return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)
