"""Registry of the parallel models of this process, so that `shard_loader(loader)` needs no model.

It holds weak references only, and nothing else reads it.
"""

from __future__ import annotations

import gc
import weakref
from typing import ClassVar

from meshwright_dtensor.errors import UsageError
from meshwright_parallel.placement.inputs import ModelPlacement


class LivePlacements:
    """Placements of the models that are alive in this process."""

    _placements: ClassVar[weakref.WeakSet[ModelPlacement]] = weakref.WeakSet()

    @classmethod
    def add(cls, placement: ModelPlacement) -> None:
        """Register a parallel model."""
        cls._placements.add(placement)

    @classmethod
    def only(cls) -> ModelPlacement:
        """The placement of the live models, if all have the same.

        Raises:
            UsageError: no model is parallel, or two models have different meshes.
        """
        # a module and its hooks are a cycle, so dropped models may still be alive
        gc.collect()
        placements = list(cls._placements)
        if not placements:
            raise UsageError(
                "no model is parallel yet; call parallelize() or auto_parallelize() before looping over the loader"
            )
        first = placements[0]
        for other in placements[1:]:
            if _axes(other) != _axes(first):
                raise UsageError(
                    f"models with different meshes are alive ({dict(first.plan.degrees)} and {dict(other.plan.degrees)}); "
                    "say which of them the loader feeds: shard_loader(loader, model=model)"
                )
        return first


def _axes(placement: ModelPlacement) -> tuple[tuple[str, int, str], ...]:
    degrees = placement.plan.degrees.items()
    return tuple(
        (axis, degree, strategy.name)
        for (axis, degree), strategy in zip(degrees, placement.strategies, strict=True)
    )
