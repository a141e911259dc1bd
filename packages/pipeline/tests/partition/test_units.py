"""Which modules are units, and which tensors cross cuts according to the planner's record."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from meshwright_dtensor.plan import PipelineRule
from meshwright_dtensor.strategy import ModuleWork, PipelineQuery, SearchRequest
from meshwright_pipeline.partition.units import called_in_parts, find_units, ownership
from meshwright_pipeline.planning.survey import survey_of
from meshwright_pipeline.planning.unit_costs import flow_of
from meshwright_pipeline.strategy import Pipeline


class Holder(nn.Module):
    """No forward, but a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.drop = nn.Linear(2, 2), nn.Linear(2, 2), nn.Dropout(0.1)
        self.scale = nn.Parameter(torch.ones(2))


class Layer(Holder):
    """With a forward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


def of(**parts: nn.Module) -> nn.Module:
    """A model with these children."""
    model = nn.Module()
    for name, part in parts.items():
        setattr(model, name, part)
    return model


def dicts() -> nn.ModuleDict:
    """A layer in which one child holds a list, and one is a list."""
    experts = Layer()
    experts.more = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
    return nn.ModuleDict(
        {"n": nn.LayerNorm(2), "m": experts, "l": nn.ModuleList([nn.Linear(2, 2), nn.GELU()])}
    )


@pytest.mark.parametrize(
    ("model", "names", "free"),
    [
        (
            of(layers=nn.ModuleList([dicts(), dicts()])),
            [f"layers.{i}.{part}" for i in range(2) for part in ("n", "m", "l.0")],
            [],
        ),
        (
            of(layers=nn.ModuleList([Holder(), Holder()])),
            [f"layers.{i}.{part}" for i in range(2) for part in ("a", "b", "drop")],
            ["layers.0.scale", "layers.1.scale"],
        ),
        (of(layers=nn.ModuleDict({"x": Layer(), "y": Layer()})), ["layers.x", "layers.y"], []),
        (of(one=nn.ModuleList([Layer()]), raw=nn.ParameterList([torch.ones(2)])), ["one.0"], ["raw.0"]),
        (of(net=nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.LayerNorm(2))), ["net.0", "net.2"], []),
        (
            of(layers=nn.ModuleList([nn.Sequential(nn.Linear(2, 2), nn.ReLU()) for _ in range(2)])),
            ["layers.0", "layers.1"],
            [],
        ),
    ],
    ids=["dicts", "holders", "dict of layers", "loose", "sequential", "layers that are sequential"],
)
def test_called_modules_are_units(model: nn.Module, names: list[str], free: list[str]) -> None:
    units = find_units(model)
    assert (list(units.names), list(units.free)) == (names, free)


def test_modules_whose_children_are_called_are_opened() -> None:
    model = of(layers=nn.ModuleList([Layer(), Layer()]), head=Layer())
    calls = frozenset({("", "layers.0"), ("", "layers.1.a"), ("", "head"), ("head", "head.a")})
    assert called_in_parts(model, find_units(model).names, calls) == {"layers.1"}
    request = SearchRequest(
        world_size=2, batch_size=2, survey=Pipeline().survey(model), pipeline=PipelineQuery(calls=calls)
    )
    survey = survey_of(request)
    assert survey is not None
    assert survey.units == ("layers.0", "layers.1.a", "layers.1.b", "layers.1.drop", "head")
    assert survey.inside[""] == {"layers.1.scale"} and survey.unit("layers.1.a") == "layers.1.a"
    assert survey.unnamed([["layers.1.a"]]) == [] and survey.unnamed([["layers.0"]]) == ["layers.1"]
    assert survey.at(frozenset(calls)) is survey.at(calls)


def test_plans_may_name_submodules() -> None:
    model = of(layers=nn.ModuleList([Layer(), Layer()]), head=Layer())
    rule = PipelineRule(stages=[["layers.0", "layers.1.a"], ["layers.1.b", "head"]])
    owned = ownership(model, rule)
    assert owned.stages == (("layers.0", "layers.1.a"), ("layers.1.b", "head"))
    assert owned.free == ("layers.1.scale",) and owned.everywhere == ("layers.1.drop",)
    whole = ownership(model, PipelineRule(stages=[["layers.0"], ["layers.1", "head"]]))
    assert whole.stages == (("layers.0",), ("layers.1", "head"))


def test_dataflow_through_sums_between_units() -> None:
    """x1 = a(x); x2 = x1 + b(x1); x3 = x2 + c(x2); the result takes x3. Every value has 10 bytes, integers no gradient."""

    def entering(*values: tuple[int, str]) -> frozenset[tuple[int, str, int]]:
        return frozenset((number, module, 10) for number, module in values)

    nothing: frozenset[int] = frozenset()
    work = [
        ModuleWork("a", outputs=((1, nothing, True), (9, nothing, False))),
        ModuleWork("b", inputs=entering((1, "a")), outputs=((2, frozenset({1}), True),)),
        ModuleWork("", inputs=entering((1, "a"), (2, "b")), outputs=((3, frozenset({1, 2}), True),)),
        ModuleWork("c", inputs=entering((3, "")), outputs=((4, frozenset({3}), True),)),
        ModuleWork("", inputs=entering((3, ""), (4, "c")), outputs=((5, frozenset({3, 4}), True),)),
        ModuleWork("d", inputs=entering((9, "a")), outputs=((6, frozenset({9}), True),)),
        ModuleWork("", inputs=entering((5, ""), (6, "d"))),
    ]

    class Known:
        def unit(self, module: str) -> str:
            return module

    flow = flow_of(work, Known(), ())
    # before b: x1 and the integers; before c: and b's result; before d: and c's
    assert flow.crossing(False) == [0, 20, 30, 40, 0]
    assert flow.crossing(True) == [0, 10, 20, 30, 0]
    assert {number for number, _, _ in flow.final} == {1, 2, 4, 6}
    # if all stages hold b, it counts as code between units
    assert flow_of(work, Known(), ["b"]).crossing(False) == [0, 20, 30, 0]
