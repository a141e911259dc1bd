"""The parts of torch's Muon: the orthogonalisation of a matrix, and its learning rate."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.optim import _muon
from torch.optim.optimizer import _to_scalar

Tensor = torch.Tensor

SENT_DTYPE = torch.bfloat16
"""In which torch orthogonalises: it rounds its input first, so the rounded input gives the same bits."""


def orthogonalize(update: Tensor, group: Mapping[str, Any]) -> Tensor:
    """[m, n] -> its orthogonalised form, in bfloat16, by torch's Newton-Schulz iteration.

    `update` is overwritten if it is bfloat16: torch scales it in place.
    """
    return _muon._zeropower_via_newtonschulz(
        update, group["ns_coefficients"], group["ns_steps"], group["eps"]
    )


def learning_rates(group: Mapping[str, Any], shape: torch.Size) -> tuple[float, float]:
    """The learning rate of a group, and that of its matrices of this shape."""
    lr = _to_scalar(group["lr"])
    return lr, _muon._adjust_lr(lr, group["adjust_lr_fn"], shape)
