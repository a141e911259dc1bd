"""A space: one device mesh with everything the core remembers about it (layouts, conversions, programs).

The space of a mesh lives on the mesh object itself, so nothing is kept in module globals and a mesh that is dropped
takes its caches along.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from meshwright_dtensor.errors import UnsupportedError
from meshwright_dtensor.mesh.layout import Layout
from meshwright_dtensor.sharding.states import States

if TYPE_CHECKING:
    from meshwright_dtensor.comm.redistribute import Conversion
    from meshwright_dtensor.dispatch.fallback import Replicated
    from meshwright_dtensor.dispatch.program import Program
    from meshwright_dtensor.mesh.attention_sharing import AttentionForm
    from meshwright_dtensor.rules import RuleBook

_ATTRIBUTE = "_meshwright_context"
MAX_PROGRAMS = 16384


@dataclass(slots=True)
class TierEntry:
    """A call that could not run as itself on the local tensors, for ``doctor`` and the strict mode."""

    function: str
    tier: int
    layouts: str
    reason: str


@dataclass
class Report:
    """How calls were mapped: programs per tier, and every call of tier 2 and 3 with the reason."""

    tiers: dict[int, int] = field(default_factory=lambda: {1: 0, 2: 0, 3: 0})
    entries: list[TierEntry] = field(default_factory=list)


def _nothing() -> None:
    """Value of an unpickled MeshContext."""


class MeshContext:
    """Caches and collectives of one :class:`DeviceMesh` (axis names required)."""

    def __init__(self, mesh: DeviceMesh) -> None:
        if mesh.mesh_dim_names is None:
            raise UnsupportedError(
                f"mesh {mesh} has no axis names; meshwright addresses axes by name: pass mesh_dim_names to init_device_mesh"
            )
        self.mesh = mesh
        self.ndim: int = mesh.ndim
        self.axes: tuple[str, ...] = tuple(mesh.mesh_dim_names)
        self.sizes: tuple[int, ...] = tuple(mesh.size(i) for i in range(mesh.ndim))
        self.coords: tuple[int, ...] = tuple(mesh.get_local_rank(i) for i in range(mesh.ndim))
        self.replicated: States = ("I",) * mesh.ndim
        self.report = Report()
        self.strict = False
        self.attention: dict[str, AttentionForm] = {}  # by axis name, see context.share_attention
        self._layouts: dict[tuple[Any, ...], Layout] = {}
        self._conversions: dict[tuple[Any, ...], Conversion | None] = {}
        self.programs: OrderedDict[Any, Program | Replicated] = OrderedDict()
        self.functions: dict[Any, bool] = {}
        self._rulebook: RuleBook | None = None
        self._inner: dict[tuple[str, ...], MeshContext] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        """A mesh that is copied or pickled (inside a DTensor, say) goes without its caches."""
        return (_nothing, ())

    @staticmethod
    def of(mesh: DeviceMesh) -> MeshContext:
        """The space of ``mesh``, made on first use."""
        context = mesh.__dict__.get(_ATTRIBUTE)
        if context is None:
            context = MeshContext(mesh)
            setattr(mesh, _ATTRIBUTE, context)
        return context

    @property
    def rulebook(self) -> RuleBook:
        """The sharding rules, first-party and from plugins."""
        if self._rulebook is None:
            from meshwright_dtensor.rules import RuleBook

            self._rulebook = RuleBook.default()
        return self._rulebook

    def inner(self, axes: tuple[str, ...]) -> MeshContext:
        """The space of the ranks that differ from this one in their places on `axes` only; it reports to this one.

        `axes`: some of this space's, in their order. No communication; the first call for a combination makes the space.
        """
        context = self._inner.get(axes)
        if context is None:
            context = self._inner[axes] = MeshContext.of(self.mesh[axes])
            context.report, context.attention = self.report, self.attention
        context.strict = self.strict
        return context

    def group(self, axis: int) -> dist.ProcessGroup:
        """Process group of mesh axis ``axis``."""
        return self.mesh.get_group(axis)

    def layout(self, states: States, shape: tuple[int, ...] | torch.Size, dtype: torch.dtype) -> Layout:
        """The one :class:`Layout` object with these fields."""
        key = (states, tuple(shape), dtype)
        layout = self._layouts.get(key)
        if layout is None:
            # on an axis of one rank every state is the same
            states = tuple("I" if n == 1 else s for s, n in zip(states, self.sizes, strict=True))
            plain = (states, tuple(shape), dtype)
            layout = self._layouts.get(plain)
            if layout is None:
                layout = self._layouts[plain] = Layout(self, states, torch.Size(shape), dtype)
            self._layouts[key] = layout
        return layout

    def conversion(self, source: States, target: States, shape: torch.Size) -> Conversion | None:
        """What turns a local tensor in ``source`` states into one in ``target`` states; None when they are equal."""
        if source == target:
            return None
        key = (source, target, shape)
        if key not in self._conversions:
            from meshwright_dtensor.comm.redistribute import Conversion

            self._conversions[key] = Conversion(self, source, target, shape)
        return self._conversions[key]

    def remember(self, key: Any, program: Program | Replicated) -> None:
        """Keep a program, forgetting the oldest when there are too many (a scalar that varies makes many keys)."""
        if len(self.programs) >= MAX_PROGRAMS:
            self.programs.popitem(last=False)
        self.programs[key] = program

    def note(self, function: str, tier: int, layouts: str, reason: str) -> None:
        """Count a program; tier 2 and 3 are listed, and are errors in strict mode."""
        self.report.tiers[tier] += 1
        if tier == 1:
            return
        self.report.entries.append(TierEntry(function, tier, layouts, reason))
        if self.strict and tier == 3:
            raise UnsupportedError(
                f"strict mode: {function} on {layouts} would gather its inputs and run replicated ({reason}); "
                "add a rule through the meshwright_op_rules hook, or turn strict off"
            )
