"""`PeerCopies`: copies of a run's state in memory, each on two hosts, from which a run goes on when processes or a host end.

A copy is a checkpoint whose files are in the memory of the hosts: each rank's file on its own host, and on another one. Which rank
writes what, the files and their checksums are those of checkpoints. There is no common folder and no manifest: each file has a note
that describes it, and ranks that start put the manifest together from the notes of all files that are there.

`put` copies the values into the memory of the file and returns; a thread computes checksums and sends the file. The next `put`
waits for it. Then the copies of all ranks are complete, and older ones are removed: so there are never more than two.
"""

from __future__ import annotations

import logging
import os
import socket
import uuid
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer

from meshwright_checkpoint._torch import unwrapped
from meshwright_checkpoint.errors import CheckpointError
from meshwright_checkpoint.format.safetensors_file import FileLayout
from meshwright_checkpoint.loading import load_from
from meshwright_checkpoint.peer_copies import restore, run_record
from meshwright_checkpoint.peer_copies.exchange import holders
from meshwright_checkpoint.peer_copies.held_file import OWN, PEERS, Generation, NewFile
from meshwright_checkpoint.peer_copies.host_folder import MEMORY, HostFolder, memory_id
from meshwright_checkpoint.peer_copies.pieces import fill, held_pieces
from meshwright_checkpoint.peer_copies.rank_copy import RankCopy
from meshwright_checkpoint.peer_copies.restore import HeldCheckpoint
from meshwright_checkpoint.rank_messages import Ranks
from meshwright_checkpoint.read.wanted import Wanted
from meshwright_checkpoint.saving.saving import WritePlans
from meshwright_checkpoint.saving.staging import copy_file
from meshwright_checkpoint.state import collect, rng
from meshwright_checkpoint.state.collect import MODEL, named_tensors
from meshwright_checkpoint.state.expected_states import bytes_per_element, is_predictable
from meshwright_checkpoint.state.optimizer_set import AnyOptimizer, own_state, parts
from meshwright_dtensor.errors import UsageError
from meshwright_dtensor.mesh.mesh import host_group

GENERATIONS = 2
"""Copies that are in memory at the same time: the last complete one, and one that is being made."""

MIB = 1 << 20
_log = logging.getLogger("meshwright")


class PeerCopies:
    """The copies of a run.

    Attributes:
        interval: steps between two copies.
        hosts: how many hosts there are: the nodes of torchrun.
    """

    def __init__(self, folder: str | os.PathLike[str], interval: int, memory: Path = MEMORY) -> None:
        """Begin (a collective call).

        Args:
            folder: of the run's checkpoints, which all ranks see; it holds the record of the run.
            memory: the file system in memory of this host.

        Raises:
            UsageError: `interval` is no number of steps.
            CheckpointError: a host has no file system in memory, or the record of the run is damaged.
        """
        if type(interval) is not int or interval < 1:
            raise UsageError(f"peer_copies={interval!r} is not a number of steps; pass at least 1, or None")
        self.interval, self._ranks = interval, Ranks()
        first = self._ranks.rank == 0
        host = memory_id(memory)
        begun = self._ranks.gather_checked(lambda: [host, run_record.begin(folder) if first else None])
        (run, self._start), hosts = begun[0][1], [str(each) for each, _ in begun]
        self._run_folder = os.fspath(folder)
        self._local = [rank for rank, other in enumerate(hosts) if other == host]
        self.hosts = len(set(hosts))
        self._holders = holders(hosts)
        self._memory, self._tag = memory, int(run[:7], 16)
        self._folder = self._ranks.run_checked(lambda: HostFolder(run, memory))
        self._ranks.run_checked(self._folder.clean)
        self._group = host_group("meshwright copies") if self.hosts > 1 else None
        self._plans = WritePlans()
        self._newest: Generation | None = None
        self._copying: RankCopy | None = None
        self._sizes: list[int] = []
        if first and self.hosts == 1:
            _log.warning(
                "peer_copies: all ranks are on one host, so the copies in memory outlive its processes, and not the host"
            )

    # --- writing ----------------------------------------------------------------------------------------------------------

    def check_room(self, model: nn.Module, optimizer: AnyOptimizer) -> None:
        """Raise CheckpointError, on all ranks, where a host has no room for the copies (a collective call).

        States that an optimizer will have after its first step count too, if it is one of torch's; of others rank 0 warns, and the
        first `put` sees them.
        """
        with own_state(unwrapped(model), optimizer):
            shared = rng.shared(rng.digests(), self._ranks)
            save_id = uuid.uuid4().hex
            _, _, body = self._plans.collect(model, optimizer, None, self._ranks, shared, save_id)
            predicted = sum(self._predicted(unwrapped(model), each, body) for each in parts(optimizer))
            sizes = self._ranks.gather_numbers(body.nbytes + predicted)
            is_predicted = self._ranks.most([predicted]) != [0]
        self._check_sizes(sizes, is_predicted)

    def _predicted(self, model: nn.Module, optimizer: Optimizer, body: FileLayout) -> int:
        """Bytes of states that the optimizer will have, of the parameters that this rank writes."""
        if not is_predictable(optimizer):
            if self._ranks.rank == 0 and not optimizer.state:
                _log.warning(
                    "peer_copies: the states of %s are not known before its first step, so the room in %s is checked again "
                    "with the first copy",
                    type(optimizer).__name__,
                    self._memory,
                )
            return 0
        each = bytes_per_element(optimizer, named_tensors(model).names)
        counts = [(piece.key.removeprefix(MODEL), prod(n for _, n in piece.box)) for piece, _ in body.pieces]
        return round(sum(each.get(name, 0.0) * count for name, count in counts))

    def put(
        self, model: nn.Module, optimizer: AnyOptimizer, extra: Any, step: int, saved: int | None = None
    ) -> None:
        """Copy the state after a step (a collective call). It is complete at the latest when the next `put` returns.

        Args:
            model, optimizer, extra: as for `save`.
            saved: the step of the last checkpoint of the run that is committed, None without one.

        Raises:
            CheckpointError: a host has no room, or the copy before this one failed.
            UnsupportedError, UsageError: as `save`.
        """
        collect.check_call("peer_copies", model)
        with own_state(unwrapped(model), optimizer):
            self._put(model, optimizer, extra, step, saved)

    def _put(self, model: nn.Module, optimizer: Any, extra: Any, step: int, saved: int | None) -> None:
        ranks = self._ranks

        ranks.run_checked(self.wait)
        generation = Generation(self._start, step, ranks.first(uuid.uuid4().hex), ranks.size)
        shared = rng.shared(rng.digests(), ranks)
        collected, types, body = self._plans.collect(model, optimizer, extra, ranks, shared, generation.id)
        metadata, described = collected.metadata, collect.describe_shards(collected.shards)
        # no rank writes a piece of them
        empty = {} if ranks.rank else {key: kind for key, kind in types.items() if not prod(kind[0])}
        copying = RankCopy(
            ranks.rank,
            body,
            {
                "optimizer": metadata.pop("optimizer"),
                "streams": metadata.pop("rng")["streams"],
                "types": {piece.key: described[piece.key][:2] for piece, _ in body.pieces} | empty,
                "saved": saved,
                # equal on all ranks but for `extra`, which rank 0 has
                "about": metadata if ranks.rank == 0 else {},
            },
        )
        sizes = ranks.gather_numbers(copying.nbytes)
        self._check_sizes(sizes)

        def take() -> None:
            # the copy before is complete on all hosts, so older ones are not needed
            spare = self._folder.spare(
                self._newest, {rank: self._files_of(rank) for rank in self._local}, ranks.rank
            )
            files = {
                rank: NewFile(
                    self._folder.path / generation.file_name(rank, whose),
                    sizes[rank],
                    spare.get((rank, whose)),
                )
                for rank, whose in self._files_of(ranks.rank)
            }
            copying.take(files, partial(copy_file, body=body, shards=collected.shards))

        ranks.run_checked(take)
        self._newest, self._copying = generation, copying
        copying.begin(self._holders[ranks.rank], self._group, self._tag)

    def _files_of(self, rank: int) -> list[tuple[int, str]]:
        """The files that a rank writes: its own, and the copies of those of other ranks. Rank and whose."""
        return [
            (rank, OWN),
            *((other, PEERS) for other, holder in enumerate(self._holders) if holder == rank),
        ]

    def wait(self) -> None:
        """Wait until this rank's part of the last copy is complete. Raises CheckpointError: it failed."""
        copying, self._copying = self._copying, None
        if copying is not None:
            copying.end()

    def forget(self) -> None:
        """Remove all copies; those that follow are of a new start (a collective call).

        Copies that a host which is cut off still has are then older than all that follow, whatever their step.
        """
        ranks = self._ranks
        ranks.run_checked(self.wait)
        self.drop(None)
        _, self._start = ranks.result_of_first(lambda: run_record.begin(self._run_folder))

    def _check_sizes(self, sizes: list[int], predicted: bool = False) -> None:
        """Raise CheckpointError, on all ranks, where a host has no room for the files.

        sizes: of each rank's file. predicted: they have states of the optimizer that are not there yet.
        """
        # `extra` grows and shrinks by a few bytes
        sizes = [-(-size // MIB) * MIB for size in sizes]
        if sizes == self._sizes:
            return
        here = sum(sizes[rank] for rank in self._local)
        other = sum(sizes[rank] for rank, holder in enumerate(self._holders) if holder in self._local)

        def check() -> None:
            room, needed = self._folder.room(), GENERATIONS * (here + other)
            if needed > room:
                parts = f"{_mib(here)} of its own ranks and {_mib(other)} of ranks of another host"
                parts += (
                    ", with the states that the optimizer will have after its first step" if predicted else ""
                )
                raise CheckpointError(
                    f"peer_copies needs {_mib(needed)} in {self._memory} of {socket.gethostname()} ({GENERATIONS} copies, each of "
                    f"{parts}), and there is room for {_mib(room)}: make it larger (docker: --shm-size; Kubernetes: an emptyDir of "
                    "medium Memory), use more hosts, or leave out peer_copies"
                )

        self._ranks.run_checked(check)
        self._sizes = sizes

    # --- going on ---------------------------------------------------------------------------------------------------------

    def newest(self, saved: int | None, last: int | None) -> tuple[HeldCheckpoint | None, list[str]]:
        """The newest copy that is whole and not older than the checkpoint of step `saved`; why newer ones are not used.

        A collective call, before the first `put`.

        Args:
            saved: the step of the last checkpoint that is whole, None without one.
            last: the same of those that are there, whole or damaged.
        """
        return restore.newest(self._folder, self._local, self._ranks, saved, last)

    def load(self, held: HeldCheckpoint, model: nn.Module, optimizer: AnyOptimizer) -> Any:
        """Load a copy that `newest` has found, in any layout (a collective call); what was given to `put` as `extra`.

        Raises MismatchError: it does not fit the model. Nothing was changed.
        """
        have = held_pieces(held.files, held.manifest.tensors)

        def bring(wanted: list[Wanted]) -> None:
            fill(have, {key: source.shape for key, source in held.tensors.items()}, wanted, self._ranks)

        extra = load_from(held, bring, model, optimizer)
        self.drop(held)
        return extra

    def drop(self, all_but: HeldCheckpoint | None) -> None:
        """Remove all copies but one: the run goes on from that, or from another state (a collective call)."""
        # all ranks have read
        self._ranks.wait_for_all()
        self._newest = None if all_but is None else all_but.generation
        self._folder.keep(*([] if all_but is None else [all_but.generation]))


def _mib(nbytes: int) -> str:
    return f"{nbytes / MIB:.1f} MiB"
