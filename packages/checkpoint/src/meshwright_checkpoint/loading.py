"""Load a checkpoint into a model and an optimizer of any layout: ``extra = load(path, model=..., optimizer=...)``."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from itertools import chain
from typing import Any

import torch
from torch import nn

from meshwright_checkpoint._torch import unwrapped
from meshwright_checkpoint.errors import CheckpointError, MismatchError
from meshwright_checkpoint.format.json_values import decode
from meshwright_checkpoint.plugin import DEFAULT
from meshwright_checkpoint.pretrained import Pretrained, is_pretrained
from meshwright_checkpoint.rank_messages import Ranks
from meshwright_checkpoint.read.node_peers import connect_node_peers
from meshwright_checkpoint.read.shared_read import read, read_tensors, slots_nbytes
from meshwright_checkpoint.read.wanted import Source, Store, Wanted
from meshwright_checkpoint.shards.local_shards import LocalShards, local_shards
from meshwright_checkpoint.state import collect, rng
from meshwright_checkpoint.state.optimizer import GroupTargets, OptimizerTargets
from meshwright_checkpoint.state.optimizer_set import AnyOptimizer, as_one, own_state
from meshwright_checkpoint.state.saved_streams import streams_of, warn_of_streams
from meshwright_checkpoint.storage.backend import ForeignStorage, any_storage_of, local_path
from meshwright_checkpoint.storage.checkpoint import Checkpoint
from meshwright_dtensor.devices import HOST
from meshwright_dtensor.devices.storage_waits import waiting_for_storage
from meshwright_dtensor.errors import UsageError
from meshwright_dtensor.sharding.boxes import slice_of, whole_box
from meshwright_dtensor.tensor.compute_copy import touch
from meshwright_dtensor.utils.names import listing

MODEL_EXTRA = "model_extra_state/"
"""Keys of tensors in the extra states of modules."""


def load(
    path: str | os.PathLike[str] | None,
    *,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
    strict: bool = True,
    only: str | Sequence[str] | None = None,
    cast: bool = False,
    random: bool = True,
    backend: str = DEFAULT,
) -> Any:
    """Load a checkpoint in place (a collective call). Layout, plan and number of ranks may differ from those of the save.

    Args:
        path: a checkpoint, the same on every rank, or a directory that `from_pretrained` reads (for the model only).
        model: as it was saved, in any layout; its tensors are overwritten.
        optimizer: over parameters of `model`, of the class that was saved; a list where several were saved.
        strict: raise if only the model or only the checkpoint has a name. With strict=False a warning lists such names.
            Different shapes, or no common name at all, are always an error.
        only: one or more patterns, such as "decoder.*". Load the model's tensors with matching names, and their optimizer
            states. Everything else stays unchanged, and so do the options of a group that is not loaded completely.
        cast: convert tensors to the model's dtypes. Without it a different dtype is an error.
        random: restore the random streams, unless only a part is loaded.
        backend: name of a checkpoint backend; `meshwright plugins` lists them.

    Returns:
        The value that was saved as `extra`; None for a `from_pretrained` directory.

    Raises:
        UsageError: `path` is None (`latest` returns None before the first save).
        CheckpointError: there is no checkpoint at the path, a file cannot be read now, or ranks load different ones.
        MismatchError: the checkpoint does not fit. The message lists all missing, unexpected and mismatched names.
            Nothing was changed.
        CorruptError: stored data are damaged. The message names the tensor. Model and optimizer may be partly overwritten.
    """
    if path is None:
        raise UsageError(
            "load() needs a path, and path is None (latest() returns None before the first save). Test it first: "
            "`if (path := latest(directory)): load(path, ...)`"
        )
    collect.check_call("load", model)
    optimizers = as_one(optimizer)
    patterns = None if only is None else ((only,) if isinstance(only, str) else tuple(only))
    options = _Options(patterns, bool(strict), bool(cast), bool(random))
    ranks, inner = Ranks(), unwrapped(model)
    with own_state(inner, optimizers), ExitStack() as opened:
        store, with_optimizer = _open_on_all(path, inner, optimizers, options, backend, ranks, opened)

        def bring(wanted: list[Wanted]) -> None:
            try:
                read(store, wanted, peers)
            finally:
                if peers is not None:
                    peers.close()

        fit, wanted = _fit(store, inner, optimizers, options, with_optimizer, ranks)
        what = f"{store.where} {fit.checkpoint.manifest.id if fit.checkpoint else ''}"
        peers = connect_node_peers(ranks, what, slots_nbytes)
        return ranks.run_checked(lambda: _fill(inner, fit, wanted, bring, ranks))


def load_from(
    checkpoint: Checkpoint,
    bring: Callable[[list[Wanted]], None],
    model: nn.Module,
    optimizer: AnyOptimizer,
) -> Any:
    """Load an open checkpoint, the same on every rank, whose values do not come from its files (a collective call).

    bring: fills all targets of this rank; every rank calls it once. Returns and raises as `load`.
    """
    collect.check_call("load", model)
    ranks, inner, options = Ranks(), unwrapped(model), _Options(None, True, False, True)
    with own_state(inner, optimizer):
        with_optimizer = ranks.most([optimizer is not None]) == [1]
        fit, wanted = _fit(checkpoint, inner, optimizer, options, with_optimizer, ranks)
        return ranks.run_checked(lambda: _fill(inner, fit, wanted, bring, ranks))


def _fit(
    store: Store,
    model: nn.Module,
    optimizer: AnyOptimizer,
    options: _Options,
    with_optimizer: bool,
    ranks: Ranks,
) -> tuple[_Fit, list[Wanted]]:
    """How a store fits, and what this rank needs of it for the model. Raises MismatchError (a collective call)."""
    fit = _Fit(store, ranks.run_checked(lambda: collect.named_tensors(model)), options)
    wanted = ranks.run_checked(fit.match_model)
    fit.match_optimizer(optimizer, ranks)
    _check_fit(fit, ranks, (collect.MODEL, collect.OPTIMIZER) if with_optimizer else (collect.MODEL,))
    return fit, wanted


@dataclass(frozen=True)
class _Options:
    """Arguments of `load` that are the same on all ranks. `only` is None or a tuple."""

    only: tuple[str, ...] | None
    strict: bool
    cast: bool
    random: bool

    def selects(self, name: str) -> bool:
        """Whether `only` matches the name."""
        return self.only is None or any(fnmatchcase(name, pattern) for pattern in self.only)


def _open_on_all(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: AnyOptimizer,
    options: _Options,
    backend: str,
    ranks: Ranks,
    opened: ExitStack,
) -> tuple[Store, bool]:
    """Open the checkpoint on all ranks, and check that all ranks load the same one with the same arguments.

    Returns the open checkpoint, and whether any rank gave an optimizer.
    """
    stores: list[Store] = []

    @waiting_for_storage()
    def open_here() -> dict[str, Any]:
        stores.append(_open(path, model, backend))
        opened.callback(stores[0].close)
        store_id = stores[0].manifest.id if isinstance(stores[0], Checkpoint) else "from_pretrained"
        arguments = {**asdict(options), "optimizer": collect.optimizer_given(model, optimizer)}
        return {"arguments": arguments, "opened": [stores[0].where, store_id]}

    here = ranks.run_checked(open_here)
    # what all ranks opened is compared only where any differ: there are as many as ranks
    if not ranks.same([here["arguments"], here["opened"][1]]):
        _check_same_store(ranks.gather(here))
    (store,) = stores
    with_optimizer = ranks.most([bool(here["arguments"]["optimizer"])]) == [1]
    if with_optimizer and not isinstance(store, Checkpoint):
        raise UsageError(f"{store.where} holds a model and no optimizer; leave out optimizer")
    return store, with_optimizer


def _check_same_store(on_ranks: Sequence[Mapping[str, Any]]) -> None:
    """Raise UsageError or CheckpointError, on every rank, if ranks call `load` differently, or have opened different stores."""
    _check_arguments([on_rank["arguments"] for on_rank in on_ranks])
    first, first_id = on_ranks[0]["opened"]
    for rank, on_rank in enumerate(on_ranks):
        where, store_id = on_rank["opened"]
        if store_id != first_id:
            raise CheckpointError(
                f"rank {rank} has opened {where}, and rank 0 {first}, which is another checkpoint; "
                "call latest() on one rank and broadcast its result"
            )


def _check_arguments(arguments_of_ranks: Sequence[Mapping[str, Any]]) -> None:
    """Raise UsageError, on every rank, if ranks call `load` with different arguments."""
    for rank, arguments in enumerate(arguments_of_ranks):
        for name, value in arguments.items():
            first = arguments_of_ranks[0][name]
            if value == first or (name == "optimizer" and None in (value, first)):
                continue
            if name == "optimizer":
                first, value = ("given" if given else "left out" for given in (first, value))
            raise UsageError(
                f"load() needs the same arguments on every rank: {name} is {first} on rank 0 and {value} on rank {rank}"
            )


def _open(path: str | os.PathLike[str], model: nn.Module, backend: str) -> Store:
    storage = any_storage_of(path, backend)
    if isinstance(storage, ForeignStorage):
        return storage.open_checkpoint(model)
    directory = local_path(storage)
    if directory is not None and is_pretrained(directory):
        return Pretrained(directory, model)
    return Checkpoint(storage)


class _Fit:
    """How a checkpoint fits the model and optimizer of this rank.

    Attributes:
        checkpoint: the store, if it is a checkpoint and not a from_pretrained directory.
        missing, mismatched: for MismatchError.
        used: keys of the checkpoint that the model takes, and keys it would take under other names.
        states: the optimizer's part; None without an optimizer.
    """

    def __init__(self, store: Store, names: collect.NamedTensors, options: _Options) -> None:
        self.store, self.names, self.options = store, names, options
        self.checkpoint = store if isinstance(store, Checkpoint) else None
        self.missing: list[str] = []
        self.mismatched: list[str] = []
        self.used: set[str] = set()
        self.states: OptimizerTargets | None = None

    def match_model(self) -> list[Wanted]:
        """The reads that fill the model's tensors; what does not fit is noted."""
        aliases: dict[str, list[str]] = {}
        for alias, first in self.names.aliases.items():
            aliases.setdefault(first, []).append(alias)
        stored_aliases = self.checkpoint.manifest.model.aliases if self.checkpoint else {}
        wanted = []
        for name, tensor in self.names.tensors.items():
            tied = [name, *aliases.get(name, ())]
            if not any(map(self.options.selects, tied)):
                continue
            self.used.update(collect.MODEL + n for n in tied)
            keys = (collect.MODEL + stored_aliases.get(n, n) for n in tied)
            key = next((k for k in keys if k in self.store.tensors), None)
            if key is None:
                self.missing.append(name)
            else:
                self.used.add(key)
                wanted += self._match_tensor(key, name, local_shards(tensor, name))
        return wanted

    def _match_tensor(self, key: str, name: str, target: LocalShards) -> list[Wanted]:
        source = self.store.tensors[key]
        if source.shape != target.shape:
            shapes = f"shape {list(source.shape)} is stored, the model has {list(target.shape)}"
            self.mismatched.append(f"{name}: {shapes}")
        elif source.dtype != target.dtype and not self.options.cast:
            stored, needed = (str(dtype).removeprefix("torch.") for dtype in (source.dtype, target.dtype))
            self.mismatched.append(f"{name}: {stored} is stored, the model has {needed}")
        else:
            return [Wanted(key, box, slice_of(target.local, local)) for box, local in target.boxes]
        return []

    def match_optimizer(self, optimizer: AnyOptimizer, ranks: Ranks) -> None:
        """Match the optimizer's states and group options (a collective call)."""
        checkpoint = self.checkpoint

        def match_states() -> list[GroupTargets]:
            if optimizer is None or checkpoint is None:
                return []
            self.states = states = OptimizerTargets(optimizer, self.mismatched)
            states.match(checkpoint, self.names, self.options.selects)
            return states.groups

        here = ranks.run_checked(match_states)
        groups = [
            [GroupTargets(tuple(saved), whole) for saved, whole in on_rank]
            for on_rank in ([here] if ranks.same(here) else ranks.gather(here))
        ]
        states = self.states
        if states is not None and checkpoint is not None and checkpoint.manifest.optimizer is not None:
            info = checkpoint.manifest.optimizer
            ranks.run_checked(lambda: states.take_options(info, groups))


def _check_fit(fit: _Fit, ranks: Ranks, sections: tuple[str, ...]) -> None:
    """Raise MismatchError, on every rank, if the checkpoint does not fit on one of them (a collective call).

    `sections`: prefixes of the keys that are loaded.
    """
    options, store = fit.options, fit.store
    missing, mismatched, extra_state = _gather_fit(fit, ranks)
    used, any_selected = _used_on_all(fit, ranks)
    unexpected: list[str] = []
    if options.only is None:
        unexpected = [key for key in store.tensors if key.startswith(sections) and key not in used]
        if fit.checkpoint is not None:
            stored = fit.checkpoint.manifest.model.extra_state
            unexpected += [name for name in stored if name not in extra_state]
            missing += [name for name in extra_state if name not in stored]
    elif not any_selected:
        missing += [f"anything that matches {pattern}" for pattern in options.only]
    if not options.strict:
        if (any_selected or options.only) and not used:
            missing = missing if options.only else ["all names of the model"]
        else:
            if missing or unexpected:
                ranks.run_on_first(lambda: _warn(store.where, missing, unexpected))
            missing = []
        unexpected = []
    if missing or unexpected or mismatched:
        raise MismatchError(store.where, _plain(missing), _plain(unexpected), tuple(mismatched))


def _gather_fit(fit: _Fit, ranks: Ranks) -> Iterator[list[str]]:
    """Missing and mismatched names and extra states, of all ranks together (a collective call)."""
    missing = [*fit.missing, *(fit.states.missing if fit.states else ())]
    here = [missing, fit.mismatched, sorted(fit.names.extra_state)]
    # those of all ranks only where any differ: there are as many as ranks
    gathered = [here] if ranks.same(here) else ranks.gather(here)
    return (list(dict.fromkeys(chain.from_iterable(of_ranks))) for of_ranks in zip(*gathered, strict=True))


def _used_on_all(fit: _Fit, ranks: Ranks) -> tuple[set[str], bool]:
    """Keys of the store that any rank takes, and whether one takes any, also a missing one (a collective call)."""
    used, keys = fit.used | (fit.states.used if fit.states else set()), sorted(fit.store.tensors)
    if not ranks.same(keys):
        taken = {key for of_rank in ranks.gather(sorted(used)) for key in of_rank}
        return taken & fit.store.tensors.keys(), bool(taken)
    # a number for each key: names of all ranks would be as many as keys and ranks
    *flags, any_selected = ranks.most([*(key in used for key in keys), bool(used)])
    return {key for key, flag in zip(keys, flags, strict=True) if flag}, bool(any_selected)


def _warn(where: str, missing: list[str], unexpected: list[str]) -> None:
    """Warn of a partial load at the user's call of `load`. Where warnings are errors, all ranks raise."""
    parts = [
        f"{what} ({len(names)}): {listing(_plain(names), 8)}"
        for what, names in (("not in the checkpoint", missing), ("not in the model", unexpected))
        if names
    ]
    text = f"{where} is loaded in part. {'; '.join(parts)}"
    try:
        warnings.warn(text, stacklevel=9)
    except Warning as error:
        raise CheckpointError(text) from error


def _plain(keys: Iterable[str]) -> tuple[str, ...]:
    return tuple(key.removeprefix(collect.MODEL) for key in keys)


def _fill(
    model: nn.Module, fit: _Fit, wanted: list[Wanted], bring: Callable[[list[Wanted]], None], ranks: Ranks
) -> Any:
    """Read all values into the model and the optimizer of this rank; what was saved as `extra`."""
    states, checkpoint = fit.states, fit.checkpoint
    whole = fit.options.only is None
    streams: dict[str, str] = {}
    values: dict[str, torch.Tensor] = {}
    if checkpoint is not None:
        if whole and fit.options.random:
            streams = streams_of(checkpoint, ranks)
        sections = (collect.EXTRA, MODEL_EXTRA) if whole else (collect.EXTRA,)
        keys = [key for key in checkpoint.tensors if key.startswith(sections)] + [*streams.values()]
        values = {key: _empty(checkpoint.tensors[key]) for key in keys}
    rest = [Wanted(key, whole_box(value.shape), value) for key, value in values.items()]
    bring([*wanted, *(states.wanted if states else ()), *rest])
    touch(list(fit.names.tensors.values()))
    if checkpoint is None:
        return None
    if states is not None:
        states.install()
    get = _getter(checkpoint, values)
    if whole:
        if stored := checkpoint.manifest.model.extra_state:
            modules = dict(model.named_modules())
            for name in fit.names.extra_state:
                if name in stored:
                    modules[name.rpartition(".")[0]].set_extra_state(decode(stored[name], get))
        if fit.options.random:
            warn_of_streams(checkpoint, ranks)
        rng.restore({stream: values[key] for stream, key in streams.items()})
    return decode(checkpoint.manifest.extra, get)


def _empty(source: Source) -> torch.Tensor:
    return torch.empty(source.shape, dtype=source.dtype, device=HOST)


def _getter(checkpoint: Checkpoint, values: Mapping[str, torch.Tensor]) -> Callable[[str], torch.Tensor]:
    """Key -> tensor, for `decode`: of `values`, others are read when they are needed."""
    return lambda key: values[key] if key in values else read_tensors(checkpoint, [key])[key]
