"""Save, load and reshard checkpoints of any layout.

    handle = save("run/step-100", model=model, optimizer=optimizer, extra={"epoch": 3})     # writes in the background
    extra = load(latest("run"), model=model, optimizer=optimizer)                           # in any other layout

Names are loaded on first use (PEP 562), so that the plugin module imports without torch.
"""

from __future__ import annotations

from importlib import import_module
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from meshwright_checkpoint.convert.export import export as export
    from meshwright_checkpoint.convert.export import export_checkpoint as export_checkpoint
    from meshwright_checkpoint.errors import CheckpointError as CheckpointError
    from meshwright_checkpoint.errors import CorruptError as CorruptError
    from meshwright_checkpoint.errors import MismatchError as MismatchError
    from meshwright_checkpoint.loading import load as load
    from meshwright_checkpoint.saving.background import SaveHandle as SaveHandle
    from meshwright_checkpoint.saving.saving import prepare_save as prepare_save
    from meshwright_checkpoint.saving.saving import save as save
    from meshwright_checkpoint.storage.retention import checkpoints as checkpoints
    from meshwright_checkpoint.storage.retention import latest as latest

# name -> module of this package that defines it
_EXPORTS = MappingProxyType(
    {
        "CheckpointError": "errors",
        "CorruptError": "errors",
        "MismatchError": "errors",
        "SaveHandle": "saving.background",
        "checkpoints": "storage.retention",
        "export": "convert.export",
        "export_checkpoint": "convert.export",
        "latest": "storage.retention",
        "load": "loading",
        "prepare_save": "saving.saving",
        "save": "saving.saving",
    }
)

__all__ = list(_EXPORTS)


def __getattr__(name: str) -> Any:
    module = _EXPORTS.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f".{module}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_EXPORTS})
