"""`--model`: names, files and functions, and what is wrong with them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from meshwright.sources import resolve
from meshwright_dtensor.deferred.materialize import has_values
from meshwright_dtensor.errors import UsageError

FILE = """
import torch
from helper_module import WIDTH

built = []

def build():
    built.append(1)
    return torch.nn.Linear(WIDTH, 3), torch.zeros(2, WIDTH)

def sized(batch_size, *, sequence_length=7):
    return torch.nn.Linear(WIDTH, 3), torch.zeros(batch_size, sequence_length, WIDTH)

def anything(**sizes):
    return torch.nn.Linear(WIDTH, 3), torch.zeros(sizes["batch_size"], WIDTH)

def wants(path):
    return torch.nn.Linear(WIDTH, 3), torch.zeros(2, WIDTH)

def large():
    return torch.nn.Linear(1 << 20, 1 << 19), torch.ones(2, 1 << 20)

def alone():
    return torch.nn.Linear(2, 2)

def broken():
    raise ValueError("of course")
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(FILE)
    (tmp_path / "helper_module.py").write_text("WIDTH = 5\n")
    return path


def get(name: str) -> object:
    return resolve(name, seed=1).make()


def test_a_function_of_a_file(file: Path) -> None:
    source = resolve(f"{file}:build", seed=1)
    first, second = source.make(), source.make()
    assert first is not second
    assert torch.equal(next(first.parameters()), next(second.parameters()))
    assert source.batch.shape == (2, 5)


@pytest.mark.parametrize(
    ("attribute", "message"),
    [("alone", "must return"), ("broken", "ValueError: of course"), ("missing", "no function 'missing'")],
)
def test_functions_that_will_not_do(file: Path, attribute: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        get(f"{file}:{attribute}")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt7", "nowhere.py:build", "no.such.module:build", "no-such.json"])
def test_names_that_mean_nothing(name: str) -> None:
    with pytest.raises(UsageError, match=name.partition(":")[0]):
        get(name)


def test_a_model_is_built_once_for_its_batch(file: Path) -> None:
    source = resolve(f"{file}:build")
    built = sys.modules["mine"].built
    assert built == []
    source.make()
    assert source.batch.shape == (2, 5) and built == [1]
    other = resolve(f"{file}:build")
    assert other.batch.shape == (2, 5) and other.batch.shape == (2, 5) and sys.modules["mine"].built == [1]


def test_what_is_planned_for_takes_no_memory(file: Path) -> None:
    model, batch = resolve(f"{file}:large").to_plan()  # 2 TiB
    assert model.weight.shape == (1 << 19, 1 << 20) and not has_values(model.weight)
    assert batch.shape == (2, 1 << 20)


def test_sizes_reach_the_function(file: Path) -> None:
    def shape(name: str, rows: int | None, tokens: int | None) -> tuple[int, ...]:
        return tuple(resolve(f"{file}:{name}", batch_size=rows, sequence_length=tokens).batch.shape)

    assert shape("sized", None, None) == (8, 7, 5)
    assert shape("sized", 3, 4) == (3, 4, 5)
    assert shape("anything", 6, 4) == (6, 5)
    defaults = {"batch_size": 3, "sequence_length": 4}
    assert resolve(f"{file}:sized", defaults=defaults).batch.shape == (3, 4, 5)
    assert resolve(f"{file}:sized", batch_size=2, defaults=defaults).batch.shape == (2, 4, 5)
    assert resolve(f"{file}:build", defaults=defaults).batch.shape == (2, 5)


@pytest.mark.parametrize("option", ["batch_size", "sequence_length"])
def test_a_size_that_would_be_ignored_is_refused(file: Path, option: str) -> None:
    message = (
        rf"--{option.replace('_', '-')} 16: .*:build brings a batch of its own.* def build\({option}=16\)"
    )
    with pytest.raises(UsageError, match=message):
        resolve(f"{file}:build", **{option: 16})  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="wants an argument 'path'"):
        resolve(f"{file}:wants")


def test_a_file_without_its_function(file: Path) -> None:
    with pytest.raises(UsageError, match=r"mine\.py is a file; name a function of it .*mine\.py:make"):
        resolve(str(file))


def test_a_demo_of_one_size_takes_no_other() -> None:
    with pytest.raises(UsageError, match="--sequence-length 64 has no effect on vit"):
        resolve("vit", sequence_length=64)


@pytest.mark.parametrize(("name", "meant"), [("gtp2", "gpt2"), ("Llama", "llama")])
def test_a_model_that_was_meant(name: str, meant: str) -> None:
    with pytest.raises(UsageError, match=f"did you mean '{meant}'"):
        resolve(name)


def test_a_function_that_was_meant(file: Path) -> None:
    with pytest.raises(UsageError, match=r"no function 'biuld'.*did you mean 'build'"):
        resolve(f"{file}:biuld")
