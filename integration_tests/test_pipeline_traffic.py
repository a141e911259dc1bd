"""What a plan says that crosses the cuts of a pipeline is what its ranks send, byte for byte, forward and backward."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import pytest
import torch
from containers import MODELS, batch
from plan_once import plan_once
from side_models import RUN
from side_models import numbers as narrow
from torch import Tensor, nn
from zoo import CASES

import meshwright as mw
from meshwright_dtensor.comm.log import communication
from meshwright_dtensor.errors import StageError
from meshwright_dtensor.testing.rank_pool import RankPool

WIDTH, ROWS = 16, 8


class Mlp(nn.Module):
    """A Sequential, with or without a residual around each of its parts, and a loss of the model's own."""

    def __init__(self, residual: bool) -> None:
        super().__init__()
        parts = [nn.Sequential(nn.Linear(WIDTH, 32), nn.ReLU(), nn.Linear(32, WIDTH)) for _ in range(4)]
        self.layers, self.residual = nn.ModuleList(parts), residual

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x) if self.residual else torch.relu(layer(x))
        return x.square().mean()


class Chosen(nn.Module):
    """Integers cross too, which have no gradient: what a first unit chose is taken by the last."""

    class Choice(nn.Module):
        """Logits, and which is largest."""

        def __init__(self) -> None:
            super().__init__()
            self.score = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            results = self.score(x)
            return results, results.argmax(-1)

    def __init__(self) -> None:
        super().__init__()
        self.choice = Chosen.Choice()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.words = nn.Embedding(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        first, chosen = self.choice(x)
        x = first
        for layer in self.layers:
            x = torch.tanh(layer(x)) + torch.zeros_like(first)  # takes a shape alone
        return {"loss": (x + self.words(chosen)).square().mean(), "first": first}


def numbers() -> dict[str, Tensor]:
    """Fractions."""
    return {"x": torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(3))}


@dataclass(frozen=True)
class Made:
    """A model and its batch, on any rank."""

    model: Callable[[], nn.Module]
    batch: Callable[[], Any]


KINDS: Mapping[str, Made] = MappingProxyType(
    {
        "mlp": Made(lambda: Mlp(False), numbers),
        "residual-mlp": Made(lambda: Mlp(True), numbers),
        "chosen": Made(Chosen, numbers),
        **{name: Made(model, batch) for name, model in MODELS.items()},
        **{name: Made(model, narrow) for name, model in RUN.items()},
        **{name: Made(case.model, case.batch) for name, case in CASES.items() if "-" not in name},
    }
)

Sent = dict[str, int]
"""phase -> bytes."""


def step(rank: int, size: int, name: str, pins: dict[str, Any]) -> tuple[Sent, Sent]:
    """One step: what is planned for the axis, and what this rank has sent."""
    made = KINDS[name]
    torch.manual_seed(0)
    model, given = made.model(), made.batch()
    plan = plan_once(model, given, cluster="laptop-cpu", **pins)
    mw.parallelize(model, plan, batch=given)
    with communication() as log:
        results = model(**given)
        loss = (
            results
            if isinstance(results, Tensor)
            else results["loss"]
            if isinstance(results, dict)
            else results.loss
        )
        loss.backward()
    planned, sent = Counter[str](), Counter[str]()
    for use in plan.collectives:
        if use.axis == "pp" and use.kind == "send_recv":
            tied = use.why == "gradients that several ranks hold"
            planned["tied" if tied else use.phase] += use.count * use.nbytes
    for event in log.events:
        if event.axis == "pp" and event.kind == "send_recv":
            sent["tied" if event.function == "tied parameters" else event.phase] += event.nbytes
    tied_planned, tied_sent = planned.pop("tied", 0), sent.pop("tied", 0)
    if plan.degree("pp") == 2:  # each rank sends all of them, and whether it has each
        names = sum(1 for _ in made.model().parameters())
        assert tied_planned <= tied_sent <= tied_planned + 4 * names and bool(tied_planned) == bool(tied_sent)
    return dict(planned), dict(sent)


def check(pool: RankPool, size: int, name: str, **pins: Any) -> None:
    """All ranks of the pipelines together send what is planned of each."""
    results = pool.run(size, step, name, {"dp": 1, "tp": 1, "cp": 1, "microbatches": 2, **pins})
    sent = Counter[str]()
    for _, bytes_sent in results:
        sent.update(bytes_sent)
    assert sent["forward"] > 0
    planned = {phase: count * (size // pins["pp"]) for phase, count in results[0][0].items()}
    if name == "chosen":
        # planned for both results of the first unit; of the one that the loss does not use there is no gradient to send
        planned["backward"] = ROWS * WIDTH * 4 * (pins["pp"] - 1)
    assert sent == planned


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
def test_what_crosses_is_what_is_planned(rank_pool: RankPool, name: str) -> None:
    check(rank_pool, 2, name, pp=2, schedule="1f1b")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "schedule"),
    [
        ("residual-mlp", "interleaved"),
        ("dicts", "zbv"),
        ("llama", "dualpipev"),
        ("llama", "interleaved"),
    ],
)
def test_stages_that_follow_each_other_on_a_rank_send_nothing(
    rank_pool: RankPool, name: str, schedule: str
) -> None:
    check(rank_pool, 2, name, pp=2, schedule=schedule, microbatches=4)


OTHERS: Sequence[tuple[str, dict[str, Any]]] = (
    ("residual-mlp", {"tp": 2}),
    ("llama", {"tp": 2}),
    ("dicts", {"dp": 2}),
    ("residual-mlp", {"dp": 2, "zero": 3}),
    ("t5", {"dp": 2, "zero": 3}),
    ("dicts", {"dp": 2, "precision": "bf16"}),
    ("llama", {"dp": 2, "precision": "bf16"}),
)
"""A model, and an axis of degree 2 in addition to the pipeline."""


@pytest.mark.slow
@pytest.mark.parametrize(("name", "pins"), OTHERS, ids=str)
def test_other_axes_leave_a_rank_its_part(rank_pool: RankPool, name: str, pins: dict[str, Any]) -> None:
    check(rank_pool, 4, name, pp=2, schedule="1f1b", **pins)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["chosen", "t5"])
def test_what_skips_stages_is_passed_on(rank_pool: RankPool, name: str) -> None:
    check(rank_pool, 4, name, pp=4, schedule="1f1b")


def of_data_axes(rank: int, size: int, zero: int, microbatches: int) -> tuple[dict[str, int], list[float]]:
    """Collectives of a step by kind, and distances of two losses from one device; parameters are changed between the two."""
    made = KINDS["llama"]
    torch.manual_seed(0)
    model, given = made.model(), made.batch()
    alone = copy.deepcopy(model)
    given = {name: value.repeat(2, 1) for name, value in given.items()}
    # ranks have different numbers of targets
    given["labels"][:3, 4:] = -100
    pins = {"pp": 2, "dp": 2, "zero": zero, "microbatches": microbatches}
    mw.parallelize(model, plan_once(model, given, cluster="laptop-cpu", planner="manual", **pins))
    distances = []
    for _ in range(2):
        torch.manual_seed(1)
        with communication() as log:
            loss = model(**given).loss
            loss.backward()
        torch.manual_seed(1)
        distances.append(abs(float(loss.detach() - alone(**given).loss.detach())))
        for parameter in (*model.parameters(), *alone.parameters()):
            # torch does not count this write
            parameter.data.mul_(0.5)
    return dict(Counter(event.kind for event in log.events if event.axis != "pp")), distances


@pytest.mark.slow
@pytest.mark.parametrize("zero", [0, 1])
def test_data_ranks_wait_for_each_other_as_often_with_more_microbatches(
    rank_pool: RankPool, zero: int
) -> None:
    few, many = (rank_pool.run(4, of_data_axes, zero, microbatches) for microbatches in (2, 4))
    assert [counts for counts, _ in few] == [counts for counts, _ in many]
    assert max(distance for _, distances in (*few, *many) for distance in distances) < 2e-6
    # the number of targets on the last stage; losses come with the end of the step, and parameters are gathered once
    assert few[-1][0]["all_reduce"] == 1 + (zero == 0) and ("all_gather" in few[0][0]) == bool(zero)


def fails_last(rank: int, size: int) -> str:
    """What a step raises where the backward of the last microbatch fails on the last rank."""
    made = KINDS["residual-mlp"]
    torch.manual_seed(0)
    model, given = made.model(), made.batch()
    pins = {"pp": 2, "dp": 2, "zero": 0, "microbatches": 2}
    mw.parallelize(model, plan_once(model, given, cluster="laptop-cpu", planner="manual", **pins))
    backwards = []

    def fail(*_: Any) -> None:
        backwards.append(rank)
        if rank == size - 1 and len(backwards) == 2:
            raise ValueError("a mistake in the last backward")

    last = model.get_submodule("layers.3")
    if any(p.device.type != "meta" for p in last.parameters()):
        last.register_full_backward_hook(fail)
    try:
        model(**given)
    except StageError as error:
        return str(error)
    return "no error"


@pytest.mark.slow
def test_a_failure_on_one_data_rank_is_told_to_all(rank_pool: RankPool) -> None:
    for told in rank_pool.run(4, fails_last, timeout=60):
        assert "a mistake in the last backward" in told
