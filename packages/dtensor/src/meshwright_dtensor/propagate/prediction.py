"""Types of a prediction (see predict): the mesh, the predicted states and collectives of a recorded run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from meshwright_dtensor.cluster.links import CollectiveKind
from meshwright_dtensor.sharding.boxes import local_shape_of
from meshwright_dtensor.sharding.states import States
from meshwright_dtensor.strategy.cost import Phase

if TYPE_CHECKING:
    from meshwright_dtensor.mesh.context import AttentionForm


@dataclass(frozen=True)
class MeshShape:
    """Axes and sizes of a mesh that need not exist.

    Attributes:
        axes: names, outermost first; ``sizes``: ranks along each.
        attention: as of a MeshContext.
    """

    axes: tuple[str, ...]
    sizes: tuple[int, ...]
    attention: Mapping[str, AttentionForm] = field(default_factory=dict)

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return len(self.axes)

    def local(self, shape: Sequence[int], states: States) -> tuple[int, ...]:
        """Shape of what the first rank holds of a value: no rank holds more."""
        return local_shape_of(tuple(shape), self.sizes, (0,) * self.ndim, states)


@dataclass(frozen=True)
class PredictedMove:
    """A predicted collective.

    Attributes:
        nbytes: of the full tensor on the mesh axis.
        module, function: of the call that needs it.
        why: the states converted, or "inside ..." of a composite.
        value: index of the value that is moved; None inside of a composite.
    """

    kind: CollectiveKind
    axis: str
    nbytes: int
    phase: Phase
    module: str
    function: str
    why: str
    value: int | None = None


@dataclass
class PredictedRun:
    """States and communication of a recorded run.

    Attributes:
        ins, outs: per node, the states of its inputs and outputs.
        states: value -> its states after the run, of values that are not replicated.
        moved: collectives, without those of single numbers.
        gathered: node -> why the call that it belongs to has no local program: its inputs are gathered.
    """

    ins: list[tuple[States, ...]] = field(default_factory=list)
    outs: list[tuple[States, ...]] = field(default_factory=list)
    states: dict[int, States] = field(default_factory=dict)
    moved: list[PredictedMove] = field(default_factory=list)
    gathered: dict[int, str] = field(default_factory=dict)
