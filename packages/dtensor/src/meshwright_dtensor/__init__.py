"""The shared core of meshwright: plans, plugins, layouts and global tensors.

Names are loaded on first use (PEP 562), so that importing this package, its plugins and its plans needs no torch.
To export a name, add it to the table below.
"""

from __future__ import annotations

from importlib import import_module
from types import MappingProxyType
from typing import Any

# name -> module of this package that defines it
_EXPORTS = MappingProxyType(
    {
        # errors
        "InfeasibleError": "errors",
        "MeshwrightError": "errors",
        "PlanError": "errors",
        "PluginError": "errors",
        "UnsupportedError": "errors",
        "UsageError": "errors",
        "VerificationError": "errors",
        # plan
        "ActivationRule": "plan",
        "ParallelPlan": "plan",
        "ParameterRule": "plan",
        "PlannedCollective": "plan",
        "Prediction": "plan",
        "Provenance": "plan",
        "RecomputeRule": "plan",
        # plugins
        "PluginHost": "plugins",
        "discover": "plugins",
        "hookimpl": "plugins",
        # tensors (these need torch)
        "CommEvent": "comm.log",
        "CommLog": "comm.log",
        "GlobalTensor": "tensor.global_tensor",
        "Layout": "mesh.layout",
        "MeshParameter": "parameter",
        "RunShard": "mesh.run_shard",
        "IntervalShard": "sharding.intervals",
        "as_mesh_parameter": "api",
        "build_mesh": "mesh.mesh",
        "canonical": "stored.permuted",
        "communication": "comm.log",
        "deferred_init": "deferred.materialize",
        "distribute": "api",
        "from_local": "api",
        "init": "mesh.mesh",
        "mark_sharding": "hints",
        "like_parameter": "stored.permuted",
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
