"""Apply a parallel plan to an unmodified model, train it as on one device, and verify the result.

Names are loaded on first use (PEP 562), so that the plugin module imports without torch.
"""

from __future__ import annotations

from importlib import import_module
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from meshwright_parallel.api.auto_parallelize import auto_parallelize as auto_parallelize
    from meshwright_parallel.api.distribute_module import distribute_module as distribute_module
    from meshwright_parallel.api.parallelize import parallelize as parallelize
    from meshwright_parallel.data.loader import shard_loader as shard_loader
    from meshwright_parallel.optim.clip_grad import clip_grad_norm_ as clip_grad_norm_
    from meshwright_parallel.optim.clip_grad import get_total_norm as get_total_norm
    from meshwright_parallel.optim.grad_scaler import GradScaler as GradScaler
    from meshwright_parallel.verification.report import VerificationReport as VerificationReport
    from meshwright_parallel.verification.verify import verify as verify

# name -> module of this package that defines it
_EXPORTS = MappingProxyType(
    {
        "GradScaler": "optim.grad_scaler",
        "VerificationReport": "verification.report",
        "auto_parallelize": "api.auto_parallelize",
        "clip_grad_norm_": "optim.clip_grad",
        "distribute_module": "api.distribute_module",
        "get_total_norm": "optim.clip_grad",
        "parallelize": "api.parallelize",
        "shard_loader": "data.loader",
        "verify": "verification.verify",
    }
)

__all__ = list(_EXPORTS)


def __getattr__(name: str) -> Any:
    module = _EXPORTS.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f".{module}", __name__), name)
    # found directly from now on
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_EXPORTS})
