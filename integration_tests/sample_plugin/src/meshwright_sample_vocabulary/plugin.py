"""What this distribution registers. Importing it is cheap: strategy, schedule and cost model are loaded when they are used."""

from __future__ import annotations

from collections.abc import Iterator

from meshwright_dtensor.plugins import CostModelSpec, DeviceSpec, ScheduleSpec, StrategySpec, hookimpl

meshwright_hook_api = "1.1"


@hookimpl
def meshwright_strategies() -> Iterator[StrategySpec]:
    """One strategy, on an axis of its own."""
    yield StrategySpec(
        name="vocabulary-shard",
        axis="vp",
        target="meshwright_sample_vocabulary.strategy:VocabularyShard",
        summary="ranks share the rows of embeddings and output heads, and nothing else",
    )


@hookimpl
def meshwright_cost_models() -> Iterator[CostModelSpec]:
    """One cost model."""
    yield CostModelSpec(
        name="host-tables",
        target="meshwright_sample_vocabulary.tables:HostTables",
        summary="operations and collectives by tables of one kind of host",
    )


@hookimpl
def meshwright_schedules() -> Iterator[ScheduleSpec]:
    """One schedule."""
    yield ScheduleSpec(
        name="one-by-one",
        target="meshwright_sample_vocabulary.schedule:OneByOne",
        summary="one microbatch after the other: a rank holds the activations of one",
    )


@hookimpl
def meshwright_devices() -> Iterator[DeviceSpec]:
    """One type of device."""
    yield DeviceSpec(
        name="shadow",
        target="meshwright_sample_vocabulary.shadow:Shadow",
        summary="the memory of the CPU under another name, for tests",
    )
