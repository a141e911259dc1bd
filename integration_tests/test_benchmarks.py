"""The page of benchmarks is what its figures say, and every part of them still runs."""

from __future__ import annotations

import json
import re
import sys
import types
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))

import bench
import peer_steps
import render
from peer_steps import COMPARISONS, Comparison

from meshwright_dtensor.testing.rank_pool import RankPool

STOCK = [comparison for comparison in COMPARISONS if comparison.needs == "torch"]


def test_the_page_is_what_the_generator_makes_of_the_newest_figures() -> None:
    file = render.newest(bench.RESULTS)
    text = render.PAGE.read_text(encoding="utf-8")
    assert text == render.page(json.loads(file.read_text()), file.name), "python benchmarks/render.py"
    plots = re.findall(r"\((_static/benchmarks/\S+)\)", text)
    assert plots
    for plot in plots:
        drawn = (render.PAGE.parent / plot).read_text(encoding="utf-8")
        assert render.digest(file) in drawn, (
            f"{plot} is not drawn from {file.name}: python benchmarks/render.py"
        )


@pytest.mark.parametrize("comparison", STOCK, ids=lambda c: f"{c.name} of {c.peer}")
def test_a_peer_does_the_same_work(comparison: Comparison, rank_pool: RankPool) -> None:
    result = peer_steps.compare(rank_pool, comparison, bench.TINY, rounds=1)
    assert len(result.seconds) == 1 and len(result.losses[0]) == peer_steps.WARM_UP
    assert result.losses[0][-1] < result.losses[0][0]
    assert result.lines[0] < result.lines[1]
    assert all(work.collectives > 0 for work in result.work)


def test_tensor_parallelism_takes_no_more_collectives_than_by_hand(rank_pool: RankPool) -> None:
    """Fewer bytes of each operation do not pay for more collectives, each of which has its start."""
    (comparison,) = (c for c in STOCK if c.peer == "tensor")
    sizes = replace(peer_steps.Sizes(), layers=1, vocabulary=256)
    ours, theirs = peer_steps.compare(rank_pool, comparison, sizes, rounds=1).work
    assert ours.collectives <= theirs.collectives and ours.nbytes <= theirs.nbytes


def test_a_peer_that_does_other_work_is_an_error() -> None:
    with pytest.raises(AssertionError, match="not the same work"):
        peer_steps.check_losses(COMPARISONS[0], ([7.0, 6.0], [7.0, 6.01]))


def test_a_peer_that_is_not_installed_is_named(rank_pool: RankPool) -> None:
    missing = Comparison("dp2", "data", "ddp", {"dp": 2}, needs="a_package_that_is_not_there")
    result = peer_steps.compare(rank_pool, missing, bench.TINY, rounds=1)
    assert result.error == "a_package_that_is_not_there is not installed" and not result.seconds


def test_lines_of_code_are_counted_without_texts(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        '"""Two\nlines."""\n\nimport os  # kept\n\n# a comment\ndef f():\n    """Text."""\n    return os\n'
    )
    assert peer_steps.code_lines(script) == 3


def test_figures_to_page(tmp_path: Path) -> None:
    """Quick figures of one part make a whole page, with what was lost marked."""
    result = peer_steps.Result(
        COMPARISONS[0], [(1.2, 1.0), (1.4, 1.0)], ([7.0], [7.0]), [(2e6, 1e6)], (13, 15)
    )
    lost = json.loads(json.dumps([peer_steps.asdict(result)]))
    part = {"date": "2026-01-02", "commit": "abc", "minutes": 1.0, "figures": lost}
    document = {"machine": bench.machine(), "versions": bench.versions(), "parts": {"training": part}}
    file = tmp_path / "bench-2026-01-02.json"
    bench.write(document, file)
    render.render(file, tmp_path / "page.md", tmp_path)
    text = (tmp_path / "page.md").read_text()
    assert "| 1300 | **1.30** ✗ (1.25 to 1.35) |" in text and "1 of 1 step times" in text
    assert render.digest(file) in (tmp_path / "ratios.svg").read_text()


def test_the_page_says_where_the_rest_of_a_step_goes() -> None:
    """What ours takes more is shown in parts that add up, where a row is lost only."""
    ours = peer_steps.Work(2000, 4, 2**21, [0.09, 0.09], [0.01, 0.01], [0.02, 0.02])
    theirs = peer_steps.Work(500, 2, 2**20, [0.08, 0.08], [0.01, 0.01], [0.01, 0.01])
    measured = {"work": (ours, theirs), "fixed": [(0.007, 0.001), (0.007, 0.001)]}
    losses = ([7.0], [7.0])
    rows = [
        peer_steps.Result(COMPARISONS[0], [(0.113, 0.092), (0.113, 0.092)], losses, **measured),
        peer_steps.Result(COMPARISONS[1], [(0.090, 0.092), (0.090, 0.092)], losses, **measured),
    ]
    part = {"figures": json.loads(json.dumps([peer_steps.asdict(row) for row in rows]))}
    part |= {"date": "2026-01-02", "commit": "abc", "minutes": 1.0}
    document = {"machine": bench.machine(), "versions": bench.versions(), "parts": {"training": part}}
    text = render.page(document, "bench-2026-01-02.json")
    assert "| 90.0, 80.0 | 7.0, 1.0 | 20.0, 10.0 | 10.0, 10.0 | 2000, 500 | 4, 2 | 2.0, 1.0 |" in text
    assert "| 21.0 | +6.0 | +4.0 | +10.0 | +1.0 |" in text
    assert text.count("| +6.0 |") == 1


def test_a_peer_keeps_its_replacements_of_torch_to_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    stock, seen = torch.nn.functional.linear, []

    def replaced(*tensors: torch.Tensor) -> torch.Tensor:
        return stock(*tensors)

    def setup(model: object, batch: object) -> Callable[[], None]:
        torch.nn.functional.linear = replaced
        return lambda: seen.append(torch.nn.functional.linear)

    monkeypatch.setitem(sys.modules, "peers.patching", types.SimpleNamespace(setup=setup))
    monkeypatch.setattr(torch.nn.functional, "linear", stock)
    patching = Comparison("dp2", "data", "patching", {})
    step = peer_steps.setup(patching, False, bench.TINY)
    assert torch.nn.functional.linear is stock
    step()
    assert seen == [replaced] and torch.nn.functional.linear is stock


def test_figures_of_another_machine_are_not_mixed(tmp_path: Path) -> None:
    document = {"machine": bench.machine(), "versions": bench.versions(), "parts": {"plans": {}}}
    file = tmp_path / "bench-2026-01-02.json"
    bench.write(document, file)
    assert bench.parts_of(file, document) == {"plans": {}}
    with pytest.raises(SystemExit, match="cannot be compared"):
        bench.parts_of(file, {**document, "versions": {"torch": "0"}})
