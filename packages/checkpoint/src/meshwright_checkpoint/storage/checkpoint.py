"""A checkpoint that is open for reading: manifest, tensors and files."""

from __future__ import annotations

from types import MappingProxyType
from typing import Self

from meshwright_checkpoint.errors import CorruptError
from meshwright_checkpoint.format.checksum import block_sums
from meshwright_checkpoint.format.manifest import Manifest
from meshwright_checkpoint.format.safetensors_file import DTYPES
from meshwright_checkpoint.read.wanted import Fragment, ReadFile, Source
from meshwright_checkpoint.storage.backend import CheckpointStorage


class OpenFiles:
    """Open files by name. Close them, or use the object as a context manager."""

    def __init__(self) -> None:
        self._files: dict[str, ReadFile] = {}

    def close(self) -> None:
        """Close all files."""
        for file in self._files.values():
            file.close()
        self._files.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class Checkpoint(OpenFiles):
    """An open checkpoint. Close it, or use it as a context manager.

    Attributes:
        manifest: the checked manifest.
        tensors: key -> where the values are stored.
        where: the path, for messages.
        no_optimizer_reason: why the checkpoint has no optimizer, for messages.

    Raises:
        CheckpointError: there is no checkpoint.
        CorruptError: the manifest is damaged.
    """

    no_optimizer_reason: str = "none was saved"

    def __init__(self, storage: CheckpointStorage) -> None:
        super().__init__()
        self._storage = storage
        self.where = storage.where
        self.manifest: Manifest = storage.manifest()
        files = self.manifest.files
        tensors = {}
        for key, stored in self.manifest.tensors.items():
            fragments = (Fragment(p.box, files[p.file].name, p.offset, p.sums) for p in stored.parts)
            tensors[key] = Source(stored.shape, DTYPES[stored.dtype], tuple(fragments))
        self.tensors = MappingProxyType(tensors)

    def file(self, name: str) -> ReadFile:
        """See `Store`. Raises CorruptError if the size or the header differs from the manifest."""
        if name not in self._files:
            written = next(file for file in self.manifest.files if file.name == name)
            opened = self._storage.open(name)
            self._files[name] = opened
            if opened.nbytes != written.nbytes:
                text = f"{opened.where} has {opened.nbytes} bytes, and {written.nbytes} were written{self._tensors_in(name)}"
                raise CorruptError(text)
            head = bytearray(written.header_nbytes)
            opened.read_into(memoryview(head), 0)
            if block_sums(memoryview(head)) != written.header_sums:
                raise CorruptError(
                    f"{opened.where} is damaged, or is not the file that was saved here: its header differs{self._tensors_in(name)}"
                )
        return self._files[name]

    def _tensors_in(self, name: str) -> str:
        keys = [key for key, source in self.tensors.items() if any(f.file == name for f in source.fragments)]
        return f"; it holds {', '.join(keys[:3])}{f' and {len(keys) - 3} more' if len(keys) > 3 else ''}"
