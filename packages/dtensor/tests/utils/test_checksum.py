"""Checksums of tensors tell any one flipped bit, in every dtype."""

from __future__ import annotations

import pytest
import torch

from meshwright_dtensor.utils.checksum import checksum

COUNT, PLACE = 5000, 4800


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.complex64]
)
def test_every_bit_counts(dtype: torch.dtype) -> None:
    value = torch.ones(COUNT).to(dtype)
    whole, size = checksum(value), value.element_size()
    for bit in range(8 * size):
        other = value.clone()
        words = other.view(torch.float32) if dtype.is_complex else other
        words.view(torch.uint8)[PLACE * size + bit // 8] ^= 1 << bit % 8
        assert checksum(other) != whole, bit
