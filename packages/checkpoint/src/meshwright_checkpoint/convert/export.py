"""Export a model to a directory for transformers' `from_pretrained`: safetensors, index and config."""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import nn

from meshwright_checkpoint._torch import bytes_of_tensor
from meshwright_checkpoint.convert.verify import read_rows
from meshwright_checkpoint.errors import CheckpointError
from meshwright_checkpoint.format.safetensors_file import lay_out_file
from meshwright_checkpoint.io.direct_write import Writer
from meshwright_checkpoint.plugin import DEFAULT
from meshwright_checkpoint.pretrained import INDEX, SINGLE
from meshwright_checkpoint.rank_messages import Ranks
from meshwright_checkpoint.read.wanted import Source
from meshwright_checkpoint.saving.saving import save
from meshwright_checkpoint.shards.write_shares import Piece
from meshwright_checkpoint.state.collect import MODEL, check_call
from meshwright_checkpoint.storage.backend import StrPath, complete_file, storage_of
from meshwright_checkpoint.storage.checkpoint import Checkpoint
from meshwright_checkpoint.storage.filesystem import DirectoryStorage, staged_directory
from meshwright_dtensor.devices.storage_waits import waiting_for_storage
from meshwright_dtensor.errors import UsageError
from meshwright_dtensor.sharding.boxes import whole_box

FILE_NBYTES = 5 << 30
Files = list[tuple[str, list[str]]]


def export(path: StrPath, *, model: nn.Module) -> None:
    """Export `model` for `from_pretrained` (a collective call). Models without a transformers config get only weights.

    Ranks first save a temporary checkpoint next to the path, and then each converts some of the files. So no rank holds much
    more than its own shards.

    Args:
        path: a directory that does not exist yet; every rank sees it.

    Raises:
        CheckpointError: the path exists, or cannot be written.
        UsageError: the path is a URL.
    """
    check_call("export", model)
    ranks = Ranks()
    target = _directory(path)
    token = ranks.gather(uuid.uuid4().hex)[0]
    staging = target.path.parent / f".{target.name}.export-{token}"
    ranks.run_checked(lambda: _free(target.path))
    try:
        save(staging, model=model, asynchronous=False)
        with ranks.run_checked(lambda: Checkpoint(DirectoryStorage(staging))) as checkpoint:
            convert(checkpoint, target.path, ranks)
    finally:
        if ranks.rank == 0 and staging.exists():
            DirectoryStorage(staging).remove(token)


def export_checkpoint(source: StrPath, path: StrPath, backend: str = DEFAULT) -> None:
    """Export a checkpoint in one process, without the model. Raises CheckpointError, CorruptError."""
    target = _directory(path).path
    _free(target)
    with Checkpoint(storage_of(source, backend)) as checkpoint:
        convert(checkpoint, target, Ranks())


def _directory(path: StrPath) -> DirectoryStorage:
    if "://" in os.fspath(path):
        text = f"{os.fspath(path)} is a URL, and from_pretrained reads directories; export to a local path, and copy it from there"
        raise UsageError(text)
    return DirectoryStorage(path)


def _free(path: Path) -> None:
    if path.exists():
        raise CheckpointError(f"{path} exists already; export to another name, or remove it first")


def convert(checkpoint: Checkpoint, path: Path, ranks: Ranks) -> None:
    """Write the model of `checkpoint` to `path`; every rank writes some of the files."""
    names = [key.removeprefix(MODEL) for key in checkpoint.tensors if key.startswith(MODEL)]
    if not names:
        text = f"{checkpoint.where} has no model to export; pass a checkpoint that was saved with model="
        raise UsageError(text)
    sources = {name: checkpoint.tensors[MODEL + name] for name in names}
    files = _files(names, sources)

    @waiting_for_storage()
    def write() -> None:
        for file, members in files[ranks.rank :: ranks.size]:
            _write(checkpoint, staging / file, members, sources)
        if ranks.rank == 0:
            for name, text in _texts(checkpoint, files, sources).items():
                with complete_file(Writer(staging / name)) as writer:
                    writer.write(text.encode())

    with staged_directory(path, checkpoint.manifest.id, ranks) as staging:
        ranks.run_checked(write)


def _files(names: Sequence[str], sources: dict[str, Source]) -> Files:
    groups: list[list[str]] = [[]]
    held = 0
    for name in names:
        nbytes = sources[name].nbytes
        if groups[-1] and held + nbytes > FILE_NBYTES:
            groups.append([])
            held = 0
        groups[-1].append(name)
        held += nbytes
    if len(groups) == 1:
        return [(SINGLE, groups[0])]
    return [(f"model-{n:05d}-of-{len(groups):05d}.safetensors", group) for n, group in enumerate(groups, 1)]


def _write(checkpoint: Checkpoint, path: Path, names: Sequence[str], sources: dict[str, Source]) -> None:
    shapes = {name: (sources[name].shape, sources[name].dtype) for name in names}
    pieces = [Piece(name, whole_box(sources[name].shape)) for name in names]
    body = lay_out_file(pieces, shapes, {"format": "pt"})
    with complete_file(Writer(path)) as writer:
        writer.write(body.header)
        for piece, _ in body.pieces:
            for values in read_rows(checkpoint, MODEL + piece.key, piece.box):
                writer.write(bytes_of_tensor(values))


def _texts(checkpoint: Checkpoint, files: Files, sources: dict[str, Source]) -> dict[str, str]:
    """Names and contents of the JSON files."""
    texts = {}
    if len(files) > 1:
        index: dict[str, Any] = {
            "metadata": {"total_size": sum(source.nbytes for source in sources.values())},
            "weight_map": {name: file for file, members in files for name in members},
        }
        texts[INDEX] = json.dumps(index, indent=2) + "\n"
    info = checkpoint.manifest.model
    if info.config is not None:
        config = {**info.config, "architectures": info.config.get("architectures") or [info.cls]}
        texts["config.json"] = json.dumps(config, indent=2) + "\n"
    return texts
