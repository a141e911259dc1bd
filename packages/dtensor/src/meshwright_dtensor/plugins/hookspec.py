"""The hooks that a plugin may implement. None takes an argument; each yields records.

A plugin is a module (or object) with functions of these names marked `@hookimpl`, announced by an entry point of the
group "meshwright" in its distribution's metadata::

    [project.entry-points.meshwright]
    acme = "acme_parallel.plugin"
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType

import pluggy

from meshwright_dtensor.plugins import records as specs
from meshwright_dtensor.plugins.records import Record

GROUP = "meshwright"
PREFIX = "meshwright_"

hookspec = pluggy.HookspecMarker(GROUP)
hookimpl = pluggy.HookimplMarker(GROUP)


class HookSpecs:
    """Every hook there is. A function of a plugin that starts with `meshwright_` must be one of them."""

    @hookspec
    def meshwright_strategies(self) -> Iterable[specs.StrategySpec]:  # type: ignore[empty-body]
        """Register ways to parallelise along a mesh axis.

        Example::

            from meshwright_dtensor.plugins import StrategySpec, hookimpl

            @hookimpl
            def meshwright_strategies():
                yield StrategySpec(
                    name="ulysses",
                    axis="cp",
                    target="meshwright_ulysses.strategy:Ulysses",
                    summary="attention heads and sequence trade places",
                )
        """

    @hookspec
    def meshwright_planners(self) -> Iterable[specs.PlannerSpec]:  # type: ignore[empty-body]
        """Register planners, for `plan(..., planner="name")`.

        Example::

            @hookimpl
            def meshwright_planners():
                yield PlannerSpec(name="greedy", target="acme_plan.greedy:Greedy", summary="first plan that fits")
        """

    @hookspec
    def meshwright_cost_models(self) -> Iterable[specs.CostModelSpec]:  # type: ignore[empty-body]
        """Register cost models, for `plan(..., cost_model="name")`.

        Example::

            @hookimpl
            def meshwright_cost_models():
                yield CostModelSpec(name="table", target="acme_cost.table:Table", summary="measured, interpolated")
        """

    @hookspec
    def meshwright_clusters(self) -> Iterable[specs.ClusterSpec]:  # type: ignore[empty-body]
        """Register clusters, for `plan(..., cluster="name")`.

        Example::

            @hookimpl
            def meshwright_clusters():
                yield ClusterSpec(name="acme-32", target="acme.clusters:ACME_32", summary="4 nodes of 8, 400 Gb/s")
        """

    @hookspec
    def meshwright_schedules(self) -> Iterable[specs.ScheduleSpec]:  # type: ignore[empty-body]
        """Register pipeline schedules.

        Example::

            @hookimpl
            def meshwright_schedules():
                yield ScheduleSpec(name="wave", target="acme_pipe.wave:Wave", summary="two waves a step")
        """

    @hookspec
    def meshwright_checkpoint_backends(self) -> Iterable[specs.BackendSpec]:  # type: ignore[empty-body]
        """Register places and formats to keep checkpoints in.

        Example::

            @hookimpl
            def meshwright_checkpoint_backends():
                yield BackendSpec(name="s3", target="acme_s3.backend:S3Backend", summary="object storage")
        """

    @hookspec
    def meshwright_op_rules(self) -> Iterable[specs.OpRuleSpec]:  # type: ignore[empty-body]
        """Register sharding rules for operators, your own or ones that torch has none for.

        Example::

            @hookimpl
            def meshwright_op_rules():
                yield OpRuleSpec(name="acme-norm", target="acme_ops.rules:NORM", summary="fused norm, sharded rows")
        """

    @hookspec
    def meshwright_placements(self) -> Iterable[specs.PlacementSpec]:  # type: ignore[empty-body]
        """Register placements: ways in which a mesh axis splits a tensor.

        Example::

            @hookimpl
            def meshwright_placements():
                yield PlacementSpec(name="strided", target="acme_place.strided:Strided", summary="every n-th row")
        """

    @hookspec
    def meshwright_devices(self) -> Iterable[specs.DeviceSpec]:  # type: ignore[empty-body]
        """Register types of devices, for `init(device="name")`.

        Example::

            @hookimpl
            def meshwright_devices():
                yield DeviceSpec(name="npu", target="acme_npu.device:Npu", summary="NPUs, over HCCL")
        """

    @hookspec
    def meshwright_commands(self) -> Iterable[specs.CommandSpec]:  # type: ignore[empty-body]
        """Register subcommands of `meshwright`.

        Example::

            @hookimpl
            def meshwright_commands():
                yield CommandSpec(name="bench", target="acme_bench.cli:main", summary="time one step of a plan")
        """


# hook -> the type that it must yield
RECORD_TYPES: Mapping[str, type[Record]] = MappingProxyType(
    {
        "meshwright_strategies": specs.StrategySpec,
        "meshwright_planners": specs.PlannerSpec,
        "meshwright_cost_models": specs.CostModelSpec,
        "meshwright_clusters": specs.ClusterSpec,
        "meshwright_schedules": specs.ScheduleSpec,
        "meshwright_checkpoint_backends": specs.BackendSpec,
        "meshwright_op_rules": specs.OpRuleSpec,
        "meshwright_placements": specs.PlacementSpec,
        "meshwright_devices": specs.DeviceSpec,
        "meshwright_commands": specs.CommandSpec,
    }
)
