"""Checkpoints in object stores, through fsspec. The manifest is written last, which is the commit.

Object stores have no rename, so objects are written under their final names. Without a manifest there is no checkpoint.
They also have no locks that end with a process. Instead each rank renews a lease object every few seconds; a rank whose
lease is not renewed for a minute is considered dead.
"""

from __future__ import annotations

import json
import posixpath
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from fnmatch import fnmatchcase
from typing import Any

import fsspec

from meshwright_checkpoint.errors import CheckpointError, CorruptError
from meshwright_checkpoint.format.manifest import HEAD_NBYTES, MAX_BYTES, NAME, Manifest, has_form
from meshwright_checkpoint.storage.failures import is_not_there, reading
from meshwright_checkpoint.storage.filesystem import DATA
from meshwright_dtensor.errors import UsageError

RENEW_SECONDS = 5.0
"""Seconds between renewals of a lease."""
LEASE_SECONDS = 60.0
"""Seconds after the last renewal until a process counts as dead."""
RETRY_SECONDS = (0.05, 0.2, 1.0, 3.0)
"""Seconds between attempts to read a lease that is unreadable."""
WORK = ".saving"
"""Prefix of the objects of a running save."""


class Lease:
    """A lease object that a thread renews until it is stopped."""

    def __init__(self, fs: Any, path: str, text: str) -> None:
        self._fs, self._path, self._text = fs, path, text
        self._stop = threading.Event()
        self._renew()
        self._thread = threading.Thread(target=self._run, name="meshwright-heartbeat", daemon=True)
        self._thread.start()

    def _renew(self) -> None:
        self._fs.pipe_file(self._path, json.dumps({"time": time.time(), "by": self._text}).encode())

    def _run(self) -> None:
        while not self._stop.wait(RENEW_SECONDS):
            # the next renewal follows soon
            with suppress(Exception):
                self._renew()

    def stop(self) -> None:
        """Stop and remove the object."""
        self._stop.set()
        self._thread.join()
        with suppress(Exception):
            self._fs.rm_file(self._path)


def lease_holder(fs: Any, path: str) -> str | None:
    """Who holds the lease, None if nobody renews it."""
    for pause in (*RETRY_SECONDS, None):
        try:
            data = json.loads(fs.cat_file(path))
            return str(data["by"])[:100] if time.time() - float(data["time"]) < LEASE_SECONDS else None
        except FileNotFoundError:
            return None
        # some stores do not replace an object atomically, so a renewal may be seen half written
        except (OSError, ValueError, KeyError, TypeError):
            if pause is not None:
                time.sleep(pause)
    return None


class ObjectWriter:
    """An object that is written sequentially. It appears when it is closed."""

    def __init__(self, fs: Any, path: str) -> None:
        self._fs, self._path = fs, path
        self._file = fs.open(path, "wb")

    def write(self, data: memoryview | bytes) -> None:
        """Append."""
        self._file.write(data)

    def close(self, durable: bool = True) -> None:
        """Close. Without `durable` remove the object."""
        self._file.close()
        if not durable:
            with suppress(OSError):
                self._fs.rm_file(self._path)


class ObjectReader:
    """An object that byte ranges are read from."""

    def __init__(self, fs: Any, path: str) -> None:
        self._fs, self._path = fs, path
        self.where = str(fs.unstrip_protocol(path))
        with reading(self.where):
            # TypeError where the store does not tell
            self.nbytes = int(fs.size(path))

    def read_into(self, buffer: memoryview, offset: int) -> None:
        """Fill `buffer` from `offset` on. Raises CorruptError if the object is too short, CheckpointError if it cannot be read."""
        # stores refuse ranges that begin at the end
        data = b""
        if offset < self.nbytes:
            with reading(self.where):
                data = self._fs.cat_file(self._path, start=offset, end=offset + len(buffer))
        if len(data) != len(buffer):
            text = f"{self.where} is truncated: it ends at {offset + len(data)} bytes, {len(buffer) - len(data)} more are expected"
            raise CorruptError(text)
        buffer[:] = data

    def close(self) -> None:
        """Nothing is open."""


class ObjectStorage:
    """CheckpointStorage of a checkpoint under a URL. Processes that save together must see the same store."""

    def __init__(self, url: str, fs: Any = None) -> None:
        if fs is None:
            try:
                fs, url = fsspec.core.url_to_fs(url)
            # the protocol is unknown, or its package is not installed
            except (ImportError, ValueError) as error:
                raise UsageError(f"{url} cannot be opened: {error}") from error
        self._fs = fs
        self._path = url.rstrip("/")
        self.where = str(fs.unstrip_protocol(self._path))
        self.name = posixpath.basename(self._path)
        self._work = ""
        self._lock: Lease | None = None
        self._alive_lease: Lease | None = None

    def begin(self, save_id: str) -> None:
        lock = self._child_path(f"{WORK}-lock")
        holder = lease_holder(self._fs, lock)
        if holder is not None:
            text = f"another job is saving to {self.where} ({holder}); save elsewhere, or wait for it"
            raise CheckpointError(text)
        if self._has_manifest():
            raise CheckpointError(f"{self.where} exists already; save under another name, or remove it first")
        if self._fs.exists(self._path):
            # left by a killed save
            self._fs.rm(self._path, recursive=True)
        self._fs.makedirs(self._path, exist_ok=True)
        self._lock = Lease(self._fs, lock, save_id)
        if lease_holder(self._fs, lock) != save_id:
            text = f"another job has begun to save to {self.where}; save elsewhere, or wait for it"
            raise CheckpointError(text)

    def claim(self, save_id: str, rank: int) -> None:
        if lease_holder(self._fs, self._child_path(f"{WORK}-lock")) != save_id:
            text = f"rank {rank} does not see the object that rank 0 has written to {self.where}: use a store that all ranks see"
            raise CheckpointError(text)
        self._work = self._child_path(f"{WORK}-{save_id}")
        self._alive_lease = Lease(self._fs, f"{self._work}-alive-{rank}", save_id)

    def writer(self, name: str) -> ObjectWriter:
        return ObjectWriter(self._fs, self._child_path(name))

    def write_note(self, rank: int, data: bytes) -> None:
        self._fs.pipe_file(f"{self._work}-done-{rank}", data)

    def read_note(self, rank: int) -> bytes | None:
        # read the lease first: the rank may finish in between
        alive = lease_holder(self._fs, f"{self._work}-alive-{rank}")
        try:
            return bytes(self._fs.cat_file(f"{self._work}-done-{rank}"))
        except FileNotFoundError:
            if alive is None:
                text = f"rank {rank} died, or could not write, while saving {self.where}"
                raise CheckpointError(text) from None
            return None

    def commit(self, manifest: bytes) -> None:
        self._fs.pipe_file(self._child_path(NAME), manifest)

    def end(self) -> None:
        if self._alive_lease is not None:
            self._alive_lease.stop()
            self._alive_lease = None

    def finish(self) -> None:
        try:
            if self._has_manifest():
                for path in self._fs.ls(self._path, detail=False):
                    if posixpath.basename(path).startswith(f"{WORK}-") and "-done-" in path:
                        with suppress(OSError):
                            self._fs.rm_file(path)
            else:
                with suppress(OSError):
                    self._fs.rm(self._path, recursive=True)
        finally:
            if self._lock is not None:
                self._lock.stop()
                self._lock = None

    def outcome(self, save_id: str) -> bool | None:
        going = lease_holder(self._fs, self._child_path(f"{WORK}-lock")) == save_id
        with suppress(CheckpointError):
            if self._has_manifest() and self.manifest().id == save_id:
                return True
        return None if going else False

    def manifest(self) -> Manifest:
        try:
            data = self._first_bytes(MAX_BYTES + 1)
        except CorruptError:
            names = [storage.name for storage in self.children()]
            hint = f"; it holds {', '.join(names[-3:])}: give one of them" if names else ""
            raise CheckpointError(f"{self.where} is not a checkpoint: it has no {NAME}{hint}") from None
        return Manifest.from_bytes(data, f"{self.where}/{NAME}")

    def _first_bytes(self, nbytes: int) -> bytes:
        """Of the manifest. Raises CorruptError: there is none. CheckpointError: it cannot be read."""
        path = self._child_path(NAME)
        with reading(f"{self.where}/{NAME}"):
            try:
                return bytes(self._fs.cat_file(path, start=0, end=nbytes))
            except Exception as error:
                # stores refuse a range of an object without bytes
                if is_not_there(error) or self._fs.size(path) != 0:
                    raise
                return b""

    def _has_manifest(self) -> bool:
        """Raises CheckpointError: that cannot be told. `exists` of fsspec is False then."""
        try:
            with reading(f"{self.where}/{NAME}"):
                self._fs.info(self._child_path(NAME))
        except CorruptError:
            return False
        return True

    def open(self, name: str) -> ObjectReader:
        return ObjectReader(self._fs, self._child_path(name))

    def nbytes(self, name: str) -> int | None:
        try:
            with reading(f"{self.where}/{name}"):
                return int(self._fs.size(self._child_path(name)))
        except CorruptError:
            return None

    def children(self) -> Sequence[ObjectStorage]:
        return [storage for storage in self._inside() if storage._is_checkpoint()]

    def _inside(self) -> list[ObjectStorage]:
        """What is directly inside. Raises CheckpointError: it cannot be listed, which is not the same as empty."""
        try:
            with reading(self.where):
                paths = sorted(self._fs.ls(self._path, detail=False))
        except CorruptError:
            return []
        return [ObjectStorage(path, self._fs) for path in paths]

    def _is_checkpoint(self) -> bool:
        """Whether there is a manifest, of the form of ours or next to files of ours. True if that cannot be told."""
        try:
            return has_form(self._first_bytes(HEAD_NBYTES)) or any(
                fnmatchcase(each.name, DATA) for each in self._inside()
            )
        except CorruptError:
            return False
        except CheckpointError:
            return True

    def parent(self) -> ObjectStorage:
        return ObjectStorage(posixpath.dirname(self._path), self._fs)

    def remove(self, save_id: str) -> None:
        """Remove the manifest first: without it there is no checkpoint."""
        with suppress(FileNotFoundError):
            self._fs.rm_file(self._child_path(NAME))
            self._fs.rm(self._path, recursive=True)

    def clean(self) -> None:
        """Nothing to do: `begin` removes leftovers, which are under the final name."""

    def _child_path(self, name: str) -> str:
        return f"{self._path}/{name}"
