"""The shared core of meshwright: plans, plugins, layouts and global tensors.

Names are loaded on first use (PEP 562), so that importing this package, its plugins and its plans needs no torch.
To export a name, add it to the table below.
"""

from __future__ import annotations

from meshwright_dtensor.utils.exports import load_on_first_use

# module of this package -> the names that it defines
__all__, __getattr__, __dir__ = load_on_first_use(
    __name__,
    {
        ".errors": "InfeasibleError, MeshwrightError, PlanError, PluginError, UnsupportedError, UsageError, "
        "VerificationError",
        ".plan": "ActivationRule, ParallelPlan, ParameterRule, PlannedCollective, Prediction, Provenance, RecomputeRule",
        ".plugins": "PluginHost, discover, hookimpl",
        # tensors (these need torch)
        ".api": "as_mesh_parameter, distribute, from_local",
        ".comm.log": "CommEvent, CommLog, communication",
        ".deferred.materialize": "deferred_init",
        ".hints": "mark_sharding",
        ".mesh.layout": "Layout",
        ".mesh.mesh": "build_mesh, init",
        ".mesh.ragged_shard": "RaggedShard",
        ".mesh.run_shard": "RunShard",
        ".parameter": "MeshParameter",
        ".sharding.intervals": "IntervalShard",
        ".stored.permuted": "canonical, like_parameter",
        ".tensor.global_tensor": "GlobalTensor",
    },
)
