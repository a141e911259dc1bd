"""What torch says of a type of devices, under the private names that it gives them."""

from __future__ import annotations

import torch
from torch.utils import _foreach_utils


def is_available(kind: str) -> bool:
    """Whether torch has devices of this type for this process."""
    try:
        module = torch.get_device_module(kind)
    except RuntimeError:
        return False
    return bool(module.is_available()) and int(module.device_count()) > 0


def is_type(kind: str) -> bool:
    """Whether torch knows a type of this name."""
    try:
        return torch.device(kind).type == kind
    except RuntimeError:
        return False


def fuses_dropout(kind: str) -> bool:
    """Whether `dropout` runs `native_dropout` there: is_fused_kernel_acceptable in torch's Dropout.cpp."""
    # tensors of the meta device stand for those of accelerators
    return kind in ("cuda", "xpu", "lazy", "meta", torch._C._get_privateuse1_backend_name())


def has_foreach(kind: str) -> bool:
    """Whether torch's optimizers have kernels for lists of tensors there."""
    return kind in _foreach_utils._get_foreach_kernels_supported_devices()


def has_fused(kind: str) -> bool:
    """Whether torch's optimizers have fused kernels there."""
    return kind in _foreach_utils._get_fused_kernels_supported_devices()
