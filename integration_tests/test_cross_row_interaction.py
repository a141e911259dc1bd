"""Where rows of a batch meet, data ranks gather them or move them: the planner says the same bytes and the same operations."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from cross_row_models import ALONE, TOGETHER
from torch.utils.flop_counter import FlopCounterMode

from meshwright_dtensor.comm.log import communication
from meshwright_dtensor.plugins import discover
from meshwright_dtensor.strategy import PlanRequest
from meshwright_dtensor.testing.rank_pool import RankPool
from meshwright_parallel import auto_parallelize
from meshwright_planner import plan
from meshwright_planner.evaluation.evaluator import Search
from meshwright_planner.evaluation.placed_model import Placed
from meshwright_planner.planners.eager import EagerPlanner, default_rules

MODELS = {**ALONE, **TOGETHER}
NUMBERS = 16
"""Bytes: sums of numbers (a loss, whether there was a gradient) are in no plan."""


def built(name: str) -> tuple[torch.nn.Module, torch.Tensor]:
    """A model and its batch, the same on every rank."""
    torch.manual_seed(0)
    make, shape = MODELS[name]
    return make(), torch.randn(shape, generator=torch.Generator().manual_seed(3))


def predicted(name: str, **degrees: int) -> float:
    """Operations of products that the planner expects of one rank."""
    model, x = built(name)
    request = PlanRequest(cluster="laptop-cpu", world_size=2, **degrees)  # type: ignore[arg-type]
    search = Search(EagerPlanner().setting(model, x, request, discover()), default_rules())
    result = search.evaluate(degrees)
    return Placed(search.basis, result.problem, result.placement).flops


def layer_flops(x: Sequence[int], w: Sequence[int], h: Sequence[int], *rest: Any, **named: Any) -> int:
    """Of an LSTM's layer, which torch's counter leaves out: every step multiplies inputs and hidden states with their weights."""
    return 2 * math.prod(x[:-1]) * (math.prod(w) + math.prod(h))


def layer_back_flops(*given: Any, **named: Any) -> int:
    """Of its backward pass: each product twice."""
    return 2 * layer_flops(*given, **named)


RECURRENT = {
    torch.ops.aten.mkldnn_rnn_layer: layer_flops,
    torch.ops.aten.mkldnn_rnn_layer_backward: layer_back_flops,
}


def step(rank: int, world: int, names: list[str], options: dict[str, int]) -> dict[str, dict[str, Any]]:
    """Name -> what is planned and what one parallel step does, and how far that is from one device."""
    result = {}
    for name in names:
        (model, x), (reference, _) = built(name), built(name)
        expected = reference(x)
        expected.backward()
        auto_parallelize(model, x, cluster="laptop-cpu", **options)
        with communication() as log, FlopCounterMode(display=False, custom_mapping=RECURRENT) as counter:
            loss = model(x)
            loss.backward()
        worst = abs(float(loss.detach().full_tensor() / expected.detach()) - 1)
        scale = max(float(p.grad.abs().max()) for p in reference.parameters() if p.grad is not None)
        for parameter, single_parameter in zip(model.parameters(), reference.parameters(), strict=True):
            if single_parameter.grad is not None:
                worst = max(
                    worst, float((parameter.grad.full_tensor() - single_parameter.grad).abs().max()) / scale
                )
        executed, planned = Counter[tuple[str, str, str]](), Counter[tuple[str, str, str]]()
        for event in log.events:
            if event.function != "data" and event.nbytes > NUMBERS:
                executed[event.axis, event.phase, event.kind] += event.nbytes
        for c in model.parallel_plan.collectives:
            if "gradients" not in c.why and not c.why.startswith("parameters") and c.nbytes > NUMBERS:
                planned[c.axis, c.phase, c.kind] += c.nbytes * c.count
        result[name] = {
            "worst": worst,
            "executed": dict(executed),
            "planned": dict(planned),
            "flops": counter.get_total_flops(),
            "notes": model.parallel_plan.provenance.notes,
        }
    return result


class Steps(dict[str, dict[str, Any]]):
    """Those of models on two data ranks, each made when it is first asked for: workers share the tests."""

    def __init__(self, pool: RankPool) -> None:
        super().__init__()
        self.pool = pool

    def __missing__(self, name: str) -> dict[str, Any]:
        self.update(self.pool.run(2, step, [name], {"dp": 2, "zero": 0})[0])
        return self[name]


@pytest.fixture(scope="session")
def steps(rank_pool: RankPool) -> Steps:
    """Shared by the tests of a worker."""
    return Steps(rank_pool)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_predicted_collectives_are_executed(steps: Steps, name: str) -> None:
    result = steps[name]
    assert result["worst"] < 1e-5
    assert result["planned"] == result["executed"]
    assert bool(result["executed"]) is (name in TOGETHER)
    assert predicted(name, dp=2) == result["flops"]
    notes = [note for note in result["notes"] if note.startswith("rows interact across dp in ")]
    assert bool(notes) is (name in TOGETHER)


WHOLE = {
    "masked_select": ("the model itself", "masked_select"),
    "rows by mask": ("second", "__getitem__"),
    "routed": ("the model itself", "where"),
    "lstm, rows in the middle": ("second", "lstm (layer)"),
}
"""Name -> a module that every rank computes whole, and a call that makes it so."""


@pytest.mark.parametrize("name", WHOLE)
def test_a_note_says_what_data_parallelism_does_not_help(steps: Steps, name: str) -> None:
    notes = [n for n in steps[name]["notes"] if n.startswith("data parallelism does not help in ")]
    module, call = WHOLE[name]
    (note,) = notes
    where, _, why = note.partition(", which every rank of dp computes for the whole batch: ")
    assert module in where and call in why and why.endswith(" needs rows of other ranks")


@pytest.mark.slow
def test_the_same_with_shards_and_replicas(rank_pool: RankPool) -> None:
    """Two axes divide the rows: what is inner is moved first."""
    names = ["batch norm", "routed", "lstm, rows in the middle", "sort rows"]
    result = rank_pool.run(4, step, names, {"dp": 4, "zero": 1, "zero_degree": 2})[0]
    for name in names:
        executed = {k: n for k, n in result[name]["executed"].items() if k[2] != "reduce_scatter"}
        stored = sum(p.numel() * 4 for p in built(name)[0].parameters())
        executed["zero", "forward", "all_gather"] = (
            executed.get(("zero", "forward", "all_gather"), 0) - stored
        )
        assert result[name]["planned"] == {k: n for k, n in executed.items() if n}, name


@pytest.mark.slow
def test_cross_row_interaction_with_a_tensor_axis(rank_pool: RankPool) -> None:
    """What that divides is moved by each of its ranks in part."""
    names = ["index_add of rows", "compared", "batch norm", "gru, rows in the middle", "gru"]
    result = rank_pool.run(4, step, names, {"dp": 2, "tp": 2, "zero": 0})[0]
    for name in names:
        assert result[name]["worst"] < 1e-5
        planned, executed = (
            {key: n for key, n in result[name][what].items() if key[0] == "dp"}
            for what in ("planned", "executed")
        )
        assert planned == executed and bool(planned) is (name in TOGETHER), name


def test_a_model_that_needs_all_rows_is_not_said_to_take_half() -> None:
    def compute(name: str, **degrees: int) -> float:
        model, x = built(name)
        result = plan(model, x, cluster="laptop-cpu", planner="manual", **degrees)
        assert not isinstance(result, list) and result.predicted is not None
        return float(result.predicted.compute_seconds)

    # all but the first product
    whole = compute("lstm, rows in the middle", world_size=1)
    assert compute("lstm, rows in the middle", world_size=2, dp=2) > 0.8 * whole
