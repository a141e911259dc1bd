"""Checkpoints in object stores, or whatever fsspec reaches: there is no rename, so the manifest, written last, is the commit.

Objects are written under their final names; as long as there is no manifest there is no checkpoint.  Object stores have no locks
that end with a process: ranks renew a small object every few seconds instead, and one that is not renewed for a minute is dead.
"""

from __future__ import annotations

import json
import posixpath
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import fsspec

from meshwright_checkpoint.errors import CheckpointError, CorruptError
from meshwright_checkpoint.format.manifest import MAX_BYTES, NAME, Manifest
from meshwright_dtensor.errors import UsageError

BEAT = 5.0
"""Seconds between two signs of life."""
LEASE = 60.0
"""Seconds after the last one until a process counts as dead."""
PAUSES = (0.05, 0.2, 1.0, 3.0)
"""Seconds between looks at a sign of life that cannot be read."""
WORK = ".saving"
"""What the objects of a save in progress begin with."""


class Heartbeat:
    """Renews an object until it is stopped."""

    def __init__(self, fs: Any, path: str, text: str) -> None:
        self._fs, self._path, self._text = fs, path, text
        self._stop = threading.Event()
        self._beat()
        self._thread = threading.Thread(target=self._run, name="meshwright-heartbeat", daemon=True)
        self._thread.start()

    def _beat(self) -> None:
        self._fs.pipe_file(self._path, json.dumps({"time": time.time(), "by": self._text}).encode())

    def _run(self) -> None:
        while not self._stop.wait(BEAT):
            with suppress(OSError):  # one that is missed is made up for by the next
                self._beat()

    def stop(self) -> None:
        """Stop, and remove the object."""
        self._stop.set()
        self._thread.join()
        with suppress(OSError):
            self._fs.rm_file(self._path)


def beats(fs: Any, path: str) -> str | None:
    """Who renews the object, None where nobody does."""
    for pause in (*PAUSES, None):
        try:
            data = json.loads(fs.cat_file(path))
            return str(data["by"])[:100] if time.time() - float(data["time"]) < LEASE else None
        except FileNotFoundError:
            return None
        except (
            OSError,
            ValueError,
            KeyError,
            TypeError,
        ):  # not every store replaces an object at once: it is being renewed
            if pause is not None:
                time.sleep(pause)
    return None


class ObjectWriter:
    """An object that is written in order; it appears when it is closed."""

    def __init__(self, fs: Any, path: str) -> None:
        self._fs, self._path = fs, path
        self._file = fs.open(path, "wb")

    def write(self, data: memoryview | bytes) -> None:
        """Append."""
        self._file.write(data)

    def close(self, durable: bool = True) -> None:
        """Close; not `durable`: remove it."""
        self._file.close()
        if not durable:
            with suppress(OSError):
                self._fs.rm_file(self._path)


class ObjectReader:
    """An object that ranges are read of."""

    def __init__(self, fs: Any, path: str) -> None:
        self._fs, self._path = fs, path
        self.where = str(fs.unstrip_protocol(path))
        try:
            self.nbytes = int(fs.size(path))
        except (OSError, TypeError, ValueError) as error:
            raise CorruptError(f"{self.where} cannot be read: {type(error).__name__}") from error

    def read_into(self, buffer: memoryview, offset: int) -> None:
        """Fill `buffer` from `offset`. Raises CorruptError where the object ends before."""
        try:
            data = self._fs.cat_file(self._path, start=offset, end=offset + len(buffer))
        except (OSError, ValueError) as error:
            raise CorruptError(f"{self.where} cannot be read: {error}") from error
        if len(data) != len(buffer):
            raise CorruptError(
                f"{self.where} ends at {offset + len(data)} bytes, where more are expected: it is cut short"
            )
        buffer[:] = data

    def close(self) -> None:
        """Nothing is open."""


class ObjectPlace:
    """A checkpoint under a URL; see `places.Place`. Processes that save together must see the same store."""

    def __init__(self, url: str, fs: Any = None) -> None:
        if fs is None:
            try:
                fs, url = fsspec.core.url_to_fs(url)
            except (
                ImportError,
                ValueError,
            ) as error:  # a protocol whose package is not installed, or that nobody knows
                raise UsageError(f"{url} cannot be opened: {error}") from error
        self._fs = fs
        self._path = url.rstrip("/")
        self.where = str(fs.unstrip_protocol(self._path))
        self.name = posixpath.basename(self._path)
        self._work = ""
        self._lock: Heartbeat | None = None
        self._alive: Heartbeat | None = None

    def begin(self, save_id: str) -> None:
        """See Place."""
        lock = self._in(f"{WORK}-lock")
        holder = beats(self._fs, lock)
        if holder is not None:
            raise CheckpointError(
                f"another job is saving to {self.where} ({holder}); save elsewhere, or wait for it"
            )
        if self._fs.exists(self._in(NAME)):
            raise CheckpointError(f"{self.where} exists already; save under another name, or remove it first")
        if self._fs.exists(self._path):
            self._fs.rm(self._path, recursive=True)  # of a killed save
        self._fs.makedirs(self._path, exist_ok=True)
        self._lock = Heartbeat(self._fs, lock, save_id)
        if beats(self._fs, lock) != save_id:
            raise CheckpointError(
                f"another job has begun to save to {self.where}; save elsewhere, or wait for it"
            )

    def claim(self, save_id: str, rank: int) -> None:
        """See Place."""
        if beats(self._fs, self._in(f"{WORK}-lock")) != save_id:
            raise CheckpointError(
                f"rank {rank} does not see what rank 0 has written to {self.where}: use a store that all ranks see"
            )
        self._work = self._in(f"{WORK}-{save_id}")
        self._alive = Heartbeat(self._fs, f"{self._work}-alive-{rank}", save_id)

    def writer(self, name: str) -> ObjectWriter:
        """See Place."""
        return ObjectWriter(self._fs, self._in(name))

    def mark(self, rank: int, data: bytes) -> None:
        """See Place."""
        self._fs.pipe_file(f"{self._work}-done-{rank}", data)

    def marked(self, rank: int) -> bytes | None:
        """See Place."""
        alive = beats(self._fs, f"{self._work}-alive-{rank}")  # asked first: it may be done in between
        try:
            return bytes(self._fs.cat_file(f"{self._work}-done-{rank}"))
        except FileNotFoundError:
            if alive is None:
                raise CheckpointError(
                    f"rank {rank} died, or could not write, while saving {self.where}"
                ) from None
            return None

    def commit(self, manifest: bytes) -> None:
        """See Place."""
        self._fs.pipe_file(self._in(NAME), manifest)

    def end(self) -> None:
        """See Place."""
        if self._alive is not None:
            self._alive.stop()
            self._alive = None

    def finish(self) -> None:
        """See Place."""
        if self._fs.exists(self._in(NAME)):
            for path in self._fs.ls(self._path, detail=False):
                if posixpath.basename(path).startswith(f"{WORK}-") and "-done-" in path:
                    with suppress(OSError):
                        self._fs.rm_file(path)
        else:
            with suppress(OSError):
                self._fs.rm(self._path, recursive=True)
        if self._lock is not None:
            self._lock.stop()
            self._lock = None

    def outcome(self, save_id: str) -> bool | None:
        """See Place."""
        going = beats(self._fs, self._in(f"{WORK}-lock")) == save_id
        if self._fs.exists(self._in(NAME)):
            with suppress(CheckpointError):
                if self.manifest().id == save_id:
                    return True
        return None if going else False

    def manifest(self) -> Manifest:
        """See Place."""
        try:
            data = self._fs.cat_file(self._in(NAME), start=0, end=MAX_BYTES + 1)
        except FileNotFoundError:
            found = [place.name for place in self.inside()]
            hint = f"; it holds {', '.join(found[-3:])}: give one of them" if found else ""
            raise CheckpointError(f"{self.where} is no checkpoint: it has no {NAME}{hint}") from None
        except OSError as error:
            raise CheckpointError(f"{self.where} cannot be read: {error}") from error
        return Manifest.from_bytes(bytes(data), f"{self.where}/{NAME}")

    def open(self, name: str) -> ObjectReader:
        """See Place."""
        return ObjectReader(self._fs, self._in(name))

    def nbytes(self, name: str) -> int | None:
        """See Place."""
        with suppress(OSError, TypeError):
            return int(self._fs.size(self._in(name)))
        return None

    def inside(self) -> Sequence[ObjectPlace]:
        """See Place."""
        try:
            found = sorted(self._fs.ls(self._path, detail=False))
        except OSError:
            return []
        places = [ObjectPlace(path, self._fs) for path in found]
        return [place for place in places if self._fs.exists(f"{place._path}/{NAME}")]

    def parent(self) -> ObjectPlace:
        """See Place."""
        return ObjectPlace(posixpath.dirname(self._path), self._fs)

    def remove(self, save_id: str) -> None:
        """The manifest first: without it there is no checkpoint."""
        with suppress(FileNotFoundError):
            self._fs.rm_file(self._in(NAME))
            self._fs.rm(self._path, recursive=True)

    def clean(self) -> None:
        """Leftovers have the name of the save that left them, and go when that is saved again."""

    def _in(self, name: str) -> str:
        return f"{self._path}/{name}"
