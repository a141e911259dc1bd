"""What this distribution registers. Importing it is cheap: the strategy itself is loaded when it is used."""

from __future__ import annotations

from collections.abc import Iterator

from meshwright_dtensor.plugins import StrategySpec, hookimpl


@hookimpl
def meshwright_strategies() -> Iterator[StrategySpec]:
    """One strategy, on an axis of its own."""
    yield StrategySpec(
        name="vocabulary-shard",
        axis="vp",
        target="meshwright_sample_vocabulary.strategy:VocabularyShard",
        summary="ranks share the rows of embeddings and output heads, and nothing else",
    )
