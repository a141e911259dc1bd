"""A script of transformers' Trainer trains to the numbers of one device, and resumes from any checkpoint of either."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import meshwright as mw
from meshwright_dtensor.testing.rank_pool import RankPool

from .plans import LIMITS, PLANS, check

pytest.importorskip("accelerate")

from transformers import Trainer, TrainingArguments

from .accelerate_script import model, samples
from .trainer_script import on_rank, one_device


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, dict[str, Any]], Path]:
    """The results of one device by precision, and where the folders of these runs are."""
    folder = tmp_path_factory.mktemp("one")
    return {precision: one_device(precision, folder / precision) for precision in LIMITS}, folder


# precision, plan (None: the plain Trainer on one device), and the plan of the run that goes on from its checkpoint
CASES = [("no", "zero3", "pp2"), ("bf16", None, "tp2")]


@pytest.mark.parametrize(("precision", "plan", "later"), CASES)
def test_trainer_has_the_numbers_of_one_device(
    rank_pool: RankPool, tmp_path: Path, alone: Any, precision: str, plan: str | None, later: str
) -> None:
    results, plain = alone
    exact, limit, start = results[precision], LIMITS[precision], plain / precision
    if plan is not None:
        start = tmp_path / "start"
        check(rank_pool.run(2, on_rank, plan, precision, start), exact, limit)
    resumed = rank_pool.run(2, on_rank, later, precision, tmp_path / "later", start)
    assert len(resumed[0]["losses"]) == 2
    check(resumed, exact, limit)


@pytest.mark.parametrize(
    ("optim", "given", "expected"),
    [
        ("adamw_torch_4bit", {"zero": 2}, {"zero": 2, "optimizer": "adamw4bit"}),
        ("adamw_bnb_8bit", {"optimizer": "sgd"}, {"optimizer": "sgd"}),
        ("adamw_torch", {}, {}),
    ],
)
def test_the_plan_knows_quantized_optimizers(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    optim: str,
    given: dict[str, Any],
    expected: dict[str, Any],
) -> None:
    from meshwright.integrations import transformers as ours

    keywords_given: list[dict[str, Any]] = []
    monkeypatch.setattr(
        ours, "auto_parallelize", lambda model, batch, **keywords: keywords_given.append(keywords)
    )
    monkeypatch.setattr(ours.ParallelTrainer, "_becomes_parallel", lambda self, model: True)
    monkeypatch.setattr(ours.ParallelTrainer, "_call_of", lambda self, batch: batch)
    trainer: Any = object.__new__(ours.ParallelTrainer)
    trainer.model, trainer._parallel = None, given
    trainer.args = TrainingArguments(str(tmp_path), use_cpu=True, report_to=[], optim=optim)
    trainer._make_parallel(lambda: [{}])
    assert keywords_given == [expected]


def misused(rank: int, size: int, folder: Path) -> list[str]:
    """The lines that a user of transformers reads who has left out ours, or has another division too."""
    from meshwright.integrations.transformers import Trainer as Ours

    lines = []
    batch = {name: value[None].repeat(4, 1) for name, value in samples(1, seed=2)[0].items()}
    net = mw.auto_parallelize(model(), batch, **PLANS["dp2"])
    plain = TrainingArguments(str(folder), use_cpu=True, report_to=[], max_steps=1, disable_tqdm=True)
    compiled = TrainingArguments(str(folder), use_cpu=True, report_to=[], torch_compile=True)
    for trainer_class, arguments in ((Trainer, plain), (Ours, compiled)):
        try:
            trainer_class(net, arguments, train_dataset=samples(8, seed=2)).train()
        except mw.errors.MeshwrightError as error:
            lines.append(f"{type(error).__name__}: {error}")
    return lines


def test_misuse_of_the_trainer_is_told_in_one_line(rank_pool: RankPool, tmp_path: Path) -> None:
    for plain, compiled in rank_pool.run(2, misused, tmp_path):
        assert "with transformers, Trainer from meshwright.integrations.transformers" in plain
        assert "the training argument torch_compile" in compiled
