"""Pipelined steps on real ranks against one device, with ordinary parameters and no other package."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from pipe_models import INNER, Bomb, Chain, Crossed, chain_batch, chain_plan, crossed_batch, crossed_plan
from torch import Tensor, nn

from meshwright_dtensor.errors import StageError, UsageError
from meshwright_dtensor.plan import ParallelPlan
from meshwright_dtensor.testing.rank_pool import RankPool
from meshwright_pipeline import call_of, pipeline, write_trace
from meshwright_pipeline.runtime.grad_handover import Sink
from meshwright_pipeline.timeline import planned

LIMIT = 1e-5


def far(value: Tensor | None, reference: Tensor | None) -> float:
    if value is None or reference is None:
        return 0.0 if value is reference else float("inf")
    return float((value - reference).abs().max() / reference.abs().max())


def make(kind: str, **options: Any) -> nn.Module:
    torch.manual_seed(0)
    return Chain(**options) if kind == "chain" else Crossed()


def train(
    rank: int, size: int, kind: str, options: dict[str, Any], plan: ParallelPlan, steps: int, uneven: bool
) -> tuple[float, float, list[str]]:
    """(largest distance of a loss, of a gradient or parameter, names of this rank's parameters)."""
    single, many = make(kind, **options), pipeline(make(kind, **options), plan)
    momentum = {"lr": 0.05, "momentum": 0.9}
    optimizers = [torch.optim.SGD(m.parameters(), **momentum) for m in (single, many)]
    single_parameters = dict(single.named_parameters(remove_duplicate=False))
    losses = gradients = 0.0
    for step in range(steps):
        batch = chain_batch(step, uneven) if kind == "chain" else crossed_batch()
        results = []
        for model, optimizer in zip((single, many), optimizers, strict=True):
            optimizer.zero_grad()
            torch.manual_seed(7 + step)
            out = model(**batch)
            loss = out["loss"] if kind == "chain" else out[0]
            (loss * 0.5).backward()
            results.append((loss.item(), torch.get_rng_state()))
        assert torch.equal(results[0][1], results[1][1]), "the generator ends in another state"
        losses = max(losses, abs(results[0][0] - results[1][0]) / abs(results[0][0]))
        for name, p in many.named_parameters():
            gradients = max(gradients, far(p.grad, single_parameters[name].grad))
        for optimizer in optimizers:
            optimizer.step()
    for name, p in many.named_parameters():
        gradients = max(gradients, far(p, single_parameters[name]))
    return losses, gradients, [name for name, _ in many.named_parameters()]


def check(ranks: list[tuple[float, float, list[str]]]) -> None:
    for losses, gradients, _ in ranks:
        assert losses < LIMIT and gradients < LIMIT, (losses, gradients)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_tied_weights_and_unequal_tokens(rank_pool: RankPool, schedule: str) -> None:
    ranks = rank_pool.run(2, train, "chain", {}, chain_plan(schedule=schedule), 3, True)
    check(ranks)
    first, last = (set(names) for _, _, names in ranks)
    assert "embed.weight" in first and "head.weight" in last and first & last == {"scale"}


def test_unequal_tokens_need_their_weights(rank_pool: RankPool) -> None:
    """The negative control: a plain mean over microbatches is far off."""
    (loss, _, _), *_ = rank_pool.run(2, unweighted, chain_plan())
    assert not loss < 100 * LIMIT  # nan: a microbatch without any token


def unweighted(rank: int, size: int, plan: ParallelPlan) -> tuple[float, float, list[str]]:
    many = pipeline(make("chain"), plan)
    many.__dict__["_meshwright_pipeline"].preparation.denominators = lambda *_: None
    single = make("chain")(**chain_batch(0, True))["loss"].item()
    return abs(many(**chain_batch(0, True))["loss"].item() - single) / single, 0.0, []


@pytest.mark.slow
def test_dropout_masks_match_one_device(rank_pool: RankPool) -> None:
    check(rank_pool.run(2, train, "chain", {"dropout": 0.3}, chain_plan(), 3, False))


@pytest.mark.slow
def test_several_stages_per_rank(rank_pool: RankPool) -> None:
    check(rank_pool.run(2, train, "chain", {}, chain_plan(stages=4, schedule="interleaved"), 2, True))
    check(rank_pool.run(2, train, "chain", {"dropout": 0.2}, chain_plan(stages=4, schedule="gpipe"), 2, True))


SPLIT = ("zero-bubble", "zbv", "dualpipev")


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["looped-bfs", *SPLIT])
def test_every_schedule_matches_one_device(rank_pool: RankPool, schedule: str) -> None:
    check(
        rank_pool.run(2, train, "chain", {"dropout": 0.2}, chain_plan(stages=4, schedule=schedule), 2, False)
    )


@pytest.mark.parametrize("schedule", SPLIT)
def test_split_backward_loses_no_gradient_off_the_path(rank_pool: RankPool, schedule: str) -> None:
    """The encoder's result enters every decoder block, and so does a bias that depends on weights alone."""
    plan = crossed_plan(schedule=schedule, ranks=2)
    check(rank_pool.run(2, train, "crossed", {}, plan, 2, False))


class Saved:
    """A tensor that autograd saves, counted while it does; only those of the inner width of a block."""

    alive = most = 0

    def __init__(self, tensor: Tensor) -> None:
        self.tensor, self.counts = tensor.detach(), tensor.dim() == 3 and tensor.shape[-1] == INNER
        Saved.alive += self.counts
        Saved.most = max(Saved.most, Saved.alive)

    def __del__(self) -> None:
        Saved.alive -= self.counts


def held(rank: int, size: int, plan: ParallelPlan) -> tuple[float, int, tuple[int, ...]]:
    """Most microbatches alive: in tensors that autograd saves, as counted by the step, and by the timetable."""
    many = pipeline(make("chain"), plan)
    Saved.alive = Saved.most = 0
    with torch.autograd.graph.saved_tensors_hooks(Saved, lambda saved: saved.tensor):
        make("chain")(**chain_batch())
        of_one, Saved.most = Saved.most, Saved.alive
        many(**chain_batch())["loss"].backward()
    assert plan.pipeline is not None
    return Saved.most * len(plan.pipeline.stages) / of_one, call_of(many).last.most_alive, planned(plan).alive


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved", "looped-bfs", *SPLIT])
def test_held_activations_match_theory(rank_pool: RankPool, schedule: str) -> None:
    plan = chain_plan(stages=2 if schedule in ("gpipe", "1f1b") else 4, schedule=schedule)
    for rank, (kept, counted, theory) in enumerate(rank_pool.run(2, held, plan)):
        assert kept == counted == theory[rank]


@pytest.mark.slow
def test_values_that_skip_stages(rank_pool: RankPool) -> None:
    check(rank_pool.run(4, train, "crossed", {}, crossed_plan(), 2, False))


def evaluate(rank: int, size: int) -> tuple[float, float, float, int]:
    single, many = make("chain", dropout=0.5), pipeline(make("chain", dropout=0.5), chain_plan())
    batch = chain_batch()
    with torch.no_grad():
        want, got = single.eval()(**batch), many.eval()(**batch)
        alone = many(ids=batch["ids"])
        longer = chain_batch(3, tokens=9)
        other = far(many(**longer)["logits"], single(**longer)["logits"])
    assert not got["logits"].requires_grad
    most = call_of(many).last.most_alive
    return far(got["logits"], want["logits"]), far(alone["logits"], want["logits"]), other, most


@pytest.mark.slow
def test_evaluation_runs_forwards_alone_at_any_shape(rank_pool: RankPool) -> None:
    for given in rank_pool.run(2, evaluate):
        assert max(given[:3]) < LIMIT and given[3] == 0


def accumulate(rank: int, size: int) -> tuple[float, int, bool]:
    """Gradients of two steps are summed; a second backward is refused; activations are those of theory."""
    single, many = make("chain"), pipeline(make("chain"), chain_plan(outputs="all"))
    for step in range(2):
        single(**chain_batch(step))["loss"].backward()
        out = many(**chain_batch(step))
        out["loss"].backward()
    assert out["logits"].shape == (8, 6, 29)
    single_parameters = dict(single.named_parameters(remove_duplicate=False))
    worst = max(far(p.grad, single_parameters[name].grad) for name, p in many.named_parameters())
    try:
        out["loss"].backward()
    except UsageError:
        return worst, call_of(many).last.most_alive, True
    return worst, call_of(many).last.most_alive, False


def test_accumulation_and_held_activations(rank_pool: RankPool) -> None:
    ranks = rank_pool.run(2, accumulate)
    assert [given[1:] for given in ranks] == [(2, True), (1, True)]
    assert max(given[0] for given in ranks) < LIMIT


def traced(rank: int, size: int, path: str) -> tuple[float, float]:
    many = pipeline(make("chain"), chain_plan())
    many(**chain_batch())["loss"].backward()
    return write_trace(many, path), planned(many.parallel_plan).bubble  # type: ignore[arg-type]


def test_step_is_written_as_trace(rank_pool: RankPool, tmp_path: Path) -> None:
    """One track a rank, every action once."""
    path = tmp_path / "trace.json"
    (measured, planned_bubble), *_ = rank_pool.run(2, traced, str(path))
    events = json.loads(path.read_text())["traceEvents"]
    for rank in range(2):
        names = [e["name"] for e in events if e["tid"] == rank and e["ph"] == "X" and e["name"] != "wait"]
        assert sorted(names) == sorted(f"{kind} {m}" for kind in ("forward", "backward") for m in range(4))
    assert 0 < measured < 1 and planned_bubble == pytest.approx(0.2)


def tied_bits(rank: int, size: int) -> Tensor:
    many = pipeline(make("chain"), chain_plan())
    optimizer = torch.optim.AdamW(many.parameters(), lr=1e-2)
    for step in range(4):
        many(**chain_batch(step))["loss"].backward()
        optimizer.step()
        optimizer.zero_grad()
    return (many.head if rank else many.embed).weight.detach()


def test_tied_weights_stay_equal_bit_for_bit(rank_pool: RankPool) -> None:
    first, last = rank_pool.run(2, tied_bits)
    assert torch.equal(first, last)


def fail(rank: int, size: int, where: str, late: bool) -> str:
    model = make("chain")
    armed = [not late]

    def fault(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        if output.is_meta or not output.any():  # a meta run, or the zeros of a profile
            return output
        if armed[0] and where == "forward":
            raise ValueError("boom forward")
        return Bomb.apply(output) if armed[0] else output

    model.layers[1].outer.register_forward_hook(fault)
    plan = chain_plan(ranks=4)
    many = pipeline(model, plan)
    if late:
        many(**chain_batch())["loss"].backward()
        armed[0] = True
    try:
        # the hook reads a unit's output, so the loss is computed after the pipeline, and units run backward in backward()
        many(**chain_batch())["loss"].backward()
    except StageError as error:
        armed[0] = False
        many.zero_grad()
        single = make("chain")
        single(**chain_batch())["loss"].backward()
        many(**chain_batch())["loss"].backward()  # the next step works
        single_parameters = dict(single.named_parameters(remove_duplicate=False))
        assert max(far(p.grad, single_parameters[name].grad) for name, p in many.named_parameters()) < LIMIT
        return str(error)
    return "no error"


@pytest.mark.slow
@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_failing_stage_is_reported_on_every_rank(rank_pool: RankPool, where: str, late: bool) -> None:
    for message in rank_pool.run(4, fail, where, late, timeout=60):
        assert f"stage 1 failed in the {where} of microbatch 0, on rank 1: ValueError: boom" in message


def load(rank: int, size: int) -> float:
    """The state dict of one device loads into every stage."""
    torch.manual_seed(99)
    single = Chain()
    many = pipeline(make("chain"), chain_plan())
    assert not many.load_state_dict(single.state_dict()).missing_keys
    loss = many(**chain_batch())["loss"]
    return abs(loss.item() - single(**chain_batch())["loss"].item())


@pytest.mark.slow
def test_state_dict_of_one_device_loads(rank_pool: RankPool) -> None:
    assert max(rank_pool.run(2, load)) < LIMIT


def refuse(rank: int, size: int) -> str:
    many = pipeline(make("chain"), chain_plan())
    try:
        many(ids=torch.tensor(3))
    except UsageError as error:
        return str(error)
    return "nothing"


def test_unsplittable_batch_is_refused_on_every_rank(rank_pool: RankPool) -> None:
    for rows in rank_pool.run(2, refuse):
        assert "a batch without rows cannot be split into 4 equal microbatches" in rows


def test_bf16_gradients_are_summed_in_the_dtype_of_the_parameter() -> None:
    """In bf16, 1 + 2**-9 is 1: small gradients added to a large sum would be lost."""
    sink = Sink(nn.Parameter(torch.zeros(3)))
    for value in (1.0, *[2.0**-9] * 64):
        sink.add(torch.full((3,), value, dtype=torch.bfloat16))
    total = sink.take()
    assert total is not None and total.dtype == torch.float32
    assert torch.equal(total, torch.full((3,), 1.125))
