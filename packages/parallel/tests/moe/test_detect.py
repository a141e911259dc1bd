"""Detection of experts: modules are proved by running them, and modules that only look like experts are rejected."""

from __future__ import annotations

import pytest
import torch
from moe_models import (
    EXPERTS,
    Across,
    Alone,
    Averaging,
    Container,
    Counting,
    Dense,
    Dropping,
    Full,
    Fused,
    Masked,
    Mixing,
    Mixture,
    Sequences,
    Shifted,
)
from torch import nn

from meshwright_dtensor.deferred.materialize import deferred_init
from meshwright_dtensor.testing.on_device import random_state, set_random_state
from meshwright_parallel.moe.detect import detect
from meshwright_parallel.moe.plan_rules import notes_of, parameters_of, rules_of
from meshwright_parallel.moe.probe import LIMIT_BYTES


def within(experts: nn.Module) -> nn.Module:
    return nn.ModuleDict({"0": experts, "layer": nn.Linear(4, 4)})


@pytest.mark.parametrize(
    ("kind", "style", "attributes"),
    [
        (Fused, "index", ("many",)),
        (Sequences, "index", ("many",)),
        (Container, "index", ()),
        (Masked, "mask", ()),
    ],
)
def test_experts_are_detected(kind: type[nn.Module], style: str, attributes: tuple[str, ...]) -> None:
    model = Mixture(kind)
    detection = detect(model)
    assert [e.candidate.name for e in detection.experts] == ["blocks.0.experts", "blocks.1.experts"]
    assert not detection.rejected
    (rule,) = rules_of(detection)
    assert (rule.module, rule.count, rule.assignment) == ("blocks.*.experts", EXPERTS, style)
    assert rule.attributes == attributes
    names = {name for name, _ in model.named_parameters() if ".experts." in name}
    assert set(parameters_of(detection)) == names


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (Averaging, "not the sum"),
        (Mixing, "depends on other rows"),
        (Across, "divided into sequences"),
        (Dense, "does not name"),
        (Shifted, "does not name"),
        (Dropping, "random numbers while training"),
        (Full, "while training, a row of its output depends on other rows"),
        (Counting, "writes to its buffer rows"),
        (Alone, "does not take tokens"),
    ],
)
def test_lookalike_is_rejected_with_the_reason(kind: type[nn.Module], reason: str) -> None:
    detection = detect(within(kind()))
    assert not detection.experts
    assert [name for name, _ in detection.rejected] == ["0"]
    assert reason in detection.rejected[0][1]
    note = f"not sharded as experts: *: {detection.rejected[0][1]}"
    assert note in notes_of(detection)


def test_probed_module_keeps_its_buffers() -> None:
    model = within(Counting())
    detect(model)
    assert not model["0"].rows.any()  # type: ignore[index]


def test_detect_needs_no_values_and_keeps_the_random_state() -> None:
    torch.manual_seed(0)
    state = random_state()
    with torch.device("meta"):
        model = Mixture()
    with deferred_init():
        later = Mixture()
    after = random_state()
    set_random_state(state)
    Mixture()
    assert torch.equal(after, random_state())
    assert len(detect(model).experts) == len(detect(later).experts) == 2
    assert torch.equal(after, random_state())


def test_large_experts_are_proved_on_a_small_copy() -> None:
    """A module of 3 TB, of which no full-size copy is made."""
    with torch.device("meta"):
        module = Fused(256, 2**15, 2**16)
    (experts,) = detect(within(module)).experts
    assert experts.candidate.expert_bytes() > LIMIT_BYTES
    assert experts.proved.width == 2**15


def test_attribute_equal_by_chance_is_not_the_number_of_experts() -> None:
    class Chance(Fused):
        def __init__(self) -> None:
            super().__init__(EXPERTS, WIDTH_TOO, 12)
            self.width = WIDTH_TOO

        def forward(self, tokens: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
            assert tokens.shape[-1] == self.width
            return super().forward(tokens, chosen, weights)

    WIDTH_TOO = EXPERTS
    (experts,) = detect(within(Chance())).experts
    assert experts.proved.attributes == ("many",)


def test_ordinary_models_have_no_experts() -> None:
    model = nn.Sequential(
        nn.Conv1d(4, 4, 3), nn.TransformerEncoderLayer(8, 2), nn.ModuleList(nn.Linear(3, 3) for _ in range(4))
    )
    detection = detect(model)
    assert not detection.experts and not detection.rejected
