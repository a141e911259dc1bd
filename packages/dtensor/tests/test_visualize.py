"""Pictures of tensors, layouts, models, communication and memory: for a terminal and for a notebook."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard

from meshwright_dtensor import ParallelPlan, communication, distribute
from meshwright_dtensor.errors import UsageError
from meshwright_dtensor.testing.on_device import device_type
from meshwright_dtensor.testing.rank_pool import RankPool
from meshwright_dtensor.trace.memory_timeline import memory
from meshwright_dtensor.utils.html import table_html, text_html
from meshwright_dtensor.utils.names import number_ranges
from meshwright_dtensor.visualize import visualize


class Balanced(HTMLParser):
    """Checks that tags match, and that nothing is loaded."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert not {"src", "href"} & {name for name, _ in attrs}
        self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def draw(_rank: int, _world_size: int, shape: tuple[int, ...]) -> tuple[list[str], list[str], str]:
    mesh = init_device_mesh(device_type(), (2, 2), mesh_dim_names=("dp", "tp"))
    value = torch.arange(float(torch.Size(shape).numel())).view(shape)
    placements = (
        [Shard(0), Shard(1)],
        [Replicate(), Shard(1)],
        [Shard(0), Shard(0)],
        [Replicate(), Partial()],
    )
    pictures = [visualize(distribute(value, mesh, p)) for p in placements]
    layout = distribute(value, mesh, placements[0]).global_layout
    assert layout._repr_html_() == pictures[0]._repr_html_() == visualize(layout).html
    with communication() as log:
        distribute(value, mesh, placements[0]).full_tensor()
    assert sum(row[3] for row in log.rows()) == len(log.events) > 0
    return [str(p) for p in pictures], [p.html for p in pictures], f"{log}{log._repr_html_()}"


def test_a_picture_says_which_rank_holds_which_part(rank_pool: RankPool) -> None:
    texts, pages, log = rank_pool.run(4, draw, (5, 6))[0]
    both, columns, rows, partial = (" ".join(text.split()) for text in texts)
    assert "[5, 6] float32 on dp 2 x tp 2: dp=S(0), tp=S(1)" in both
    assert (
        "dim 0 dim 1: 0-2 dim 1: 3-5" in both and "0-2 rank 0 rank 1" in both and "3-4 rank 2 rank 3" in both
    )
    assert "0-2 ranks 0, 2" in columns and "3-5 ranks 1, 3" in columns
    assert [f"rank {n}" in rows for n in range(4)] == [True] * 4
    assert "the sum of what the ranks along tp hold" in partial
    for page in pages:
        Balanced(page)
    assert "all-gather" in log and "<table" in log


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).relu()
        return x


def test_models_and_plain_tensors() -> None:
    picture = visualize(Net())
    assert "Net: 6 parameters, not parallel" in str(picture) and repr(picture) == str(picture)
    row = next(line.split() for line in str(picture).splitlines() if "layers.*.weight" in line)
    assert row[1] == "3" and "whole" in row
    Balanced(picture.html)
    assert "whole on every rank" in str(visualize(torch.ones(3)))
    with pytest.raises(UsageError, match=r"give a tensor, a torch\.nn\.Module or a Layout"):
        visualize(3)  # type: ignore[arg-type]


def test_plans_are_tables_in_notebooks() -> None:
    plan = ParallelPlan(world_size=2, degrees={"tp": 2}, provenance={"model": "<b>Net"})
    Balanced(plan._repr_html_())
    assert "&lt;b&gt;Net" in plan._repr_html_() and "tp 2 = 2 ranks" in plan._repr_html_()


def test_an_empty_log_says_so() -> None:
    with communication() as log:
        pass
    assert str(log) == "no communication\n" and "no communication" in log._repr_html_()


def test_memory_timeline_counts_tensors_until_they_are_freed(tmp_path: Path) -> None:
    kib = 256  # float32 numbers
    with memory() as timeline:
        a = torch.zeros(8 * kib)
        b = a + 1
        view = b[1:]
        del a
        c = b * 2
        del b, view, c
    sizes = [event.nbytes for event in timeline.events]
    assert sizes == [n * 1024 for n in (8, 16, 8, 16, 8, 0)] or sorted(sizes) == [
        0,
        *[8192] * 3,
        *[16384] * 2,
    ]
    assert timeline.peak.nbytes == 16 * 1024 and "at most 16.0 KiB" in str(timeline)
    count = len(timeline.events)
    d = torch.ones(3)
    del d
    assert len(timeline.events) == count
    Balanced(timeline._repr_html_())
    timeline.save(tmp_path / "memory.json")
    events = json.loads((tmp_path / "memory.json").read_text())["traceEvents"]
    assert [e["args"]["bytes"] for e in events] == sizes and {e["ph"] for e in events} == {"C"}
    with memory() as nothing:
        pass
    assert "no tensors" in str(nothing) and "no tensors" in nothing._repr_html_()


def test_memory_timeline_sees_what_a_backward_frees() -> None:
    model, x = Net(), torch.randn(64, 4)
    with memory() as timeline:
        loss = model(x).sum()
        held = timeline.events[-1].nbytes
        loss.backward()
        freed = timeline.events[-1].nbytes
    assert freed < held <= timeline.peak.nbytes


def step_of_dtensor(_rank: int, _world_size: int) -> int:
    mesh = init_device_mesh(device_type(), (2,), mesh_dim_names=("dp",))
    x = distribute(torch.ones(1 << 16), mesh, [Shard(0)])
    stored = x.to_local().untyped_storage().nbytes()
    with memory() as timeline:
        y = x * 2
    assert y.to_local().numel() == 1 << 15
    assert dist.get_world_size() == 2
    return timeline.peak.nbytes - stored


def test_memory_timeline_counts_local_bytes(rank_pool: RankPool) -> None:
    assert rank_pool.run(2, step_of_dtensor) == [4 << 15] * 2


def test_html_is_escaped_and_numbers_are_ranges() -> None:
    assert "&lt;i&gt;" in table_html(("<i>",), [("<i>",)]) and "&lt;i&gt;" in text_html("<i>")
    assert "text-align:right" in table_html(("n",), [(1,)], right=("n",))
    assert number_ranges([5, 1, 2, 3]) == "1-3, 5" and number_ranges([]) == ""
