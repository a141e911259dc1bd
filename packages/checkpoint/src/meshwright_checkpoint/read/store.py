"""Read boxes of the tensors of a checkpoint: only the blocks that are needed, each verified by its checksum."""

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
    """Number of ranks on this machine, from the launcher's LOCAL_WORLD_SIZE."""
    text = os.environ.get("LOCAL_WORLD_SIZE", "")
    return max(int(text), 1) if text.isdigit() else 1


def reader_threads(ranks: int) -> int:
    """Number of reading threads of one of `ranks` ranks on this machine: its share of the cores, but at least 3.

    Three keep the disk busy while earlier blocks are verified.
    """
    return max(3, min(4, usable_cores() // ranks))


def read(store: Store, wanted: Sequence[Wanted], peers: NodePeers | None = None) -> None:
    """Fill every target.

    Args:
        store: the open checkpoint.
        wanted: the boxes that this rank needs.
        peers: the other ranks of this machine. All call this at the same time; shared bytes are read by one of them.

    Extra memory: the slots of `SharedRead`, 52 MiB for two ranks of a machine together, 14 MiB per rank from four on, and one
    chunk in each thread that bypasses the page cache.

    Raises:
        CorruptError: stored values are damaged; the message names the tensor.
        CheckpointError: another rank of this machine failed.
    """
    SharedRead(store, wanted, peers, reader_threads(len(peers.ranks) if peers else _local_ranks())).run()


def new_tensor(source: Source) -> torch.Tensor:
    """An empty tensor of the stored shape and dtype."""
    return torch.empty(source.shape, dtype=source.dtype)


def read_tensors(store: Store, keys: Sequence[str]) -> dict[str, torch.Tensor]:
    """Read whole tensors. Raises CorruptError, also for a missing key."""
    missing = [key for key in keys if key not in store.tensors]
    if missing:
        raise CorruptError(f"{store.where} refers to {missing[0]}, which is not in the checkpoint")
    tensors = {key: new_tensor(store.tensors[key]) for key in keys}
    read(store, [Wanted(key, tuple((0, n) for n in t.shape), t) for key, t in tensors.items()])
    return tensors
