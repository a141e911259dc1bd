"""Load directories of transformers' `from_pretrained` directly into shards."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from torch import nn

from meshwright_checkpoint.errors import CheckpointError, CorruptError
from meshwright_checkpoint.format.dtypes import DTYPES
from meshwright_checkpoint.format.manifest import NAME
from meshwright_checkpoint.format.safetensors_file import Entry, header_length, read_header
from meshwright_checkpoint.hf.key_mapping import fuse, match_prefix
from meshwright_checkpoint.read.wanted import Fragment, ReadFile, Source
from meshwright_checkpoint.state.collect import MODEL, named_tensors
from meshwright_checkpoint.storage.checkpoint import OpenFiles
from meshwright_checkpoint.storage.filesystem import Reader
from meshwright_dtensor.model.stage_info import stages_of
from meshwright_dtensor.sharding.boxes import whole_box

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


def is_pretrained(path: Path) -> bool:
    """Whether `path` is a from_pretrained directory, and not a checkpoint of meshwright."""
    return not (path / NAME).exists() and any((path / name).is_file() for name in (SINGLE, INDEX))


class Pretrained(OpenFiles):
    """An open from_pretrained directory, with the names and fused tensors of `model`. Sizes are checked; there are no checksums.

    Raises:
        CorruptError: the index or a header is damaged.
    """

    def __init__(self, path: Path, model: nn.Module) -> None:
        super().__init__()
        self._path = path
        self.where = str(path)
        try:
            entries = self._entries()
            wanted = {name: tuple(tensor.shape) for name, tensor in named_tensors(model).tensors.items()}
            sources = {
                name: Source(
                    entry.shape,
                    DTYPES[entry.dtype],
                    (Fragment(whole_box(entry.shape), file, entry.offset),) if 0 not in entry.shape else (),
                )
                for name, (file, entry) in entries.items()
            }
            division = stages_of(model)
            elsewhere = frozenset() if division is None else frozenset(division.holders) - wanted.keys()
            prefix = getattr(model, "base_model_prefix", "")
            named_now = match_prefix(sources, wanted.keys() | elsewhere, prefix)
            self.tensors: Mapping[str, Source] = {
                MODEL + name: source for name, source in fuse(named_now, wanted, model, elsewhere).items()
            }
        except BaseException:
            self.close()
            raise

    def _entries(self) -> dict[str, tuple[str, Entry]]:
        """name -> (file, entry), of all files."""
        names = [SINGLE]
        if not (self._path / SINGLE).is_file():
            try:
                index = json.loads((self._path / INDEX).read_bytes())
                names = sorted(set(index["weight_map"].values()))
            except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
                raise CorruptError(
                    f"{self._path / INDEX} is not a valid index: {ascii(str(error))[:100]}"
                ) from None
        entries_by_name: dict[str, tuple[str, Entry]] = {}
        for name in names:
            if not isinstance(name, str) or Path(name).name != name or name.startswith("."):
                raise CorruptError(
                    f"{self._path / INDEX} names the file {ascii(name)[:80]}; files must be next to it"
                )
            if not (self._path / name).is_file():
                raise CheckpointError(f"{self._path / name} is missing, but the index names it")
            file = self.file(name)
            first = bytearray(min(8, file.nbytes))
            file.read_into(memoryview(first), 0)
            head = bytearray(8 + header_length(bytes(first), file.nbytes, file.where))
            file.read_into(memoryview(head), 0)
            entries, _ = read_header(bytes(head), file.nbytes, file.where)
            entries_by_name.update({key: (name, entry) for key, entry in entries.items()})
        return entries_by_name

    def file(self, name: str) -> ReadFile:
        """See `Store`."""
        if name not in self._files:
            # download caches have links
            self._files[name] = Reader(self._path / name, follow=True)
        return self._files[name]
