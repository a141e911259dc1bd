"""What this distribution registers with the plugin host. Imports without torch."""

from __future__ import annotations

from collections.abc import Iterable

from meshwright_dtensor.plugins import ScheduleSpec, StrategySpec, hookimpl


@hookimpl
def meshwright_strategies() -> Iterable[StrategySpec]:
    """The strategy of this package."""
    yield StrategySpec(
        name="pipeline",
        axis="pp",
        target="meshwright_pipeline.strategy:Pipeline",
        summary="ranks share the modules of the model; microbatches pass from stage to stage",
    )


@hookimpl
def meshwright_schedules() -> Iterable[ScheduleSpec]:
    """The schedules of this package."""
    yield ScheduleSpec(
        name="gpipe",
        target="meshwright_pipeline.schedules.gpipe:GPipe",
        summary="all forwards, then all backwards; any number of stages a rank",
    )
    yield ScheduleSpec(
        name="1f1b",
        target="meshwright_pipeline.schedules.one_f_one_b:OneForwardOneBackward",
        summary="forwards and backwards take turns; few activations in flight",
    )
    yield ScheduleSpec(
        name="interleaved",
        target="meshwright_pipeline.schedules.interleaved:Interleaved",
        summary="1f1b over several stages a rank; a smaller bubble, more messages",
    )
