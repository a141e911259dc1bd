"""Records the operations of a callable as nodes over values while it runs, usually on fake tensors.

A dispatch mode sees the aten ops, a function mode the torch functions they belong to.  A *composite* (linear, attention,
embedding, cross-entropy, dropout) is recorded as one node, all other functions op by op.  Mutations are in
single-assignment form: a mutated tensor gets a new value.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import torch
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import flop_registry

from meshwright_dtensor._torch.core import TorchDispatchMode, is_fake, pytree, unwatched
from meshwright_dtensor._torch.line_by_line import LINE_BY_LINE
from meshwright_dtensor._torch.metas import FLOPS, METAS
from meshwright_dtensor.trace.function_kinds import Args, Function, Kwargs

T = TypeVar("T")
aten = torch.ops.aten
_ALIASES = frozenset({aten.detach.default, aten.alias.default, aten.lift_fresh.default})
_QUERIES = frozenset({aten.sym_size.int, aten._local_scalar_dense.default})
DEVICE = torch.ops.prim.device.default
"""Autograd calls it on fake tensors again and again, so it is not recorded."""


@dataclass(slots=True, unsafe_hash=True)
class Ref:
    """Stands for a tensor among recorded arguments: the value with index ``i``."""

    i: int

    def __repr__(self) -> str:
        return f"%{self.i}"


def is_ref(x: object) -> bool:
    """Leaf predicate for pytree functions over recorded arguments."""
    return isinstance(x, Ref)


@dataclass(slots=True)
class Value:
    """A recorded tensor: geometry, dtype, and origin (``"param:fqn"``, ``"input:name"``...)."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool = False
    name: str | None = None

    @property
    def nbytes(self) -> int:
        """Size of the whole value in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def differentiable(self) -> bool:
        """Whether a value of this dtype can have a gradient."""
        return self.dtype.is_floating_point or self.dtype.is_complex


@dataclass(frozen=True, slots=True)
class Call:
    """Address of a torch function call: the ``occurrence``-th call of ``function`` within one forward of ``module``.

    ``forward``: which forward of the module within one of the model that is.

    Only calls with a tensor that is derived from an input or a parameter are counted: the dispatcher sees no others.
    """

    module: str
    function: str
    occurrence: int
    forward: int = 0


@dataclass(slots=True, eq=False)
class Node:
    """One recorded operation; tensors among ``args`` and ``kwargs`` are :class:`Ref`."""

    op: Any
    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    ins: list[Ref]
    outs: list[Ref]
    module: str = ""
    call: Call | None = None
    flops: float = 0.0
    mutates: bool = False
    call_inputs: tuple[int | None, ...] = ()

    def __repr__(self) -> str:
        return f"{self.name}({self.args}, {self.kwargs}) -> {self.outs}"


_PLAIN = frozenset({type(None), bool, int, float, str, torch.dtype, torch.device, Ref})
"""Types of nearly all leaves: this test is ten times as fast as pytree's."""


def leaves(tree: Any, kind: type[T]) -> list[T]:
    """The leaves of this kind in a tree of arguments, in pytree order; a Ref is a leaf."""
    result: list[T] = []
    _collect(tree, kind, result)
    return result


def _collect(tree: Any, kind: type[T], result: list[T]) -> None:
    node = type(tree)
    if node is tuple or node is list:
        for x in tree:
            _collect(x, kind, result)
    elif node is dict:
        for x in tree.values():
            _collect(x, kind, result)
    elif isinstance(tree, kind):
        result.append(tree)
    elif node not in _PLAIN:
        result.extend(x for x in pytree.tree_leaves(tree, is_leaf=is_ref) if isinstance(x, kind))


def is_product(op: Any) -> bool:
    """Whether an aten op counts operations: products, convolutions, attention."""
    return getattr(op, "_overloadpacket", None) in flop_registry or op in FLOPS


def refs_in(tree: Any) -> list[Ref]:
    """The refs of a tree of recorded arguments, in pytree order."""
    return leaves(tree, Ref)


def function_name(function: Callable[..., Any]) -> str:
    """The name under which a torch function is addressed in a :class:`Call`."""
    return getattr(function, "__name__", str(function))


class RecordedWhole(Protocol):
    """A torch function that is recorded as one node: a composite of the rules."""

    @property
    def name(self) -> str:
        """Name of its nodes."""

    def normalise(self, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs] | None:
        """The call in canonical positional form with defaults filled in; None records it op by op."""


@dataclass(slots=True)
class ModuleFrame:
    """The module whose forward is running, the number of that forward, and its count of calls per function name."""

    module: str
    counts: Counter[str] = field(default_factory=Counter)
    forward: int = 0


class _Functions(TorchFunctionMode):
    """Notifies the recorder of each torch function."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_function__(
        self, func: Function, types: Any, args: Args = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return self.recorder.on_function(func, args, dict(kwargs or {}))


class Recorder(TorchDispatchMode):
    """Context manager that records the operations inside as :attr:`nodes` over :attr:`values`.

    Args:
        composites: torch function -> its composite.
        inputs: tensors registered first, so that they are values ``0 .. len(inputs) - 1``.
    """

    def __init__(
        self,
        composites: Mapping[Callable[..., Any], RecordedWhole] | None = None,
        inputs: Iterable[torch.Tensor] = (),
    ) -> None:
        super().__init__()
        self.values: list[Value] = []
        self.nodes: list[Node] = []
        self.detaches = False
        """Whether a computed tensor was detached: an alias, which has no node."""
        self.unreturned_write = ""
        """An op that writes to an argument and returns nothing, so that no node tells of it."""
        self.frames: list[ModuleFrame] = [ModuleFrame("")]
        self.forwards: Counter[str] = Counter()
        """Module -> how many forwards of it have begun."""
        self._composites = composites or {}
        self._functions = _Functions(self)
        self._index: dict[int, int] = {}
        self._aliases: dict[int, set[int]] = {}
        self._kept: list[torch.Tensor] = []
        self._tainted: set[int] = set()
        self._silent = 0
        self._call: Call | None = None
        self._call_inputs: tuple[int | None, ...] = ()
        for tensor in inputs:
            self.mark(tensor)

    # ---- module frames, pushed and popped by the caller's module hooks
    def enter_module(self, name: str | None) -> None:
        """The forward of module ``name`` begins; None: of a module without a name, whose calls are those of its caller."""
        if name is None:
            self.frames.append(self.frames[-1])
        else:
            self.frames.append(ModuleFrame(name, forward=self.forwards[name]))
            self.forwards[name] += 1

    def exit_module(self) -> None:
        """The innermost running forward ends."""
        self.frames.pop()

    # ---- values
    def ref(self, tensor: torch.Tensor) -> Ref:
        """The ref of ``tensor``; a tensor not seen before becomes a new value."""
        index = self._index.get(id(tensor))
        if index is None:
            index = len(self.values)
            self.values.append(_value(tensor))
            self._bind(tensor, index)
        return Ref(index)

    def mark(self, tensor: torch.Tensor, name: str | None = None) -> Ref:
        """Register an input, parameter or buffer; all but buffers taint what is computed from them."""
        ref = self.ref(tensor)
        self.values[ref.i].name = name
        if name is None or not name.startswith("buffer:"):
            self._tainted.add(id(tensor))
        return ref

    def index_of(self, tensor: torch.Tensor) -> int | None:
        """The value index of a tensor that was seen, else None."""
        return self._index.get(id(tensor))

    def _bind(self, tensor: torch.Tensor, index: int) -> None:
        self._index[id(tensor)] = index
        self._aliases.setdefault(index, set()).add(id(tensor))
        # an id must not be reused while we map it
        self._kept.append(tensor)

    def references(self, tree: Any) -> Any:
        """``tree`` with each tensor replaced by its ref."""
        node = type(tree)
        if node is tuple or node is list:
            return node([self.references(x) for x in tree])
        if node is dict:
            return {key: self.references(x) for key, x in tree.items()}
        if isinstance(tree, torch.Tensor):
            return self.ref(tree)
        if node in _PLAIN:
            return tree
        return pytree.tree_map(lambda x: self.ref(x) if isinstance(x, torch.Tensor) else x, tree)

    # ---- recording
    def __enter__(self) -> Recorder:
        super().__enter__()
        self._functions.__enter__()
        return self

    def __exit__(self, *exc: Any) -> None:
        self._functions.__exit__(*exc)
        super().__exit__(*exc)

    def on_function(self, func: Function, args: Args, kwargs: Kwargs) -> Any:
        """Run a torch function, noting its address; a composite is recorded as one node."""
        if self._silent:
            return func(*args, **kwargs)
        if func in LINE_BY_LINE:
            # torch took the mode off for this call
            with self._functions:
                return LINE_BY_LINE[func](*args, **kwargs)
        tensors = leaves((args, kwargs), torch.Tensor)
        tainted = any(id(t) in self._tainted for t in tensors)
        outer = self._call, self._call_inputs
        if tainted:
            frame, name = self.frames[-1], function_name(func)
            self._call = Call(frame.module, name, frame.counts[name], frame.forward)
            self._call_inputs = tuple(self._index.get(id(t)) for t in tensors)
            frame.counts[name] += 1
        else:
            self._call, self._call_inputs = None, ()
        try:
            composite = self._composites.get(func)
            normal = composite.normalise(args, kwargs) if composite is not None else None
            if composite is None or normal is None:
                return func(*args, **kwargs)
            versions = [t._version for t in tensors]
            self._silent += 1
            try:
                out = self.composed(func, args, kwargs, tensors)
            finally:
                self._silent -= 1
            if versions == [t._version for t in tensors] and any(out is t for t in tensors):
                # the identity: a dropout that is off
                return out
            self._add(None, composite.name, normal[0], normal[1], out)
            return out
        finally:
            self._call, self._call_inputs = outer

    def __torch_dispatch__(self, func: Any, types: Any, args: Args = (), kwargs: Kwargs | None = None) -> Any:
        if func is DEVICE:
            return func(*args)
        kwargs = kwargs or {}
        out = self.compute(func, args, kwargs)
        if self._silent or func.namespace == "prim" or func in _QUERIES:
            return out
        if func in _ALIASES:
            self.detaches |= func is aten.detach.default and not self._is_new(args[0])
            self._bind(out, self.ref(args[0]).i)
            if id(args[0]) in self._tainted:
                self._tainted.add(id(out))
            return out
        flops = flop_registry.get(func._overloadpacket)
        if flops is not None:
            count = float(flops(*args, **kwargs, out_val=out))
        else:
            count = float(FLOPS[func](*args, **kwargs)) if func in FLOPS else 0.0
        self._add(func, str(func), args, kwargs, out, count)
        return out

    def composed(self, func: Function, args: Args, kwargs: Kwargs, tensors: list[torch.Tensor]) -> Any:
        """Run a composite; `tensors`: those among its arguments."""
        return func(*args, **kwargs)

    def compute(self, func: Any, args: Args, kwargs: Kwargs) -> Any:
        """Run one aten op."""
        meta = METAS.get(func)
        return meta(*args, **kwargs) if meta is not None and is_fake(args[0]) else func(*args, **kwargs)

    def _is_new(self, tensor: torch.Tensor) -> bool:
        """Whether ``tensor`` depends on no values: torch detaches the results of its ``*_like`` functions."""
        if id(tensor) not in self._tainted:
            return True
        made = self.nodes[-1] if self.nodes else None
        if made is None or not ("_like." in made.name or made.name.startswith("aten.new_")):
            return False
        return Ref(self._index[id(tensor)]) in made.outs

    def _add(self, op: Any, name: str, args: Any, kwargs: Any, out: Any, flops: float = 0.0) -> None:
        tensors = leaves((args, kwargs), torch.Tensor)
        outputs = leaves(out, torch.Tensor)
        if not outputs:
            if op is not None and op._schema.is_mutable:
                self.unreturned_write = name
            return
        node_args, node_kwargs = self.references(tuple(args)), self.references(dict(kwargs))
        ins = refs_in((node_args, node_kwargs))
        seen = {id(t) for t in tensors}
        mutated = [t for t in outputs if id(t) in seen] if op is None or op._schema.is_mutable else []
        for tensor in mutated:
            self._reversion(tensor)
        outs = [self.ref(t) for t in outputs]
        if any(id(t) in self._tainted for t in tensors):
            self._tainted.update(id(t) for t in outputs)
        module, call, inputs = self.frames[-1].module, self._call, self._call_inputs
        node = Node(op, name, node_args, node_kwargs, ins, outs, module, call, flops, bool(mutated), inputs)
        self.nodes.append(node)
        self.added(tensors)

    def added(self, tensors: list[torch.Tensor]) -> None:
        """A node was added; `tensors`: those among its arguments, in the order of its `ins`."""

    def _reversion(self, tensor: torch.Tensor) -> None:
        """Give ``tensor`` and its aliases a new value: the old one is overwritten."""
        old = self._index[id(tensor)]
        new = len(self.values)
        self.values.append(_value(tensor))
        for alias in self._aliases.pop(old):
            self._index[alias] = new
            self._aliases.setdefault(new, set()).add(alias)


def _value(tensor: torch.Tensor) -> Value:
    with unwatched():
        # of another length than the shape, of a sparse tensor
        stride = tuple(tensor.stride()) if tensor.layout is torch.strided else (0,) * (tensor.dim() + 1)
        return Value(tuple(tensor.shape), stride, tensor.dtype, tensor.requires_grad)
