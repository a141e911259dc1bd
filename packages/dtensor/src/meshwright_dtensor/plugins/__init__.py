"""Plugins: how strategies, planners, clusters, rules and commands are found. Imports without torch.

Write a plugin with `hookimpl` and the records; use plugins with `discover()`, which returns a `PluginHost`.
"""

from .collect import DISABLE
from .compare import compare_across_ranks, discover_on_all_ranks
from .hookspec import GROUP, RECORD_TYPES, HookSpecs, hookimpl
from .host import PluginHost, discover
from .records import (
    BackendSpec,
    ClusterSpec,
    CommandSpec,
    CostModelSpec,
    OpRuleSpec,
    PlacementSpec,
    PlannerSpec,
    Record,
    ScheduleSpec,
    StrategySpec,
)
from .registered import Problem, Registered

__all__ = [
    "DISABLE",
    "GROUP",
    "RECORD_TYPES",
    "BackendSpec",
    "ClusterSpec",
    "CommandSpec",
    "CostModelSpec",
    "HookSpecs",
    "OpRuleSpec",
    "PlacementSpec",
    "PlannerSpec",
    "PluginHost",
    "Problem",
    "Record",
    "Registered",
    "ScheduleSpec",
    "StrategySpec",
    "compare_across_ranks",
    "discover",
    "discover_on_all_ranks",
    "hookimpl",
]
