"""Plugins: discovery of strategies, planners, clusters, rules and commands. Torch-free.

Write a plugin with `hookimpl` and the records; use plugins with `discover()`, which returns a `PluginHost`.
"""

from meshwright_dtensor.plugins.hook_api import HOOK_API as HOOK_API
from meshwright_dtensor.plugins.hookspec import GROUP as GROUP
from meshwright_dtensor.plugins.hookspec import RECORD_TYPES as RECORD_TYPES
from meshwright_dtensor.plugins.hookspec import HookSpecs as HookSpecs
from meshwright_dtensor.plugins.hookspec import hookimpl as hookimpl
from meshwright_dtensor.plugins.host import PluginHost as PluginHost
from meshwright_dtensor.plugins.host import discover as discover
from meshwright_dtensor.plugins.rank_check import compare_across_ranks as compare_across_ranks
from meshwright_dtensor.plugins.rank_check import discover_on_all_ranks as discover_on_all_ranks
from meshwright_dtensor.plugins.records import BackendSpec as BackendSpec
from meshwright_dtensor.plugins.records import ClusterSpec as ClusterSpec
from meshwright_dtensor.plugins.records import CommandSpec as CommandSpec
from meshwright_dtensor.plugins.records import CostModelSpec as CostModelSpec
from meshwright_dtensor.plugins.records import DeviceSpec as DeviceSpec
from meshwright_dtensor.plugins.records import OpRuleSpec as OpRuleSpec
from meshwright_dtensor.plugins.records import PlacementSpec as PlacementSpec
from meshwright_dtensor.plugins.records import PlannerSpec as PlannerSpec
from meshwright_dtensor.plugins.records import Problem as Problem
from meshwright_dtensor.plugins.records import Record as Record
from meshwright_dtensor.plugins.records import Registered as Registered
from meshwright_dtensor.plugins.records import ScheduleSpec as ScheduleSpec
from meshwright_dtensor.plugins.records import StrategySpec as StrategySpec
from meshwright_dtensor.plugins.registration import DISABLE as DISABLE
