"""Plugins: discovery of strategies, planners, clusters, rules and commands. Torch-free.

Write a plugin with `hookimpl` and the records; use plugins with `discover()`, which returns a `PluginHost`.
"""

from meshwright_dtensor.plugins.discovery import DISABLE
from meshwright_dtensor.plugins.hookspec import GROUP, RECORD_TYPES, HookSpecs, hookimpl
from meshwright_dtensor.plugins.host import PluginHost, discover
from meshwright_dtensor.plugins.rank_check import compare_across_ranks, discover_on_all_ranks
from meshwright_dtensor.plugins.records import (
    BackendSpec,
    ClusterSpec,
    CommandSpec,
    CostModelSpec,
    OpRuleSpec,
    PlacementSpec,
    PlannerSpec,
    Problem,
    Record,
    Registered,
    ScheduleSpec,
    StrategySpec,
)

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
