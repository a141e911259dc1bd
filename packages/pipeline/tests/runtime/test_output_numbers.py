"""Numbers in the outputs of a model are those of the whole batch, gradient included, in every position."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from loss_models import (
    ADDING,
    OUTSIDE,
    WHOLE,
    WITH_NUMBERS,
    Judge,
    judged,
    judged_batch,
    judged_plan,
    mean,
)
from torch import Tensor, nn

from meshwright_dtensor.errors import PlanError, StageError
from meshwright_dtensor.testing.rank_pool import RankPool
from meshwright_pipeline import call_of, pipeline
from meshwright_pipeline._torch import pytree
from meshwright_pipeline.analysis import loss_additivity
from meshwright_pipeline.partition.units import find_units
from meshwright_pipeline.runtime.actions.stage import Stage
from meshwright_pipeline.trace.loss import loss_of
from meshwright_pipeline.trace.meta_model import skeleton
from meshwright_pipeline.trace.profiler import Profiler

LIMIT = 1e-5


def verdict(judge: Judge, count: int = 4) -> loss_additivity.Additivity | None:
    model = judged(judge)
    units = find_units(model).names
    profiler, call = Profiler(skeleton(model, units), units), ((), judged_batch(0))
    proof = loss_additivity.prove_additive(profiler, profiler.run(*call), call, count)
    return proof if isinstance(proof, loss_additivity.Additivity) else None


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 4, 8])
@pytest.mark.parametrize("name", ADDING)
def test_additive_loss_is_proven(name: str, count: int) -> None:
    additivity = verdict(ADDING[name], count)
    assert additivity is not None
    assert additivity.loss.power == (
        1 if name in ("sum", "by hand", "by valid targets", "no grammar", "squares") else 0
    )


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 4, 8])
@pytest.mark.parametrize("name", WHOLE)
def test_other_losses_are_not_proven(name: str, count: int) -> None:
    assert verdict(WHOLE[name], count) is None


def test_loss_without_rows_counts_once() -> None:
    additivity = verdict(lambda m, x, y, k: m.weight.square())
    assert additivity is not None and additivity.loss.weight(4) == 0.25


def test_numbers_that_are_not_additive_are_no_leaves() -> None:
    """For each of them, the value of a microbatch is not its share of the value of the batch."""
    additivity = verdict(
        lambda m, x, y, k: (mean(x, y), k.mean() * k.numel(), k.sum().expand(k.shape[0]).sum(), k.mean())
    )
    assert additivity is not None
    assert [leaf is not None for leaf in additivity.leaves] == [True, False, False, True]


def test_every_output_leaf_is_analysed() -> None:
    additivity = verdict(WITH_NUMBERS["additive numbers"])
    assert additivity is not None and additivity.whole and len(additivity.fixed) == 2
    assert [leaf.power for leaf in additivity.leaves if leaf] == [1, 1, None, None, 0]
    assert additivity.leaves[3] == loss_additivity.Leaf(rows=0)


def far(value: Any, reference: Any) -> float:
    if not isinstance(value, Tensor) or not isinstance(reference, Tensor) or value.shape != reference.shape:
        return 0.0 if type(value) is type(reference) and value == reference else float("inf")
    value, reference = value.detach(), reference.detach()
    return float((value - reference).abs().max() / reference.abs().max().clamp(min=1e-30))


def total_of(out: Any) -> Tensor:
    """The loss; without one, a sum over all differentiable outputs."""
    loss = loss_of(out)
    if loss is not None:
        return loss
    parts = [leaf.square().sum() for leaf in pytree.tree_leaves(out) if leaf.requires_grad]
    return torch.stack(parts).sum()


def run(
    rank: int, size: int, names: list[str], schedule: str, outputs: str, count: int = 4
) -> list[tuple[str, float, float, int]]:
    """Per case: (name, largest distance of an output, of a gradient, most microbatches alive)."""
    cases = []
    for name in names:
        judge = (ADDING | WHOLE | OUTSIDE | WITH_NUMBERS)[name]
        single = judged(judge)
        many = pipeline(judged(judge), judged_plan(schedule, outputs=outputs, microbatches=count))
        single_parameters = dict(single.named_parameters(remove_duplicate=False))
        values = gradients = 0.0
        for step in range(2):
            want, got = single(**judged_batch(step)), many(**judged_batch(step))
            for model, out in ((single, want), (many, got)):
                model.zero_grad()
                (2 * total_of(out)).backward()
            values = max(values, far(loss_of(got), loss_of(want)))
            if outputs == "all" or loss_of(want) is None:
                leaves = zip(pytree.tree_leaves(got), pytree.tree_leaves(want), strict=True)
                values = max(values, *(far(a, b) for a, b in leaves))
            for parameter, p in many.named_parameters():
                gradients = max(gradients, far(p.grad, single_parameters[parameter].grad))
        held = call_of(many).last.most_alive
        with torch.no_grad():
            want, got = single.eval()(**judged_batch(2)), many.eval()(**judged_batch(2))
        leaves = zip(pytree.tree_leaves(got), pytree.tree_leaves(want), strict=True)
        values = max(values, *(far(a, b) for a, b in leaves))
        cases.append((name, values, gradients, held))
    return cases


def check(ranks: list[list[tuple[str, float, float, int]]]) -> None:
    for cases in ranks:
        for name, values, gradients, _ in cases:
            assert values < LIMIT and gradients < LIMIT, (name, values, gradients)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["1f1b", "zero-bubble"])
def test_losses_match_one_device(rank_pool: RankPool, schedule: str) -> None:
    ranks = rank_pool.run(2, run, [*ADDING, *WHOLE], schedule, "loss", timeout=300)
    check(ranks)
    if schedule == "1f1b":
        held = {name: number for name, _, _, number in ranks[0]}
        assert {held[name] for name in ADDING} == {2}  # backwards start before the last forward has ended
        assert {held[name] for name in WHOLE} == {4}


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved"])
def test_output_numbers_match_one_device(rank_pool: RankPool, schedule: str) -> None:
    check(rank_pool.run(2, run, [*OUTSIDE], schedule, "loss", timeout=300))
    check(rank_pool.run(2, run, [*WITH_NUMBERS, "products", "sum"], schedule, "all", timeout=300))


def wrong(rank: int, size: int, name: str) -> float:
    """Distance of a plain mean over microbatches."""
    many = pipeline(judged(ADDING[name]), judged_plan("1f1b"))
    call_of(many).preparation.additivity = lambda prepared, whole: loss_additivity.Additivity(
        loss_additivity.Leaf(power=0), ()
    )
    return far(loss_of(many(**judged_batch(0))), loss_of(judged(ADDING[name])(**judged_batch(0))))


class Balanced(nn.Module):
    """Each block returns a number computed from all rows."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
        self.gates = nn.ModuleList(Gate() for _ in range(4))
        self.scale = scale

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        total = x.new_zeros(())
        for layer, gate in zip(self.layers, self.gates, strict=True):
            x, number = gate(torch.tanh(layer(x)))
            total = total + number
        return x.square().mean() + self.scale * total, x


class Gate(nn.Linear):
    def __init__(self) -> None:
        super().__init__(6, 6)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        shares = super().forward(x).softmax(-1)
        return x * shares, shares.mean(0).square().sum()


def refuse(rank: int, size: int, count: int) -> Any:
    def built() -> Balanced:
        torch.manual_seed(0)
        return Balanced(0.1)

    plan = judged_plan("1f1b", microbatches=count)
    stages = (("layers.[01]", "gates.[01]"), ("layers.[23]", "gates.[23]"))
    assert plan.pipeline is not None
    plan = plan.replace(pipeline=plan.pipeline.model_copy(update={"stages": stages}))
    x = torch.randn(8, 6, generator=torch.Generator().manual_seed(1))
    single, many = built(), pipeline(built(), plan)
    try:
        got = many(x)[0]
    except PlanError as error:
        return str(error)
    want = single(x)[0]
    for loss in (got, want):
        loss.backward()
    single_parameters = dict(single.named_parameters())
    return max(
        far(got, want), *(far(p.grad, single_parameters[name].grad) for name, p in many.named_parameters())
    )


def test_numbers_that_units_compute_from_rows_are_refused(rank_pool: RankPool) -> None:
    """A unit has computed them from one microbatch; the value for the batch does not follow."""
    for told in rank_pool.run(2, refuse, 4):
        assert "module 'gates.0' computes a row differently when other rows of the batch are present" in told
        assert "use one microbatch" in told
    assert max(rank_pool.run(2, refuse, 1)) < LIMIT


@pytest.mark.parametrize("name", ["sum", "by hand", "by valid targets", "class weights"])
def test_plain_mean_over_microbatches_is_wrong(rank_pool: RankPool, name: str) -> None:
    """The negative control."""
    assert not min(rank_pool.run(2, wrong, name)) < 100 * LIMIT


class Warming(nn.Module):
    """Computes another loss in its third step."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = judged(ADDING["mean"])
        self.warm: bool = False

    def forward(self, ids: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
        logits = self.inner.chain(ids)["logits"]
        loss = mean(logits, labels)
        return loss * logits.square().mean().sqrt() if self.warm else loss


def warm_up(rank: int, size: int, kind: type) -> tuple[list[str], list[float]]:
    """The error of each step, and how far its loss is from that of one device. A number is no flag."""
    plan = judged_plan("1f1b")
    assert plan.pipeline is not None
    stages = tuple(tuple(f"inner.{name}" for name in stage) for stage in plan.pipeline.stages)
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(Warming())
    single, many = models
    pipeline(many, plan.replace(pipeline=plan.pipeline.model_copy(update={"stages": stages})))
    told, off = [], []
    for step in range(4):
        single.warm = many.warm = kind(step == 2)
        try:
            loss = many(**judged_batch(step))
            loss.backward()
            told.append("")
            off.append(far(loss, single(**judged_batch(step))))
        except StageError as error:
            told.append(str(error))
    return told, off


@pytest.mark.slow
def test_loss_that_changes_later_is_refused(rank_pool: RankPool) -> None:
    for (first, second, third, fourth), _ in rank_pool.run(2, warm_up, int):
        assert not first and not second and not fourth
        assert "runs other operations than in the first step" in third


@pytest.mark.slow
def test_loss_that_changes_with_a_flag_is_that_of_one_device(rank_pool: RankPool) -> None:
    for told, off in rank_pool.run(2, warm_up, bool):
        assert told == [""] * 4
        assert max(off) < LIMIT


def counted_steps(rank: int, size: int) -> list[tuple[float, float, int] | str]:
    """Of each step: distances of the loss and of a gradient from one device, and forwards that count targets; or its error."""
    hidden, counted = [0], [0]

    def judge(model: Any, x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        least = model.least + hidden[0]
        return mean(x, y.masked_fill(y < least, -100) if least else y)

    def counting(*args: Any) -> Any:
        counted[0] += 1
        return count(*args)

    single, whole = judged(judge), judged(judge)
    single.least = whole.least = 0
    many = pipeline(whole, judged_plan("1f1b", microbatches=4))
    count, Stage.count = Stage.count, counting  # type: ignore[method-assign]
    steps: list[tuple[float, float, int] | str] = []
    # seen by the forward alone in the last two
    for step, (least, unseen) in enumerate([(0, 0), (0, 0), (9, 0), (9, 0), (0, 0), (0, 0), (0, 9), (0, 9)]):
        single.least = many.least = least
        hidden[0], counted[0] = unseen, 0
        for model in (single, many):
            model.zero_grad()
        want = single(**judged_batch(step))
        want.backward()
        try:
            got = many(**judged_batch(step))
            got.backward()
        except StageError as error:
            steps.append(str(error))
            continue
        parameters = dict(single.named_parameters(remove_duplicate=False))
        apart = max(far(p.grad, parameters[name].grad) for name, p in many.named_parameters())
        steps.append((far(got, want), apart, counted[0]))
    Stage.count = count  # type: ignore[method-assign]
    return steps


def test_targets_that_an_input_holds_are_counted_without_a_forward(rank_pool: RankPool) -> None:
    """Once a step has shown it. A forward that then takes other targets ends its step, and the next one counts by forwards."""
    for rank, steps in enumerate(rank_pool.run(2, counted_steps)):
        failed = steps.pop(6)
        assert isinstance(failed, str) and "targets a microbatch" in failed
        assert all(isinstance(step, tuple) and max(step[:2]) < LIMIT for step in steps), steps
        forwards = [step[2] for step in steps if isinstance(step, tuple)]
        # changed targets are in no input
        assert forwards == ([4, 0, 4, 4, 4, 0, 4] if rank else [0] * 7)
