"""The parts of the main job that need no ranks: text, rows, the verdict, the picture."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from meshwright.demo import tasks
from meshwright.demo.report import verdict
from meshwright.demo.tasks import read_text
from meshwright.demo.train import TOLERANCE, Options, Outcome, Step
from meshwright.pictures import draw_losses
from meshwright_dtensor.errors import UsageError

TEXT = torch.arange(5000, dtype=torch.int64).remainder(251).to(torch.uint8)


def outcome(*differences: float) -> Outcome:
    steps = [Step(n, 5.0 - n + d, 5.0 - n, 0.1, 0.2) for n, d in enumerate(differences)]
    return Outcome("gpt2", 4, {"dp": 2, "tp": 2}, 5_000_000, steps)


def test_the_standard_library_is_the_default_text() -> None:
    text = read_text()
    assert text.dtype == torch.uint8 and len(text) > 1_000_000
    assert torch.equal(text, read_text())
    assert bytes(text[:20_000].tolist()).decode("utf-8", "replace").count("\n") > 100


def test_a_file_and_its_errors(tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_bytes(b"abc")
    assert read_text(path).tolist() == [97, 98, 99]
    with pytest.raises(UsageError, match="3 bytes: training needs at least 4"):
        read_text(path, at_least=4)
    with pytest.raises(UsageError, match="No such file"):
        read_text(tmp_path / "missing")


@pytest.mark.parametrize("kind", [tasks.NextByte, tasks.MaskedByte, tasks.ByteImage])
def test_a_row_is_always_the_same_and_draws_nothing_from_the_model(kind: type) -> None:
    rows = kind(TEXT, 17, 10, seed=3)
    before = torch.get_rng_state()
    from_loader = list(tasks.loader(rows, 5))
    direct = list(tasks.batches(kind(TEXT, 17, 10, seed=3), 5))
    assert torch.equal(before, torch.get_rng_state())
    assert len(direct) == len(from_loader) == 2
    for first, second in zip(from_loader, direct, strict=True):
        assert first.keys() == second.keys() and all(torch.equal(first[key], second[key]) for key in first)
    other = next(tasks.batches(kind(TEXT, 17, 10, seed=4), 5))
    assert any(not torch.equal(other[key], direct[0][key]) for key in other)


def test_masked_bytes_are_asked_for_and_the_others_are_not() -> None:
    batch = next(tasks.batches(tasks.MaskedByte(TEXT, 200, 4, seed=0), 4))
    hidden = batch["input_ids"] == tasks.MASK
    assert torch.equal(hidden, batch["labels"] != tasks.IGNORED)
    assert 0.05 < hidden.float().mean() < 0.3
    assert batch["labels"][hidden].max() < tasks.BYTES


def test_kinds_of_bytes() -> None:
    data = torch.tensor(list(b" \nx_7)+"))
    assert tasks.kind_of_byte(data).tolist() == [0, 1, 2, 2, 3, 4, 5]


def test_the_verdict_is_that_of_the_worst_step() -> None:
    good, bad = outcome(0.0, -4e-6, 1e-6), outcome(0.0, 2 * TOLERANCE, 0.0)
    assert good.passed and good.worst.step == 1
    assert not bad.passed and bad.worst.step == 1
    assert verdict(good).startswith("PASS: gpt2 on 4 ranks (dp2 x tp2), 3 steps")
    assert verdict(bad).startswith("FAIL: ") and "\n" not in verdict(bad)


def test_a_loss_that_is_no_number_never_passes() -> None:
    assert outcome(0.0, math.nan).worst.difference == math.inf
    assert not outcome(math.nan).passed


@pytest.mark.slow
def test_the_picture_and_the_json(tmp_path: Path) -> None:
    draw_losses(outcome(0.0, 1e-6), tmp_path / "new" / "losses.png")
    assert (tmp_path / "new" / "losses.png").read_bytes().startswith(b"\x89PNG")
    data = json.loads(json.dumps(outcome(0.0, 1e-6).to_dict()))
    assert data["passed"] is True and data["worst_step"] == 1 and len(data["steps"]) == 2


@pytest.mark.parametrize(
    ("wrong", "message"),
    [({"model": "gpt5"}, "gpt5"), ({"steps": 0}, "--steps 0"), ({"batch_size": -1}, "--batch-size -1")],
)
def test_options_are_checked(wrong: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Options(**wrong)  # type: ignore[arg-type]


def test_a_plan_and_pinned_degrees_contradict() -> None:
    with pytest.raises(UsageError, match="already fixes the degrees"):
        Options(plan=Path("plan.json"), degrees={"tp": 2})
