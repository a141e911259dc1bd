"""A checkpoint that is open for reading."""

from __future__ import annotations

from types import MappingProxyType

from meshwright_checkpoint.errors import CorruptError
from meshwright_checkpoint.format.checksum import block_sums
from meshwright_checkpoint.format.dtypes import BY_NAME
from meshwright_checkpoint.format.manifest import Manifest
from meshwright_checkpoint.read.wanted import Fragment, ReadFile, Source
from meshwright_checkpoint.storage.backend import Place


class Checkpoint:
    """A checkpoint of this package; close it, or use it as a context manager.

    Attributes:
        manifest: what it says of itself, checked.
        tensors: key -> where its values are.
        where: its path, for messages.
        without_optimizer: why it has none, where it has none.

    Raises:
        CheckpointError: there is none.
        CorruptError: its manifest is damaged.
    """

    without_optimizer: str = "none was saved"

    def __init__(self, place: Place) -> None:
        self._place = place
        self.where = place.where
        self.manifest: Manifest = place.manifest()
        self._files: dict[str, ReadFile] = {}
        files = self.manifest.files
        self.tensors = MappingProxyType(
            {
                key: Source(
                    stored.shape,
                    BY_NAME[stored.dtype],
                    tuple(Fragment(p.box, files[p.file].name, p.offset, p.sums) for p in stored.parts),
                )
                for key, stored in self.manifest.tensors.items()
            }
        )

    def file(self, name: str) -> ReadFile:
        """See `Store`. Raises CorruptError where size or header are not those that were written."""
        if name not in self._files:
            said = next(file for file in self.manifest.files if file.name == name)
            opened = self._place.open(name)
            self._files[name] = opened
            if opened.nbytes != said.nbytes:
                raise CorruptError(
                    f"{opened.where} has {opened.nbytes} bytes, and {said.nbytes} were written{self._hit(name)}"
                )
            head = bytearray(said.header_nbytes)
            opened.read_into(memoryview(head), 0)
            if block_sums(memoryview(head)) != said.header_sums:
                raise CorruptError(
                    f"{opened.where} is damaged, or is not the file that was saved here: its header differs{self._hit(name)}"
                )
        return self._files[name]

    def _hit(self, name: str) -> str:
        hit = [key for key, source in self.tensors.items() if any(f.file == name for f in source.fragments)]
        return f"; it holds {', '.join(hit[:3])}{f' and {len(hit) - 3} more' if len(hit) > 3 else ''}"

    def close(self) -> None:
        """Close its files."""
        for file in self._files.values():
            file.close()
        self._files.clear()

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
