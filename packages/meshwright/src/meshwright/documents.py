"""The documents in files of text, JSONL, Parquet and Arrow, one after the other."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from meshwright_dtensor.errors import UsageError

TABLES = (".parquet", ".arrow", ".feather")
"""Suffixes of files that are read with pyarrow."""


def documents(files: Sequence[Path], column: str) -> Iterator[str | list[int]]:
    """The documents of files: a text file is one, and so is each line of JSONL and each row of a table. Raises UsageError."""
    for file in files:
        if file.suffix == ".jsonl" or file.suffix in TABLES:
            for number, value in enumerate(
                _lines(file, column) if file.suffix == ".jsonl" else _rows(file, column)
            ):
                if not isinstance(value, (str, list)):
                    rule = "a document is a text, or a list of tokens; set data.column"
                    raise UsageError(
                        f"data: {column!r} of document {number} of {file} is {value!r:.60}; {rule}"
                    )
                yield value
            continue
        try:
            text, wrong = file.read_text(encoding="utf-8"), "a zero byte"
        except (OSError, UnicodeDecodeError) as error:
            text, wrong = "\0", str(error)
        if "\0" in text:
            fix = "name the text files with a pattern, as folder/*.txt"
            raise UsageError(f"data: {file} is no text in UTF-8 ({wrong}); {fix}")
        yield text


def _lines(file: Path, column: str) -> Iterator[Any]:
    """The values of a field of the objects in a file of JSONL."""
    with open(file, "rb") as lines:
        for number, line in enumerate(lines, 1):
            try:
                values = [json.loads(line).get(column)] if line.strip() else []
            except (ValueError, AttributeError) as error:
                raise UsageError(
                    f"data: line {number} of {file} is no JSON object ({error}); correct it"
                ) from error
            yield from values


def _rows(file: Path, column: str) -> Iterator[Any]:
    """The values of a column of a Parquet or Arrow file, of which Arrow has two formats."""
    import pyarrow as pa
    import pyarrow.parquet

    try:
        if file.suffix == ".parquet":
            batches = pa.parquet.ParquetFile(file).iter_batches(columns=[column])
        else:
            raw = pa.memory_map(str(file))
            streamed = bytes(raw.read(6)) != b"ARROW1"
            raw.seek(0)
            reader = pa.ipc.open_stream(raw) if streamed else pa.ipc.open_file(raw)
            batches = reader if streamed else map(reader.get_batch, range(reader.num_record_batches))
        for batch in batches:
            yield from batch.select([column]).column(0).to_pylist()
    except (pa.ArrowException, KeyError) as error:
        raise UsageError(
            f"data: {file} has no column {column!r} to read ({error}); set data.column"
        ) from error
