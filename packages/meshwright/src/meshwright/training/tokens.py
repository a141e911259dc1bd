"""From files to tokens: documents are tokenized once, files of tokens are taken as they are."""

from __future__ import annotations

import hashlib
import json
import os
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from meshwright.documents import documents
from meshwright.recipes.schema import Recipe
from meshwright_dtensor.errors import UsageError

_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")
"""Files of a tokenizer, in addition to those that its class names."""


@dataclass(frozen=True)
class Tokenizer:
    """encode: from a text to token ids. size: of the vocabulary. end: the token after each document. digest: of its files."""

    encode: Callable[[str], Sequence[int]]
    size: int
    end: int
    digest: int = 0


def tokenizer_of(recipe: Recipe) -> Tokenizer:
    """The tokenizer of a recipe. "bytes": a token is a byte, and byte 0 ends a document. Raises UsageError."""
    if recipe.vocabulary == "bytes":
        return Tokenizer(str.encode, 256, 0)
    try:
        from transformers import AutoTokenizer

        # see `configs.config_of`
        loaded = AutoTokenizer.from_pretrained(recipe.vocabulary, trust_remote_code=False)
    except Exception as error:
        raise UsageError(
            f"tokenizer: {recipe.vocabulary} cannot be read ({error}); give the folder of one"
        ) from error
    if loaded.eos_token_id is None:
        raise UsageError(
            f"tokenizer: {recipe.vocabulary} has no eos_token to end a document with; give it one"
        )
    names = sorted({*loaded.vocab_files_names.values(), *_FILES})
    files = [file for file in (Path(recipe.vocabulary, name) for name in names) if file.is_file()]
    digest = checksum(*((file.name, bytes_of(file)) for file in files))
    return Tokenizer(
        lambda text: loaded(text, add_special_tokens=False)["input_ids"],
        len(loaded),
        loaded.eos_token_id,
        digest,
    )


def checksum(*named: tuple[str, np.ndarray]) -> int:
    """The CRC of names and arrays: of all values, or of 256 even pieces of an array with more than 2 ** 28 values."""
    crc, piece = 0, 1 << 20
    for name, array in named:
        crc = zlib.crc32(f"{name} {array.size} ".encode(), crc)
        few = array.size <= 256 * piece
        starts = (
            range(0, array.size, piece) if few else np.linspace(0, array.size - piece, 256, dtype=np.int64)
        )
        for start in starts:
            # the same for the same values of another type
            crc = zlib.crc32(array[start : start + piece].astype("<u4").tobytes(), crc)
    return crc


def bytes_of(file: Path) -> np.ndarray:
    """The bytes of a file, which stay on the disk."""
    return np.memmap(file, np.uint8, "r") if file.stat().st_size else np.empty(0, np.uint8)


def check_tokens(ids: np.ndarray, tokenizer: Tokenizer, where: str) -> None:
    """Check that the tokens are of the vocabulary. Raises UsageError."""
    if len(ids) and not 0 <= ids.min() <= ids.max() < tokenizer.size:
        wrong, rule = (
            ids.min() if ids.min() < 0 else ids.max(),
            f"not one of the {tokenizer.size} of the tokenizer",
        )
        raise UsageError(f"data: {where} has token {wrong}, {rule}; name the tokenizer that made the tokens")


def as_tokens(ids: Any, where: str, column: str) -> np.ndarray:
    """The tokens of a document as integers of shape (n,), which bytes and lists of integers are. Raises UsageError."""
    try:
        array = np.frombuffer(ids, np.uint8) if isinstance(ids, bytes) else np.asarray(ids)
    except ValueError:
        # lists of different lengths
        array = np.empty((0, 0))
    if array.ndim == 1 and (array.dtype.kind in "iu" or not len(array)):
        return array if len(array) else array.astype(np.int64)
    wrong = next((item for item in ids if type(item) is not int), ids)
    rule = "its tokens are one list of integers; set data.column to such a one, or to one of text"
    raise UsageError(f"data: {column!r} of {where} has {wrong!r:.60}, a {type(wrong).__name__}: {rule}")


def tokens_of(file: Path, dtype: str | None) -> np.ndarray:
    """The tokens of a file, which stay on the disk: numpy's .npy, or .bin without a header. Raises UsageError."""
    try:
        array = (
            np.load(file, mmap_mode="r") if file.suffix == ".npy" else np.memmap(file, dtype or "uint16", "r")
        )
    except (ValueError, OSError) as error:
        raise UsageError(
            f"data: {file} cannot be read ({error}); set data.dtype to that of its tokens"
        ) from error
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise UsageError(
            f"data: {file} is {array.dtype} of shape {array.shape}; tokens are integers of shape (n,)"
        )
    return array


def prepared(
    files: Sequence[Path], column: str, recipe: Recipe, tokenizer: Tokenizer
) -> tuple[np.ndarray, np.ndarray]:
    """The tokens of the documents of files, each with its end token, and where each ends; made once for a run's folder."""
    # a copied file may have the time of the one that it replaces
    states = [
        (str(file.resolve()), file.stat().st_mtime_ns, checksum(("", bytes_of(file)))) for file in files
    ]
    made_with = [recipe.vocabulary == "bytes", tokenizer.digest, column, states]
    digest = hashlib.sha256(json.dumps(made_with).encode()).hexdigest()
    folder, dtype = (
        Path(recipe.out) / "data" / digest[:16],
        np.uint16 if tokenizer.size <= 1 << 16 else np.uint32,
    )
    # the last file to appear
    last = folder / "ends.npy"
    if not last.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        lengths: list[int] = []
        with open(folder / "tokens.bin", "wb") as target:
            for document in documents(files, column):
                ids = tokenizer.encode(document) if isinstance(document, str) else document
                array = as_tokens(ids, f"document {len(lengths)}", column)
                check_tokens(array, tokenizer, f"document {len(lengths)}")
                target.write(np.append(array, tokenizer.end).astype(dtype).tobytes())
                lengths.append(len(array) + 1)
        np.save(folder / "part.npy", np.cumsum(lengths, dtype=np.int64))
        os.replace(folder / "part.npy", last)
    ends = np.load(last)
    return np.memmap(folder / "tokens.bin", dtype, "r") if len(ends) else np.empty(0, dtype), ends
