"""The exceptions of meshwright. Each message is one line: the value, the rule it breaks, and the fix.

`exit_code` is what the command line returns for the error: 2 usage, 3 infeasible, 4 a check failed.
"""

from __future__ import annotations

import pickle


class MeshwrightError(Exception):
    """Base of every error that meshwright raises on purpose. Catch this to catch them all.

    `listed`: the message has a line for each of several reasons, and the command line keeps the lines.
    `rank`: the one that has failed, where this error tells it on another rank; None for errors of this rank.
    """

    exit_code: int = 1
    listed: bool = False
    rank: int | None = None


class UsageError(MeshwrightError):
    """The caller gave a wrong name, value or combination."""

    exit_code = 2


class PlanError(UsageError):
    """A plan is malformed, or does not fit the run it is used in.

    Attributes: `field` (path into the plan, such as "degrees.tp"; "" if the text as a whole is no plan), its `value`,
    the `rule` that it breaks, `nearest` (the nearest legal value, or None if there is none to name), and the `file`
    that the plan was read from, or None. The message holds all five.
    """

    def __init__(
        self, field: str, value: object, rule: str, nearest: str | None = None, file: str | None = None
    ) -> None:
        self.field, self.value, self.rule = field, value, rule
        self.nearest, self.file = nearest, file
        if field:
            text = f"plan field {field}{f' of {file}' if file else ''} is {_short(value)}: {rule}"
        else:
            subject = f"{file} is not a plan file" if file else "the text is not a plan"
            text = f"{subject}: {rule}" + ("" if value is None else f", found {_short(value)}")
        text = f"{text}; nearest legal: {nearest}" if nearest else text
        super().__init__(" ".join(text.split()))

    def __reduce__(self) -> tuple[type[PlanError], tuple[str, object, str, str | None, str | None]]:
        return type(self), (self.field, self.value, self.rule, self.nearest, self.file)


class PluginError(UsageError):
    """A plugin is registered wrongly, cannot be found, or cannot be loaded."""


class InfeasibleError(MeshwrightError):
    """No plan satisfies the request (memory, degrees or pins). The message names the smallest change that would."""

    exit_code = 3

    def __init__(self, message: str, listed: bool = False) -> None:
        super().__init__(message)
        self.listed = listed


class VerificationError(MeshwrightError):
    """A check ran and failed: parallel values differ from those of one device."""

    exit_code = 4


class UnsupportedError(MeshwrightError):
    """The operation is not supported here; any result would be silently wrong."""


class StageError(MeshwrightError):
    """A stage of a pipeline failed. Raised on every rank; on the rank of the stage, the error itself is its cause.

    Attributes: `stage`, `microbatch`, `action` ("forward" or "backward"), `rank` (of the run) and `reason`.
    """

    rank: int

    def __init__(self, stage: int, microbatch: int, action: str, rank: int, reason: str) -> None:
        self.stage, self.microbatch, self.action = stage, microbatch, action
        self.rank, self.reason = rank, reason
        text = f"stage {stage} failed in the {action} of microbatch {microbatch}, on rank {rank}: {reason}"
        super().__init__(" ".join(text.split()))

    def __reduce__(self) -> tuple[type[StageError], tuple[int, int, str, int, str]]:
        return type(self), (self.stage, self.microbatch, self.action, self.rank, self.reason)


def portable(error: Exception) -> Exception:
    """The error, or its text if it cannot be pickled for other ranks."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        # pickling a foreign error may raise anything
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


def _short(value: object, limit: int = 120) -> str:
    """`ascii(value)`, cut to `limit` characters. ascii, so that a lone surrogate can still be printed."""
    try:
        text = ascii(value)
    except Exception:
        # a hostile or half-built object must not hide the error being reported
        text = f"<{type(value).__name__}>"
    return text if len(text) <= limit else text[: limit - 3] + "..."
