"""The parallel plan: the document that a planner writes, a person edits and commits, and the runtime carries out.

Torch-free. A plan is a frozen value: equality, hashing and `diff` go by content (the time of creation aside), and its
JSON is stable, so that a plan under version control changes only where its content does.

Version 1 holds what is carried out today. A field that nothing executes does not exist: naming one is an error.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from meshwright_dtensor.errors import PlanError
from meshwright_dtensor.plan.diff import diff
from meshwright_dtensor.plan.field_types import guarded
from meshwright_dtensor.plan.fields import PlanFields
from meshwright_dtensor.plan.report import explain, plan_html
from meshwright_dtensor.plan.serialization import dumps, identity, loads, to_data
from meshwright_dtensor.plan.validate import check


class ParallelPlan(PlanFields):
    """How a model is parallelized over a mesh of ranks; `PlanFields` documents the fields.

    Raises PlanError for a wrong field, type or value. `validate_for` checks how the fields fit each other and the run.
    """

    def replace(self, **changes: Any) -> ParallelPlan:
        """A copy with these fields changed, checked like a new plan."""
        return ParallelPlan(**{**{name: getattr(self, name) for name in type(self).model_fields}, **changes})

    def validate_for(self, world_size: int | None = None, axes: Iterable[str] | None = None) -> None:
        """Raise PlanError unless the plan is valid and fits a run.

        world_size: ranks of the run; None takes that of the plan.
        axes: mesh axes of installed strategies; None does not check them.
        """
        # fields first, since model_copy and model_construct do not check them
        ParallelPlan.from_dict(to_data(self))
        check(self, world_size, None if axes is None else tuple(axes))

    def to_json(self) -> str:
        """The plan as JSON text, stable and readable in a diff. Ends in a newline."""
        return dumps(to_data(self))

    def executed_json(self) -> str:
        """The fields that are carried out, as JSON text: equal on ranks that run the same, whatever predictions and notes say."""
        told = ("predicted", "collectives", "provenance")
        return dumps({name: value for name, value in to_data(self).items() if name not in told})

    @classmethod
    def from_dict(cls, data: object) -> ParallelPlan:
        """The plan that plain dicts and lists describe. Raises PlanError."""
        return guarded(cls, lambda: cls.model_validate(data))

    @classmethod
    def from_json(cls, text: str | bytes) -> ParallelPlan:
        """The plan of a JSON text. Raises PlanError."""
        return cls.from_dict(loads(text))

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> ParallelPlan:
        """Read a plan from a file. Raises PlanError, which names the file."""
        where = os.fspath(path)
        try:
            text = Path(path).read_bytes()
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            raise PlanError("", None, f"it cannot be read ({reason})", file=where) from error
        try:
            return cls.from_json(text)
        except PlanError as error:
            raise PlanError(error.field, error.value, error.rule, error.nearest, where) from None

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan to a file, atomically. Raises PlanError if it cannot be written."""
        target = Path(path)
        temporary = None
        try:
            handle, temporary = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(self.to_json())
            mask = os.umask(0)
            os.umask(mask)
            # mkstemp makes private files
            os.chmod(temporary, 0o666 & ~mask)
            os.replace(temporary, target)
        except OSError as error:
            if temporary is not None:
                with contextlib.suppress(OSError):
                    os.unlink(temporary)
            rule = f"it cannot be written: {error.strerror or error}"
            raise PlanError("(file)", os.fspath(path), rule) from error

    def diff(self, other: ParallelPlan) -> list[str]:
        """The changes from this plan to `other`, a line each; empty if they are equal."""
        return diff(self, other)

    def explain(self, width: int = 110) -> str:
        """The plan as plain text: mesh, placements, activations, predicted time and memory, provenance."""
        return explain(self, width)

    def _repr_html_(self) -> str:
        """The plan for a notebook: its mesh and figures, and the whole text to open."""
        return plan_html(self)

    def _identity(self) -> str:
        return dumps(identity(self))

    def __eq__(self, other: object) -> bool:
        return self._identity() == other._identity() if isinstance(other, ParallelPlan) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._identity())

    def __str__(self) -> str:
        mesh = " x ".join(f"{axis} {degree}" for axis, degree in self.degrees.items()) or "one rank"
        return f"ParallelPlan({mesh}, {len(self.parameters)} parameter rules, {len(self.activations)} activation rules)"
