"""Outputs that a training step does not keep: they raise when they are read, and say how to keep them."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pipe_models import Chain, chain_batch, chain_plan
from torch import Tensor

from meshwright_dtensor.errors import UnsupportedError
from meshwright_dtensor.testing.rank_pool import RankPool
from meshwright_pipeline import pipeline
from meshwright_pipeline.runtime.results.step_output import DroppedOutput, with_loss

CPU = torch.device("cpu")


@dataclass(slots=True, frozen=True)
class Slotted:
    loss: Tensor
    logits: Tensor
    steps: int


READS: dict[str, Callable[[Tensor], Any]] = {
    "method": lambda x: x.argmax(-1),
    "operator": lambda x: x + 1,
    "first operand is another tensor": lambda x: torch.ones(4).add_(x),
    "function": lambda x: torch.nn.functional.softmax(x, -1),
    "shape, which is that of a microbatch": lambda x: x.shape,
    "index": lambda x: x[0],
    "truth": bool,
    "list": lambda x: x.tolist(),
    "numpy": lambda x: x.numpy(),
    "in a list": lambda x: torch.stack([x, x]),
    "cast, then read": lambda x: x.float().detach().cpu().sum(),
    "copy": copy.deepcopy,
    "pickle": pickle.dumps,
    "memory": lambda x: x.data_ptr(),
    "backward": lambda x: x.backward(),
}


@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_reading_raises(read: Callable[[Tensor], Any]) -> None:
    with pytest.raises(UnsupportedError, match=r'Set pipeline\.outputs to "all"'):
        read(DroppedOutput.of(torch.ones(4, 3), CPU))


def test_what_needs_no_value_works() -> None:
    x = DroppedOutput.of(torch.ones(4, dtype=torch.bfloat16), CPU)
    assert isinstance(x, Tensor) and x.dtype == torch.bfloat16 and x.float().dtype == torch.float32
    assert x.to(torch.float64).dtype == x.double().dtype == torch.float64
    assert x.to(torch.ones(1, dtype=torch.float64)).dtype == torch.float64 and x.device == CPU
    assert "not kept" in repr(x) and "not kept" in f"{x}"


@pytest.mark.parametrize(
    "make",
    [dict, lambda **outputs: tuple(outputs.values()), SimpleNamespace, Slotted],
    ids=["dict", "tuple", "class", "slots"],
)
def test_only_the_loss_is_kept(make: Callable[..., Any]) -> None:
    loss = torch.tensor(2.0)
    result = with_loss(make(loss=torch.tensor(1.0), logits=torch.ones(2), steps=3), loss, keep=False)
    kept = vars(result) if isinstance(result, SimpleNamespace) else result
    if isinstance(kept, Slotted):
        kept = (kept.loss, kept.logits, kept.steps)
    given, logits, steps = kept.values() if isinstance(kept, dict) else kept
    assert given is loss and isinstance(logits, DroppedOutput) and steps == 3


def accuracy(rank: int, size: int, outputs: str) -> float:
    """Of the logits of a training step."""
    model, batch = pipeline(Chain(), chain_plan(outputs=outputs)), chain_batch()
    out = model(**batch)
    out["loss"].backward()
    return float((out["logits"].argmax(-1) == batch["labels"]).float().mean())


def test_a_training_step(rank_pool: RankPool) -> None:
    assert rank_pool.run(2, accuracy, "all")
    with pytest.raises(Exception, match="argmax of an output of a training step"):
        rank_pool.run(2, accuracy, "loss")
