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
        target="meshwright_pipeline.schedule.gpipe:GPipe",
        summary="all forwards, then all backwards; any number of stages a rank",
    )
    yield ScheduleSpec(
        name="1f1b",
        target="meshwright_pipeline.schedule.one_f_one_b:OneForwardOneBackward",
        summary="forwards and backwards take turns; few activations in flight",
    )
    yield ScheduleSpec(
        name="interleaved",
        target="meshwright_pipeline.schedule.interleaved:Interleaved",
        summary="1f1b over several stages a rank; a smaller bubble, more messages",
    )
    yield ScheduleSpec(
        name="looped-bfs",
        target="meshwright_pipeline.schedule.looped_bfs:LoopedBFS",
        summary="gpipe over several stages a rank; a smaller bubble, everything in flight",
    )
    yield ScheduleSpec(
        name="zero-bubble",
        target="meshwright_pipeline.schedule.zero_bubble:ZeroBubble",
        summary="interleaved with split backwards: gradients of weights fill the bubble",
    )
    yield ScheduleSpec(
        name="zbv",
        target="meshwright_pipeline.schedule.zbv:ZBV",
        summary="two stages a rank along a V, split backwards: the memory of 1f1b, hardly a bubble",
    )
    yield ScheduleSpec(
        name="dualpipev",
        target="meshwright_pipeline.schedule.dualpipe_v:DualPipeV",
        summary="two stages a rank along a V, forwards paired with backwards",
    )
