"""Apply a plan of parallelism to an unmodified model, train it as on one device, and check that it is the same.

Names are loaded on first use (PEP 562), so that the plugin module imports without torch.
"""

from __future__ import annotations

from importlib import import_module
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from meshwright_parallel.apply import parallelize as parallelize
    from meshwright_parallel.auto import auto_parallelize as auto_parallelize
    from meshwright_parallel.clip import clip_grad_norm_ as clip_grad_norm_
    from meshwright_parallel.clip import get_total_norm as get_total_norm
    from meshwright_parallel.loader import shard_loader as shard_loader
    from meshwright_parallel.modules import distribute_module as distribute_module
    from meshwright_parallel.report import VerificationReport as VerificationReport
    from meshwright_parallel.scaler import GradScaler as GradScaler
    from meshwright_parallel.verification import verify as verify

# name -> module of this package that defines it
_EXPORTS = MappingProxyType(
    {
        "GradScaler": "scaler",
        "VerificationReport": "report",
        "auto_parallelize": "auto",
        "clip_grad_norm_": "clip",
        "distribute_module": "modules",
        "get_total_norm": "clip",
        "parallelize": "apply",
        "shard_loader": "loader",
        "verify": "verification",
    }
)

__all__ = list(_EXPORTS)


def __getattr__(name: str) -> Any:
    module = _EXPORTS.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f".{module}", __name__), name)
    globals()[name] = value  # found directly from now on
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_EXPORTS})
