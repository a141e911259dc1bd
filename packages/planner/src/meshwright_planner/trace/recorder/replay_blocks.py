"""Replay of repeated blocks: two members of a family run, the others get copies of the second's recording.

The first two members of a family (see `families`) run.  If both did the same, all others but the last are not run: their
nodes, values and saved tensors are copies of the second's, with their own parameters and inputs, and their results are new
fake tensors of the same geometry.  The last one runs; if it does something else, the recording is discarded.
A family that was verified once is trusted in recordings of other sizes: there only its first member runs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import nn

from meshwright_dtensor.trace.graph import Call, Node, Ref
from meshwright_planner import _torch
from meshwright_planner._torch import pytree
from meshwright_planner.trace.recorder.repeated_blocks import HookCall, families, recorded_hooks, replay_hooks
from meshwright_planner.trace.recorder.storage_recorder import StorageRecorder
from meshwright_planner.trace.user_checkpoints import Checkpoint


class BlocksDifferError(Exception):
    """A block did something else than the others of its family."""


@dataclass
class _BlockRun:
    """The recording of one block.

    Args:
        nodes, values, packed: (first, one past the last).
        inputs: value of each tensor among the arguments, in order.
        roots: first value of the storage of each of them.
        own_values: name of a parameter or buffer below the module -> value.
        outputs, spec: the flattened output: (number of the argument or None, tensor), or an object that is no tensor.
        storages: per output, the values of its storage.
        around: the checkpoints that it ran in.
        hook_calls: calls of hooks inside it.
        forwards: module -> how many forwards of it had begun before, and begin in the block.
        signature: equal for two runs of a family; None if the run cannot be replayed.
    """

    module: str
    nodes: tuple[int, int]
    values: tuple[int, int]
    packed: tuple[int, int]
    inputs: list[int]
    roots: list[int]
    own_values: dict[str, int]
    outputs: list[Any]
    spec: Any
    storages: list[list[int]]
    around: list[Checkpoint]
    hook_calls: list[HookCall]
    forwards: tuple[Counter[str], Counter[str]]
    signature: Any


@dataclass(frozen=True)
class Copy:
    """A copied block: the range of its original's saved tensors, the shift of node numbers, and the map of values."""

    packed: tuple[int, int]
    shift: int
    value: Callable[[int], int]


class BlockReplayer:
    """Replaces the forwards of a model's repeated blocks during a recording; the model is `borrowed`, which restores them.

    `trusted`: families, by the name of their first block, that an earlier recording verified.
    """

    def __init__(self, model: nn.Module, recorder: StorageRecorder, trusted: Collection[str]) -> None:
        self.recorder, self._trusted = recorder, frozenset(trusted)
        self._runs: dict[Any, list[_BlockRun | None]] = {}
        self._families = families(model)
        modules = dict(model.named_modules())
        for name in self._families:
            module: Any = modules[name]
            module.__dict__["forward"] = self._forward(name, module, module.forward)

    def verified(self) -> set[str]:
        """The families whose first and last members did the same as all that ran."""
        calls: dict[str, list[list[_BlockRun | None]]] = {}
        for (family, _), runs in self._runs.items():
            calls.setdefault(family, []).append(runs)
        return {
            family
            for family, (runs, *others) in calls.items()
            if not others
            and len(runs) > 2
            and all(r is not None and r.signature == runs[0].signature for r in runs)  # type: ignore[union-attr]
        }

    def _forward(self, name: str, module: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
        family, last = self._families[name]

        def run(*args: Any, **kwargs: Any) -> Any:
            # read now, not before: some models register hooks at the start of their forward
            hooks = _torch.hooks_inside(module)
            given = None if hooks is None else self._call_signature(args, kwargs)
            if given is None:
                return forward(*args, **kwargs)
            tensors, shape = given
            # recomputation in a checkpoint depends on what ran in it before
            around = self.recorder.checkpoints.open()
            begun = tuple((id(c), c.nodes) if c.nodes else None for c in around)
            key = (shape, hooks, torch.is_grad_enabled(), begun)
            runs = self._runs.setdefault((family, key), [])
            if family in self._trusted and runs and runs[0] is not None:
                return self._replay(runs[0], name, module, tensors)
            first, second = (*runs[:2], None, None)[:2]
            # the second of two runs that did the same
            source = second if first and second and first.signature == second.signature else None
            if source is not None and not last:
                return self._replay(source, name, module, tensors)
            done, out = self._run(name, module, tensors, lambda: forward(*args, **kwargs))
            if source is not None and (done is None or done.signature != source.signature):
                raise BlocksDifferError(name)
            runs.append(done)
            return out

        return run

    def _call_signature(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[list[torch.Tensor], Any] | None:
        """The tensors among the arguments, and a key of all arguments; None if they cannot be compared."""
        leaves, spec = pytree.tree_flatten((args, kwargs))
        tensors = [x for x in leaves if isinstance(x, torch.Tensor)]
        order: dict[int, int] = {}
        entries: list[Any] = []
        kinds = iter(_torch.gradient_kinds(tensors))
        for x in leaves:
            if isinstance(x, torch.Tensor):
                fake = _torch.is_fake(x)
                # values of real tensors may decide which operations run: only identical tensors are equal
                same = order.setdefault(id(x), len(order)) if fake else ("real", id(x), _torch.writes(x))
                tainted = self.recorder.is_tainted(x)
                entries.append((same, tuple(x.shape), tuple(x.stride()), x.dtype, next(kinds), tainted))
            else:
                try:
                    hash(x)
                except TypeError:
                    return None
                entries.append((type(x), x) if isinstance(x, (int, float, str, bool, type(None))) else id(x))
        return tensors, (str(spec), tuple(entries))

    def _own_values(self, module: nn.Module) -> dict[str, int]:
        tables = (module.named_parameters, module.named_buffers)
        named = chain.from_iterable(table(remove_duplicate=False) for table in tables)
        return {name: self.recorder.ref(tensor).i for name, tensor in named}

    def _run(
        self, name: str, module: nn.Module, tensors: list[torch.Tensor], forward: Callable[[], Any]
    ) -> tuple[_BlockRun | None, Any]:
        recorder = self.recorder
        inputs = [recorder.ref(t).i for t in tensors]
        roots = [recorder.storage_of(t, [i])[0] for t, i in zip(tensors, inputs)]
        own_values, around = self._own_values(module), self.recorder.checkpoints.open()
        first = len(recorder.nodes), len(recorder.values), len(recorder.packed)
        before = recorder.forwards.copy()
        with recorded_hooks(module, recorder) as hook_calls:
            out = forward()
        nodes, values, packed = zip(first, (len(recorder.nodes), len(recorder.values), len(recorder.packed)))
        if [recorder.ref(t).i for t in tensors] != inputs or self._own_values(module) != own_values:
            # an input, parameter or buffer was written to
            return None, out
        weights = set(own_values.values())
        for tensor in (t for seen in hook_calls.seen for t in seen.tensors()):
            index = recorder.index_of(tensor)
            # it has no counterpart in a copied block
            if index is None or index in weights or not _torch.is_fake(tensor):
                return None, out
        outputs = self._outputs(out, tensors, values[0])
        if outputs is None or not hook_calls.passive:
            return None, out
        parts = (name, nodes, values, packed, inputs, roots, own_values, *outputs, around, hook_calls.seen)
        run = _BlockRun(*parts, forwards=(before, recorder.forwards - before), signature=None)
        run.signature = self._signature_of(run)
        return (None if run.signature is None else run), out

    def _outputs(
        self, out: Any, tensors: list[torch.Tensor], first: int
    ) -> tuple[list[Any], Any, list[list[int]]] | None:
        """Outputs, spec and storages as in `_BlockRun`; None if one is neither an input nor a new fake (from value `first` on)."""
        recorder = self.recorder
        leaves, spec = pytree.tree_flatten(out)
        place = {id(t): k for k, t in enumerate(tensors)}
        keys = {_torch.storage_key(t) for t in tensors} - {None}
        outputs: list[Any] = []
        storages: list[list[int]] = []
        for x in leaves:
            if not isinstance(x, torch.Tensor):
                outputs.append(x)
                storages.append([])
                continue
            if id(x) not in place:
                index = recorder.index_of(x)
                is_new = index is not None and index >= first and _torch.is_fake(x)
                if not is_new or _torch.storage_key(x) in keys:
                    return None
            outputs.append((place.get(id(x)), x))
            storages.append(list(recorder.storage_of(x, [])))
        return outputs, spec, storages

    def _signature_of(self, run: _BlockRun) -> Any:
        """The recording of a block in a form that is equal for blocks that do the same; None if it cannot be replayed."""
        own_values = {i: name for name, i in run.own_values.items()}
        given = {i: k for k, i in reversed(list(enumerate(run.inputs)))}

        def label(i: int) -> Any:
            if i >= run.values[0]:
                return i - run.values[0]
            if i in own_values:
                return "own", own_values[i]
            return ("input", given[i]) if i in given else ("outside", i)

        entries: list[Any] = []
        for node in self.recorder.nodes[slice(*run.nodes)]:
            if node.mutates and any(r.i < run.values[0] for r in node.ins[:1]):
                return None
            call = node.call and _moved(node.call, run.module, "", run.forwards[0], Counter())
            tensors = tuple(label(r.i) for r in (*node.ins, *node.outs))
            rest = repr(_mapped((node.args, node.kwargs), lambda i: 0))
            module = _renamed(node.module, run.module, "")
            entries.append((node.name, module, call, tensors, rest, node.flops))
        values = [(v.shape, v.dtype, v.requires_grad) for v in self.recorder.values[slice(*run.values)]]
        ref = self.recorder.ref

        def shown(x: Any) -> Any:
            if _is_output(x):
                return x[0], x[0] is None and ref(x[1]).i - run.values[0]
            return x if isinstance(x, (tuple, int, str)) else id(x)

        calls = run.hook_calls
        hooks = [(s.module, s.place, str(s.spec), [label(ref(t).i) for t in s.tensors()]) for s in calls]
        return entries, values, hooks, str(run.spec), list(map(shown, run.outputs))

    def _replay(self, run: _BlockRun, name: str, module: nn.Module, tensors: list[torch.Tensor]) -> Any:
        """Copy the recording `run` for module `name`."""
        recorder = self.recorder
        table: dict[int, int] = {}
        for i, root, tensor in zip(run.inputs, run.roots, tensors):
            now = recorder.ref(tensor).i
            table[i] = now
            table.setdefault(root, recorder.storage_of(tensor, [now])[0])
        own_values = self._own_values(module)
        table.update((i, own_values[key]) for key, i in run.own_values.items())
        low = run.values[0]
        start, shift = len(recorder.nodes), len(recorder.values) - low

        def value(i: int) -> int:
            return i + shift if i >= low else table.get(i, i)

        recorder.copied[name] = run.module
        recorder.values.extend(recorder.values[slice(*run.values)])
        copied = recorder.nodes[slice(*run.nodes)]
        before, begun = run.forwards
        calls = (n.call and _moved(n.call, run.module, name, before, recorder.forwards) for n in copied)
        recorder.nodes.extend(_copied(n, call, value, run.module, name) for n, call in zip(copied, calls))
        recorder.forwards.update({_renamed(module, run.module, name): n for module, n in begun.items()})
        recorder.copy_notes(run.nodes, run.around)
        roots = ((i, recorder.roots.get(i)) for i in range(*run.values))
        recorder.roots.update((value(i), value(root)) for i, root in roots if root is not None)
        recorder.packed.append((start, Copy(run.packed, start - run.nodes[0], value), False, False))
        made: dict[int, torch.Tensor] = {}

        def fake_copy(x: torch.Tensor, storage: list[int] | None = None) -> torch.Tensor:
            i = recorder.ref(x).i
            # an input, or a value from outside
            if i < low:
                return tensors[run.inputs.index(i)] if i in run.inputs else x
            if id(x) not in made:
                storage = recorder.storage_of(x, []) if storage is None else storage
                made[id(x)] = recorder.fake_copy(x, value(i), [value(k) for k in storage])
            return made[id(x)]

        if not replay_hooks(run.hook_calls, module, recorder, fake_copy):
            raise BlocksDifferError(name)
        leaves = []
        for x, storage in zip(run.outputs, run.storages):
            if not _is_output(x):
                leaves.append(x)
            elif x[0] is not None:
                leaves.append(tensors[x[0]])
            else:
                leaves.append(fake_copy(x[1], storage))
        return pytree.tree_unflatten(leaves, run.spec)


def _is_output(x: Any) -> bool:
    return isinstance(x, tuple) and len(x) == 2 and isinstance(x[1], torch.Tensor)


def _moved(call: Call, old: str, new: str, before: Counter[str], begun: Counter[str]) -> Call:
    """The address of a call of block `old` in block `new`; how many forwards of each module had begun before either."""
    module = _renamed(call.module, old, new)
    forward = call.forward - before[call.module] + begun[module]
    return Call(module, call.function, call.occurrence, forward)


def _copied(node: Node, call: Call | None, value: Callable[[int], int], old: str, new: str) -> Node:
    args, kwargs = _mapped(node.args, value), _mapped(node.kwargs, value)
    ins, outs = ([Ref(value(r.i)) for r in refs] for refs in (node.ins, node.outs))
    inputs = tuple([None if i is None else value(i) for i in node.call_inputs])
    rest = (_renamed(node.module, old, new), call, node.flops, node.mutates, inputs)
    return Node(node.op, node.name, args, kwargs, ins, outs, *rest)


def _mapped(tree: Any, value: Callable[[int], int]) -> Any:
    """Recorded arguments with mapped values."""
    if isinstance(tree, Ref):
        return Ref(value(tree.i))
    if isinstance(tree, (tuple, list)):
        return type(tree)([_mapped(x, value) for x in tree])
    return {key: _mapped(x, value) for key, x in tree.items()} if isinstance(tree, Mapping) else tree


def _renamed(name: str, old: str, new: str) -> str:
    return new + name[len(old) :] if name == old or name.startswith(f"{old}.") else name
