"""What this distribution registers. Importing it is cheap: the strategy itself is loaded when it is used."""

from __future__ import annotations

from collections.abc import Iterator

from meshwright_dtensor.plugins import StrategySpec, hookimpl


@hookimpl
def meshwright_strategies() -> Iterator[StrategySpec]:
    """One strategy, on an axis of its own."""
    yield StrategySpec(
        name="sequence-shard",
        axis="sq",
        target="meshwright_sample_sequence.strategy:SequenceShard",
        summary="ranks share the tokens of each row; the core gathers where tokens meet",
    )
