"""What goes wrong with checkpoints, as errors of this package."""

from __future__ import annotations

from meshwright_dtensor.errors import MeshwrightError, UnsupportedError, UsageError


class CheckpointError(MeshwrightError):
    """Base of every error about a checkpoint: it is not there, cannot be written, or another job writes it."""

    exit_code = 2


class CorruptError(CheckpointError):
    """What is stored is not what was saved: a checksum, a size or the manifest itself is wrong."""

    exit_code = 4


def error_of_rank(rank: int, text: str) -> MeshwrightError:
    """What the error of another rank, "Kind: text", is here: of its kind on every rank, so that all can go on alike."""
    kinds = {kind.__name__: kind for kind in (CorruptError, UnsupportedError, UsageError)}
    return kinds.get(text.partition(":")[0], CheckpointError)(f"rank {rank} failed: {text}")


class MismatchError(CheckpointError):
    """A checkpoint is whole, but does not go with the model or optimizer.

    Attributes: `missing` (names that the model has and the checkpoint lacks), `unexpected` (the other way round) and
    `mismatched` (name and reason). The message lists them all.
    """

    def __init__(
        self,
        path: str,
        missing: tuple[str, ...] = (),
        unexpected: tuple[str, ...] = (),
        mismatched: tuple[str, ...] = (),
    ) -> None:
        self.path, self.missing, self.unexpected, self.mismatched = path, missing, unexpected, mismatched
        listed = (("missing", missing), ("unexpected", unexpected), ("mismatched", mismatched))
        parts = [f"{what} ({len(names)}): {', '.join(names)}" for what, names in listed if names]
        optimizer = any("the optimizer" in text for text in (*missing, *mismatched))
        shapes = any(": shape " in text for text in mismatched)
        dtypes = any(" is stored, the model has " in text and ": shape " not in text for text in mismatched)
        fixes = [
            ("leave out optimizer, or give one of the class and groups that were saved", optimizer),
            (
                "shapes have to be those that were saved: build that model, or give only=(patterns) of the rest",
                shapes,
            ),
            ("cast=True changes dtypes", dtypes),
            (
                "only=(patterns) loads a part, strict=False leaves what is missing or unexpected",
                missing or unexpected,
            ),
        ]
        advice = "; ".join(fix for fix, helps in fixes if helps)
        super().__init__(f"checkpoint {path} does not fit: {'; '.join(parts)}{'. ' * bool(advice)}{advice}")

    def __reduce__(self) -> tuple[type[MismatchError], tuple[object, ...]]:
        return type(self), (self.path, self.missing, self.unexpected, self.mismatched)
