"""Numbers of the batch, which microbatches divide by."""

from __future__ import annotations

import pytest
import torch

from meshwright_pipeline.trace.loss_denominators import MicrobatchNumbers, sum_denominators

PLACE = (("sum", "model.py", 7), 0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int64])
def test_numbers_are_rounded_once(dtype: torch.dtype) -> None:
    part = MicrobatchNumbers((torch.tensor(700, dtype=dtype),), {PLACE: (torch.tensor(700, dtype=dtype), 1)})
    numbers = sum_denominators([part] * 128, 1, [PLACE])
    assert numbers.counts == (700.0,)
    assert numbers.sums[PLACE].dtype == dtype and float(numbers.sums[PLACE]) == 128 * 700
    # added one after the other in half precision, they are not
    total = torch.zeros((), dtype=dtype)
    for _ in range(128):
        total = total + part.counts[0]
    assert (float(total) == 128 * 700) == (dtype != torch.bfloat16)
