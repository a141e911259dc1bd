"""compile="auto": blocks of streaming operations are compiled, blocks of products are not, and the plan lists what was decided."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch._inductor import config

from meshwright_dtensor.errors import PlanError, UsageError
from meshwright_dtensor.plan import ParallelPlan
from meshwright_planner import plan
from meshwright_planner.clusters.registry import LAPTOP_CPU
from meshwright_planner.reports.explain import explain

WIDTH = 256
IN_LINE = replace(LAPTOP_CPU, hides_launch=False)
"""A machine whose host has no time of its own for the calls of regions."""


class Streaming(nn.Module):
    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm, self.gain = nn.LayerNorm(width), nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(x)
        return x + torch.sigmoid(h) * torch.tanh(h) * self.gain


class Products(nn.Module):
    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x))


class Values(Streaming):
    """Its rows are selected by value, and a part of it is not."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__(width)
        self.part = Streaming(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.part(x)
        rows = (x.detach().sum(-1) > 0).nonzero()[:, 0]
        return x.index_add(0, rows, super().forward(x[rows]))


class Model(nn.Module):
    """Lists of blocks, each of two blocks of one class."""

    def __init__(self, width: int = WIDTH, **kinds: type[nn.Module]) -> None:
        super().__init__()
        self.first = nn.Linear(width, width)
        self.lists = tuple(kinds)
        for name, kind in kinds.items():
            setattr(self, name, nn.ModuleList(kind(width) for _ in range(2)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for name in self.lists:
            for block in getattr(self, name):
                x = block(x)
        return x.pow(2).mean()


def chosen(model: nn.Module, rows: int = 64, width: int = WIDTH, **keywords: Any) -> tuple[list[str], str]:
    """The patterns that run compiled, and the notes on them."""
    options: dict[str, Any] = {"cluster": IN_LINE, "world_size": 1, "compile": "auto", **keywords}
    made: Any = plan(model, torch.randn(rows, width), **options)
    notes = [note for note in made.provenance.notes if note.startswith("compile=")]
    return [rule.pattern for rule in made.compile], "; ".join(notes)


def test_blocks_that_stream_are_chosen_and_products_are_not() -> None:
    model = Model(streaming=Streaming, products=Products)
    patterns, notes = chosen(model, rows=1024)
    assert patterns == ["streaming.*"]
    assert "streaming.* (2 modules) runs compiled, which is predicted to save" in notes
    assert "products.* (2 modules) is not compiled" in notes and "less than 1%" in notes
    assert chosen(Model(products=Products), rows=1024)[0] == []


def test_a_call_costs_more_than_fusing_a_few_small_operations_saves() -> None:
    small = Model(8, streaming=Streaming)
    patterns, notes = chosen(small, 4, 8)
    assert patterns == [] and "is not compiled, which would save nothing: less than 1%" in notes
    # the host of this one waits for the device
    assert chosen(small, 4, 8, cluster="laptop-cpu")[0] == ["streaming.*"]


def test_the_plan_lists_the_blocks_and_is_read_as_it_is() -> None:
    made: Any = plan(
        Model(streaming=Streaming), torch.randn(64, WIDTH), cluster=IN_LINE, world_size=1, compile="auto"
    )
    assert ParallelPlan.from_json(made.to_json()) == made
    assert made.model_dump()["compile"] == ({"pattern": "streaming.*", "backend": "inductor"},)
    assert made.provenance.request["compile"] == "auto"
    assert "streaming.* (2 modules) runs compiled" in " ".join(str(explain(made)).split())
    with pytest.raises(PlanError, match="a plan lists the modules; give True, 'auto'"):
        made.replace(compile="auto")


@pytest.mark.parametrize(
    "pins",
    [
        {"tp": 2},
        {"zero": 3, "dp": 2},
        {"zero": 2, "dp": 2, "zero_unit": "row"},
        {"pp": 2, "microbatches": 2},
        {"dp": 2, "tp": 2, "world_size": 4},
        {"dp": 2, "zero_degree": 1, "memory_limit": "1GiB"},
        {"planner": "manual"},
        {"recompute": "full"},
        {"precision": "bf16"},
    ],
    ids=str,
)
def test_pinned_plans_choose_too(pins: dict[str, Any]) -> None:
    patterns, _ = chosen(
        Model(streaming=Streaming, products=Products), **{"rows": 1024, "world_size": 2, **pins}
    )
    assert patterns == ["streaming.*"]


def test_stages_share_the_saving_and_recomputation_adds_to_it() -> None:
    def milliseconds(**keywords: Any) -> float:
        text = chosen(Model(streaming=Streaming), rows=1024, **keywords)[1]
        number, unit = text.partition("to save ")[2].split()[:2]
        return float(number) * {"ms": 1.0, "us": 1e-3}[unit]

    alone = milliseconds()
    assert milliseconds(world_size=2, pp=2, microbatches=1) == pytest.approx(alone / 2, rel=0.02)
    assert milliseconds(recompute="full") > 1.2 * alone
    # kept results leave nothing to compile
    assert chosen(Model(streaming=Streaming), rows=1024, recompute="selective")[0] == []


def test_parts_of_blocks_that_depend_on_values_count() -> None:
    values = chosen(Model(values=Values), rows=256)
    alone = chosen(Model(values=Streaming), rows=256)
    # one graph for the part of each block, as for a block of that part alone
    assert values[0] == alone[0] == ["values.*"]
    saved = [text.partition("to save ")[2].partition(" of")[0] for _, text in (values, alone)]
    assert saved[0] == saved[1]


def test_nothing_is_compiled_where_there_are_no_blocks_or_no_compiler() -> None:
    assert chosen(Streaming()) == (
        [],
        "compile='auto': nothing is compiled, because this Streaming has no repeated blocks",
    )
    model = Model(streaming=Streaming)
    with config.patch({"cpp.cxx": (None, "no-such-compiler")}):
        patterns, notes = chosen(model, 1024, cluster=None)
        assert patterns == [] and "finds no C++ compiler here" in notes
        # a plan for another machine does not depend on this one
        assert chosen(model, 1024)[0] == ["streaming.*"]
    assert chosen(model, 1024, cluster=None)[0] == ["streaming.*"]


@pytest.mark.parametrize("wrong", ["Auto", ["auto"], ("auto", "streaming.*")])
def test_auto_is_a_word_by_itself(wrong: Any) -> None:
    with pytest.raises(UsageError, match=r"'auto' \(by itself\) for those where it saves time"):
        chosen(Model(streaming=Streaming), compile=wrong)
