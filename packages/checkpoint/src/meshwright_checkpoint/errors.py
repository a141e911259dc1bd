"""Errors of this package."""

from __future__ import annotations

from typing import TypeVar

from meshwright_dtensor.errors import MeshwrightError, UnsupportedError, UsageError

Names = tuple[str, ...]
E = TypeVar("E", bound=MeshwrightError)


class CheckpointError(MeshwrightError):
    """Base of all errors about a checkpoint: for example it is missing, cannot be written, or another job writes it."""

    exit_code = 2


class CorruptError(CheckpointError):
    """The stored data are damaged: a checksum, a size or the manifest is wrong."""

    exit_code = 4


class ReplicaError(MeshwrightError):
    """Ranks that hold copies of one value have different ones."""

    exit_code = 4


def error_of_rank(rank: int, text: str) -> MeshwrightError:
    """The error of another rank, given as "Kind: text", with the same class on this rank."""
    kinds = {kind.__name__: kind for kind in (CorruptError, UnsupportedError, UsageError)}
    return told(kinds.get(text.partition(":")[0], CheckpointError)(f"rank {rank} failed: {text}"), rank)


def told(error: E, rank: int) -> E:
    """The error, as one that another rank has told."""
    error.rank = rank
    return error


class MismatchError(CheckpointError):
    """A sound checkpoint that does not fit the model or optimizer.

    Attributes: `missing` (names that the model has and the checkpoint lacks), `unexpected` (the other way round) and
    `mismatched` (name and reason). The message lists them all.
    """

    def __init__(
        self, path: str, missing: Names = (), unexpected: Names = (), mismatched: Names = ()
    ) -> None:
        self.path, self.missing, self.unexpected, self.mismatched = path, missing, unexpected, mismatched
        listed = (("missing", missing), ("unexpected", unexpected), ("mismatched", mismatched))
        parts = [f"{what} ({len(names)}): {', '.join(names)}" for what, names in listed if names]
        optimizer = any("the optimizer" in text for text in (*missing, *mismatched))
        shapes = any(": shape " in text for text in mismatched)
        dtypes = any(" is stored, the model has " in text and ": shape " not in text for text in mismatched)
        named = missing or unexpected
        fixes = {
            "leave out optimizer, or pass one of the saved class and groups": optimizer,
            "shapes must equal the saved ones: build that model, or load the other tensors with only=(patterns)": shapes,
            "cast=True changes dtypes": dtypes,
            "only=(patterns) loads a part, strict=False ignores missing and unexpected names": named,
        }
        advice = "; ".join(fix for fix, helps in fixes.items() if helps)
        super().__init__(f"checkpoint {path} does not fit: {'; '.join(parts)}{'. ' * bool(advice)}{advice}")

    def __reduce__(self) -> tuple[type[MismatchError], tuple[object, ...]]:
        return type(self), (self.path, self.missing, self.unexpected, self.mismatched)
