"""Remove old checkpoints of a directory."""

from __future__ import annotations

from dataclasses import dataclass

from meshwright_checkpoint.storage.backend import CheckpointStorage
from meshwright_checkpoint.storage.checkpoint_list import found_in
from meshwright_dtensor.errors import UsageError


@dataclass(frozen=True)
class Retention:
    """Which checkpoints to keep; see `save`. None keeps all. Raises UsageError for numbers below 1.

    Attributes:
        damaged: paths of checkpoints whose values are known to be wrong. They are neither counted nor removed, as those whose
            manifest or sizes are wrong. Wrong values that nobody has read are not known: such checkpoints are counted, and removed.
    """

    keep_last: int | None = None
    keep_every: int | None = None
    damaged: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        for name, value in (("keep_last", self.keep_last), ("keep_every", self.keep_every)):
            if value is not None and (type(value) is not int or value < 1):
                text = (
                    f"{name}={value!r} is not a positive integer; pass at least 1, or None to keep everything"
                )
                raise UsageError(text)
        if self.keep_every is not None and self.keep_last is None:
            raise UsageError(f"keep_every={self.keep_every} only adds to keep_last; pass keep_last too")

    def apply(self, committed: CheckpointStorage) -> None:
        """Remove old checkpoints in the parent of `committed`, but none without a step and none that are known to be damaged."""
        if self.keep_last is None:
            return
        steps = [
            (each.storage, each.save_id, each.step)
            for each in found_in(committed.parent())
            if each.problem is None and each.step is not None and each.storage.where not in self.damaged
        ]
        for storage, save_id, step in steps[: -self.keep_last]:
            kept = self.keep_every is not None and step % self.keep_every == 0
            if not kept and storage.where != committed.where:
                storage.remove(save_id)
