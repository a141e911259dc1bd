"""The device of these tests, and ranks that share it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from meshwright_dtensor.testing.rank_pool import RankPool

BACKENDS = {"gloo": "gloo", "nccl": "cpu:gloo,cuda:nccl"}


@pytest.fixture(scope="session")
def device() -> str:
    """Where models are: the GPU, if there is one."""
    return "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(scope="session", params=BACKENDS)
def device_ranks(request: pytest.FixtureRequest, device: str) -> Iterator[RankPool]:
    """Ranks whose collectives are gloo's, then NCCL's; they share the GPU where there are more ranks than GPUs."""
    if device == "cpu" and request.param != "gloo":
        pytest.skip("NCCL needs a GPU")
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
    if torch.cuda.is_available() or "gpu" in config.option.markexpr:
        return
    left_out = [item for item in items if item.get_closest_marker("gpu")]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]
