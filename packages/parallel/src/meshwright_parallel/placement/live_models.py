"""Which models of this process are parallel, so that `shard_loader(loader)` needs no model.

Only weak references are kept: a model that is dropped is forgotten. Nothing else reads this.
"""

from __future__ import annotations

import gc
import weakref
from typing import ClassVar

from meshwright_dtensor.errors import UsageError
from meshwright_parallel.placement.inputs import ModelPlacement


class LivePlacements:
    """What `parallelize` did to the models that are alive in this process, one world of ranks."""

    # the loader of a training loop is a plain function of the loader alone, so this must be found without an argument
    _known: ClassVar[weakref.WeakSet[ModelPlacement]] = weakref.WeakSet()

    @classmethod
    def add(cls, placed: ModelPlacement) -> None:
        """Note that a model has been placed."""
        cls._known.add(placed)

    @classmethod
    def only(cls) -> ModelPlacement:
        """How batches enter the models that are alive, where that is the same for all of them.

        Raises:
            UsageError: no model is parallel, or two models take their batches differently.
        """
        gc.collect()  # a module and its hooks refer to each other: dropped models may still be here
        found = list(cls._known)
        if not found:
            raise UsageError(
                "no model is parallel yet; call parallelize() or auto_parallelize() before looping over the loader"
            )
        first = found[0]
        for other in found[1:]:
            if _kind(other) != _kind(first):
                raise UsageError(
                    f"models with different meshes are alive ({dict(first.plan.degrees)} and {dict(other.plan.degrees)}); "
                    "say which of them the loader feeds: shard_loader(loader, model=model)"
                )
        return first


def _kind(placed: ModelPlacement) -> tuple[tuple[str, int, str], ...]:
    return tuple(
        (axis, degree, strategy.name)
        for (axis, degree), strategy in zip(placed.plan.degrees.items(), placed.strategies, strict=True)
    )
