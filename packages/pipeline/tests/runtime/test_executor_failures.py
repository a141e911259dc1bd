"""Steps that fail: every rank gets stage, microbatch and action of the failure, and none waits for ever."""

from __future__ import annotations

import os
import pickle
import re
import signal
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pipe_models import Bomb, Chain, chain_batch, chain_plan
from torch import Tensor, nn

from meshwright_dtensor.errors import StageError
from meshwright_dtensor.schedule.registry import schedule_named
from meshwright_dtensor.testing.rank_pool import RankError, RankPool
from meshwright_pipeline import Action, Shape, pipeline, timetable
from meshwright_pipeline.runtime.actions.executor import RankStages, StepRun
from meshwright_pipeline.runtime.agreement import Agreement, Vote
from meshwright_pipeline.runtime.p2p import messages
from meshwright_pipeline.runtime.p2p.messages import Transport, packets
from meshwright_pipeline.runtime.p2p.step import Peers


def real(output: Tensor) -> bool:
    """Not a meta tensor, nor the zeros of a profile."""
    return not output.is_meta and bool(output.any())


class Fatal(torch.autograd.Function):
    """Kills the process in its backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        os.kill(os.getpid(), signal.SIGKILL)
        return gradients[0]


def die(rank: int, size: int, stage: int, where: str, folder: str) -> None:
    """One rank is killed in the second step, in microbatch 2; every other writes its error and time to a file."""
    torch.manual_seed(0)
    model, armed, seen = Chain(), [False], [0]

    def hook(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        if not (armed[0] and real(output)):
            return output
        seen[0] += 1
        if seen[0] < 3:
            return output
        if where == "forward":
            os.kill(os.getpid(), signal.SIGKILL)
        return Fatal.apply(output)

    model.layers[stage].outer.register_forward_hook(hook)
    many = pipeline(model, chain_plan(ranks=4, schedule="gpipe"))
    many(**chain_batch())["loss"].backward()
    armed[0] = True
    start = time.monotonic()
    try:
        many(**chain_batch(1))
    except StageError as error:
        Path(folder, str(rank)).write_text(f"{time.monotonic() - start:.1f} {error}")
    while len(list(Path(folder).iterdir())) < size - 1 and time.monotonic() < start + 60:
        time.sleep(0.05)  # stay alive until the other ranks have their error


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "where"), [(1, "forward"), (0, "backward")])
def test_dead_rank_is_reported_on_all_others(stage: int, where: str, tmp_path: Path) -> None:
    """No rank waits for gradients of the first stage: its death is noticed by a send, or at the end of the step."""
    with RankPool(grace=30.0) as pool, pytest.raises(RankError, match=f"rank {stage}.*SIGKILL"):
        pool.run(4, die, stage, where, str(tmp_path), timeout=240)
    told = {int(path.name): path.read_text() for path in tmp_path.iterdir()}
    assert sorted(told) == [rank for rank in range(4) if rank != stage]
    for text in told.values():
        assert float(text.split()[0]) < 20
        # outputs of earlier microbatches may be lost with it
        assert re.search(
            f"stage {stage} failed in the {where} of microbatch [0123], on rank {stage}", text
        ), text
        assert "it has died or hangs, since a message to or from it was lost" in text or "rank 0 died" in text


class Lost:
    """A message that does not leave."""

    def wait(self) -> None:
        raise RuntimeError("connection closed by peer")


def lost(*args: Any, **options: Any) -> Lost:
    raise RuntimeError("connection closed by peer")


@pytest.mark.parametrize("training", [True, False], ids=["prepared", "settled"])
def test_peer_that_dies_between_actions_is_reported(training: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its death is noticed by a prefetch, or when messages are flushed: the step ends with a failure."""
    monkeypatch.setattr(dist, "get_rank", lambda group: 0)
    monkeypatch.setattr(dist, "get_backend_config", lambda group: "cpu:gloo")
    monkeypatch.setattr(messages, "isend", lambda *args, **options: None if training else Lost())
    monkeypatch.setattr(messages, "irecv", lost)
    table = timetable(schedule_named("1f1b"), Shape(2, 2, 2))
    stage: Any = SimpleNamespace(
        is_last=False,
        index=0,
        cut=SimpleNamespace(sent=lambda index: [0]),
        run=lambda call, received, *_: ({0: torch.ones(2, requires_grad=True)}, None),
    )
    transport = Transport(None, torch.device("cpu"))  # type: ignore[arg-type]
    stages = RankStages({0: stage}, Peers(transport, table), None)
    run = StepRun(stages, [((), {})] * 2, (lambda *_: []) if training else None, None, "ids")
    failure = run.run().failure
    assert failure is not None and failure.lost and failure.action.stage == 1
    assert failure.action == Action("B" if training else "F", 1, 0)
    assert "connection closed by peer" in str(failure.error)


def arrives(buffer: Tensor) -> None:
    ((_, packet),) = packets(pickle.dumps(Vote((1.0, 2.0), None, "")), 0, torch.device("cpu"))
    buffer.copy_(packet)


def test_agreement_holds_when_a_rank_dies_before_the_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 has sent the sum; the next step notices the dead rank."""
    monkeypatch.setattr(dist, "get_rank", lambda group: 0)
    monkeypatch.setattr(dist, "get_backend_config", lambda group: "cpu:gloo")
    monkeypatch.setattr(dist, "get_world_size", lambda group: 3)
    monkeypatch.setattr(messages, "irecv", lambda buffer, *args: arrives(buffer))
    monkeypatch.setattr(messages, "isend", lambda *args, **options: Lost())
    agreement = Agreement(None, lambda rank: Action("F", 0, 0))  # type: ignore[arg-type]
    assert agreement.settle(Vote((1.0, 0.0), None, "")) == (3.0, 4.0)


def change(rank: int, size: int) -> str:
    """After the first block, microbatch 2 is shorter than the others: its hook runs on both sides of the cut."""
    torch.manual_seed(0)
    model, seen = Chain(), [0]

    def hook(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        # the check of rows runs it without gradients
        seen[0] += real(output) and torch.is_grad_enabled()
        return output[:, 1:] if seen[0] == 3 else output

    model.layers[0].register_forward_hook(hook)
    many = pipeline(model, chain_plan(ranks=4))
    try:
        many(**chain_batch())
    except StageError as error:
        return str(error)
    return "no error"


@pytest.mark.slow
def test_changed_shape_is_reported_on_every_rank(rank_pool: RankPool) -> None:
    for text in rank_pool.run(4, change, timeout=150):
        assert "stage 1 failed in the forward of microbatch 2, on rank 1" in text
        assert "have changed from [2, 6, 8] torch.float32 to [2, 5, 8] torch.float32" in text


def fail(rank: int, size: int, kind: str) -> str:
    """A backward raises: that of a weight, which is deferred, or that of the path to the inputs."""
    torch.manual_seed(0)
    model = Chain()
    if kind == "weights":
        weight = model.layers[1].outer

        class Through(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.weight, self.bias = weight.weight, weight.bias

            def forward(self, x: Tensor) -> Tensor:
                return nn.functional.linear(x, Bomb.apply(self.weight), self.bias)

        model.layers[1].outer = Through()  # type: ignore[assignment]
    else:
        model.layers[1].outer.register_forward_hook(lambda m, a, out: Bomb.apply(out) if real(out) else out)
    many = pipeline(model, chain_plan(stages=4, schedule="zero-bubble"))
    try:
        many(**chain_batch())["loss"].backward()
    except StageError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize("kind", ["inputs", "weights"])
def test_failing_half_of_a_backward_is_named(rank_pool: RankPool, kind: str) -> None:
    for text in rank_pool.run(2, fail, kind, timeout=150):
        assert (
            f"stage 1 failed in the backward to {kind} of microbatch 0, on rank 1: ValueError: boom backward"
            in text
        )
