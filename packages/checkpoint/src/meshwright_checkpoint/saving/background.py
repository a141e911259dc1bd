"""The background half of a save: write, make durable, commit. It makes no collective call."""

from __future__ import annotations

import atexit
import datetime
import importlib.metadata
import json
import logging
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import closing, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import torch

from meshwright_checkpoint._torch import bytes_of_tensor
from meshwright_checkpoint.errors import CheckpointError, told
from meshwright_checkpoint.format.checksum import block_sums
from meshwright_checkpoint.format.manifest import Manifest
from meshwright_checkpoint.format.safetensors_file import FileLayout
from meshwright_checkpoint.io.worker import Worker, yield_to_training
from meshwright_checkpoint.storage.backend import CheckpointStorage, complete_file
from meshwright_checkpoint.storage.retention import Retention
from meshwright_dtensor.devices.storage_waits import waiting_for_storage
from meshwright_dtensor.mesh.lost_ranks import JobNotes
from meshwright_dtensor.mesh.mesh import timeout_of_world

T = TypeVar("T")
_log = logging.getLogger("meshwright")
CHUNK = 16 << 20
MAX_UNHASHED_PARTS = 2
"""Parts that are written before the checksum of the first of them is known."""
POLL_SECONDS = 0.02
START_DELAY = 0.005
"""Seconds that a background save waits before it starts, so that the caller continues at once."""
GRACE_SECONDS = 3.0
"""How long the caller waits for a save, before it asks whether the other ranks are there, and before it asks again."""
NOT_COMMITTED = "rank 0 gave it up, or died; nothing was committed"


@dataclass
class Job:
    """One save of one rank.

    data: the bytes of the header and of each piece of `body`, one after the other; set before the thread starts.
    background: training continues during the save.
    waits, leaves: set while the caller waits for the save; once it waits for nothing else any more.
    """

    storage: CheckpointStorage
    save_id: str
    rank: int
    ranks: int
    step: int | None
    retention: Retention
    metadata: dict[str, Any]
    tensor_types: dict[str, Any]
    body: FileLayout
    background: bool
    data: Iterable[torch.Tensor] = ()
    waits: threading.Event = field(default_factory=threading.Event)
    leaves: threading.Event = field(default_factory=threading.Event)

    def patience(self) -> float | None:
        """For how many seconds a rank may be silent; None while nobody waits for the save."""
        if self.leaves.is_set() or not threading.main_thread().is_alive():
            # so that it has to miss two questions one after the other: a busy host may answer one of them late
            return GRACE_SECONDS
        return timeout_of_world() if self.waits.is_set() else None


class SaveHandle:
    """A save in flight.

    Attributes:
        path: where the checkpoint will be.
        step: of training; None without one, and in other formats.
        error_raised: whether `wait` has raised the error of the save.
    """

    def __init__(self, path: str, job: Job | None) -> None:
        """`job`: None if the save is already committed."""
        self.path = path
        self.step = None if job is None else job.step
        self._error: BaseException | None = None
        self._job = job
        self.error_raised = False
        self._done = threading.Event()
        if job is None:
            self._done.set()
            return
        # not a daemon: a process that ends normally finishes its save first
        self._thread = threading.Thread(target=self._run, args=(job,), name="meshwright-save")
        atexit.register(self._report_at_exit)
        self._thread.start()

    @property
    def done(self) -> bool:
        """Whether the save has ended, committed or failed."""
        return self._done.is_set()

    @property
    def committed(self) -> bool:
        """Whether the checkpoint is there."""
        return self.done and self._error is None

    def wait(self, timeout: float | None = None) -> None:
        """Return once the checkpoint is committed.

        Args:
            timeout: seconds to wait at most; None waits as long as it takes.

        Raises CheckpointError: the save failed and nothing was committed, or it still runs after `timeout`, or another rank has not
        answered for as long as collectives wait (`mw.init(timeout=)`).
        """
        if self._job is not None:
            self._job.waits.set()
        try:
            with waiting_for_storage():
                done = self._done.wait(timeout)
        finally:
            # also after Ctrl-C, when nobody waits any more
            if self._job is not None:
                self._job.waits.clear()
        if not done:
            raise CheckpointError(f"saving {self.path} still runs after timeout={timeout:g} s; wait longer")
        if self._error is not None:
            self.error_raised = True
            raise CheckpointError(f"saving {self.path} failed: {self._error}") from self._error

    def wait_for_those_that_answer(self) -> None:
        """`wait`, but for ranks that do not answer only some seconds, as at the end of a process. Raises as `wait`."""
        if self._job is not None:
            self._job.leaves.set()
        self.wait()

    def _report_at_exit(self) -> None:
        """At process exit: print an error that `wait` has not raised."""
        self._done.wait()
        if self._error is not None and not self.error_raised:
            print(
                f"meshwright: saving {self.path} failed: {self._error}; there is no checkpoint there (handle.wait() raises this)",
                file=sys.stderr,
            )

    def __repr__(self) -> str:
        state = "in flight" if not self.done else "failed" if self._error is not None else "committed"
        return f"{type(self).__name__}({self.path!r}, {state})"

    def _run(self, job: Job) -> None:
        notes = JobNotes()
        try:
            if job.background:
                time.sleep(START_DELAY)
                yield_to_training()
            _write(job)
            if job.rank == 0:
                _commit(job, notes)
            else:
                # rank 0 commits or fails
                if not _awaited(lambda: job.storage.outcome(job.save_id), job, notes):
                    raise told(CheckpointError(notes.text(job.save_id) or NOT_COMMITTED), 0)
        # storage libraries may raise anything, and what is not caught would count as committed
        except Exception as error:
            # rank 0 has removed the files
            gone = isinstance(error, FileNotFoundError) and job.rank
            self._error = (
                told(CheckpointError(notes.text(job.save_id) or NOT_COMMITTED), 0) if gone else error
            )
            if job.rank == 0:
                # before the others see that it has failed
                notes.leave(
                    job.save_id,
                    str(error) if isinstance(error, CheckpointError) else f"rank 0 failed: {error}",
                )
            # best effort: rank 0 also sees a released lock without a note
            with suppress(Exception):
                note = {"error": f"{type(error).__name__}: {error}"}
                job.storage.write_note(job.rank, json.dumps(note).encode())
        finally:
            with suppress(Exception):
                job.storage.end()
            with suppress(Exception):
                if job.rank == 0:
                    job.storage.finish()
            job.data = ()
            if self._error is None:
                atexit.unregister(self._report_at_exit)
            self._done.set()


def _awaited(look: Callable[[], T | None], job: Job, others: JobNotes) -> T:
    """What `look` returns, once it is not None: what another rank does.

    Raises CheckpointError: a rank has not answered for longer than `job.patience`. It would be waited for to no end.
    """
    last_question, silent_since = time.monotonic(), None
    while (value := look()) is None:
        time.sleep(POLL_SECONDS)
        patience, now = job.patience(), time.monotonic()
        if patience is None:
            last_question, silent_since = now, None
        elif now - last_question > max(GRACE_SECONDS, patience / 4):
            silent = others.silent()
            last_question = now
            silent_since = None if not silent else silent_since or now
            if silent_since is not None and now - silent_since >= patience:
                raise CheckpointError("; ".join(silent))
    return value


def _write(job: Job) -> None:
    """Write this rank's file and compute its checksums at the same time; then publish the note."""
    with closing(Worker[str]("meshwright-sums")) as worker:
        sums: list[Future[str]] = []
        with complete_file(job.storage.writer(file_name(job.rank))) as writer:
            for part in job.data:
                view = bytes_of_tensor(part)
                # bounds the memory of parts that are copies
                if len(sums) >= MAX_UNHASHED_PARTS:
                    sums[-MAX_UNHASHED_PARTS].result()
                sums.append(worker.submit(partial(block_sums, view)))
                for at in range(0, len(view), CHUNK):
                    writer.write(view[at : at + CHUNK])
        note = describe_file(job.rank, job.body, [future.result() for future in sums])
    note["optimizer"] = job.metadata.get("optimizer")
    note["streams"] = job.metadata["rng"]["streams"]
    job.storage.write_note(job.rank, json.dumps(note).encode())


def file_name(rank: int) -> str:
    """The name of the file that a rank writes."""
    return f"data-{rank:05d}.safetensors"


def describe_file(rank: int, body: FileLayout, sums: Sequence[str]) -> dict[str, Any]:
    """A rank's file, as JSON for `manifest_of`. `sums`: the checksums of the header and of each piece."""
    header, *digits = sums
    sizes = {"nbytes": body.nbytes, "header_nbytes": len(body.header)}
    return {
        "file": {"name": file_name(rank), **sizes, "header_sums": header},
        "pieces": [[p.key, p.box, offset, d] for (p, offset), d in zip(body.pieces, digits, strict=True)],
    }


def _commit(job: Job, others: JobNotes) -> None:
    notes: list[Any] = []
    for rank in range(job.ranks):
        notes.append(json.loads(_awaited(partial(job.storage.read_note, rank), job, others)))
        if "error" in notes[-1]:
            raise told(CheckpointError(f"rank {rank} failed: {notes[-1]['error']}"), rank)
    about = {**about_save(job.save_id, job.step, job.ranks), **job.metadata, **merge_notes(notes)}
    job.storage.commit(manifest_of(job.tensor_types, notes, about).to_bytes())
    try:
        job.storage.clean()
        job.retention.apply(job.storage)
    # the checkpoint is there, and the other ranks see it: nothing may make the save fail any more
    except Exception as error:
        _log.warning("%s is saved, but older checkpoints were not removed: %s", job.storage.where, error)


def about_save(save_id: str, step: int | None, ranks: int) -> dict[str, Any]:
    """Fields of a manifest that say when it was written, and by which versions."""
    versions = {"torch": str(torch.__version__)}
    for name in ("meshwright-checkpoint", "meshwright-dtensor"):
        with suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    created = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    return {"id": save_id, "created": created, "step": step, "world_size": ranks, "versions": versions}


def merge_notes(notes: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Fields of a manifest to which all ranks add: `optimizer` and `streams` of their notes."""
    return {
        "optimizer": merge_optimizers([note["optimizer"] for note in notes]),
        "rng": {"streams": {name: count for note in notes for name, count in note["streams"].items()}},
    }


def manifest_of(
    types: Mapping[str, tuple[Sequence[int], str]], files: Sequence[dict[str, Any]], about: dict[str, Any]
) -> Manifest:
    """The checked manifest of the files of all ranks.

    Args:
        types: key -> shape and name of the dtype.
        files: from `describe_file`, in rank order.
        about: all other fields.
    """
    tensors: dict[str, Any] = {
        key: {"shape": shape, "dtype": dtype, "parts": []} for key, (shape, dtype) in sorted(types.items())
    }
    for rank, file in enumerate(files):
        for key, box, offset, sums in file["pieces"]:
            tensors[key]["parts"].append({"box": box, "file": rank, "offset": offset, "sums": sums})
    data = {**about, "files": [file["file"] for file in files], "tensors": tensors}
    return Manifest.checked(data, "the manifest to be written")


def merge_optimizers(optimizers: list[Any]) -> Any:
    """Merge the optimizers of all ranks. Groups with equal options become one."""
    given = [optimizer for optimizer in optimizers if optimizer is not None]
    if not given:
        return None
    params: dict[str, dict[str, None]] = {}
    for optimizer in given:
        for group in optimizer["groups"]:
            group_params = params.setdefault(json.dumps(group["options"], sort_keys=True), {})
            group_params.update(dict.fromkeys(group["params"]))
    groups = [{"params": list(names), "options": json.loads(options)} for options, names in params.items()]
    values: dict[str, Any] = {}
    for optimizer in given:
        values.update(optimizer["values"])
    return {"cls": given[0]["cls"], "groups": groups, "values": values}
