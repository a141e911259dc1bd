"""The loss of a model that the command line runs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from meshwright_dtensor.errors import UsageError

if TYPE_CHECKING:
    import torch


def loss_of(output: Any) -> torch.Tensor:
    """The loss in what a model returned.

    Raises:
        UsageError: there is none, and what somebody at a command line can do about it.
    """
    from meshwright_parallel.verification.verify import find_loss

    value = find_loss(output)
    if value is None:
        raise UsageError(
            f"the model returned a {type(output).__name__} in which no loss was found (a number, its .loss or its 'loss'), and "
            "the command line calls a model as it is; let --model file.py:function return one that computes its loss, such as "
            "a module around yours, and labels in the batch"
        )
    return value
