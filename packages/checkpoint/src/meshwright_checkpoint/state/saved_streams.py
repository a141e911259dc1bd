"""Which random streams of a checkpoint a rank takes."""

from __future__ import annotations

import warnings

from meshwright_checkpoint.rank_messages import Ranks
from meshwright_checkpoint.storage.checkpoint import Checkpoint
from meshwright_dtensor.utils.names import count_of


def streams_of(checkpoint: Checkpoint, ranks: Ranks) -> dict[str, str]:
    """Stream -> key of the state that this rank takes; not those that were saved per rank, on another number of ranks."""
    info = checkpoint.manifest.rng
    keys = {}
    for stream, count in info.streams.items() if info is not None else ():
        key = f"rng/{0 if count == 1 else ranks.rank}/{stream}"
        if count in (1, ranks.size) and key in checkpoint.tensors:
            keys[stream] = key
    return keys


def warn_of_streams(checkpoint: Checkpoint, ranks: Ranks) -> None:
    """Warn of streams that are not restored, at the user's call of `load`."""
    info = checkpoint.manifest.rng
    streams = info.streams if info is not None else {}
    per_rank = [stream for stream, count in streams.items() if count not in (1, ranks.size)]
    if any(stream.startswith("torch") for stream in per_rank) and ranks.rank == 0:
        warnings.warn(
            f"the random streams {', '.join(per_rank)} of {checkpoint.where} were saved per rank, on "
            f"{count_of(streams[per_rank[0]], 'rank')}, and "
            f"this run has {ranks.size}: they are not restored. Seed them yourself, or pass random=False.",
            stacklevel=6,
        )
