"""Torch's random kernels on GPUs in plain Python, element by element, with a generator that only counts."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

BLOCK = 256
Words = tuple[int, int, int, int]


def philox(counter: Words, key: tuple[int, int]) -> Words:
    """Philox4x32-10, as published."""
    c, k = list(counter), list(key)
    for _ in range(10):
        high0, low0 = divmod(0xD2511F53 * c[0], 1 << 32)
        high1, low1 = divmod(0xCD9E8D57 * c[2], 1 << 32)
        c = [high1 ^ c[1] ^ k[0], low1, high0 ^ c[3] ^ k[1], low0]
        k = [(k[0] + 0x9E3779B9) % (1 << 32), (k[1] + 0xBB67AE85) % (1 << 32)]
    return c[0], c[1], c[2], c[3]


class Stream:
    """A generator of a GPU, as far as ways to draw use it."""

    def __init__(self, seed: int, offset: int = 0) -> None:
        self.seed, self.offset = seed, offset

    def initial_seed(self) -> int:
        return self.seed

    def get_offset(self) -> int:
        return self.offset

    def set_offset(self, offset: int) -> None:
        self.offset = offset

    def get_state(self) -> torch.Tensor:
        return torch.tensor([self.seed, self.offset])

    def set_state(self, state: torch.Tensor) -> None:
        self.seed, self.offset = state.tolist()


Curand = Callable[[Words], list[np.generic]]


def uniform4(four: Words) -> list[np.generic]:
    """curand_uniform4: four float32."""
    return [np.float32(np.float32(w) * np.float32(2**-32)) + np.float32(2**-33) for w in four]


def uniform2(four: Words) -> list[np.generic]:
    """curand_uniform2_double: two float64."""
    pairs = ((four[0], four[1]), (four[2], four[3]))
    return [np.float64((x ^ (y << 21)) * 2.0**-53) + 2.0**-54 for x, y in pairs]


class Kernels:
    """The kernels of a device that runs `threads` at most. `drawn` counts elements that they have drawn."""

    def __init__(self, stream: Stream, threads: int, most_bytes: int = 2**31 - 1) -> None:
        self.stream, self.threads, self.most_bytes, self.drawn = stream, threads, most_bytes, 0

    def fill(
        self, tensor: torch.Tensor, curand: Curand, transform: Callable[[np.generic], object]
    ) -> torch.Tensor:
        """distribution_nullary_kernel, over the elements in the order of memory."""
        order = sorted(range(tensor.dim()), key=lambda d: -tensor.stride(d))
        memory = tensor.permute(order)
        values: list[object] = []
        stride = tensor.element_size() * (memory.stride(-1) if tensor.dim() else 1)
        self._kernel(memory.numel(), stride, curand, transform, values)
        memory.copy_(torch.tensor(values, dtype=tensor.dtype).view(memory.shape))
        return tensor

    def _kernel(
        self,
        numel: int,
        stride: int,
        curand: Curand,
        transform: Callable[[np.generic], object],
        values: list[object],
    ) -> None:
        unroll = len(curand((0, 0, 0, 0)))
        threads = min(self.threads, -(-numel // BLOCK) * BLOCK)
        offset = self.stream.offset
        self.stream.offset += ((numel - 1) // (threads * unroll) + 1) * 4
        if 1 + (numel - 1) * stride > self.most_bytes:
            # of a tensor that is too large, an iterator gives the parts that are not
            parts = [numel]
            while any(1 + (part - 1) * stride > self.most_bytes for part in parts):
                parts = [
                    half
                    for part in parts
                    for half in (
                        (part // 2, part - part // 2)
                        if 1 + (part - 1) * stride > self.most_bytes
                        else (part,)
                    )
                ]
            for part in parts:
                self._kernel(part, stride, curand, transform, values)
            return
        self.drawn += numel
        out: list[object] = [None] * numel
        key = self.stream.seed % (1 << 32), self.stream.seed >> 32
        for thread in range(threads):
            for call, start in enumerate(range(thread, numel, threads * unroll)):
                at = offset // 4 + call
                rand = curand(philox((at % (1 << 32), at >> 32, thread, 0), key))
                for ii in range(unroll):
                    if start + threads * ii < numel:
                        out[start + threads * ii] = transform(rand[ii])
        values += out

    def fused_dropout(self, tensor: torch.Tensor, p: float) -> torch.Tensor:
        """What native_dropout makes of ones: its kernels with and without vectors."""
        numel, dtype = tensor.numel(), tensor.dtype
        real = np.float64 if dtype == torch.float64 else np.float32
        kept = real(1.0 - p)
        scale = torch.tensor(float(real(1.0 / float(kept))), dtype=dtype).item()
        vector = 16 // tensor.element_size()
        while numel % vector:
            vector //= 2
        threads = min(self.threads, -(-numel // BLOCK) * BLOCK)
        offset, self.stream.offset = (
            self.stream.offset,
            self.stream.offset + ((numel - 1) // (threads * 4) + 1) * 4,
        )
        key = self.stream.seed % (1 << 32), self.stream.seed >> 32
        flat = [0.0] * numel
        self.drawn += numel
        for thread in range(threads):
            call = offset // 4
            if vector == 1:
                for start in range(thread, numel, threads * 4):
                    rand = uniform4(philox((call, 0, thread, 0), key))
                    call += 1
                    for ii in range(4):
                        if start + threads * ii < numel:
                            flat[start + threads * ii] = scale * float(real(rand[ii]) < kept)
                continue
            for start in range(thread * vector, numel, threads * vector):
                rand = []
                for _ in range((vector + 3) // 4):
                    rand += uniform4(philox((call, 0, thread, 0), key))
                    call += 1
                for ii in range(vector):
                    flat[start + ii] = scale * float(real(rand[ii]) < kept)
        order = sorted(range(tensor.dim()), key=lambda d: -tensor.stride(d))
        memory = tensor.permute(order)
        memory.copy_(torch.tensor(flat, dtype=torch.float64).view(memory.shape))
        return tensor
