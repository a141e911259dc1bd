"""A script of accelerate trains to the numbers of one device, and resumes under another plan and on another number of ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import meshwright as mw
from meshwright_dtensor.errors import MeshwrightError
from meshwright_dtensor.testing.rank_pool import RankPool

from .plans import LIMITS, PLANS, check, gap

pytest.importorskip("accelerate")

from .accelerate_script import model, on_rank, one_device, samples

# precision, plan, and the plan of the run that goes on from its checkpoint; None: on one rank
CASES = [("no", "dp2", "zero3"), ("bf16", "pp2", None)]


@pytest.fixture(scope="module")
def exact(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    results = {
        precision: one_device(precision, tmp_path_factory.mktemp("one") / precision) for precision in LIMITS
    }
    assert gap(results["bf16"]["losses"], results["no"]["losses"]) > LIMITS["no"]
    return results


@pytest.mark.parametrize(("precision", "plan", "later"), CASES)
def test_accelerate_has_the_numbers_of_one_device(
    rank_pool: RankPool, tmp_path: Path, exact: Any, precision: str, plan: str, later: str | None
) -> None:
    check(rank_pool.run(2, on_rank, plan, precision, tmp_path), exact[precision], LIMITS[precision])
    resumed = (
        [on_rank(0, 1, plan, precision, tmp_path / "later", tmp_path)]
        if later is None
        else rank_pool.run(2, on_rank, later, precision, tmp_path / "later", tmp_path)
    )
    assert len(resumed[0]["losses"]) == 3
    check(resumed, exact[precision], LIMITS[precision])


class Part(torch.Tensor):
    """Stands for a global tensor."""

    def full_tensor(self) -> torch.Tensor:
        return torch.arange(4)


@pytest.mark.parametrize("as_objects", [False, True])
def test_tensors_for_metrics_are_whole_among_other_values(as_objects: bool) -> None:
    from accelerate.state import GradientState

    from meshwright.integrations.accelerate import Accelerator

    accelerator: Any = object.__new__(Accelerator)
    accelerator.gradient_state = GradientState()
    part = torch.arange(2).as_subclass(Part)
    (y, rest), only = (
        accelerator.gather_for_metrics(given, use_gather_object=as_objects)
        for given in ((part, [1, 2]), {"y": part})
    )
    assert rest == [1, 2]
    assert all(type(value) is torch.Tensor and len(value) == 4 for value in (y, only["y"]))


@contextmanager
def told(lines: list[str]) -> Iterator[None]:
    try:
        yield
    except MeshwrightError as error:
        lines.append(f"{type(error).__name__}: {error}")


def misused(rank: int, size: int) -> list[str]:
    """The lines that a user of accelerate reads who has left out one of ours."""
    import accelerate

    from meshwright.integrations.accelerate import Accelerator

    lines: list[str] = []
    batch = {name: value[None].repeat(4, 1) for name, value in samples(1, seed=2)[0].items()}
    net = mw.auto_parallelize(model(), batch, **PLANS["dp2"])
    with told(lines):
        accelerate.Accelerator(cpu=True).prepare(net)
    with told(lines):
        Accelerator().prepare(model())
    with told(lines):
        Accelerator(parallelism_config=accelerate.ParallelismConfig())
    return lines


def test_misuse_is_told_in_one_line(rank_pool: RankPool) -> None:
    first, second = rank_pool.run(2, misused)
    plain, not_parallel, divides = first
    assert first == second
    assert "meshwright.integrations.accelerate" in plain
    assert "this GPT2LMHeadModel is not parallel" in not_parallel
    assert "mw.auto_parallelize(model, batch)" in not_parallel
    assert "parallelism_config= makes accelerate divide the model" in divides


def called(rank: int, size: int) -> list[Any]:
    from meshwright.integrations.accelerate import Accelerator

    accelerator = Accelerator()
    calls: list[str] = []
    accelerator.on_main_process(lambda: calls.append("main"))()
    accelerator.on_process(process_index=1)(lambda: calls.append("second"))()
    with accelerator.main_process_first():
        calls.append("first")
    if rank == 1:
        accelerator.set_trigger()
    return [*calls, accelerator.check_trigger(), accelerator.is_main_process, dist.get_world_size()]


def test_calls_for_one_process(rank_pool: RankPool) -> None:
    assert rank_pool.run(2, called) == [["main", "first", True, True, 2], ["second", "first", True, False, 2]]
