"""What only a GPU shows: waits in a step, streams under stress, its fused attention, its memory, and a world of one over NCCL."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from plan_once import plan_once
from torch.nn.attention import SDPBackend, sdpa_kernel
from zoo import CASES

import meshwright as mw
from meshwright_dtensor.devices import device_of
from meshwright_dtensor.testing.rank_pool import RankPool

from .training_cases import PLANS, differences, precise

pytestmark = pytest.mark.gpu
ALONE: dict[str, Any] = {"dp": 1}


@pytest.fixture
def stressed_ranks(gpu: str) -> Iterator[RankPool]:
    """Ranks of their own: what they turn on stays on."""
    with RankPool(backend="cpu:gloo,cuda:nccl") as pool:
        yield pool


@pytest.mark.parametrize("model", ["llama", "gpt2", "mixtral", "vit"])
def test_a_world_of_one(device_ranks: RankPool, device: str, model: str) -> None:
    (wrong,) = device_ranks.run(1, differences, model, ALONE, device)
    assert not wrong


def errors_of_waits(rank: int, size: int, model: str, plan: str, device: str) -> str:
    """What torch says of a third step in which the host may not wait for the GPU."""
    mw.init(device)
    case = CASES[model]
    batch = {key: value.to(device) for key, value in case.batch().items()}
    parallel: Any = case.model().to(device)
    pins = PLANS[plan][1]
    parallel = mw.parallelize(parallel, plan_once(parallel, batch, cluster="laptop-cpu", **pins), batch=batch)
    optimizer = torch.optim.AdamW(parallel.parameters(), fused=True)

    def step() -> None:
        parallel(**batch).loss.backward()
        mw.clip_grad_norm_(parallel.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    step()
    step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    except RuntimeError as error:
        return str(error)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return ""


@pytest.mark.parametrize("plan", ["dp2", "tp2", "zero3", "pp2", "cp2"])
@pytest.mark.parametrize("model", ["llama", "gpt2"])
def test_a_step_waits_for_nothing(stressed_ranks: RankPool, gpu: str, model: str, plan: str) -> None:
    """As `integration_tests/test_fake_gpu.py` counts it without a GPU."""
    for error in stressed_ranks.run(2, errors_of_waits, model, plan, gpu):
        assert not error


def stressed(rank: int, size: int, how: str, plan: str, device: str) -> list[str]:
    """Differences from one device, where memory that a stream still reads is given to somebody else at once."""
    if how == "sanitizer":
        # raises where two streams use a tensor and nothing orders them: what TORCH_CUDA_SANITIZER=1 does
        torch.cuda._sanitizer.enable_cuda_sanitizer()
    else:
        # blocks are given back to the allocator in odd sizes, so that freed memory is used again soon
        torch.cuda.memory._set_allocator_settings("max_split_size_mb:21,garbage_collection_threshold:0.1")
        torch.cuda.set_per_process_memory_fraction(0.02)
    return differences(rank, size, "llama", PLANS[plan][1], device)


@pytest.mark.parametrize("plan", ["dp2", "zero3"])
@pytest.mark.parametrize("how", ["sanitizer", "allocator"])
def test_streams_under_stress(stressed_ranks: RankPool, gpu: str, how: str, plan: str) -> None:
    """Reduction of gradients and prefetch of blocks have streams of their own."""
    for wrong in stressed_ranks.run(2, stressed, how, plan, gpu):
        assert not wrong


def with_kernel(rank: int, size: int, kernel: str, plan: str, device: str) -> list[str]:
    """Differences from one device, both by this kernel of attention, in bfloat16."""
    # of the classes with dropout, whose masks `test_gpu_random.py` compares
    with sdpa_kernel([getattr(SDPBackend, kernel), SDPBackend.MATH]):
        return differences(rank, size, "gpt2", PLANS[plan][1], device, "bf16")


@pytest.mark.parametrize("plan", ["tp2", "cp2"])
@pytest.mark.parametrize("kernel", ["MATH", "FLASH_ATTENTION", "EFFICIENT_ATTENTION"])
def test_kernels_of_attention(device_ranks: RankPool, device: str, kernel: str, plan: str) -> None:
    for wrong in device_ranks.run(2, with_kernel, kernel, plan, device):
        assert not wrong


def compiled(rank: int, size: int, device: str) -> tuple[list[float], list[float], int]:
    """Losses of four steps as they are and by compiled regions, and calls that were compiled."""
    precise(device)
    mw.init(device)
    losses: list[list[float]] = []
    calls = 0
    for compiles in (False, True):
        torch.manual_seed(0)
        model: Any = CASES["llama"].model().to(device)
        model.config.use_cache = False
        batch = {key: value.to(device) for key, value in CASES["llama"].batch().items()}
        plan = plan_once(model, batch, cluster="laptop-cpu", dp=2, compile=compiles)
        model = mw.parallelize(model, plan, batch=batch)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        torch.manual_seed(1)
        losses.append([])
        for _ in range(4):
            loss = model(**batch).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses[-1].append(float(loss.detach()))
        if compiles:
            calls = sum(row.compiled for row in mw.debug.regions(model).rows)
    return losses[0], losses[1], calls


def test_compiled_regions(device_ranks: RankPool, device: str) -> None:
    for expected, seen, calls in device_ranks.run(2, compiled, device):
        assert calls > 0
        assert seen == pytest.approx(expected, rel=1e-4)


def test_snapshots_go_to_pinned_memory(gpu: str) -> None:
    record = device_of(gpu)
    memory = record.pinned(1 << 20, 0)
    assert memory is not None and memory.is_pinned()
    source = torch.full((1 << 18,), 3.0, device=gpu)
    target = memory.view(torch.float32)
    target.copy_(source, non_blocking=True)
    record.synchronize(source.device)
    assert bool((target == 3.0).all())
