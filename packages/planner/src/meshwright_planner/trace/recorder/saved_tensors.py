"""What autograd keeps of a recorded run, by the node that it is kept for."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import torch

from meshwright_planner import _torch
from meshwright_planner.trace.recorder.replay_blocks import Copy
from meshwright_planner.trace.recorder.storage_recorder import StorageRecorder
from meshwright_planner.trace.tape import Saved, Tape


def saved_and_dropped(
    watcher: StorageRecorder, kept: Mapping[int, int], tape: Tape
) -> tuple[list[Saved], list[Saved]]:
    """What lives until the backward pass, and what checkpoints of the model give up.

    `kept`: node as it was recorded -> node of the tape.
    """
    found = list(_saved(watcher, kept, tape))
    # what leaves a checkpoint, and is kept by what takes it, is that one's
    saved = [
        item if tape.inside[item.node] == tape.inside[item.by] else item._replace(node=item.by, output=False)
        for item, again in found
        if not again
    ]
    saved += _kept_by_policies(watcher, kept, tape)
    return saved, [item for item, again in found if again]


def _saved(watcher: StorageRecorder, kept: Mapping[int, int], tape: Tape) -> Iterator[tuple[Saved, bool]]:
    """What autograd keeps, and whether a checkpoint gives it up."""
    produced = {r.i: k for k, node in enumerate(watcher.nodes) for r in node.outs}
    seen: dict[int, Saved | None] = {}
    inner: set[int | None] = set()

    for item, again in _entries(watcher, 0, len(watcher.packed), seen, inner):
        # inputs are packed before their node is recorded, outputs after
        own = item.root is not None and item.value is not None and produced.get(item.value) == item.node - 1
        node = kept.get(item.node - 1 if own else item.node)
        # what the next function reads is packed there too, before its node is
        by = kept.get(item.by if own else item.node)
        if node is not None:
            output = own or item.root is None
            yield item._replace(node=node, output=output, by=node if by is None else by), again
            continue
        writer = (
            item.node if own else item.node + 1
        )  # what it writes to, or multiplies with, is kept before it
        if writer in kept and _was_copied(watcher, writer):
            later = kept[writer]
            item = item._replace(root=None, value=None) if own else item
            yield item._replace(node=later, output=own, by=later), again


def _kept_by_policies(watcher: StorageRecorder, kept: Mapping[int, int], tape: Tape) -> Iterator[Saved]:
    """Results that checkpoints of the model keep beside what autograd does."""
    for old, note in enumerate(watcher.notes):
        if old not in kept:
            continue
        index = kept[old]
        tensors = next((found for spot in note.place if (found := spot.kept)), [])
        for ref in watcher.nodes[old].outs if tensors else ():
            root = watcher.roots.get(ref.i, ref.i)
            yield Saved(index, root, ref.i, True, tape.values[root].nbytes, index)
        for tensor in tensors:
            if not watcher.storage_of(tensor, []):  # inner to a composite
                yield Saved(index, None, None, True, tensor.numel() * tensor.element_size(), index)


def _was_copied(watcher: StorageRecorder, index: int) -> bool:
    """Whether the node before wrote down what this one overwrites: autograd keeps a copy of it (`mul_`)."""
    copy, written = watcher.nodes[index - 1], watcher.nodes[index] if index < len(watcher.nodes) else None
    return (
        written is not None
        and written.mutates
        and copy.op is torch.ops.aten.clone.default
        and copy.ins[0] == written.ins[0]
    )


def _entries(
    watcher: StorageRecorder, first: int, last: int, seen: dict[int, Saved | None], inner: set[int | None]
) -> Iterator[tuple[Saved, bool]]:
    """What was packed from one place to another, by the number of nodes that there were; of copies, what their first has."""
    for place in range(first, last):
        index, what, inside, again = watcher.packed[place]
        if isinstance(what, Copy):
            for item, given_up in _entries(watcher, *what.packed, seen, inner):
                root, value = (None if i is None else what.value(i) for i in (item.root, item.value))
                node, by = item.node + what.shift, item.by + what.shift
                yield Saved(node, root, value, item.output, item.nbytes, by), given_up
            continue
        if place not in seen:
            seen[place] = _packed(watcher, index, what, inner, index - inside)
        found = seen[place]
        if found is not None:
            yield found, again


def _packed(
    watcher: StorageRecorder, index: int, tensor: torch.Tensor, inner: set[int | None], by: int
) -> Saved | None:
    """A tensor that autograd keeps, by the number of nodes that there were; None where it was seen before."""
    nbytes = tensor.numel() * tensor.element_size()
    key = _torch.storage_key(tensor)
    known = watcher.storages.get(key, []) if key is not None else []
    if not known:
        new = key not in inner
        inner.add(key)
        return Saved(index, None, None, True, nbytes, by) if new else None
    geometry = (tuple(tensor.shape), tuple(tensor.stride()))
    same = [i for i in known if (watcher.values[i].shape, watcher.values[i].stride) == geometry]
    exact = watcher.index_of(tensor)
    value = exact if exact is not None else (same or known)[0]
    full = watcher.values[known[0]]
    # a view of a part keeps the whole storage, an expanded one no more than that
    size = math.prod(full.shape) * full.dtype.itemsize if nbytes else 0
    return Saved(index, known[0], value, False, size, by)
