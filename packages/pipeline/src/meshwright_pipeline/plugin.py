"""What this distribution registers with the plugin host. Imports without torch."""

from __future__ import annotations

from collections.abc import Iterable

from meshwright_dtensor.plugins import ScheduleSpec, StrategySpec, hookimpl

meshwright_hook_api = "1.0"

_SCHEDULES = {
    "gpipe": ("gpipe:GPipe", "all forwards, then all backwards; any number of stages a rank"),
    "1f1b": ("one_f_one_b:OneForwardOneBackward", "forwards, backwards in turns; few activations in flight"),
    "interleaved": ("one_f_one_b:Interleaved", "1f1b, several stages a rank; smaller bubble, more messages"),
    "looped-bfs": ("gpipe:LoopedBFS", "gpipe, several stages a rank; smaller bubble, everything in flight"),
    "zero-bubble": ("one_f_one_b:ZeroBubble", "interleaved, split backwards; weights' part fills the bubble"),
    "zbv": ("zbv:ZBV", "two stages a rank along a V, split backwards: the memory of 1f1b, hardly a bubble"),
    "dualpipev": ("dualpipe_v:DualPipeV", "two stages a rank along a V, forwards paired with backwards"),
}


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
    for name, (target, summary) in _SCHEDULES.items():
        yield ScheduleSpec(name=name, target=f"meshwright_pipeline.schedule.{target}", summary=summary)
