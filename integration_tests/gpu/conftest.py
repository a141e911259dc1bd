"""The device of these tests, ranks that share it, and how many checks wait for a GPU.

`--device cpu` leaves the GPU of this machine alone; `--device cuda` fails where there is none.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from meshwright_dtensor.testing.rank_pool import RankPool

BACKENDS = {"gloo": "gloo", "nccl": "cpu:gloo,cuda:nccl"}


NEEDS_GPU = "needs a GPU"
"""In the reason of each check that is skipped without one."""


def _device(config: pytest.Config) -> str:
    here = "cuda" if torch.cuda.is_available() else "cpu"
    return str(config.getoption("--device") or here)


@pytest.fixture(autouse=True)
def _nothing_is_on_the_gpu_by_default() -> Iterator[None]:
    """These tests move models to the GPU themselves."""
    before = torch.get_default_device()
    torch.set_default_device(None)
    yield
    torch.set_default_device(before if before.type != "cpu" else None)


@pytest.fixture(scope="session")
def device(pytestconfig: pytest.Config) -> str:
    """Where models are: the GPU, if there is one."""
    return _device(pytestconfig)


@pytest.fixture
def gpu(device: str) -> str:
    """The GPU, for checks that nothing else can stand for."""
    if device == "cpu":
        pytest.skip(NEEDS_GPU)
    return device


@pytest.fixture(scope="session", params=BACKENDS)
def device_ranks(request: pytest.FixtureRequest, device: str) -> Iterator[RankPool]:
    """Ranks whose collectives are gloo's, then NCCL's; they share the GPU where there are more ranks than GPUs."""
    if device == "cpu" and request.param != "gloo":
        pytest.skip(f"NCCL {NEEDS_GPU}")
    with RankPool(backend=BACKENDS[request.param]) as pool:
        yield pool


@pytest.fixture
def sending_ranks(device_ranks: RankPool, device: str) -> RankPool:
    """Those that can send tensors of the device to each other."""
    if device != "cpu" and device_ranks.backend == "gloo":
        pytest.skip("gloo sends tensors of the CPU only")
    return device_ranks


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests marked `gpu` are for `tox -e gpu` and machines with a GPU; `-m gpu` runs them on the CPU too."""
    if "gpu" in config.option.markexpr or _device(config) != "cpu":
        return
    left_out = [item for item in items if item.get_closest_marker("gpu")]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """One line: how many checks wait for a GPU."""
    skipped = [str(report.longrepr) for report in terminalreporter.stats.get("skipped", [])]
    waiting = sum(NEEDS_GPU in reason for reason in skipped)
    if waiting:
        terminalreporter.write_line(
            f"no GPU here: {waiting} checks wait for one, the others ran on the CPU; on a machine with a GPU: tox run -e gpu"
        )
