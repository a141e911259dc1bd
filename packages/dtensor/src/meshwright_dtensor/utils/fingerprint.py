"""A short hash of a model, by which a plan recognises the model that it was made for."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn


def fingerprint(model: nn.Module) -> str:
    """Class name and 16 hex digits over class names, parameter names, shapes and dtypes; not over values."""
    digest = hashlib.sha256()
    for name, module in model.named_modules():
        digest.update(f"{name}:{type(module).__qualname__}\n".encode())
    for name, parameter in model.named_parameters(remove_duplicate=False):
        digest.update(f"{name}:{tuple(parameter.shape)}:{parameter.dtype}\n".encode())
    return f"{type(model).__name__}-{digest.hexdigest()[:16]}"
