"""MeshContext: a device mesh with its process groups, its settings and its caches."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final, Literal, TypeVar

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from meshwright_dtensor.errors import UnsupportedError, UsageError
from meshwright_dtensor.mesh.call_order import CallOrder
from meshwright_dtensor.sharding.states import States
from meshwright_dtensor.utils.names import listing, suggestion

_ATTRIBUTE = "_meshwright_context"
T = TypeVar("T")

AttentionForm = Literal["all_gather", "ring", "all_to_all"]

FORMS: Final[tuple[AttentionForm, ...]] = ("all_gather", "ring", "all_to_all")
"""Ways to compute attention over a sharded sequence: gather keys and values, pass them around the ring, shard the heads."""


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


class MeshContext:
    """One :class:`DeviceMesh` (axis names required) with its caches, stored on the mesh object.

    Attributes:
        replicated: the states of a value that every rank holds whole.
        report: how calls were mapped to local programs.
        strict: whether a call that has to run replicated is an error.
        calls: those of the user that need every rank.
        attention: mesh axis -> how attention is computed where the sequence is sharded over it.
        rng: "exact" draws the random numbers of one device, "fast" those of a stream for each shard.
        programs: local programs of calls, oldest first (see dispatch.local_program.program).
        cache: the results of :meth:`cached`, by (make, key).
    """

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
        self.rng: Literal["exact", "fast"] = "exact"
        self.calls = CallOrder()
        self.attention: dict[str, AttentionForm] = {}
        self.programs: OrderedDict[Any, Any] = OrderedDict()
        self.cache: dict[Any, Any] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        """A mesh that is copied or pickled (inside a DTensor, say) goes without its caches."""
        return (type(None), ())

    @staticmethod
    def of(mesh: DeviceMesh) -> MeshContext:
        """The context of ``mesh``, made on first use."""
        context = mesh.__dict__.get(_ATTRIBUTE)
        if context is None:
            context = MeshContext(mesh)
            setattr(mesh, _ATTRIBUTE, context)
        return context

    def cached(self, make: Callable[..., T], *key: Any) -> T:
        """``make(self, *key)``, called once for each key."""
        try:
            return self.cache[make, key]  # type: ignore[no-any-return]
        except KeyError:
            value = self.cache[make, key] = make(self, *key)
            return value

    def inner(self, axes: tuple[str, ...]) -> MeshContext:
        """The context of the ranks that differ from this rank on ``axes`` only, in mesh order; it shares report and calls."""
        context = self.cached(_inner, axes)
        context.strict, context.rng = self.strict, self.rng
        return context

    def group(self, axis: int) -> dist.ProcessGroup:
        """Process group of mesh axis ``axis``."""
        return self.mesh.get_group(axis)


def draws_per_shard(mesh: DeviceMesh) -> bool:
    """Whether each shard of a value over ``mesh`` has a random stream of its own (`MeshContext.rng`)."""
    context = getattr(mesh, _ATTRIBUTE, None)
    return context is not None and context.rng == "fast"


def follow_call(of: Any, call: str) -> None:
    """Note a call that needs every rank (see `CallOrder`). `of`: a mesh or a tensor over one; nothing is noted for others."""
    context = getattr(getattr(of, "device_mesh", of), _ATTRIBUTE, None)
    if context is not None:
        context.calls.follow(call)


def _inner(outer: MeshContext, axes: tuple[str, ...]) -> MeshContext:
    context = MeshContext.of(outer.mesh[axes])
    context.report, context.attention, context.calls = outer.report, outer.attention, outer.calls
    return context


def share_attention(mesh: DeviceMesh, axis: str, form: str) -> None:
    """Let attention run where queries, keys and values are all sharded over ``axis`` along the sequence.

    ``form`` is one of :data:`FORMS`. Raises UsageError if there is no such axis or form.
    """
    context = MeshContext.of(mesh)
    if axis not in context.axes:
        raise UsageError(f"mesh axis {axis!r} does not exist; the axes are {listing(context.axes)}")
    if form not in FORMS:
        raise UsageError(f"attention form {form!r} is none of {listing(FORMS)}{suggestion(form, FORMS)}")
    context.attention[axis] = form
