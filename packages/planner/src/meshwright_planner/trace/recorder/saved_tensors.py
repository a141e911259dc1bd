"""The tensors that autograd saves in a recorded run, by node."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import torch

from meshwright_planner import _torch
from meshwright_planner.trace.recorder.replay_blocks import Copy
from meshwright_planner.trace.recorder.storage_recorder import StorageRecorder
from meshwright_planner.trace.tape import Saved, Tape


def note_saved(recorder: StorageRecorder, kept: Mapping[int, int], tape: Tape) -> None:
    """Set `tape.saved` and `tape.dropped`; `kept`: recorded node -> node of the tape."""
    for item, again in _saved(recorder, kept):
        # a tensor that leaves a checkpoint and is saved by its consumer counts as the consumer's
        if not again and tape.inside[item.node] != tape.inside[item.by]:
            item = item._replace(node=item.by, output=False)
        (tape.dropped if again else tape.saved).append(item)
    tape.saved += _kept_by_policies(recorder, kept, tape)


def _saved(recorder: StorageRecorder, kept: Mapping[int, int]) -> Iterator[tuple[Saved, bool]]:
    """The tensors that autograd saves, each with whether a checkpoint drops it."""
    produced = {r.i: k for k, node in enumerate(recorder.nodes) for r in node.outs}
    seen: dict[int, Saved | None] = {}
    inner: set[int | None] = set()

    for item, again in _entries(recorder, 0, len(recorder.packed), seen, inner):
        # inputs are packed before their node is recorded, outputs after
        is_output = item.value is not None and produced.get(item.value) == item.node - 1
        node = kept.get(item.node - 1 if is_output else item.node)
        # the next function also packs its inputs, before its node is recorded
        by = kept.get(item.by if is_output else item.node)
        if node is not None:
            output = is_output or item.root is None
            yield item._replace(node=node, output=output, by=node if by is None else by), again
            continue
        # the overwritten tensor is saved before it
        writer = item.node if is_output else item.node + 1
        if writer not in kept or not recorder.nodes[writer].mutates:
            continue
        copy, written = recorder.nodes[writer - 1 : writer + 1]
        # autograd saves a copy of the tensor (`mul_`)
        if copy.op is torch.ops.aten.clone.default and copy.ins[0] == written.ins[0]:
            later = kept[writer]
            item = item._replace(root=None, value=None) if is_output else item
            yield item._replace(node=later, output=is_output, by=later), again


def _kept_by_policies(recorder: StorageRecorder, kept: Mapping[int, int], tape: Tape) -> Iterator[Saved]:
    """Results that policies of the model's checkpoints save, in addition to autograd."""
    for old, note in enumerate(recorder.notes):
        if old not in kept:
            continue
        index = kept[old]
        tensors = next((kept_results for spot in note.place if (kept_results := spot.kept)), [])
        for ref in recorder.nodes[old].outs if tensors else ():
            root = recorder.roots.get(ref.i, ref.i)
            yield Saved(index, root, ref.i, True, tape.values[root].nbytes, index)
        for tensor in tensors:
            # inside a composite
            if not recorder.storage_of(tensor, []):
                yield Saved(index, None, None, True, tensor.numel() * tensor.element_size(), index)


def _entries(
    recorder: StorageRecorder, first: int, last: int, seen: dict[int, Saved | None], inner: set[int | None]
) -> Iterator[tuple[Saved, bool]]:
    """The tensors packed in a range, by the number of nodes recorded by then; copied blocks repeat their original's."""
    for place in range(first, last):
        index, what, inside, is_dropped = recorder.packed[place]
        if isinstance(what, Copy):
            for item, given_up in _entries(recorder, *what.packed, seen, inner):
                root, value = (None if i is None else what.value(i) for i in (item.root, item.value))
                node, by = item.node + what.shift, item.by + what.shift
                yield Saved(node, root, value, item.output, item.nbytes, by), given_up
            continue
        if place not in seen:
            seen[place] = _packed(recorder, index, what, inner, index - inside)
        entry = seen[place]
        if entry is not None:
            yield entry, is_dropped


def _packed(
    recorder: StorageRecorder, index: int, tensor: torch.Tensor, inner: set[int | None], by: int
) -> Saved | None:
    """A saved tensor, by the number of nodes recorded by then; None if its storage was saved before."""
    nbytes = tensor.numel() * tensor.element_size()
    key = _torch.storage_key(tensor)
    values = recorder.storages.get(key, []) if key is not None else []
    if not values:
        new = key not in inner
        inner.add(key)
        return Saved(index, None, None, True, nbytes, by) if new else None
    geometry = (tuple(tensor.shape), tuple(tensor.stride()))
    same = [i for i in values if (recorder.values[i].shape, recorder.values[i].stride) == geometry]
    exact = recorder.index_of(tensor)
    value = exact if exact is not None else (same or values)[0]
    full = recorder.values[values[0]]
    # a view keeps its whole storage, an expanded view no more than that
    size = math.prod(full.shape) * full.dtype.itemsize if nbytes else 0
    return Saved(index, values[0], value, False, size, by)
