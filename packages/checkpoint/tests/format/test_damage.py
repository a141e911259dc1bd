"""Damaged, truncated, swapped or invented files raise an error of this package that names the tensor."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import random
import re
import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from models import adam, build, train
from torch import nn

from meshwright_checkpoint import CheckpointError, CorruptError, load, save
from meshwright_checkpoint.format.checksum import BLOCK, COLUMNS, block_sums
from meshwright_checkpoint.pretrained import INDEX, Pretrained
from meshwright_dtensor.errors import MeshwrightError

FLIPS = 120


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("damage") / "x"
    put(path)
    return path


def put(path: Path, seed: int = 0) -> None:
    model = build("plain", seed)
    optimizer = adam(model)
    train(model, optimizer)
    save(path, model=model, optimizer=optimizer, extra={"e": torch.ones(3)}, asynchronous=False)


def take(path: Path) -> None:
    model = build("plain")
    load(path, model=model, optimizer=adam(model))


def copied(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "copy", dirs_exist_ok=True))


@pytest.mark.slow
def test_load_detects_every_flipped_bit(saved: Path, tmp_path: Path) -> None:
    take(saved)
    path = copied(saved, tmp_path)
    rng = random.Random(0)
    for number in range(FLIPS):
        name = "manifest.json" if number % 6 == 0 else "data-00000.safetensors"
        data = bytearray((saved / name).read_bytes())
        at = rng.randrange(len(data) * 8)
        data[at // 8] ^= 1 << at % 8
        (path / name).write_bytes(data)
        with pytest.raises(CorruptError) as caught:
            take(path)
        assert name == "manifest.json" or re.search("(model|optimizer|rng|extra)/", str(caught.value))
        shutil.copyfile(saved / name, path / name)
    take(path)


def test_load_detects_truncated_and_swapped_files(saved: Path, tmp_path: Path) -> None:
    path, other = copied(saved, tmp_path), tmp_path / "other"
    put(other, seed=3)
    data = "data-00000.safetensors"
    whole = (saved / data).read_bytes()
    for length in (0, 7, 4096, len(whole) // 2, len(whole) - 1):
        (path / data).write_bytes(whole[:length])
        with pytest.raises(CorruptError, match=r"bytes, and .* were written; it holds "):
            take(path)
    shutil.copyfile(other / data, path / data)  # of the same size and structure, of another save
    with pytest.raises(CorruptError, match="not the file that was saved here"):
        take(path)
    shutil.copyfile(saved / data, path / data)
    shutil.copyfile(other / "manifest.json", path / "manifest.json")  # a stale manifest
    with pytest.raises(CorruptError):
        take(path)
    shutil.copyfile(saved / "manifest.json", path / "manifest.json")
    (path / data).unlink()
    with pytest.raises(CorruptError, match="cannot be read"):
        take(path)
    os.symlink(saved / data, path / data)
    with pytest.raises(CorruptError, match="cannot be read"):
        take(path)


class Bomb:
    """Runs code when it is unpickled."""

    def __reduce__(self) -> Any:
        return (os.mkdir, (BOMB,))


BOMB = os.path.join(tempfile.gettempdir(), f"meshwright-test-bomb-{os.getpid()}")


def test_load_never_opens_pickle(saved: Path, tmp_path: Path) -> None:
    path = copied(saved, tmp_path)
    for name in ("data.pt", "extra.pkl", ".metadata", "pytorch_model.bin", "optimizer.pt"):
        (path / name).write_bytes(pickle.dumps(Bomb()))
    take(path)
    for name in ("manifest.json", "data-00000.safetensors"):
        (path / name).write_bytes(pickle.dumps(Bomb()))
        with pytest.raises(CheckpointError):
            take(path)
    assert not os.path.exists(BOMB)


def sealed(data: Any) -> bytes:
    """Any manifest, with a correct checksum."""
    body = json.dumps({k: v for k, v in data.items() if k != "sha256"})[1:].encode()
    return b'{"sha256": "%s",\n' % hashlib.sha256(body).hexdigest().encode() + body


values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(
        ["../../etc/passwd", "/etc/passwd", "data-00000.safetensors", "manifest.json", "F32", "I64"]
    ),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)


@pytest.mark.slow
@settings(max_examples=150, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_random_manifest_raises_meshwright_errors_only(
    saved: Path, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    manifest = json.loads((saved / "manifest.json").read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        node, key = manifest, data.draw(st.sampled_from(sorted(manifest)))
        while isinstance(node[key], (dict, list)) and node[key] and data.draw(st.integers(0, 4)):
            node = node[key]
            key = data.draw(
                st.sampled_from(sorted(node) if isinstance(node, dict) else list(range(len(node))))
            )
        how = data.draw(st.integers(0, 3))
        if how == 0 and isinstance(node, dict) and len(node) > 1:
            del node[key]
        elif how == 1 and isinstance(node[key], int):
            node[key] = node[key] + data.draw(st.integers(-5000, 5000))
        else:
            node[key] = data.draw(values)
    path = tmp_path_factory.getbasetemp() / "fuzzed"
    shutil.rmtree(path, ignore_errors=True)
    shutil.copytree(saved, path)
    (path / "manifest.json").write_bytes(sealed(manifest))
    state = torch.get_rng_state()
    try:
        take(path)
    except MeshwrightError:
        pass
    finally:
        torch.set_rng_state(state)


def test_hostile_manifest_is_rejected(saved: Path, tmp_path: Path) -> None:
    path = copied(saved, tmp_path)
    for raw in (b"", b"{}", b"[" * 100_000, b'{"sha256": "' + b"0" * 64 + b'",\n', b"\xff" * 100):
        (path / "manifest.json").write_bytes(raw)
        with pytest.raises(CorruptError):
            take(path)
    good = json.loads((saved / "manifest.json").read_bytes())
    for change in (
        {"version": 1},
        {"version": 3},
        {"files": [{**good["files"][0], "name": "../copy/data-00000.safetensors"}]},
        {"extra": json.loads("[" * 900 + "]" * 900)},
        {"tensors": {"model/a": {"shape": [2**50], "dtype": "F32", "parts": []}}},
    ):
        (path / "manifest.json").write_bytes(sealed({**good, **change}))
        with pytest.raises(CheckpointError):
            take(path)


def test_checksum_detects_changed_words() -> None:
    generator = random.Random(1)
    data = bytearray(generator.randbytes(BLOCK + 1003))
    first = block_sums(memoryview(data))
    assert len(first) == 64
    for _ in range(200):  # one bit, and the top bits of two words, which a plain sum would miss
        a, b = generator.randrange(BLOCK // 8), generator.randrange(BLOCK // 8)
        same_row, same_column = a // COLUMNS * COLUMNS + b % COLUMNS, a % COLUMNS + b // COLUMNS * COLUMNS
        for places in (
            [(8 * a + generator.randrange(8), generator.randrange(8))],
            [(8 * a + 7, 7), (8 * b + 7, 7)],
            [(8 * a + 7, 7), (8 * min(same_row, BLOCK // 8 - 1) + 7, 7)],
            [(8 * a + 7, 7), (8 * min(same_column, BLOCK // 8 - 1) + 7, 7)],
        ):
            changed = bytearray(data)
            for at, bit in places:
                changed[at] ^= 1 << bit
            assert (block_sums(memoryview(changed)) == first) == (changed == data)
    swapped = data[8:16] + data[:8] + data[16:]
    assert block_sums(memoryview(swapped)) != first


@pytest.mark.parametrize("sector", [512, 4096])
def test_checksum_detects_swapped_sectors(sector: int) -> None:
    """In a block of sectors with equal sums, row sums detect few swaps and column sums all."""
    block = np.zeros((BLOCK // sector, sector // 8), dtype=np.uint64)
    generator = random.Random(2)
    ones = [generator.randrange(sector // 8) for _ in block]
    block[np.arange(len(block)), ones] = 1
    first = block_sums(block.tobytes())
    seen = 0
    for _ in range(300):
        a, b = generator.sample(range(len(block)), 2)
        changed = block.copy()
        changed[[a, b]] = changed[[b, a]]
        assert (block_sums(changed.tobytes()) == first) == (ones[a] == ones[b])
        seen += ones[a] != ones[b]
    assert seen > 200


def test_checksum_misses_cancelling_changes_of_four_words() -> None:
    """Changes of four words at the corners of two rows and columns cancel, as documented."""
    table = np.arange(BLOCK // 8, dtype=np.uint64)
    changed = table.copy()
    for row, column, by in ((3, 5, 9), (3, 70, -9), (8, 5, -9), (8, 70, 9)):
        changed.view(np.int64)[row * COLUMNS + column] += by
    assert block_sums(changed.tobytes()) == block_sums(table.tobytes())
    changed[3 * COLUMNS + 5] += np.uint64(1)
    assert block_sums(changed.tobytes()) != block_sums(table.tobytes())


@pytest.mark.parametrize("nbytes", [1, 771, 8 * COLUMNS, 8 * COLUMNS + 5, 30_001])
def test_checksum_equals_documented_definition(nbytes: int) -> None:
    """docs/checkpoints.md, in plain Python."""
    data = random.Random(nbytes).randbytes(nbytes)
    words = [int.from_bytes(data[at : at + 8].ljust(8, b"\0"), "little") for at in range(0, len(data), 8)]
    columns = [sum(words[at::2053]) % 2**64 for at in range(2053)]
    rows = [sum(words[at : at + 2053]) % 2**64 for at in range(0, len(words), 2053)]
    sums = b"".join(total.to_bytes(8, "little") for total in columns + rows)
    assert block_sums(memoryview(data)) == hashlib.blake2b(sums, digest_size=16).hexdigest()


@pytest.mark.parametrize("name", ["x" * 300, "a\0b", "\ud800", "gone.safetensors"])
def test_files_that_an_index_names_and_that_cannot_be(name: str, tmp_path: Path) -> None:
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"weight": name}}))
    with pytest.raises(CorruptError, match=r"cannot be read|is no name of a file"):
        Pretrained(tmp_path, nn.Linear(2, 2))
