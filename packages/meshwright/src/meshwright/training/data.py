"""The rows that a model learns from: files become tokens once, and rows and their order depend on the recipe alone."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from meshwright.recipes.rules import TABLES, TOKEN_FILES, expand
from meshwright.recipes.schema import Recipe, Source
from meshwright.sources import call_with
from meshwright_dtensor.errors import UsageError

IGNORED = -100
"""The label of a position that no loss counts."""

Sample = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Tokenizer:
    """encode: from text, or the bytes of a text file, to token ids. end: the token after each document."""

    encode: Callable[[str | bytes], Sequence[int]]
    size: int
    end: int


def tokenizer_of(recipe: Recipe) -> Tokenizer:
    """The tokenizer of a recipe. "bytes": a token is a byte, and byte 0 ends a document. Raises UsageError."""
    if recipe.tokenizer == "bytes":
        return Tokenizer(lambda text: text if isinstance(text, bytes) else text.encode(), 256, 0)
    try:
        from transformers import AutoTokenizer

        loaded = AutoTokenizer.from_pretrained(recipe.tokenizer)
    except Exception as error:
        raise UsageError(
            f"tokenizer: {recipe.tokenizer} cannot be read ({error}); give the folder of one"
        ) from error
    if loaded.eos_token_id is None:
        raise UsageError(
            f"tokenizer: {recipe.tokenizer} has no eos_token, which ends a document; give it one"
        )

    def encode(text: str | bytes) -> Sequence[int]:
        return loaded(text if isinstance(text, str) else text.decode(), add_special_tokens=False)["input_ids"]

    return Tokenizer(encode, len(loaded), loaded.eos_token_id)


class Rows(Dataset[Sample]):
    """Rows of tokens: input_ids and labels, int64 (length,), and where rows are padded an attention_mask.

    parts: arrays of tokens that no row crosses. ends: where the documents of the only part end, to keep them apart.
    """

    def __init__(
        self, parts: Sequence[np.ndarray], length: int, tokenizer: Tokenizer, ends: np.ndarray | None
    ) -> None:
        self.parts, self.length, self.tokenizer = parts, length, tokenizer
        starts: list[np.ndarray] = []
        for part in parts:
            # a whole row from every start, or, of documents, what is left of each
            begin = np.arange(len(part) // length) * length
            if ends is not None:
                first = np.concatenate([[0], ends[:-1]])
                begin = np.concatenate(
                    [np.arange(a, b, length) for a, b in zip(first, ends, strict=True)] or [begin]
                )
            starts.append(begin)
        self.starts, self.ends = starts, ends
        self.offsets = np.cumsum([len(begin) for begin in starts])

    def __len__(self) -> int:
        return int(self.offsets[-1]) if len(self.offsets) else 0

    def __getitem__(self, index: int) -> Sample:
        number = int(np.searchsorted(self.offsets, index, side="right"))
        begin = int(self.starts[number][index - (self.offsets[number - 1] if number else 0)])
        until = begin + self.length
        if self.ends is not None:
            until = min(until, int(self.ends[np.searchsorted(self.ends, begin, side="right")]))
        ids = torch.from_numpy(self.parts[number][begin:until].astype(np.int64))
        _check_tokens(ids.numpy(), self.tokenizer, f"row {index}")
        if self.ends is None:
            return {"input_ids": ids, "labels": ids.clone()}
        padded = torch.full((3, self.length), self.tokenizer.end)
        padded[0, : len(ids)], padded[1], padded[2] = ids, IGNORED, 0
        padded[1, : len(ids)], padded[2, : len(ids)] = ids, 1
        return {"input_ids": padded[0], "labels": padded[1], "attention_mask": padded[2]}


def _check_tokens(ids: np.ndarray, tokenizer: Tokenizer, where: str) -> None:
    if len(ids) and not 0 <= ids.min() <= ids.max() < tokenizer.size:
        rule = f"which is outside of the {tokenizer.size} tokens of the tokenizer; name the one that made the tokens"
        raise UsageError(f"data: {where} has token {ids.min() if ids.min() < 0 else ids.max()}, {rule}")


def rows_of(source: Source, recipe: Recipe, tokenizer: Tokenizer) -> Any:
    """The dataset of a source, with len() and [index]. Files of text become tokens in the run's folder, once. Raises UsageError."""
    if source.function is not None:
        rows = call_with("data", source.function, sequence_length=recipe.sequence_length)
        if not (
            hasattr(rows, "__len__")
            and hasattr(rows, "__getitem__")
            and len(rows)
            and isinstance(rows[0], dict)
        ):
            raise UsageError(
                f"data: {source.function} must return a dataset with len() and [index], of dicts of tensors"
            )
        return rows
    files = [file for pattern in source.files for file in expand(pattern)]
    parts = [_tokens(file, source.dtype) for file in files if file.suffix in TOKEN_FILES]
    ends = None
    if texts := [file for file in files if file.suffix not in TOKEN_FILES]:
        part, ends = _prepared(texts, source.column, recipe, tokenizer)
        parts.append(part)
    rows = Rows(parts, recipe.sequence_length, tokenizer, None if recipe.packing else ends)
    if not len(rows):
        count = sum(map(len, parts))
        raise UsageError(
            f"data: {', '.join(source.files)} has {count} tokens, and a row sequence_length = {recipe.sequence_length}; give "
            "more data, or shorter rows"
        )
    return rows


def _tokens(file: Path, dtype: str | None) -> np.ndarray:
    """The tokens of a file, not yet read: numpy's .npy, or .bin without a header."""
    array = np.load(file, mmap_mode="r") if file.suffix == ".npy" else np.memmap(file, dtype or "uint16", "r")
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise UsageError(
            f"data: {file} is {array.dtype} of shape {array.shape}; tokens are integers of shape (n,)"
        )
    return array


def _prepared(
    files: Sequence[Path], column: str, recipe: Recipe, tokenizer: Tokenizer
) -> tuple[np.ndarray, np.ndarray]:
    """The tokens of documents, each with its end token, and where each ends."""
    told = [
        recipe.tokenizer,
        column,
        *((str(file.resolve()), (s := file.stat()).st_size, s.st_mtime_ns) for file in files),
    ]
    folder = Path(recipe.out) / "data" / hashlib.sha256(json.dumps(told).encode()).hexdigest()[:16]
    dtype = np.uint16 if tokenizer.size <= 1 << 16 else np.uint32
    if not (folder / "ends.npy").is_file():
        folder.mkdir(parents=True, exist_ok=True)
        ends, count = [], 0
        with open(folder / "tokens.bin.part", "wb") as target:
            for document in documents(files, column):
                if not isinstance(document, (str, bytes, list)):
                    raise UsageError(
                        f"data: {column!r} is {document!r:.80}; a document is a text, or a list of tokens"
                    )
                ids = document if isinstance(document, list) else tokenizer.encode(document)
                raw = np.frombuffer(ids, np.uint8) if isinstance(ids, bytes) else np.asarray(ids, np.int64)
                _check_tokens(raw, tokenizer, f"a document ({count} tokens on)")
                target.write(np.append(raw, tokenizer.end).astype(dtype).tobytes())
                count += len(raw) + 1
                ends.append(count)
        os.replace(folder / "tokens.bin.part", folder / "tokens.bin")
        # the last file says that all are there
        np.save(folder / "part.npy", np.asarray(ends, np.int64))
        os.replace(folder / "part.npy", folder / "ends.npy")
    ends_ = np.load(folder / "ends.npy")
    return (np.memmap(folder / "tokens.bin", dtype, "r") if len(ends_) else np.zeros(0, dtype)), ends_


def documents(files: Sequence[Path], column: str) -> Iterator[Any]:
    """The documents of files: a text file is one, and so is each line of JSONL and each row of a table. Raises UsageError."""
    for file in files:
        if file.suffix == ".jsonl":
            with open(file, encoding="utf-8") as lines:
                for number, line in enumerate(lines, 1):
                    try:
                        yield json.loads(line)[column]
                    except (ValueError, KeyError, TypeError) as error:
                        text = f"data: {file}, line {number} is no JSON object with a field {column!r}; set data.column"
                        raise UsageError(text) from error
        elif file.suffix in TABLES:
            yield from _column(file, column)
        else:
            content = file.read_bytes()
            if b"\0" in content:
                text = f"data: {file} is no text (it has a zero byte); name the text files with a pattern, as folder/*.txt"
                raise UsageError(text)
            yield content


def _column(file: Path, column: str) -> Iterator[Any]:
    """The values of a column of a Parquet or Arrow file, of which Arrow has two formats."""
    import pyarrow as pa
    import pyarrow.dataset

    try:
        if file.suffix == ".parquet":
            batches = pa.dataset.dataset(file, format="parquet").to_batches(columns=[column])
        else:
            raw = pa.memory_map(str(file))
            streamed = bytes(raw.read(6)) != b"ARROW1"
            raw.seek(0)
            reader = pa.ipc.open_stream(raw) if streamed else pa.ipc.open_file(raw)
            batches = reader if streamed else map(reader.get_batch, range(reader.num_record_batches))
        for batch in batches:
            yield from batch.select([column]).column(0).to_pylist()
    except (pa.ArrowException, KeyError) as error:
        text = f"data: {file} has no column {column!r} that can be read ({error}); set data.column"
        raise UsageError(text) from error


class Order:
    """The row numbers of batch after batch, without end: every epoch has all rows in an order of its own.

    first: rows that were taken before; what follows depends on it, the seed and the number of rows alone.
    """

    def __init__(self, rows: int, batch: int, seed: int, first: int = 0) -> None:
        self.rows, self.batch, self.seed, self.first = rows, batch, seed, first

    def __iter__(self) -> Iterator[list[int]]:
        indices: list[int] = []
        for epoch in itertools.count(self.first // self.rows):
            generator = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
            skipped = max(0, self.first - epoch * self.rows)
            for index in torch.randperm(self.rows, generator=generator)[skipped:].tolist():
                indices.append(index)
                if len(indices) == self.batch:
                    yield indices
                    indices = []


def in_order(rows: int, batch: int, most: int | None) -> list[list[int]]:
    """The row numbers of whole batches, in order and once, at most so many. Raises UsageError where there is none."""
    if rows < batch:
        raise UsageError(f"evaluation.data has {rows} rows, and a batch {batch}; give more, or shorter rows")
    return [list(range(start, start + batch)) for start in range(0, rows - batch + 1, batch)][:most]


def loader_of(rows: Dataset[Any], batches: Iterable[list[int]], workers: int = 0) -> DataLoader[Any]:
    """Loads these batches. The generator is given so that the model's random numbers stay as they are."""
    generator = torch.Generator().manual_seed(0)
    return DataLoader(rows, batch_sampler=batches, num_workers=workers, generator=generator)  # type: ignore[arg-type]


def identity(rows: Any, recipe: Recipe) -> dict[str, int]:
    """What must be equal for a run to go on with the same rows in the same order."""
    samples = [rows[n] for n in (0, len(rows) // 2, len(rows) - 1)] if recipe.data.function is None else []
    content = zlib.crc32(
        b"".join(tensor.numpy().tobytes() for sample in samples for tensor in sample.values())
    )
    return {
        "data": content,
        "rows": len(rows),
        "sequence_length": recipe.sequence_length,
        "seed": recipe.seed,
    }
