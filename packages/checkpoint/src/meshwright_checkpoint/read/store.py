"""Read any box of any tensor of a checkpoint into memory: only the blocks that are needed, each one checked."""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch

from meshwright_checkpoint.errors import CorruptError
from meshwright_checkpoint.read.node_peers import NodePeers
from meshwright_checkpoint.read.shared_read import SharedRead
from meshwright_checkpoint.read.wanted import Source, Store, Wanted
from meshwright_dtensor.utils.cpu import usable_cores


def _local_ranks() -> int:
    """How many ranks a launcher says it has started on this machine."""
    text = os.environ.get("LOCAL_WORLD_SIZE", "")
    return max(int(text), 1) if text.isdigit() else 1


def reader_threads(ranks: int) -> int:
    """How many threads read at once: as many as so many ranks of this machine leave cores to each, and enough that the disk has
    something to do while what it has brought is checked.
    """
    return max(3, min(4, usable_cores() // ranks))


def read(store: Store, wanted: Sequence[Wanted], peers: NodePeers | None = None) -> None:
    """Fill every target.

    Args:
        store: what is read.
        wanted: what this rank wants.
        peers: the ranks of this machine, which all call this at once; what several of them want is read by one.

    Extra memory: the slots of `filling`, 52 MiB for two ranks of a machine together, 14 MiB a rank from four on, and in each
    thread that reads around the system's cache one more portion.

    Raises:
        CorruptError: what is stored is not what was saved; the message names the tensor.
        CheckpointError: another rank of this machine has failed.
    """
    SharedRead(store, wanted, peers, reader_threads(len(peers.ranks) if peers else _local_ranks())).run()


def new_tensor(source: Source) -> torch.Tensor:
    """An empty tensor for all of it."""
    return torch.empty(source.shape, dtype=source.dtype)


def read_tensors(store: Store, keys: Sequence[str]) -> dict[str, torch.Tensor]:
    """These tensors, whole. Raises CorruptError, also for a key that is not there."""
    missing = [key for key in keys if key not in store.tensors]
    if missing:
        raise CorruptError(f"{store.where} refers to {missing[0]}, which it does not hold")
    tensors = {key: new_tensor(store.tensors[key]) for key in keys}
    read(store, [Wanted(key, tuple((0, n) for n in t.shape), t) for key, t in tensors.items()])
    return tensors
