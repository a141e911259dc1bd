"""Models whose rows interact run as one microbatch and then match one device. Others are split."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from mixing_models import (
    BY_ROW,
    KEEPS,
    MIXING,
    WRITES,
    batch,
    changed,
    plan,
    writing,
)
from pipe_models import Chain, Crossed, chain_batch, crossed_batch
from torch import Tensor, nn

from meshwright_dtensor.errors import PlanError
from meshwright_dtensor.strategy import Link, ModuleWork, PipelineQuery, SearchRequest, StrategyCost
from meshwright_dtensor.testing.rank_pool import RankPool
from meshwright_pipeline import call_of, pipeline
from meshwright_pipeline.analysis import row_mixing
from meshwright_pipeline.analysis.row_mixing import CannotSplit, find_row_mixing
from meshwright_pipeline.analysis.stub_weights import StubMode
from meshwright_pipeline.partition.units import find_units
from meshwright_pipeline.strategy import Pipeline

LINK = Link("test", 1e-6, 1e9)
LIMIT = 1e-5


def found(model: nn.Module, given: dict[str, Tensor] | None = None) -> CannotSplit | None:
    return find_row_mixing(model, find_units(model).names, ((), batch() if given is None else given))


# ---- the trial
@pytest.mark.parametrize("inside", [True, False], ids=["inside", "between"])
@pytest.mark.parametrize("name", MIXING)
def test_row_mixing_is_found(name: str, inside: bool) -> None:
    told = found(changed(MIXING[name], inside))
    assert told is not None
    assert told.why.startswith(
        "module 'layers.1' computes" if inside else "the code before module 'layers.1' combines"
    )


@pytest.mark.parametrize("inside", [True, False], ids=["inside", "between"])
@pytest.mark.parametrize("name", BY_ROW)
def test_batch_independent_code_is_accepted(name: str, inside: bool) -> None:
    assert found(changed(BY_ROW[name], inside)) is None


@pytest.mark.parametrize("inside", [True, False], ids=["inside", "between"])
@pytest.mark.parametrize("name", WRITES)
def test_state_written_by_every_forward_is_found(name: str, inside: bool) -> None:
    attribute, write = WRITES[name]
    told = found(writing(write, inside))
    whose = "module 'layers.1'" if inside else "the model"
    assert told is not None and told.why.startswith(f"{whose} writes to its {attribute!r} in every forward")


@pytest.mark.parametrize("name", KEEPS)
def test_state_unchanged_by_a_second_run_is_accepted(name: str) -> None:
    assert found(writing(KEEPS[name])) is None and found(writing(KEEPS[name], False)) is None


@pytest.mark.parametrize("rows", [2, 3, 8])
def test_row_mixing_is_found_with_few_rows(rows: int) -> None:
    given = {name: value[:rows] for name, value in batch().items()}
    assert found(changed(MIXING["mean"], True), given) is not None
    assert found(changed(BY_ROW["experts"], True), given) is None
    assert found(changed(MIXING["mean"], True), {name: value[:1] for name, value in batch().items()}) is None


def test_equal_rows_are_made_distinct() -> None:
    given = {name: torch.ones_like(value) for name, value in batch().items()}
    assert found(changed(MIXING["mean"], True), given) and found(changed(MIXING["mean"], False), given)


def test_neither_model_nor_batch_need_values() -> None:
    with torch.device("meta"):
        mixed, plain = changed(MIXING["mean"], True), changed(BY_ROW["experts"], False)
    empty = {name: torch.empty_like(value, device="meta") for name, value in batch().items()}
    assert found(mixed, empty) is not None and found(plain, empty) is None
    assert all(p.is_meta for p in mixed.parameters())


class Scaled(nn.Module):
    """Passes a scalar that code between units computes from the rows to a unit."""

    def __init__(self, of_rows: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Times() for _ in range(3))
        self.of_rows = of_rows

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        scale = x.abs().max() if self.of_rows else torch.tensor(2.0)
        for layer in self.layers:
            x = layer(x, scale)
        return (x - y).square().mean()


class Times(nn.Linear):
    def __init__(self) -> None:
        super().__init__(6, 6)

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        return super().forward(x) * scale


def test_scalar_arguments_count_only_if_the_unit_uses_them() -> None:
    told = found(Scaled(True))
    assert told is not None and "module 'layers.0'" in told.why
    assert found(Scaled(False)) is None


class Handing(nn.Module):
    """A unit returns a scalar computed from the rows, and the next unit uses it."""

    def __init__(self, taken: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Summing() for _ in range(3))
        self.taken = taken

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        number = x.new_zeros(())
        for layer in self.layers:
            x, now = layer(x, number)
            number = now if self.taken else number
        return (x - y).square().mean()


class Summing(nn.Linear):
    def __init__(self) -> None:
        super().__init__(6, 6)

    def forward(self, x: Tensor, number: Tensor) -> tuple[Tensor, Tensor]:
        x = super().forward(x) + number
        return x, x.mean()


def test_scalars_between_units_are_compared() -> None:
    assert found(Handing(True)) is not None and found(Handing(False)) is None


class Returning(Handing):
    """A scalar of a unit is part of the result."""

    def forward(self, x: Tensor, y: Tensor) -> Any:
        x, number = self.layers[0](x, x.new_zeros(()))
        return (x - y).square().mean(), number


def test_scalars_of_units_in_the_result_are_compared() -> None:
    assert found(Returning(True)) is not None


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_ordinary_models_are_accepted(dropout: float) -> None:
    assert found(Chain(dropout=dropout), chain_batch()) is None
    assert found(Crossed(), crossed_batch()) is None


def test_dropout_without_stub_mode_looks_like_row_mixing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control: dropout makes rows differ."""

    class Moving(row_mixing.StubMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **(kwargs or {}))

    monkeypatch.setattr(row_mixing, "StubMode", Moving)
    assert found(Chain(dropout=0.5), chain_batch()) is not None


def test_trial_leaves_model_and_generators_unchanged() -> None:
    torch.manual_seed(3)
    model, seen = writing(WRITES["running mean"][1]), []
    model.layers[0].register_forward_hook(lambda *given: seen.append(given))
    states = torch.get_rng_state(), random.getstate()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    assert found(model) is not None
    assert torch.equal(torch.get_rng_state(), states[0]) and random.getstate() == states[1]
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not seen and len(model.layers[0]._forward_hooks) == 1


class Wide(nn.Module):
    """Blocks of billions of parameters."""

    def __init__(self, change: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.start = nn.Embedding(100_000, 16384)
        self.layers = nn.ModuleList(Inner(change) for _ in range(2))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.start(ids)
        for layer in self.layers:
            x = x + layer(x)
        return x.square().mean()


class Inner(nn.Module):
    def __init__(self, change: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16384)
        self.up, self.down = nn.Linear(16384, 65536), nn.Linear(65536, 16384, bias=False)
        self.change = change

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.change(torch.relu(self.up(self.norm(x)))))


def test_row_mixing_is_found_in_blocks_of_any_size() -> None:
    ids = {"ids": torch.zeros(4, 64, dtype=torch.long)}
    with torch.device("meta"):
        mixed, plain = Wide(lambda x: x - x[..., -1:].mean(0)), Wide(lambda x: x - x.mean(-1, keepdim=True))
    assert found(mixed, ids) is not None and found(plain, ids) is None


class Image(nn.Module):
    """Wide convolutions in a unit, with `change` between them."""

    def __init__(self, change: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.layers = nn.Conv2d(3, 64, 3), nn.ModuleList(Images(change) for _ in range(2))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        x = self.first(x)
        for layer in self.layers:
            x = x + layer(x)
        return {"loss": x.square().mean()}


class Images(nn.Module):
    def __init__(self, change: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.down = nn.Conv2d(64, 96, 3, stride=2, padding=1)
        self.up = nn.ConvTranspose2d(96, 64, 4, stride=2, padding=1)
        self.change = change

    def forward(self, x: Tensor) -> Tensor:
        return self.up(self.change(torch.relu(self.down(x))))


def test_row_mixing_is_found_between_wide_convolutions() -> None:
    batch = {"x": torch.zeros(4, 3, 10, 10)}
    mixed = Image(lambda x: x - x[:, :1, :1, :1].mean(0))
    plain = Image(lambda x: x - x.mean((1, 2, 3), keepdim=True))
    assert found(mixed, batch) is not None and found(plain, batch) is None


@pytest.mark.parametrize("kind", [nn.Conv1d, nn.Conv2d, nn.ConvTranspose2d, nn.Conv3d])
@pytest.mark.parametrize("channels", [(48, 40), (33, 65)])
def test_reduced_convolution_uses_every_channel(kind: type[nn.Conv2d], channels: tuple[int, int]) -> None:
    layer = kind(*channels, 3, stride=2, padding=1, dilation=1)
    dims = layer.weight.dim() - 2
    x = torch.randn(2, channels[0], *[7] * dims)
    with torch.no_grad():
        real = layer(x)
        with StubMode():
            made, other = layer(x), layer(x.index_fill(1, torch.tensor(channels[0] - 1), 0.0))
            alone = layer(x[:1])
    assert made.shape == real.shape and not torch.equal(made, other)
    torch.testing.assert_close(made[:1], alone)
    inner = made.flatten(2)[..., made.flatten(2).shape[-1] // 2]
    assert bool((inner != layer.bias).all())
    assert 0.2 < float(made.std() / real.std()) < 5


# ---- plans
def cost(model: nn.Module, **options: object) -> StrategyCost:
    work = tuple(ModuleWork(f"layers.{i}", 1.0, 64.0) for i in range(4))
    request = SearchRequest(
        2,
        8,
        options={"schedule": "1f1b", **options},
        survey=Pipeline().survey(model),
        pipeline=PipelineQuery(work=work),
    )
    request = replace(request, pipeline=replace(request.pipeline, example=((), batch())))
    if not options:
        counts = {way["microbatches"] for way in Pipeline().ways(request, 2)}
        assert counts == {1} or 1 not in counts
    return Pipeline().cost(request, 2, LINK)


@pytest.mark.parametrize(
    ("model", "why"),
    [
        (changed(MIXING["mean"], True), "module 'layers.1' computes a row differently"),
        (changed(MIXING["roll"], False), "the code before module 'layers.1' combines several rows"),
        (writing(WRITES["calls"][1]), "module 'layers.1' writes to its 'calls'"),
    ],
    ids=["inside", "between", "writes"],
)
def test_row_mixing_models_are_planned_with_one_microbatch(model: nn.Module, why: str) -> None:
    costed = cost(model)
    (note,) = costed.notes
    assert costed.fields["pipeline"]["microbatches"] == 1
    assert "one microbatch, so that its ranks compute one after the other" in note and why in note
    with pytest.raises(PlanError, match=f"microbatches is 4: {why}.*or use one microbatch; nearest legal: 1"):
        cost(model, microbatches=4)


def test_other_models_are_planned_with_several_microbatches() -> None:
    costed = cost(changed(BY_ROW["experts"], True))
    assert not costed.notes and costed.fields["pipeline"]["microbatches"] > 1


# ---- steps
def far(tensor: Tensor, other: Tensor) -> float:
    return float((tensor - other).detach().abs().max() / other.detach().abs().max().clamp(min=1e-30))


def step(rank: int, size: int, cases: list[tuple[str, bool]], count: int, looks: bool = True) -> list[Any]:
    """For each case the largest distance of loss and gradients to one device, or the error."""
    made: list[Any] = []
    for name, inside in cases:
        change = (MIXING | BY_ROW)[name]
        single, many = changed(change, inside), pipeline(changed(change, inside), plan(count))
        if not looks:
            call_of(many).preparation.check_rows = lambda whole: None
        try:
            got = many(**batch())
        except PlanError as error:
            made.append(str(error))
            continue
        want = single(**batch())
        for loss in (got, want):
            loss.backward()
        expected = dict(single.named_parameters())
        gradients = (far(p.grad, expected[n].grad) for n, p in many.named_parameters())
        made.append(max(far(got, want), *gradients))
    return made


CASES = [(name, inside) for name in MIXING for inside in (True, False)]


@pytest.mark.slow
def test_several_microbatches_are_rejected_before_the_first_step(rank_pool: RankPool) -> None:
    for told in rank_pool.run(2, step, CASES, 4):
        for (_, inside), text in zip(CASES, told, strict=True):
            where = "module 'layers.1'" if inside else "the code before module 'layers.1'"
            assert f"plan field pipeline.microbatches is 4: {where}" in text and "nearest legal: 1" in text


@pytest.mark.slow
def test_one_microbatch_matches_one_device(rank_pool: RankPool) -> None:
    for distances in rank_pool.run(2, step, CASES, 1):
        assert max(distances) < LIMIT


@pytest.mark.slow
def test_results_are_wrong_without_the_check(rank_pool: RankPool) -> None:
    """The negative control."""
    first, second = rank_pool.run(2, step, CASES, 4, False)
    assert min(map(max, zip(first, second, strict=True))) > 100 * LIMIT


@pytest.mark.slow
def test_batch_independent_models_match_one_device_in_microbatches(rank_pool: RankPool) -> None:
    cases = [(name, inside) for name in BY_ROW for inside in (True, False)]
    for distances in rank_pool.run(2, step, cases, 4):
        assert max(distances) < LIMIT


def written(
    rank: int, size: int, names: list[str], count: int, inside: bool, looks: bool = True
) -> dict[str, Any]:
    """For each case whether two steps wrote the same as one device, if this rank holds it; or the error."""
    made: dict[str, Any] = {}
    for name in names:
        attribute, write = WRITES[name]
        single, many = writing(write, inside), pipeline(writing(write, inside), plan(count))
        if not looks:
            call_of(many).preparation.check_rows = lambda whole: None
        try:
            for number in range(2):
                many(**batch(number))
                single(**batch(number))
        except PlanError as error:
            made[name] = str(error)
            continue
        if inside and rank:
            continue  # the second block is on the first rank
        ours, other = (many.layers[1], single.layers[1]) if inside else (many, single)
        # as the next forward sees it
        with call_of(many).left.shown(many, torch.device("cpu")):
            value, two = (torch.as_tensor(getattr(m, attribute), dtype=torch.float64) for m in (ours, other))
        made[name] = value.shape == two.shape and far(value, two) < LIMIT
    return made


@pytest.mark.slow
@pytest.mark.parametrize("inside", [True, False], ids=["inside", "between"])
def test_written_state_matches_one_device(rank_pool: RankPool, inside: bool) -> None:
    for told in rank_pool.run(2, written, [*WRITES], 4, inside):
        assert all("microbatches is 4" in text and "in every forward" in text for text in told.values())
    for same in rank_pool.run(2, written, [*WRITES], 1, inside):
        assert all(value is True for value in same.values()), same


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:the schedule")
@pytest.mark.parametrize("inside", [True, False], ids=["inside", "between"])
def test_written_state_differs_without_the_check(rank_pool: RankPool, inside: bool) -> None:
    """The negative control. Expert counts would be additive, and code after the units runs on the whole batch, once for a list."""
    names = [n for n in WRITES if n != "load" and (inside or n not in ("mean of the batch", "list"))]
    for same in rank_pool.run(2, written, names, 4, inside, False):
        assert not any(same.values()), same
