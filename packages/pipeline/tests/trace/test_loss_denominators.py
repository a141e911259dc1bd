"""Numbers of the batch, which microbatches divide by."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.overrides import BaseTorchFunctionMode

from meshwright_dtensor.errors import UnsupportedError
from meshwright_pipeline._torch import function_mode
from meshwright_pipeline.trace.loss_denominators import (
    BatchDenominatorMode,
    DenominatorCounter,
    Denominators,
    MicrobatchNumbers,
    sum_denominators,
)

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


def test_mode_is_on_from_the_unit_before_the_first_loss() -> None:
    x, y = torch.randn(4, 3, generator=torch.Generator().manual_seed(0)), torch.tensor([0, 1, -100, 2])
    with DenominatorCounter(()) as counter:
        counter.unit()
        F.cross_entropy(x, y)
        counter.unit()
    assert counter.after == 1 and [int(count) for count in counter.counts] == [3]
    numbers = Denominators((2.0,), {}, after=counter.after)
    with BatchDenominatorMode(numbers) as mode:
        assert function_mode() is not mode
        mode.unit_ended()
        assert function_mode() is mode
        loss = F.cross_entropy(x, y)
    assert function_mode() is None
    torch.testing.assert_close(loss, F.cross_entropy(x, y, reduction="sum") / 2)
    # a loss that comes earlier than counted would be divided by the number of its microbatch
    with pytest.raises(UnsupportedError, match="other operations"), BatchDenominatorMode(numbers) as mode:
        F.cross_entropy(x, y)
        mode.unit_ended()


def test_mode_is_not_turned_on_inside_of_one_of_the_model() -> None:
    """It would end with that one: losses after it are then counted from the first function on."""
    x, y = torch.zeros(2, 3), torch.tensor([0, 1])
    with DenominatorCounter(()) as counter:
        with BaseTorchFunctionMode():
            counter.unit()
        F.cross_entropy(x, y)
    assert counter.after == 0
    with pytest.raises(UnsupportedError), BatchDenominatorMode(Denominators((2.0,), {}, after=1)) as mode:
        with BaseTorchFunctionMode():
            mode.unit_ended()
