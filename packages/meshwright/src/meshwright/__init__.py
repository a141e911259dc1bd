"""meshwright: run a model that was written for one device on many, unchanged.

Every public name lives in the package that owns it and is imported on first use, so `import meshwright` is cheap and
works where a part is missing until that part is asked for.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from meshwright import debug as debug
    from meshwright.resharding import reshard as reshard
    from meshwright_checkpoint import export as export
    from meshwright_checkpoint import latest as latest
    from meshwright_checkpoint import load as load
    from meshwright_checkpoint import prepare_save as prepare_save
    from meshwright_checkpoint import save as save
    from meshwright_dtensor import errors as errors
    from meshwright_dtensor.api import distribute as distribute
    from meshwright_dtensor.deferred.materialize import deferred_init as deferred_init
    from meshwright_dtensor.hints import mark_sharding as mark_sharding
    from meshwright_dtensor.mesh.mesh import init as init
    from meshwright_dtensor.plan import ParallelPlan as ParallelPlan
    from meshwright_parallel import GradScaler as GradScaler
    from meshwright_parallel import auto_parallelize as auto_parallelize
    from meshwright_parallel import clip_grad_norm_ as clip_grad_norm_
    from meshwright_parallel import distribute_module as distribute_module
    from meshwright_parallel import get_total_norm as get_total_norm
    from meshwright_parallel import parallelize as parallelize
    from meshwright_parallel import shard_loader as shard_loader
    from meshwright_parallel import verify as verify
    from meshwright_planner import explain as explain
    from meshwright_planner import plan as plan
    from meshwright_planner import profile_model

    # in the planner that name is a package of its own
    profile = profile_model

__version__ = "0.1.0"

# name -> (module, attribute); None means the module itself.
_EXPORTS: dict[str, tuple[str, str | None]] = {
    "GradScaler": ("meshwright_parallel", "GradScaler"),
    "ParallelPlan": ("meshwright_dtensor.plan", "ParallelPlan"),
    "auto_parallelize": ("meshwright_parallel", "auto_parallelize"),
    "clip_grad_norm_": ("meshwright_parallel", "clip_grad_norm_"),
    "get_total_norm": ("meshwright_parallel", "get_total_norm"),
    "debug": ("meshwright.debug", None),
    "deferred_init": ("meshwright_dtensor.deferred.materialize", "deferred_init"),
    "distribute": ("meshwright_dtensor.api", "distribute"),
    "distribute_module": ("meshwright_parallel", "distribute_module"),
    "errors": ("meshwright_dtensor.errors", None),
    "explain": ("meshwright_planner", "explain"),
    "export": ("meshwright_checkpoint", "export"),
    "init": ("meshwright_dtensor.mesh.mesh", "init"),
    "latest": ("meshwright_checkpoint", "latest"),
    "load": ("meshwright_checkpoint", "load"),
    "mark_sharding": ("meshwright_dtensor.hints", "mark_sharding"),
    "parallelize": ("meshwright_parallel", "parallelize"),
    "plan": ("meshwright_planner", "plan"),
    "profile": ("meshwright_planner", "profile_model"),
    "prepare_save": ("meshwright_checkpoint", "prepare_save"),
    "reshard": ("meshwright.resharding", "reshard"),
    "save": ("meshwright_checkpoint", "save"),
    "shard_loader": ("meshwright_parallel", "shard_loader"),
    "verify": ("meshwright_parallel", "verify"),
}

__all__ = sorted([*_EXPORTS, "__version__"])


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module 'meshwright' has no attribute {name!r}")
    module_name, attribute = _EXPORTS[name]
    module = importlib.import_module(module_name)
    value = module if attribute is None else getattr(module, attribute)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_EXPORTS})
