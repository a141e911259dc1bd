"""`--model`: names, files and functions, and what is wrong with them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from meshwright.commands.options import parse_size
from meshwright.sources import resolve
from meshwright_dtensor.errors import UsageError

FILE = """
import torch
from neighbour import WIDTH

def build():
    return torch.nn.Linear(WIDTH, 3), torch.zeros(2, WIDTH)

def alone():
    return torch.nn.Linear(2, 2)

def broken():
    raise ValueError("of course")
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(FILE)
    (tmp_path / "neighbour.py").write_text("WIDTH = 5\n")
    return path


def get(name: str) -> object:
    return resolve(name, batch_size=2, sequence_length=8, seed=1)


def test_a_function_of_a_file(file: Path) -> None:
    source = resolve(f"{file}:build", batch_size=2, sequence_length=8, seed=1)
    one, two = source.make(), source.make()
    assert one is not two
    assert torch.equal(next(one.parameters()), next(two.parameters()))
    assert source.batch.shape == (2, 5)


@pytest.mark.parametrize(
    ("attribute", "said"),
    [("alone", "must return"), ("broken", "ValueError: of course"), ("missing", "no function 'missing'")],
)
def test_functions_that_will_not_do(file: Path, attribute: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        get(f"{file}:{attribute}")


@pytest.mark.parametrize("name", ["gpt7", "nowhere.py:build", "no.such.module:build", "no-such.json"])
def test_names_that_mean_nothing(name: str) -> None:
    with pytest.raises(UsageError, match=name.partition(":")[0]):
        get(name)


@pytest.mark.parametrize(
    ("text", "size"), [("1", 1), ("2kB", 2000), ("1.5 GiB", 3 << 29), ("80GB", 80 * 10**9), ("3MiB", 3 << 20)]
)
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "GB", "-1GB", "1 parsec", "nan", "inf", "0", "1e40"])
def test_no_sizes(text: str) -> None:
    with pytest.raises(UsageError, match="--memory-limit"):
        parse_size(text)
