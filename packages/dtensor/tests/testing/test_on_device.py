"""Tests on a type of device: where tensors are, here and on ranks, and what is skipped. Also run with `--device` of a plugin."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshwright_dtensor.errors import UsageError
from meshwright_dtensor.testing.device_option import _begins
from meshwright_dtensor.testing.on_device import (
    backend_for,
    device_type,
    random_state,
    seeded,
    set_random_state,
    use,
)
from meshwright_dtensor.testing.rank_pool import RankPool, fake_group


def there(rank: int, size: int, given: Tensor) -> tuple[str, Tensor, nn.Parameter]:
    """Where a rank makes tensors, their sum over ranks, and a parameter."""
    made = torch.ones(3)
    assert given.device == made.device == nn.Linear(2, 2).weight.device
    dist.all_reduce(made)
    torch.set_default_device("meta")
    return device_type(), made + given, nn.Parameter(torch.ones(2, device=given.device), requires_grad=False)


def test_ranks_and_this_process_make_tensors_on_the_device(rank_pool: RankPool) -> None:
    # a function that changes the default device leaves the next one as it was
    for _ in range(2):
        for kind, total, parameter in rank_pool.run(2, there, torch.arange(3.0)):
            assert kind == "meta" and torch.equal(total, torch.tensor([2.0, 3.0, 4.0]))
            assert type(parameter) is nn.Parameter and not parameter.requires_grad
            assert parameter.device.type == total.device.type == device_type()


def test_random_numbers_of_the_device() -> None:
    first = torch.randn(4, generator=seeded(3))
    assert first.device.type == device_type()
    assert torch.equal(first, torch.randn(4, generator=seeded(3)))
    before = random_state()
    drawn = torch.rand(3)
    assert not torch.equal(before, random_state())
    set_random_state(before)
    assert torch.equal(drawn, torch.rand(3))


def test_a_fake_group_takes_tensors_of_the_device() -> None:
    with fake_group(4):
        dist.all_reduce(torch.ones(2))


def test_a_device_that_is_not_there_is_refused() -> None:
    before = torch.get_default_device()
    with pytest.raises(UsageError, match=r"device 'hpu': there is none here; use one of those here, cpu"):
        use("hpu")
    assert torch.get_default_device() == before


def test_ranks_share_a_gpu_over_gloo() -> None:
    assert backend_for("cpu") == backend_for("cuda") == "gloo"


@pytest.mark.parametrize(
    ("line", "skipped"),
    [
        ("t/x.py::test_a", True),
        ("t/x.py::test_a[one-", True),
        ("t/x.py::test_a[one-two]", True),
        ("t/x.py", True),
        ("t", True),
        ("t/x.py::test", False),
        ("t/x", False),
        ("t/x.py::test_a[two", False),
    ],
)
def test_a_line_of_what_a_device_lacks_is_of_whole_names(line: str, skipped: bool) -> None:
    assert _begins("t/x.py::test_a[one-two]", line) is skipped


TESTS = """
import pytest

@pytest.mark.host("files")
def test_of_the_host():
    pass

def test_of_any_device():
    pass
"""


@pytest.mark.slow
@pytest.mark.host("where there is no GPU")
@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here")
def test_without_the_device_tests_wait_or_fail(tmp_path: Path) -> None:
    (tmp_path / "test_some.py").write_text(TESTS)
    options = ["-p", "meshwright_dtensor.testing.device_option", "-p", "no:cacheprovider", "-q", "-rs"]
    command = [sys.executable, "-m", "pytest", *options, "-c", "/dev/null", str(tmp_path), "--device", "cuda"]
    done = subprocess.run([*command, "--where-available"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "no GPU here: 1 checks wait for one" in done.stdout and "of the CPU alone: files" in done.stdout
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 4
    assert "--device: device 'cuda': there is none here; use one of those here, cpu" in done.stderr
