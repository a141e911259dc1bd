"""Repeated blocks run twice, not a hundred times: what the second did is written down again for those that follow.

The first two members of a family (see `families`) run.  Where both did the same, all others but the last are not run: their
nodes, values and saved tensors are copies of the second's, with their own parameters and inputs, and their results are new
fake tensors of the same geometry.  The last one runs again; if it does not do the same, nothing of the recording is used.
A family that has passed once is trusted in recordings of other sizes: there, its first member runs, and no other.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from meshwright_dtensor.trace.graph import Call, Node, Ref
from meshwright_planner import _torch
from meshwright_planner._torch import pytree
from meshwright_planner.trace.recorder.hook_views import Sight, show, watched_hooks
from meshwright_planner.trace.recorder.repeated_blocks import families
from meshwright_planner.trace.recorder.storage_recorder import StorageRecorder
from meshwright_planner.trace.user_checkpoints import Checkpoint


class UnlikeError(Exception):
    """A block did not do what the others of its family did."""


@dataclass
class _Run:
    """What one block did: places among nodes and values, what went in and what came out.

    Args:
        module: its name.
        nodes, values, packed: (first, one past the last).
        inputs: value of each tensor among the arguments, in order.
        roots: first value of the storage of each of them.
        own: name of a parameter or buffer below the module -> value.
        outputs, spec: what came out: (which argument, or None, the tensor), or the thing itself.
        storages: per output, the values of its storage.
        around: the checkpoints that it ran in.
        sights: what hooks inside of it saw.
        alike: what must be the same in two runs of a family; None where it cannot be written down again.
    """

    module: str
    nodes: tuple[int, int]
    values: tuple[int, int]
    packed: tuple[int, int]
    inputs: list[int]
    roots: list[int]
    own: dict[str, int]
    outputs: list[Any]
    spec: Any
    storages: list[list[int]]
    around: list[Checkpoint]
    sights: list[Sight]
    alike: Any


@dataclass(frozen=True)
class Copy:
    """A block that was copied: the places of what it had packed, how far its nodes went, and its values by `value`."""

    packed: tuple[int, int]
    shift: int
    value: Callable[[int], int]


def replay_blocks(model: nn.Module, watcher: StorageRecorder, trusted: Collection[str] = ()) -> Replayer:
    """Take over the forwards of a model's repeated blocks; the model is `borrowed`, which gives them back.

    `trusted`: families, by the name of their first block, that passed in an earlier recording.
    """
    return Replayer(model, watcher, trusted)


class Replayer:
    """Takes over the forwards of a model's repeated blocks while it is recorded."""

    def __init__(self, model: nn.Module, watcher: StorageRecorder, trusted: Collection[str]) -> None:
        self.watcher, self._trusted = watcher, frozenset(trusted)
        self._runs: dict[Any, list[_Run | None]] = {}
        self._found = families(model)
        modules = dict(model.named_modules())
        for name in self._found:
            module: Any = modules[name]
            module.__dict__["forward"] = self._forward(name, module, module.forward)

    def proven(self) -> set[str]:
        """The families of which every member ran, or was written down as one that did the same as the first and the last."""
        calls: dict[str, list[list[_Run | None]]] = {}
        for (family, _), runs in self._runs.items():
            calls.setdefault(family, []).append(runs)
        return {
            family
            for family, (runs, *others) in calls.items()
            if not others and len(runs) > 2 and all(r is not None and r.alike == runs[0].alike for r in runs)  # type: ignore[union-attr]
        }

    def _forward(self, name: str, module: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
        family, last = self._found[name]

        def run(*args: Any, **kwargs: Any) -> Any:
            # looked for now, not before: some models hang hooks up at the head of their forward
            hooks = _torch.hooks_inside(module)
            given = None if hooks is None else self._given(args, kwargs)
            if given is None:
                return forward(*args, **kwargs)
            tensors, shape = given
            # of a checkpoint that has run something, it depends on that what runs again
            around = self.watcher.checkpoints.open()
            begun = tuple((id(one), one.nodes) if one.nodes else None for one in around)
            key = (shape, hooks, torch.is_grad_enabled(), begun)
            runs = self._runs.setdefault((family, key), [])
            if family in self._trusted and runs and runs[0] is not None:
                return self._again(runs[0], name, module, tensors)
            trusted = (
                len(runs) > 1
                and runs[0] is not None
                and runs[1] is not None
                and runs[0].alike == runs[1].alike
            )
            if trusted and not last:
                assert runs[1] is not None
                return self._again(runs[1], name, module, tensors)
            done = self._run(name, module, tensors, lambda: forward(*args, **kwargs))
            if trusted and (done[0] is None or runs[1] is None or done[0].alike != runs[1].alike):
                raise UnlikeError(name)
            runs.append(done[0])
            return done[1]

        return run

    def _given(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[torch.Tensor], Any] | None:
        """The tensors among the arguments, and what else there is to say of them; None where too little is known."""
        leaves, spec = pytree.tree_flatten((args, kwargs))
        tensors = [x for x in leaves if isinstance(x, torch.Tensor)]
        order: dict[int, int] = {}
        said: list[Any] = []
        asked = iter(_torch.asked(tensors))
        for x in leaves:
            if isinstance(x, torch.Tensor):
                fake = _torch.is_fake(x)
                # values of real tensors decide what a program does: only the very same ones are known to be alike
                same = order.setdefault(id(x), len(order)) if fake else ("real", id(x), _torch.writes(x))
                tainted = self.watcher.is_tainted(x)
                said.append((same, tuple(x.shape), tuple(x.stride()), x.dtype, next(asked), tainted))
            else:
                try:
                    hash(x)
                except TypeError:
                    return None
                said.append((type(x), x) if isinstance(x, (int, float, str, bool, type(None))) else id(x))
        return tensors, (str(spec), tuple(said))

    def _own(self, module: nn.Module) -> dict[str, int]:
        named = (
            *module.named_parameters(remove_duplicate=False),
            *module.named_buffers(remove_duplicate=False),
        )
        return {name: self.watcher.ref(tensor).i for name, tensor in named}

    def _run(
        self, name: str, module: nn.Module, tensors: list[torch.Tensor], forward: Callable[[], Any]
    ) -> tuple[_Run | None, Any]:
        watcher = self.watcher
        inputs = [watcher.ref(t).i for t in tensors]
        roots = [watcher.storage_of(t, [i])[0] for t, i in zip(tensors, inputs)]
        own, around = self._own(module), self.watcher.checkpoints.open()
        first = len(watcher.nodes), len(watcher.values), len(watcher.packed)
        with watched_hooks(module, watcher) as sights:
            out = forward()
        nodes, values, packed = zip(first, (len(watcher.nodes), len(watcher.values), len(watcher.packed)))
        if [watcher.ref(t).i for t in tensors] != inputs or self._own(module) != own:
            return None, out  # something of theirs was written to
        if not sights.only_looked or any(self._unknown(t, own) for s in sights.seen for t in s.tensors()):
            return None, out
        leaves, spec = pytree.tree_flatten(out)
        place = {id(t): k for k, t in enumerate(tensors)}
        keys = {_torch.storage_key(t) for t in tensors} - {None}
        outputs: list[Any] = []
        storages: list[list[int]] = []
        for x in leaves:
            if not isinstance(x, torch.Tensor):
                outputs.append(x)
            elif id(x) in place:
                outputs.append((place[id(x)], x))
            else:
                index = watcher.index_of(x)
                if (
                    index is None
                    or index < values[0]
                    or not _torch.is_fake(x)
                    or _torch.storage_key(x) in keys
                ):
                    return None, out
                outputs.append((None, x))
            storages.append([] if not isinstance(x, torch.Tensor) else list(watcher.storage_of(x, [])))
        run = _Run(
            name,
            nodes,
            values,
            packed,
            inputs,
            roots,
            own,
            outputs,
            spec,
            storages,
            around,
            sights.seen,
            None,
        )
        run.alike = self._alike(run)
        return (None if run.alike is None else run), out

    def _unknown(self, tensor: torch.Tensor, own: Mapping[str, int]) -> bool:
        """Whether a hook of another block could not be shown what this tensor is there."""
        index = self.watcher.index_of(tensor)
        return index is None or index in own.values() or not _torch.is_fake(tensor)

    def _alike(self, run: _Run) -> Any:
        """What two runs of a family must have in common, with names for what differs."""
        own = {i: name for name, i in run.own.items()}
        given = {i: k for k, i in reversed(list(enumerate(run.inputs)))}

        def label(i: int) -> Any:
            if i >= run.values[0]:
                return i - run.values[0]
            return ("own", own[i]) if i in own else ("input", given[i]) if i in given else ("outside", i)

        said: list[Any] = []
        for node in self.watcher.nodes[slice(*run.nodes)]:
            if node.mutates and any(r.i < run.values[0] for r in node.ins[:1]):
                return None
            call = node.call and (
                _below(node.call.module, run.module),
                node.call.function,
                node.call.occurrence,
            )
            tensors = tuple(label(r.i) for r in (*node.ins, *node.outs))
            rest = repr(_mapped((node.args, node.kwargs), lambda i: 0))
            said.append((node.name, _below(node.module, run.module), call, tensors, rest, node.flops))
        values = [(v.shape, v.dtype, v.requires_grad) for v in self.watcher.values[slice(*run.values)]]
        outputs = [x if not _is_output(x) else (x[0], x[0] is None and self.watcher.ref(x[1]).i - run.values[0])
                   for x in run.outputs]  # fmt: skip
        sights = [
            (s.module, s.place, str(s.spec), [label(self.watcher.ref(t).i) for t in s.tensors()])
            for s in run.sights
        ]
        return (
            said,
            values,
            sights,
            str(run.spec),
            [x if isinstance(x, (tuple, int, str)) else id(x) for x in outputs],
        )

    def _again(self, run: _Run, name: str, module: nn.Module, tensors: list[torch.Tensor]) -> Any:
        """Write down what `run` did as done by module `name`."""
        watcher = self.watcher
        table: dict[int, int] = {}
        for i, root, tensor in zip(run.inputs, run.roots, tensors):
            now = watcher.ref(tensor).i
            table[i] = now
            table.setdefault(root, watcher.storage_of(tensor, [now])[0])
        own = self._own(module)
        table.update((i, own[key]) for key, i in run.own.items())
        start, shift = len(watcher.nodes), len(watcher.values) - run.values[0]
        low = run.values[0]

        def value(i: int) -> int:
            return i + shift if i >= low else table.get(i, i)

        watcher.copied[name] = run.module
        watcher.values.extend(watcher.values[slice(*run.values)])
        watcher.nodes.extend(_copied(n, value, run.module, name) for n in watcher.nodes[slice(*run.nodes)])
        watcher.copy_notes(run.nodes, run.around)
        roots = ((i, watcher.roots.get(i)) for i in range(*run.values))
        watcher.roots.update((value(i), value(root)) for i, root in roots if root is not None)
        watcher.packed.append((start, Copy(run.packed, start - run.nodes[0], value), False, False))
        made: dict[int, torch.Tensor] = {}

        def stand_in(x: torch.Tensor, storage: list[int] | None = None) -> torch.Tensor:
            i = watcher.ref(x).i
            if i < low:  # it went in, or it is from outside
                return tensors[run.inputs.index(i)] if i in run.inputs else x
            if id(x) not in made:
                storage = watcher.storage_of(x, []) if storage is None else storage
                made[id(x)] = watcher.stand_in(x, value(i), [value(k) for k in storage])
            return made[id(x)]

        if not show(run.sights, module, watcher, stand_in):
            raise UnlikeError(name)
        leaves = []
        for x, storage in zip(run.outputs, run.storages):
            if not _is_output(x):
                leaves.append(x)
            elif x[0] is not None:
                leaves.append(tensors[x[0]])
            else:
                leaves.append(stand_in(x[1], storage))
        return pytree.tree_unflatten(leaves, run.spec)


def _is_output(x: Any) -> bool:
    return isinstance(x, tuple) and len(x) == 2 and isinstance(x[1], torch.Tensor)


def _copied(node: Node, value: Callable[[int], int], old: str, new: str) -> Node:
    call = node.call
    if call is not None:
        call = Call(_renamed(call.module, old, new), call.function, call.occurrence)
    return Node(
        node.op,
        node.name,
        _mapped(node.args, value),
        _mapped(node.kwargs, value),
        [Ref(value(r.i)) for r in node.ins],
        [Ref(value(r.i)) for r in node.outs],
        _renamed(node.module, old, new),
        call,
        node.flops,
        node.mutates,
        tuple(None if i is None else value(i) for i in node.call_inputs),
    )


def _mapped(tree: Any, value: Callable[[int], int]) -> Any:
    """Recorded arguments with other values."""
    if isinstance(tree, Ref):
        return Ref(value(tree.i))
    if isinstance(tree, (tuple, list)):
        return type(tree)([_mapped(x, value) for x in tree])
    if isinstance(tree, Mapping):
        return {key: _mapped(x, value) for key, x in tree.items()}
    return tree


def _renamed(name: str, old: str, new: str) -> str:
    return new + name[len(old) :] if name == old or name.startswith(f"{old}.") else name


def _below(name: str, module: str) -> str:
    return _renamed(name, module, "")
