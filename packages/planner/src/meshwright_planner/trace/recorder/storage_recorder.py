"""A recorder that knows the storages of values, keeps real tensors small, and accepts copied recordings."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import zip_longest
from typing import Any

import torch

from meshwright_dtensor.devices import on_host
from meshwright_dtensor.errors import UsageError
from meshwright_dtensor.trace.graph import DEVICE, Recorder, is_product, leaves
from meshwright_dtensor.trace.one_device import OF_A_GROUP, collective_of
from meshwright_planner import _torch
from meshwright_planner._torch import pytree
from meshwright_planner.trace.grad_flow import Note, find_function_gradients
from meshwright_planner.trace.recorder import rnn_workspace
from meshwright_planner.trace.user_checkpoints import Checkpoint, Checkpoints, Place

REAL_ELEMENTS = 2**25
"""Integer results with more elements than this are fake too: no model reads every entry of a large mask."""

INSIDE_ELEMENTS = 2**12
"""The same inside a composite of fake tensors (the mask of causal attention), whose inner results nobody reads."""


class StorageRecorder(Recorder):
    """A recorder that knows which values share a storage, and keeps real tensors small."""

    def __init__(self, composites: Mapping[Callable[..., Any], Any], mode: Any = None) -> None:
        self.storages: dict[int, list[int]] = {}
        self.roots: dict[int, int] = {}
        """Value -> the first value of its storage, if that is another."""
        # (id of a tensor, value) whose storage is noted
        self._stored: set[tuple[int, int]] = set()
        self.fake = mode
        self._real_elements = REAL_ELEMENTS
        self.copied: dict[str, str] = {}
        self.packed: list[tuple[int, Any, bool, bool]] = []
        """Saved tensors: (number of nodes so far, tensor or Copy of earlier entries, whether the torch function that made the
        last node still runs, whether a checkpoint drops the tensor)."""
        self.notes: list[Note] = []
        """Per node, how it was run."""
        self.checkpoints = Checkpoints(lambda tensor: self.pack(tensor, True))
        # the place of the last operation
        self._place: Place = ()
        super().__init__(composites)

    def pack(self, tensor: torch.Tensor, is_dropped: bool = False) -> torch.Tensor:
        """Note that autograd saves a tensor: a hook of torch.autograd.graph.saved_tensors_hooks."""
        inside = bool(self.nodes) and self._call is not None and self.nodes[-1].call == self._call
        count = len(self.nodes) if is_dropped else self.checkpoints.keeper(len(self.nodes))
        self.packed.append((count, tensor, inside, is_dropped))
        return tensor

    def on_function(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """See Recorder.on_function."""
        # before a tensor is saved in one that has just begun
        self.checkpoints.open()
        return super().on_function(func, args, kwargs)

    def added(self, tensors: list[torch.Tensor]) -> None:
        """See Recorder.added."""
        self._add_note(Note(torch.is_grad_enabled(), _torch.gradient_kinds(tensors), self._place))

    def _add_note(self, note: Note) -> None:
        for spot in note.place:
            spot.checkpoint.add(len(self.notes))
        self.notes.append(note)

    def copy_notes(self, nodes: tuple[int, int], around: Sequence[Checkpoint]) -> None:
        """Repeat the notes of a range of nodes for a copied block; `around`: the checkpoints that the original ran in."""
        notes = self.notes[slice(*nodes)]
        if not any(note.place for note in notes):
            self.notes.extend(Note(note.enabled, note.requires, (), note) for note in notes)
            return
        here = self.checkpoints.again(around)
        for note in notes:
            place = tuple(spot._replace(checkpoint=here(spot.checkpoint)) for spot in note.place)
            self._add_note(Note(note.enabled, note.requires, place, note))

    def find_functions(self) -> None:
        """Note which inputs of autograd.Functions receive gradients, after the run."""
        if all(note.enabled or not any(note.requires) for note in self.notes):
            return
        seen: dict[int, torch.Tensor] = {}
        for tensor in self._kept:
            value = self._index[id(tensor)]
            if value not in seen or not seen[value].requires_grad:
                seen[value] = tensor
        find_function_gradients(self.nodes, self.notes, seen.get)

    def ref(self, tensor: torch.Tensor) -> Any:
        """See Recorder.ref."""
        ref = super().ref(tensor)
        if (id(tensor), ref.i) not in self._stored:
            self._stored.add((id(tensor), ref.i))
            key = _torch.storage_key(tensor)
            if key is not None:
                values = self.storages.setdefault(key, [])
                if ref.i not in values:
                    values.append(ref.i)
                    if values[0] != ref.i:
                        self.roots[ref.i] = values[0]
        return ref

    def storage_of(self, tensor: torch.Tensor, none: list[int]) -> list[int]:
        """The values that share the storage of `tensor`, oldest first; `none` if its storage is unknown."""
        key = _torch.storage_key(tensor)
        return (self.storages.get(key) or none) if key is not None else none

    def extent(self) -> tuple[int, int]:
        """Number of nodes and of values so far."""
        return len(self.nodes), len(self.values)

    def is_tainted(self, tensor: torch.Tensor) -> bool:
        """Whether it depends on an input or a parameter."""
        return id(tensor) in self._tainted

    def fake_copy(self, like: torch.Tensor, index: int, storage: list[int]) -> torch.Tensor:
        """A new fake tensor with the geometry of `like`, as value `index`, whose storage is that of `storage`."""
        self._silent += 1
        try:
            make = partial(_torch.fake_like, self.fake, like, like.device)
            new = _torch.computed(make) if like.requires_grad else make()
        finally:
            self._silent -= 1
        self._bind(new, index)
        key = _torch.storage_key(new)
        if key is not None and storage:
            self.storages[key] = list(storage)
        if id(like) in self._tainted:
            self._tainted.add(id(new))
        return new

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is DEVICE:
            return func(*args)
        if call := collective_of(func, args):
            raise UsageError(OF_A_GROUP.format(f"module {self.frames[-1].module or 'the model'!r}", call))
        kwargs = kwargs or {}
        place = self.checkpoints.place(func)
        if place and self._silent and not is_product(func):
            # in a composite the last product counts: policies of checkpoints save products
            spots = zip(place, self._place)
            place = tuple(spot._replace(op=was.op, number=was.number) for spot, was in spots)
        self._place = place
        if self.fake is not None and _result_elements(args, kwargs) > self._real_elements:
            args, kwargs = pytree.tree_map_only(torch.Tensor, self._faked, (args, kwargs))
            with self.fake:
                return super().__torch_dispatch__(func, types, args, kwargs)
        if self.fake is not None:
            tensors = leaves((args, kwargs), torch.Tensor)
            # real tensors require a gradient because fake tensors were written to them
            written = {id(t) for t in tensors if t.requires_grad and not _torch.is_fake(t)}
            if func._schema.is_mutable and not _torch.is_fake(args[0]) and any(map(_torch.is_fake, tensors)):
                written.add(id(args[0]))
            if written:

                def change(t: torch.Tensor) -> torch.Tensor:
                    """The same value in the same storage, fake where it is written."""
                    return self.fake_copy(t, self.ref(t).i, self.storage_of(t, [])) if id(t) in written else t

                args, kwargs = pytree.tree_map_only(torch.Tensor, change, (args, kwargs))
        return super().__torch_dispatch__(func, types, args, kwargs)

    def composed(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[torch.Tensor]
    ) -> Any:
        """See Recorder.composed."""
        if not any(map(_torch.is_fake, tensors)):
            return super().composed(func, args, kwargs, tensors)
        self._real_elements = INSIDE_ELEMENTS
        try:
            return super().composed(func, args, kwargs, tensors)
        finally:
            self._real_elements = REAL_ELEMENTS

    def compute(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """See Recorder.compute."""
        out = None if self.fake is None else _torch.meta_result(self.fake, func, args, kwargs)
        out = super().compute(func, args, kwargs) if out is None else out
        if self.fake is None or not rnn_workspace.is_layer(func) or not _torch.is_fake(args[0]):
            return out
        x, *weights, hidden = *args[:5], args[10]
        place = rnn_workspace.WORKSPACE
        if out[place].numel() or not on_host(x.device):
            return out
        nbytes = rnn_workspace.workspace_bytes(x, tuple(weights), hidden, tuple(args[7:]))
        with self.fake:
            kept = torch.empty(nbytes, dtype=torch.uint8, device=x.device)
        return (*out[:place], kept, *out[place + 1 :])

    def _faked(self, tensor: torch.Tensor) -> torch.Tensor:
        if _torch.is_fake(tensor):
            return tensor
        fake = _torch.fake_like(self.fake, tensor, tensor.device)
        self._bind(fake, self.ref(tensor).i)
        if id(tensor) in self._tainted:
            self._tainted.add(id(fake))
        return fake


def _result_elements(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int:
    """An estimate of the elements of a result: of the broadcast inputs, or of a size among the arguments."""
    if any(map(_torch.is_fake, args)):
        return 0
    tensors = leaves((args, kwargs), torch.Tensor)
    if any(map(_torch.is_fake, tensors)):
        return 0
    broadcast = (max(1, *dims) for dims in zip_longest(*(t.shape[::-1] for t in tensors), fillvalue=1))
    sizes = [a for a in args if isinstance(a, (list, tuple)) and a and all(isinstance(x, int) for x in a)]
    return max([math.prod(broadcast), *map(math.prod, sizes)])
