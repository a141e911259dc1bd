"""Save, load and reshard checkpoints of any layout.

    handle = save("run/step-100", model=model, optimizer=optimizer, extra={"epoch": 3})     # writes in the background
    loaded = load_latest("run", model=model, optimizer=optimizer)                           # in any other layout

Names are loaded on first use (PEP 562), so that the plugin module imports without torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from meshwright_dtensor.utils.exports import load_on_first_use

if TYPE_CHECKING:
    from meshwright_checkpoint.convert.export import export as export
    from meshwright_checkpoint.convert.export import export_checkpoint as export_checkpoint
    from meshwright_checkpoint.errors import CheckpointError as CheckpointError
    from meshwright_checkpoint.errors import CorruptError as CorruptError
    from meshwright_checkpoint.errors import MismatchError as MismatchError
    from meshwright_checkpoint.errors import ReplicaError as ReplicaError
    from meshwright_checkpoint.folder_checkpoints import LoadedCheckpoint as LoadedCheckpoint
    from meshwright_checkpoint.folder_checkpoints import load_latest as load_latest
    from meshwright_checkpoint.loading import load as load
    from meshwright_checkpoint.saving.background import SaveHandle as SaveHandle
    from meshwright_checkpoint.saving.saving import prepare_save as prepare_save
    from meshwright_checkpoint.saving.saving import save as save
    from meshwright_checkpoint.state.full_state import full_state_dict as full_state_dict
    from meshwright_checkpoint.state.replicas import check_replicas as check_replicas
    from meshwright_checkpoint.state.replicas import watch_replicas as watch_replicas
    from meshwright_checkpoint.storage.checkpoint_list import checkpoints as checkpoints
    from meshwright_checkpoint.storage.checkpoint_list import latest as latest

# module of this package -> the names that it defines
__all__, __getattr__, __dir__ = load_on_first_use(
    __name__,
    {
        ".convert.export": "export, export_checkpoint",
        ".errors": "CheckpointError, CorruptError, MismatchError, ReplicaError",
        ".loading": "load",
        ".folder_checkpoints": "LoadedCheckpoint, load_latest",
        ".saving.background": "SaveHandle",
        ".saving.saving": "prepare_save, save",
        ".state.full_state": "full_state_dict",
        ".state.replicas": "check_replicas, watch_replicas",
        ".storage.checkpoint_list": "checkpoints, latest",
    },
)
