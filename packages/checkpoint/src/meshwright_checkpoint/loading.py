"""Load a checkpoint into a model and an optimizer, whatever their layout: ``extra = load(path, model=..., optimizer=...)``."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch
from torch import nn

from meshwright_checkpoint._torch import unwrapped
from meshwright_checkpoint.errors import CheckpointError, MismatchError
from meshwright_checkpoint.format.json_values import decode
from meshwright_checkpoint.hf.pretrained import Pretrained, is_pretrained
from meshwright_checkpoint.plugin import DEFAULT
from meshwright_checkpoint.rank_messages import Ranks
from meshwright_checkpoint.read.node_peers import connect_node_peers
from meshwright_checkpoint.read.shared_read import slots_nbytes
from meshwright_checkpoint.read.store import read, read_tensors
from meshwright_checkpoint.read.wanted import Store, Wanted
from meshwright_checkpoint.shards.local_shards import LocalShards, local_shards
from meshwright_checkpoint.state import rng
from meshwright_checkpoint.state.collect import (
    MODEL,
    NamedTensors,
    check_model,
    named_tensors,
    optimizer_given,
)
from meshwright_checkpoint.state.optimizer import GroupTargets, OptimizerTargets
from meshwright_checkpoint.storage.backend import ForeignStorage, any_storage_of, local_path
from meshwright_checkpoint.storage.checkpoint import Checkpoint
from meshwright_dtensor.errors import UsageError
from meshwright_dtensor.sharding.boxes import slice_of
from meshwright_dtensor.tensor.compute_copy import touch
from meshwright_dtensor.utils.names import listing


def load(
    path: str | os.PathLike[str] | None,
    *,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    strict: bool = True,
    only: str | Sequence[str] | None = None,
    cast: bool = False,
    random: bool = True,
    backend: str = DEFAULT,
) -> Any:
    """Load a checkpoint in place (a collective call). Saved and present layouts, plans and numbers of ranks may differ.

    Args:
        path: a checkpoint, the same on every rank, or a directory that `from_pretrained` reads (for the model only).
        model: as it was saved, in any layout; its tensors are overwritten.
        optimizer: over parameters of `model`, of the class that was saved.
        strict: names that only the model or only the checkpoint has are an error; without it a warning names them. Other shapes
            always are an error, and to have no name in common.
        only: load the tensors of the model whose names match (one of) these patterns, "decoder.*", and the optimizer's states of
            those. The rest is left as it is, and so are the options of a group that is not loaded whole.
        cast: let a tensor of another dtype be converted to the model's; without it that is an error.
        random: set the random streams as they were saved, unless only a part is loaded.
        backend: name of a checkpoint backend; `meshwright plugins` lists them.

    Returns:
        What was saved as `extra`; None from a directory of `from_pretrained`.

    Raises:
        UsageError: `path` is None, as `latest` gives where there is no checkpoint yet.
        CheckpointError: there is no checkpoint at the path, or ranks have given different ones.
        MismatchError: it does not fit; lists everything that is missing, unexpected or mismatched. Nothing was changed.
        CorruptError: what is stored is damaged; the message names the tensor. Model and optimizer may be partly overwritten.
    """
    if path is None:
        raise UsageError(
            "path=None names no checkpoint (latest() gives None where there is none yet): load only what is there, "
            "`if (path := latest(directory)): load(path, ...)`"
        )
    check_model("load", model)
    ranks = Ranks()
    patterns = None if only is None else ((only,) if isinstance(only, str) else tuple(only))
    inner = unwrapped(model)
    given = {"only": patterns, "strict": bool(strict), "cast": bool(cast), "random": bool(random)}
    stores: list[Store] = []
    with ExitStack() as opened:

        def begin() -> dict[str, Any]:
            stores.append(_open(path, inner, backend))
            opened.callback(stores[0].close)
            which = stores[0].manifest.id if isinstance(stores[0], Checkpoint) else "from_pretrained"
            arguments = {**given, "optimizer": optimizer_given(inner, optimizer)}
            return {"arguments": arguments, "opened": [stores[0].where, which]}

        told = ranks.gather_checked(begin)
        _check_alike([one["arguments"] for one in told])
        _check_same([one["opened"] for one in told])
        optimizes = any(one["arguments"]["optimizer"] for one in told)
        (store,) = stores
        checkpoint = store if isinstance(store, Checkpoint) else None
        if checkpoint is None and optimizes:
            raise UsageError(f"{store.where} holds a model and no optimizer; leave out optimizer")
        names = named_tensors(inner)
        fit = _Fit()
        wanted = ranks.run_checked(lambda: _model_targets(store, names, patterns, cast, fit))

        def begin_states() -> list[GroupTargets]:
            if optimizer is None or checkpoint is None:
                return []
            chosen = partial(_chosen, patterns)
            fit.states = OptimizerTargets.of(checkpoint, optimizer, names, fit.mismatched, chosen)
            return fit.states.groups

        groups = [
            [GroupTargets(tuple(saved), whole) for saved, whole in one]
            for one in ranks.gather_checked(begin_states)
        ]
        states = fit.states
        if states is not None and checkpoint is not None and checkpoint.manifest.optimizer is not None:
            info = checkpoint.manifest.optimizer
            ranks.run_checked(lambda: states.take_options(info, groups, fit.mismatched))
        _check(ranks, store, fit, names, states, optimizes, strict, patterns)

        what = f"{store.where} {checkpoint.manifest.id if checkpoint else ''}"
        neighbours = connect_node_peers(ranks, what, slots_nbytes)

        def fill() -> Any:
            try:
                read(store, [*wanted, *(states.wanted if states else ())], neighbours)
            finally:
                if neighbours is not None:
                    neighbours.close()
            touch(list(names.tensors.values()))
            if checkpoint is None:
                return None
            if states is not None:
                states.install()
            _set_extra_states(inner, checkpoint, names, patterns)
            if random and patterns is None:
                _restore_random(checkpoint, ranks)
            keys = [key for key in checkpoint.tensors if key.startswith("extra/")]
            held_back = read_tensors(checkpoint, keys)
            return decode(checkpoint.manifest.extra, lambda key: _known(held_back, key, checkpoint))

        return ranks.run_checked(fill)


def _check_alike(told: Sequence[Mapping[str, Any]]) -> None:
    """Raise UsageError, on every rank, where ranks have not been given the same."""
    for rank, one in enumerate(told):
        for name, value in one.items():
            first = told[0][name]
            if value == first or (name == "optimizer" and None in (value, first)):
                continue
            if name == "optimizer":
                first, value = ("given" if there else "left out" for there in (first, value))
            raise UsageError(
                f"load() is called with {name} {first} on rank 0 and {value} on rank {rank}; call it alike on all"
            )


def _open(path: str | os.PathLike[str], model: nn.Module, backend: str) -> Store:
    """What is to be loaded, open."""
    storage = any_storage_of(path, backend)
    if isinstance(storage, ForeignStorage):
        return storage.open_checkpoint(model)
    directory = local_path(storage)
    if directory is not None and is_pretrained(directory):
        return Pretrained(directory, model)
    return Checkpoint(storage)


@dataclass
class _Fit:
    """How checkpoint and model fit on this rank."""

    missing: list[str] = field(default_factory=list)
    mismatched: list[str] = field(default_factory=list)
    used: set[str] = field(default_factory=set)
    states: OptimizerTargets | None = None


def _model_targets(
    store: Store, names: NamedTensors, patterns: tuple[str, ...] | None, cast: bool, fit: _Fit
) -> list[Wanted]:
    """What this rank reads into the model; `fit` is filled in."""
    aliases: dict[str, list[str]] = {}
    for other, first in names.aliases.items():
        aliases.setdefault(first, []).append(other)
    stored_aliases: Mapping[str, str] = store.manifest.model.aliases if isinstance(store, Checkpoint) else {}
    wanted = []
    for name, tensor in names.tensors.items():
        known = [name, *aliases.get(name, ())]
        if not any(_chosen(patterns, one) for one in known):
            continue
        found = next((k for one in known if (k := _stored_as(store, one, stored_aliases)) is not None), None)
        fit.used.update(MODEL + one for one in known)
        if found is None:
            fit.missing.append(name)
            continue
        fit.used.add(found)
        source, target = store.tensors[found], local_shards(tensor, name)
        if source.shape != target.shape:
            fit.mismatched.append(
                f"{name}: shape {list(source.shape)} is stored, the model has {list(target.shape)}"
            )
        elif source.dtype != target.dtype and not cast:
            fit.mismatched.append(
                f"{name}: {_short(source.dtype)} is stored, the model has {_short(target.dtype)}"
            )
        else:
            wanted += wanted_for(found, target)
    return wanted


def _chosen(patterns: tuple[str, ...] | None, name: str) -> bool:
    return patterns is None or any(fnmatchcase(name, pattern) for pattern in patterns)


def _stored_as(store: Store, name: str, aliases: Mapping[str, str]) -> str | None:
    key = MODEL + aliases.get(name, name)
    return key if key in store.tensors else None


def wanted_for(key: str, target: LocalShards) -> list[Wanted]:
    """What this rank reads of a tensor that lies as `target`."""
    return [Wanted(key, there, slice_of(target.local, here)) for there, here in target.boxes]


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _check(
    ranks: Ranks,
    store: Store,
    fit: _Fit,
    names: NamedTensors,
    states: OptimizerTargets | None,
    optimizes: bool,
    strict: bool,
    patterns: tuple[str, ...] | None,
) -> None:
    """Raise MismatchError on every rank where one is due on any."""
    told = ranks.gather(
        {
            "missing": [*fit.missing, *(states.missing if states else ())],
            "mismatched": fit.mismatched,
            "used": sorted(fit.used | (states.used if states else set())),
            "extra_state": sorted(names.extra_state),
        }
    )

    def union(what: str) -> tuple[str, ...]:
        return tuple(dict.fromkeys(x for one in told for x in one[what]))

    used = set(union("used"))
    sections = [MODEL, "optimizer/"] if optimizes else [MODEL]
    unexpected = [k for k in store.tensors if k.startswith(tuple(sections)) and k not in used]
    missing = list(union("missing"))
    if isinstance(store, Checkpoint):
        stored = store.manifest.model.extra_state
        missing += [n for n in union("extra_state") if n not in stored and patterns is None]
        unexpected += [n for n in stored if n not in union("extra_state")]
    if patterns is not None:
        unexpected = []
        if not used:
            missing += [f"anything that matches {pattern}" for pattern in patterns]
    if not strict:
        nothing = (used or patterns) and not used.intersection(store.tensors)
        left = [
            f"{what} ({len(names)}): {listing(_plain(names), 8)}"
            for what, names in (("not in the checkpoint", missing), ("not in the model", unexpected))
            if names
        ]
        if left and not nothing:
            text = f"{store.where} is loaded in part. {'; '.join(left)}"
            ranks.run_checked(lambda: _warn(ranks, text))
        missing, unexpected = ((missing if patterns else ["anything that it has"]) if nothing else []), []
    mismatched = union("mismatched")
    if missing or unexpected or mismatched:
        raise MismatchError(store.where, _plain(missing), _plain(unexpected), mismatched)


def _warn(ranks: Ranks, text: str) -> None:
    """A warning of rank 0 at the line of `load`, and an error that all ranks are told where warnings are errors."""
    if ranks.rank:
        return
    try:
        warnings.warn(text, stacklevel=8)
    except Warning as error:
        raise CheckpointError(text) from error


def _check_same(opened: Sequence[tuple[str, str]]) -> None:
    """Raise CheckpointError, on every rank, where ranks have opened different checkpoints: a model would be made of both."""
    (first, known), *_ = opened
    for rank, (where, which) in enumerate(opened):
        if which != known:
            raise CheckpointError(
                f"rank {rank} has opened {where}, and rank 0 {first}, which is another checkpoint; "
                "let one rank choose (latest), and tell the others"
            )


def _plain(keys: Iterable[str]) -> tuple[str, ...]:
    return tuple(key.removeprefix(MODEL) for key in keys)


def _set_extra_states(
    model: nn.Module, checkpoint: Checkpoint, names: NamedTensors, patterns: tuple[str, ...] | None
) -> None:
    stored = checkpoint.manifest.model.extra_state
    if not stored or patterns is not None:
        return
    keys = [key for key in checkpoint.tensors if key.startswith("model_extra_state/")]
    tensors = read_tensors(checkpoint, keys)
    modules = dict(model.named_modules())
    for name in names.extra_state:
        if name in stored:
            value = decode(stored[name], lambda key: _known(tensors, key, checkpoint))
            modules[name.rpartition(".")[0]].set_extra_state(value)


def _known(tensors: dict[str, torch.Tensor], key: str, checkpoint: Checkpoint) -> torch.Tensor:
    return tensors[key] if key in tensors else read_tensors(checkpoint, [key])[key]


def _restore_random(checkpoint: Checkpoint, ranks: Ranks) -> None:
    info = checkpoint.manifest.rng
    if info is None:
        return
    differing = [s for s, count in info.streams.items() if count not in (1, ranks.size)]
    if any(stream.startswith("torch") for stream in differing) and ranks.rank == 0:
        warnings.warn(
            f"the random streams {', '.join(differing)} of {checkpoint.where} differ between its ranks, of which this run has "
            f"{ranks.size}: they are left as they are; seed them, or give random=False",
            stacklevel=4,
        )
    keys = {}
    for stream, count in info.streams.items():
        key = f"rng/{0 if count == 1 else ranks.rank}/{stream}"
        if stream not in differing and key in checkpoint.tensors:
            keys[stream] = key
    found = read_tensors(checkpoint, list(keys.values()))
    rng.restore({stream: found[key] for stream, key in keys.items()})
