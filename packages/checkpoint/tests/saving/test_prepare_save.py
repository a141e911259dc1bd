"""prepare_save: the first save uses the prepared memory, and nothing else touches it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.distributed.tensor import Shard
from torch.distributed.tensor.placement_types import _StridedShard

from meshwright_checkpoint import load, prepare_save, save
from meshwright_checkpoint.io.host_memory import SLACK, ReservedMemory
from meshwright_checkpoint.saving import saving
from meshwright_checkpoint.shards.local_shards import _stock_region


@pytest.fixture
def saver() -> saving.Saver:
    """A Saver without earlier saves."""
    saving._saver.cache_clear()
    return saving._saver()


def model_of(value: float) -> torch.nn.Module:
    return torch.nn.ParameterDict({f"w{i}": torch.full((1 << 18,), value + i) for i in range(8)})


def test_reserved_memory_is_not_touched_after_take(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("meshwright_checkpoint.io.host_memory.PART", 4096)
    reserved = ReservedMemory(64 << 20, None)
    memory = reserved.take()
    assert memory is not None and memory.numel() == (64 << 20) + SLACK
    part = memory[: 64 << 20].fill_(1)
    assert not reserved._thread.is_alive()
    assert int(part.view(torch.int64).min()) == int(part.view(torch.int64).max()) != 0


@pytest.mark.parametrize("wait", [False, True])
def test_first_save_uses_prepared_memory(wait: bool, saver: saving.Saver, tmp_path: Path) -> None:
    model = model_of(1.0)
    prepare_save(model, wait=wait)
    reserved = saver.buffer._reserved
    assert reserved is not None
    save(tmp_path / "step-1", model=model, extra={"more": torch.ones(1 << 18)}).wait()
    memory = reserved._memory
    assert memory is not None and saver.buffer._buffer.data_ptr() == memory.data_ptr()
    other = model_of(-1.0)
    extra = load(tmp_path / "step-1", model=other)
    assert all(torch.equal(other[name], value) for name, value in model.items())
    assert torch.equal(extra["more"], torch.ones(1 << 18))
    prepare_save(model)  # the buffer is large enough
    assert saver.buffer._reserved is None


def test_prepare_save_waits_for_running_save(saver: saving.Saver, tmp_path: Path) -> None:
    handle = save(tmp_path / "step-1", model=model_of(1.0))
    large = torch.nn.ParameterDict({"w": torch.full(((SLACK >> 2) + (5 << 20),), 2.0)})
    prepare_save(large)
    assert handle.done
    save(tmp_path / "step-2", model=large).wait()
    small = model_of(0.0)
    load(tmp_path / "step-1", model=small)
    assert all(torch.equal(small[name], value) for name, value in model_of(1.0).items())


def test_strided_shard_differs_from_plain_shard() -> None:
    plain, strided = (Shard(0), Shard(0)), (_StridedShard(0, split_factor=2), Shard(0))
    layouts = [(tuple(zip(p, (2, 2), (1, 0))), tuple(map(type, p))) for p in (plain, strided, plain)]
    regions = [_stock_region(axes, kinds, (8,)) for axes, kinds in layouts]
    assert regions[0] == regions[2] != regions[1]
