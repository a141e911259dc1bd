"""meshwright: run a model that was written for one device on many, unchanged.

Every public name lives in the package that owns it and is imported on first use, so `import meshwright` is cheap and
works where a part other than the core is missing until that part is asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from meshwright_dtensor.utils.exports import load_on_first_use

if TYPE_CHECKING:
    from meshwright import debug as debug
    from meshwright.resharding import reshard as reshard
    from meshwright.runs.elastic_loop import elastic as elastic
    from meshwright.runs.stragglers import watch_stragglers as watch_stragglers
    from meshwright_checkpoint import check_replicas as check_replicas
    from meshwright_checkpoint import export as export
    from meshwright_checkpoint import full_state_dict as full_state_dict
    from meshwright_checkpoint import latest as latest
    from meshwright_checkpoint import load as load
    from meshwright_checkpoint import load_latest as load_latest
    from meshwright_checkpoint import prepare_save as prepare_save
    from meshwright_checkpoint import save as save
    from meshwright_checkpoint import watch_replicas as watch_replicas
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
    from meshwright_parallel import step_whole_blocks as step_whole_blocks
    from meshwright_parallel import step_whole_matrices as step_whole_matrices
    from meshwright_parallel import verify as verify
    from meshwright_planner import explain as explain
    from meshwright_planner import plan as plan
    from meshwright_planner import profile_model

    profile = profile_model

__version__ = "0.1.0"

# module -> the names that it defines
__all__, __getattr__, __dir__ = load_on_first_use(
    __name__,
    {
        ".debug": "",
        ".resharding": "reshard",
        ".runs.elastic_loop": "elastic",
        ".runs.stragglers": "watch_stragglers",
        "meshwright_checkpoint": "check_replicas, export, full_state_dict, latest, load, load_latest, prepare_save, "
        "save, watch_replicas",
        "meshwright_dtensor.api": "distribute",
        "meshwright_dtensor.deferred.materialize": "deferred_init",
        "meshwright_dtensor.errors": "",
        "meshwright_dtensor.hints": "mark_sharding",
        "meshwright_dtensor.mesh.mesh": "init",
        "meshwright_dtensor.plan": "ParallelPlan",
        "meshwright_parallel": "GradScaler, auto_parallelize, clip_grad_norm_, distribute_module, get_total_norm, "
        "parallelize, shard_loader, step_whole_blocks, step_whole_matrices, verify",
        "meshwright_planner": "explain, plan, profile_model as profile",
    },
)
__all__ = sorted([*__all__, "__version__"])
