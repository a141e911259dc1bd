"""Which device a rank is given, on machines with GPUs too."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from meshwright_dtensor.errors import UsageError
from meshwright_dtensor.mesh.mesh import backend_of, check_sends, extremes, init, message_device

pytestmark = pytest.mark.host("a GPU that is pretended next to the CPU")


@pytest.fixture
def one_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(
        torch.accelerator, "current_accelerator", lambda check_available=False: torch.device("cuda")
    )
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def test_more_ranks_than_gpus_are_refused(one_gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "1")
    with pytest.raises(UsageError, match=r"rank 1 of its host .* 1 cuda device; .*--nproc-per-node 1"):
        init()
    assert not dist.is_initialized()


def test_a_world_for_the_cpu_stays_there(one_gpu: None) -> None:
    assert init("cpu") == torch.device("cpu")
    assert backend_of(None, "cuda") is None
    assert init() == torch.device("cpu")


def test_small_messages_are_on_the_cpu() -> None:
    init("cpu")
    assert message_device(None) == torch.device("cpu")
    assert extremes([3, -2], None) == [(3, 3), (-2, -2)]
    dist.destroy_process_group()


def test_gloo_sends_tensors_of_the_cpu_only() -> None:
    init("cpu")
    group = dist.group.WORLD
    assert group is not None
    check_sends(group, torch.device("cpu"), "a pipeline (pp)")
    with pytest.raises(UsageError, match=r"a pipeline .pp. sends tensors"):
        check_sends(group, torch.device("cuda"), "a pipeline (pp)")
    dist.destroy_process_group()
