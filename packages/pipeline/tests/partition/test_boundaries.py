"""Units, tensors that cross stage boundaries, and the choice of boundaries."""

from __future__ import annotations

import copy
import itertools
import random
from types import SimpleNamespace

import pytest
import torch
from pipe_models import WIDTH, Chain, Crossed, chain_batch, chain_plan, crossed_batch, crossed_plan
from torch import nn

from meshwright_dtensor.errors import PlanError
from meshwright_dtensor.plan import ParallelPlan, PipelineRule, RecomputeRule
from meshwright_dtensor.strategy import Link, ModuleWork, PipelineQuery, SearchRequest
from meshwright_dtensor.testing.rank_pool import RankPool
from meshwright_pipeline import pipeline
from meshwright_pipeline.install.division import check_division
from meshwright_pipeline.partition.boundaries import cut
from meshwright_pipeline.partition.units import find_units, ownership
from meshwright_pipeline.planning.stage_costs import linear_partition
from meshwright_pipeline.planning.unit_costs import NO_WORK, sum_work
from meshwright_pipeline.strategy import Pipeline
from meshwright_pipeline.trace.meta_model import skeleton
from meshwright_pipeline.trace.profiler import Profiler


def test_units_are_blocks_and_single_modules() -> None:
    units = find_units(Chain())
    assert units.names == ("embed", "drop", "layers.0", "layers.1", "layers.2", "layers.3", "norm", "head")
    assert units.free == ("scale",)


def test_results_used_after_a_boundary_cross_it() -> None:
    model, plan = Crossed(), crossed_plan()
    owned = ownership(model, plan.pipeline)
    before = torch.get_rng_state()
    profile = Profiler(skeleton(model, owned.units), owned.units).run((), crossed_batch())
    assert torch.equal(before, torch.get_rng_state())
    made = cut(profile, owned)
    assert [[label[0] for label in sent] for sent in made.crossing] == [
        ["encoder.1"],
        ["encoder.1", "start", "decoder.0"],
        ["encoder.1", "start", "decoder.1"],
    ]


class Residual(nn.Module):
    """Its loss is in an object that pytree does not know, and depends on the first layer's output."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: torch.Tensor) -> SimpleNamespace:
        first = x = self.layers[0](x)
        for layer in self.layers[1:]:
            x = torch.tanh(layer(x))
        return SimpleNamespace(loss=x.square().mean() + first.square().mean())


def test_inputs_of_a_loss_in_an_object_cross() -> None:
    model, rule = Residual(), PipelineRule(stages=[["layers.[01]"], ["layers.[23]"]], microbatches=2)
    owned = ownership(model, rule)
    made = cut(
        Profiler(skeleton(model, owned.units), owned.units).run((), {"x": torch.randn(2, WIDTH)}), owned
    )
    assert [label[0] for label in made.crossing[0]] == ["layers.0", "layers.1"]


def residual(rank: int, size: int) -> tuple[float, float]:
    """The loss of a step, and of one device."""
    torch.manual_seed(1)
    single, x = Residual(), torch.randn(8, WIDTH)
    many = copy.deepcopy(single)
    rule = PipelineRule(stages=[["layers.[01]"], ["layers.[23]"]], microbatches=2)
    pipeline(many, ParallelPlan(world_size=2, degrees={"pp": 2}, pipeline=rule))
    return many(x).loss.item(), single(x).loss.item()


def test_loss_in_an_object_matches_one_device(rank_pool: RankPool) -> None:
    for many, single in rank_pool.run(2, residual):
        assert many == pytest.approx(single, rel=1e-6)


class Twice(nn.Module):
    """Passes two batches through the same layers, in sequence or together."""

    def __init__(self, together: bool, layers: int = 2) -> None:
        super().__init__()
        self.layers, self.together = nn.ModuleList(nn.Linear(4, 4) for _ in range(layers)), together

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x

    def forward(self, first: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        if self.together:
            first, other = self.encode(torch.cat([first, other])).chunk(2)
        else:
            first, other = self.encode(first), self.encode(other)
        return (first - other).square().mean()


def test_error_for_repeated_calls_suggests_a_single_call() -> None:
    def divided(together: bool, stages: list[list[str]]) -> list[int]:
        model, rule = Twice(together), PipelineRule(stages=stages, microbatches=2)
        owned = ownership(model, rule)
        batch = {"first": torch.randn(2, 4), "other": torch.randn(2, 4)}
        made = cut(Profiler(skeleton(model, owned.units), owned.units).run((), batch), owned)
        return sorted(made.stage.values())

    for stages in ([["layers.0"], ["layers.1"]], [["layers"], ["layers.0"]]):
        with pytest.raises(PlanError, match=r"all rows \(torch.cat\)"):
            divided(False, stages)
    assert divided(True, [["layers.0"], ["layers.1"]]) == [0, 1]
    # if both stages hold the layers, the calls are divided
    assert divided(False, [["layers"], ["layers"]]) == [0, 0, 1, 1]
    assert divided(False, [["layers.0"], ["layers"]]) == [0, 1, 1, 1]
    assert divided(False, [["layers"], ["layers.1"]]) == [0, 0, 0, 1]


def train_twice(rank: int, size: int) -> float:
    """Largest distance of a loss or gradient to one device if both stages hold all layers."""
    worst, models = 0.0, []
    for parallel in (False, True):
        torch.manual_seed(0)
        model: nn.Module = Twice(False)
        models.append(pipeline(model, plan_of(stages=[["layers"], ["layers"]])) if parallel else model)
    for number in range(2):
        first, other = torch.randn(2, 8, 4, generator=torch.Generator().manual_seed(number))
        losses = [model(first, other) for model in models]
        worst = max(worst, abs(float(losses[0] - losses[1])) / float(losses[0]))
        for loss in losses:
            loss.backward()
    expected = dict(models[0].named_parameters())
    far = [
        (p.grad - expected[n].grad).abs().max() / expected[n].grad.abs().max()
        for n, p in models[1].named_parameters()
    ]
    return max(worst, *map(float, far))


@pytest.mark.slow
def test_layers_on_two_stages_match_one_device(rank_pool: RankPool) -> None:
    assert max(rank_pool.run(2, train_twice)) < 1e-5


@pytest.mark.parametrize("layers", [2, 3, 4])
def test_plan_with_repeated_calls_can_be_cut(layers: int) -> None:
    model = Twice(False, layers)
    work = tuple(ModuleWork(f"layers.{i}", 1.0, 64.0) for _ in range(2) for i in range(layers))
    request = SearchRequest(
        2, 8, options={"schedule": "1f1b"}, survey=Pipeline().survey(model), pipeline=PipelineQuery(work=work)
    )
    rule = Pipeline().cost(request, 2, Link("test", 1e-6, 1e9)).fields["pipeline"]
    owned = ownership(model, PipelineRule(stages=rule["stages"], microbatches=2))
    batch = {"first": torch.randn(2, 4), "other": torch.randn(2, 4)}
    made = cut(Profiler(skeleton(model, owned.units), owned.units).run((), batch), owned)
    assert sorted(made.stage.values()) == [0] * layers + [1] * layers


def test_skeleton_takes_no_memory_and_keeps_the_model() -> None:
    model = Chain()
    copied = skeleton(model, find_units(model).names)
    assert {name for name, _ in nn.Module.named_parameters(copied)} == {"scale"}
    with pytest.raises(RuntimeError, match="read between units"):
        list(copied.parameters())
    assert copied.embed.weight.is_meta and not model.embed.weight.is_meta


@pytest.mark.parametrize("seed", range(20))
def test_linear_partition_is_optimal(seed: int) -> None:
    """Uneven blocks and a heavy head: equal to brute force."""
    random.seed(seed)
    count = random.randint(2, 4)
    costs = [random.choice([1.0, 1.0, 2.5]) for _ in range(random.randint(count, 9))] + [6.0]

    def slowest(cuts: tuple[int, ...]) -> float:
        return max(sum(costs[a:b]) for a, b in itertools.pairwise((0, *cuts, len(costs))))

    best = min(slowest(c) for c in itertools.combinations(range(1, len(costs)), count - 1))
    assert slowest(tuple(linear_partition(costs, count))) == pytest.approx(best)


def plan_of(**rule: object) -> ParallelPlan:
    return ParallelPlan(world_size=2, degrees={"pp": 2}, pipeline=PipelineRule(**rule))


@pytest.mark.parametrize(
    ("stages", "shared", "message"),
    [
        ([["embed", "drop", "layers.9"], ["head"]], [], "layers.9"),
        ([["embed", "layers.[01]"], ["layers.[23]", "norm"]], [], "'head' has parameters and is in no stage"),
        ([["drop"], ["embed", "layers.*", "norm", "head"]], [], "a stage needs a module with parameters"),
        ([["embed", "layers.[01]"], ["layers.[23]", "norm", "head"]], ["nothing"], "pipeline.shared"),
    ],
)
def test_error_names_the_plan_field(stages: object, shared: object, message: str) -> None:
    with pytest.raises(PlanError) as caught:
        check_division(Chain(), plan_of(stages=stages, shared=shared))
    assert message in str(caught.value)


@pytest.mark.parametrize("tracks", [True, False])  # with no statistics of its own, in eval() too
def test_batch_norm_with_microbatches_is_rejected(tracks: bool) -> None:
    norms = (torch.nn.BatchNorm1d(4, track_running_stats=tracks) for _ in range(2))
    model = torch.nn.Sequential(*norms).train(tracks)
    with pytest.raises(PlanError, match="normalises by the whole batch"):
        check_division(model, plan_of(stages=[["0"], ["1"]], microbatches=2))
    check_division(model, plan_of(stages=[["0"], ["1"]], microbatches=1))


def test_half_precision_without_a_scaler_is_rejected() -> None:
    with pytest.raises(PlanError, match="take bf16"):
        check_division(Chain(), chain_plan().replace(precision={"parameters": "fp16"}))


def test_descending_stage_order_is_rejected() -> None:
    model = Chain()
    stages = [["layers.[01]", "norm", "head"], ["embed", "layers.[23]"]]
    owned = ownership(model, plan_of(stages=stages).pipeline)
    profile = Profiler(skeleton(model, owned.units), owned.units).run((), chain_batch())
    with pytest.raises(PlanError, match="after stage 1 has begun"):
        cut(profile, owned)


def test_fields_are_checked_and_explained() -> None:
    plan = chain_plan()
    assert ParallelPlan.from_json(plan.to_json()) == plan
    assert "pipeline: 2 stages, 4 microbatches a step, schedule 1f1b" in plan.explain()
    assert any("pipeline.microbatches: 4 -> 8" in line for line in plan.diff(chain_plan(microbatches=8)))
    with pytest.raises(PlanError, match="equally many stages"):
        plan.replace(degrees={"pp": 3}, world_size=3).validate_for()
    with pytest.raises(PlanError, match="need stages"):
        check_division(Chain(), plan.replace(pipeline=None))
    with pytest.raises(PlanError, match="add pp to degrees"):
        plan.replace(degrees={"dp": 2}).validate_for()


def test_unsupported_standalone_plan_is_rejected() -> None:
    with pytest.raises(PlanError, match=r"plan field recompute .*use meshwright_parallel.parallelize"):
        pipeline(Chain(), chain_plan().replace(recompute=(RecomputeRule(pattern="layers.*"),)))


def test_sum_work_equals_adding_part_by_part() -> None:
    draw = random.Random(0)

    def part() -> ModuleWork:
        shared = frozenset((draw.randrange(4), 8.0 * draw.randrange(9)) for _ in range(draw.randrange(3)))
        taken = frozenset((draw.randrange(9), "made", 4) for _ in range(draw.randrange(3)))
        numbers = [float(draw.randrange(100)) for _ in range(4)]
        return ModuleWork(
            "m", numbers[0], numbers[1], frozenset(), taken, shared, numbers[2], numbers[3], 0.25
        )

    for _ in range(50):
        parts = [part() for _ in range(6)]
        one_by_one = NO_WORK
        for each in parts:
            one_by_one = one_by_one.then(sum_work("", [each]))
        assert sum_work("", parts) == one_by_one == sum_work("", parts[2:], sum_work("", parts[:2]))
        # transient bytes exist together with the bytes kept so far, not with later ones
        assert one_by_one.over >= parts[-1].transient_bytes
