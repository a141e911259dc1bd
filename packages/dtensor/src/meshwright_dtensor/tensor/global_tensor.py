"""Global tensors: activations with a global shape that are stored on this rank as a plain local tensor.

A :class:`GlobalTensor` wraps a local tensor above autograd: each torch call on it looks up a local program by
(function, layouts, static arguments), runs it on the local tensors and labels the outputs.  Autograd records plain local
ops.  The wrapper carries the Python dispatch key and a meta tensor's geometry, so code that bypasses
``__torch_function__`` raises instead of reading local values as global ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import Any, NoReturn

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement

from meshwright_dtensor._torch.core import dtensor_local, make_subclass
from meshwright_dtensor.comm.log import NOWHERE, Site
from meshwright_dtensor.comm.redistribute import Conversion, conversion_between
from meshwright_dtensor.errors import UnsupportedError
from meshwright_dtensor.mesh.context import MeshContext
from meshwright_dtensor.mesh.layout import Layout, states_of
from meshwright_dtensor.sharding.boxes import shardable
from meshwright_dtensor.sharding.intervals import IntervalShard
from meshwright_dtensor.sharding.states import State, States
from meshwright_dtensor.tensor.unheard import Unheard

Tensor = torch.Tensor


class GlobalTensor(Unheard, torch.Tensor):
    """A global value over a device mesh, held on this rank as a local tensor.

    Behaves as the global ``torch.Tensor``: shape, indexing, arithmetic, autograd.  Made by :func:`distribute` and by
    torch functions on other global tensors.
    """

    # faster than entries of a dict, which is made only where there are others
    __slots__ = ("_local", "_layout")
    _local: Tensor
    _layout: Layout
    _memo: dict[Any, tuple[int, bool, Tensor]] | None = None
    _plain: Tensor | None = None

    # ---- models read these on every line, so they bypass the dispatcher, without a Python frame
    shape = property(attrgetter("_layout.shape"))  # type: ignore[assignment]
    dtype = property(attrgetter("_layout.dtype"))  # type: ignore[assignment]
    ndim = property(attrgetter("_layout.ndim"))  # type: ignore[assignment]
    device = property(attrgetter("_local.device"))  # type: ignore[assignment]
    is_cuda = property(attrgetter("_local.is_cuda"))  # type: ignore[assignment]
    is_cpu = property(attrgetter("_local.is_cpu"))  # type: ignore[assignment]
    is_meta = property(attrgetter("_local.is_meta"))  # type: ignore[assignment]
    is_leaf = property(attrgetter("_local.is_leaf"))  # type: ignore[assignment]
    grad_fn = property(attrgetter("_local.grad_fn"))  # type: ignore[assignment]

    @property
    def requires_grad(self) -> bool:  # type: ignore[override]
        return self._local.requires_grad

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        self._local.requires_grad = value

    def size(self, dim: int | None = None) -> Any:  # type: ignore[override]
        """Global size."""
        return self._layout.shape if dim is None else self._layout.shape[dim]

    def dim(self) -> int:
        """Number of tensor dims."""
        return self._layout.ndim

    ndimension = dim

    def numel(self) -> int:
        """Number of elements of the global value."""
        return self._layout.shape.numel()

    nelement = numel

    def __len__(self) -> int:
        if self._layout.ndim == 0:
            raise TypeError("len() of a 0-d tensor")
        return self._layout.shape[0]

    def __hash__(self) -> int:
        return id(self)

    def __iter__(self) -> Any:
        return iter(self.unbind(0))

    # ---- layout
    @property
    def global_layout(self) -> Layout:
        """The layout of the value."""
        return self._layout

    @property
    def device_mesh(self) -> DeviceMesh:
        """The device mesh."""
        return self._layout.context.mesh

    @property
    def placements(self) -> tuple[Placement, ...]:
        """Torch placements, one per mesh axis."""
        return self._layout.placements

    def to_local(self) -> Tensor:
        """This rank's part, connected to autograd; its gradient is that of the part."""
        return self._local.view_as(self._local)

    def full_tensor(self) -> Tensor:
        """The global value as a plain tensor on every rank (a collective call), connected to autograd."""
        return local_in(self, self._layout.context.replicated).view(self._layout.shape)

    def redistribute(self, placements: Sequence[Placement | State]) -> GlobalTensor:
        """The same value in another layout: torch placements or states, one per mesh axis."""
        layout = self._layout
        states = states_of(placements, layout.shape, layout.context)
        check_shardable(layout.context, layout.shape, states)
        target = layout.with_states(states)
        return self if target is layout else wrap(local_in(self, target.states), target)

    # ---- representation and copies
    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        if self._layout.replicated:
            return f"GlobalTensor({self._local.detach()!r}, {self._layout!r})"
        return f"GlobalTensor(local={self._local.detach()!r}, {self._layout!r})"

    def __deepcopy__(self, memo: dict[int, Any]) -> GlobalTensor:
        if not self._local.is_leaf:
            raise RuntimeError(
                "Only leaf tensors support deepcopy; this global tensor was computed: use .detach().clone() or .full_tensor()"
            )
        copy = wrap(self._local.detach().clone().requires_grad_(self._local.requires_grad), self._layout)
        memo[id(self)] = copy
        return copy

    def __reduce_ex__(self, protocol: Any) -> Any:
        if self._layout.replicated:
            # kept alive with the tensor: torch.save tells storages apart by their address
            self._plain = self._local.detach()
            return self._plain.__reduce_ex__(protocol)
        raise UnsupportedError(
            f"a global tensor ({self._layout!r}) cannot be pickled or torch.saved: it is this rank's part only; "
            "save x.full_tensor() (the whole value) or x.to_local() (this rank's part)"
        )

    def __tensor_flatten__(self) -> NoReturn:
        raise UnsupportedError(
            f"torch.compile cannot take a global tensor ({self._layout!r}): its graph would see this rank's part as the whole; "
            "call the function uncompiled, or compile what runs on x.to_local() or x.full_tensor()"
        )

    @staticmethod
    def __tensor_unflatten__(inner: Any, context: Any, size: Any, stride: Any) -> NoReturn:
        raise UnsupportedError(
            "torch.compile cannot make a global tensor; compile what runs on plain tensors"
        )

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> NoReturn:
        raise UnsupportedError(
            f"{func} reached a global tensor below __torch_function__ (functorch, torch.compile, a scripted function or a "
            "C++ extension); pass x.full_tensor(), the whole value, or wrap the call in an autograd.Function"
        )


class DetachedView(GlobalTensor):
    """A copy of a tensor that is a view on one device: its base had to be moved.

    A read after the base was modified in place raises; a write goes to the base too, where it is known how the view was taken.
    """

    _base_tensor: Tensor
    _base_version: int
    # how it was taken, where a write can reach the base
    _origin: Any = None

    @property
    def stale(self) -> bool:
        """Whether the base was written to since the view was taken."""
        return version_of(self._base_tensor) != self._base_version

    def check_fresh(self) -> None:
        """Raise if it is stale."""
        if self.stale:
            raise UnsupportedError(
                f"this tensor ({self._layout!r}) is a view whose base was modified in place after the view was taken; on one "
                "device it would show the change, here it is a copy because the base is sharded: take the view again"
            )

    def to_local(self) -> Tensor:
        """This rank's part, if it is up to date."""
        self.check_fresh()
        return super().to_local()

    def full_tensor(self) -> Tensor:
        """The global value, if it is up to date."""
        self.check_fresh()
        return super().full_tensor()

    def redistribute(self, placements: Sequence[Placement | State]) -> GlobalTensor:
        """The same value in another layout, if it is up to date."""
        self.check_fresh()
        return super().redistribute(placements)


def wrap(local: Tensor, layout: Layout, cls: type[GlobalTensor] = GlobalTensor) -> GlobalTensor:
    """The global tensor of ``layout`` whose part on this rank is ``local``."""
    t: Any = make_subclass(cls, layout.template)
    t._local = local
    t._layout = layout
    return t  # type: ignore[no-any-return]


def detached(local: Tensor, layout: Layout, base: Tensor) -> DetachedView:
    """The view ``local`` of ``base``, or of the base of ``base`` if that is a detached view."""
    view: Any = wrap(local, layout, DetachedView)
    if isinstance(base, DetachedView):
        origin = base._base_tensor
    else:
        origin = base._local if isinstance(base, GlobalTensor) else base
        origin = dtensor_local(origin) if isinstance(origin, DTensor) else origin
    view._base_tensor, view._base_version = origin, version_of(origin)
    return view  # type: ignore[no-any-return]


def version_of(t: Tensor) -> int:
    """The number of writes to ``t``; -1 in inference mode, where torch does not count them."""
    return -1 if t.is_inference() else t._version


def local_in(t: GlobalTensor, states: States, site: Site = NOWHERE) -> Tensor:
    """The local tensor of ``t`` in ``states``; gathered and reduced values and aliases are kept with the tensor."""
    layout = t._layout
    conversion = conversion_between(layout.context, layout.states, states, layout.shape)
    return t._local if conversion is None else converted(t, conversion, site)


def converted(t: GlobalTensor, conversion: Conversion, site: Site = NOWHERE) -> Tensor:
    """The local tensor of ``t`` after a conversion from its states (see :func:`local_in`)."""
    if conversion.by_way_of is not None:
        return local_in(_through(t, conversion.by_way_of, site), conversion.target, site)
    local = t._local
    grad = local.requires_grad and torch.is_grad_enabled()
    memo = t._memo
    if memo is not None:
        kept = memo.get(conversion)
        if kept is not None and kept[0] == local._version and kept[1] == grad:
            return kept[2]
    result = conversion.apply(local, site)
    # every layer slices the same mask: all of them keep one copy for their backward passes
    if (conversion.keep or not local.is_floating_point()) and not local.is_inference():
        if memo is None:
            memo = t._memo = {}
        memo[conversion] = (local._version, grad, result)
    return result


def _through(t: GlobalTensor, states: States, site: Site) -> GlobalTensor:
    """``t`` in other states as a global tensor with its own kept values, as long as it is up to date."""
    local = local_in(t, states, site)
    layout = t._layout
    kept: Any = t.__dict__.get("_middle")
    if kept is None or kept._local is not local or kept._layout.states != states:
        kept = wrap(local, layout.with_states(states))
        t.__dict__["_middle"] = kept
    return kept  # type: ignore[no-any-return]


def check_shardable(context: MeshContext, shape: Sequence[int], states: States) -> None:
    """Refuse shards that would leave a rank empty. Raises UnsupportedError: naming dim, size, and number of ranks."""
    sizes = list(shape)
    for axis, state in enumerate(states):
        n = context.sizes[axis]
        if not isinstance(state, int) or n == 1:
            continue
        if isinstance(state, IntervalShard):
            if state.total != sizes[state] or len(state.intervals) != n:
                raise UnsupportedError(
                    f"interval shard {state!r} of {state.total} elements on {len(state.intervals)} ranks does not fit dim "
                    f"{int(state)} of size {sizes[state]} on the {n} ranks of mesh axis {context.axes[axis]!r}; make it for that "
                    "size"
                )
            later = [s for s in states[axis + 1 :] if isinstance(s, int)]
            if int(state) in map(int, later) and not state.even:
                raise UnsupportedError(
                    f"interval shard {state!r} gives ranks unequal lengths of dim {int(state)}, which a later mesh axis shards "
                    "too; use intervals of equal length there"
                )
            sizes[state] = state.lengths[0]
            continue
        if not shardable(sizes[state], n):
            raise UnsupportedError(
                f"tensor dim {state} of size {shape[state]} cannot be sharded over the {n} ranks of mesh axis "
                f"{context.axes[axis]!r}: a rank would be empty; use at most {sizes[state]} ranks or replicate it"
            )
        sizes[state] = -(-sizes[state] // n)
