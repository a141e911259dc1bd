"""Which blocks planning treats as repeated: it runs one of them, and reuses its result for the others."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright_pipeline.analysis.loss_preview import LossChecker
from meshwright_pipeline.partition.repeated_units import RepeatedUnitProfiler
from meshwright_pipeline.partition.units import find_units
from meshwright_pipeline.trace.meta_model import skeleton

BLOCKS = 6


class Shared:
    """A configuration that all blocks share."""

    kinds = "aabaab"


class Keeper:
    """A cache that models pass to their blocks."""

    def __init__(self) -> None:
        self.kept: list[Any] = []


class Block(nn.Module):
    """May also return scores. `tell` decides, from the block and its arguments."""

    def __init__(
        self, place: int, shared: Shared, tell: Callable[[Any, Keeper], Any], **attributes: Any
    ) -> None:
        super().__init__()
        self.layer_idx, self.config, self.tell = place, shared, tell
        self.linear = nn.Linear(8, 8)
        self.linear.place = place + 3
        self.activation, self.scale = torch.tanh, functools.partial(torch.mul, other=2.0)
        self.__dict__.update(attributes)
        self.runs = RunCounter()

    def forward(self, x: Tensor, keeper: Keeper) -> Any:
        RunCounter.count += 1
        x = self.scale(self.activation(self.linear(x)))
        told = self.tell(self, keeper)
        return (x, x.sum(-1)) if told is True else (x, told) if told else x


class RunCounter(nn.Module):
    """Counts the blocks that were run."""

    count = 0


class Net(nn.Module):
    """Computes a loss from the scores of blocks that is not additive."""

    def __init__(self, tell: Callable[[Any, Keeper], Any], aux: str = "") -> None:
        super().__init__()
        shared = Shared()
        self.blocks = nn.ModuleList(
            Block(i, shared, tell, **({"aux": aux[i] == "b"} if aux else {})) for i in range(BLOCKS)
        )

    def forward(self, x: Tensor) -> Tensor:
        keeper, all_scores = Keeper(), []
        for block in self.blocks:
            out = block(x, keeper)
            x, scores = out if isinstance(out, tuple) else (out, None)
            if isinstance(scores, Tensor):
                all_scores.append(scores)
        loss = x.square().mean()
        for scores in all_scores:
            loss = loss + 0.1 * torch.logsumexp(scores, 0).mean()
        return loss


def looked(model: nn.Module) -> tuple[str, int]:
    """Why the loss is not additive, and how many blocks were run to find out."""
    RunCounter.count = 0
    return LossChecker(model, find_units(model).names).check(
        ((), {"x": torch.ones(8, 8)})
    ).why, RunCounter.count


def test_blocks_that_only_pass_on_their_index_are_repeated() -> None:
    why, runs = looked(Net(lambda block, keeper: False))
    assert not why and runs == 3  # once in each run, since the arguments are new


DIFFER: dict[str, Callable[[Any, Keeper], Any]] = {
    "by parity": lambda block, keeper: block.layer_idx % 2 == 1,
    "by order": lambda block, keeper: block.layer_idx > 2,
    "by truth": lambda block, keeper: bool(not block.layer_idx),
    "by equality": lambda block, keeper: block.layer_idx == 4,
    "by a list": lambda block, keeper: block.config.kinds[block.layer_idx] == "b",
    "by a set": lambda block, keeper: block.layer_idx in {1, 3},
    "by a part of it": lambda block, keeper: str(block.linear.place) == "5",
}
"""Blocks that use their index: all of them have to run."""


@pytest.mark.parametrize("how", DIFFER)
def test_blocks_that_use_their_index_are_not_repeated(how: str) -> None:
    why, runs = looked(Net(DIFFER[how]))
    assert "sums or means over rows" in why and runs >= 3 * BLOCKS


def test_blocks_with_different_attributes_are_not_repeated() -> None:
    why, runs = looked(Net(lambda block, keeper: block.aux, aux="aabaab"))
    assert "sums or means over rows" in why and runs == 3 * 2


def leaves_something(block: Any, keeper: Keeper) -> None:
    block.last = 3


def hands_its_number_on(block: Any, keeper: Keeper) -> None:
    keeper.kept.append(block.layer_idx)


@pytest.mark.parametrize(
    "tell", [leaves_something, hands_its_number_on, lambda block, keeper: block.layer_idx]
)
def test_blocks_that_store_something_are_run(tell: Callable[[Any, Keeper], Any]) -> None:
    why, runs = looked(Net(tell))
    assert not why and runs >= 3 * BLOCKS


class Stretched(nn.Module):
    """Its size shows only in its parameter."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        return x.mean(-1, keepdim=True) * self.weight


class Read(nn.Module):
    """Uses the parameters of its blocks before it calls them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Stretched(size) for size in (2, 3))

    def forward(self, x: Tensor) -> Tensor:
        penalty = sum((layer.weight * x[0, :1]).sum() for layer in self.layers)
        for layer in self.layers:
            x = layer(x)
        return x.square().mean() + penalty


def test_parameter_sizes_are_compared_before_the_first_run() -> None:
    model = Read()
    names = find_units(model).names
    profile = RepeatedUnitProfiler(skeleton(model, names), names).run((torch.ones(4, 5),), {})
    assert profile.read and [tuple(profile.results[name, 0].output.shape) for name in names] == [
        (4, 2),
        (4, 3),
    ]


def test_training_mode_and_missing_parameters_distinguish_blocks() -> None:
    class One(nn.Module):
        def __init__(self, bias: bool) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4))
            self.register_parameter("bias", nn.Parameter(torch.ones(4)) if bias else None)
            self.register_buffer("mask", None)

        def forward(self, x: Tensor) -> Tensor:
            x = x * self.weight
            return F.pad(x, (0, 1)) if self.training else x

    model = nn.Sequential(*(nn.Sequential(One(False)) for _ in range(3)))
    model[1].eval()
    model[2][0].register_buffer("other", None)
    names = find_units(model).names
    built = RepeatedUnitProfiler(skeleton(model, names), names)._built
    assert len(set(built.values())) == 3


@pytest.mark.slow
def test_caches_may_read_the_layer_index() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=5, num_attention_heads=2
    )
    model = transformers.AutoModelForCausalLM.from_config(config)
    names = find_units(model).names
    runs: list[Any] = []

    class Spied(RepeatedUnitProfiler):
        def _tried(self, unit: str, *rest: Any) -> Any:
            runs.append(unit)
            return super()._tried(unit, *rest)

    ids = torch.ones(2, 8, dtype=torch.long)
    profile = Spied(skeleton(model, names), names).run((), {"input_ids": ids, "labels": ids})
    assert len(profile.order) == 8 and sum("layers" in unit for unit in runs) == 1


class Looking(nn.Module):
    """Reads values, so it does not run on the meta device."""

    tries: tuple[str, ...] = ()

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(512, 1024))  # two megabytes

    def forward(self, x: Tensor) -> Tensor:
        Looking.tries += (x.device.type,)
        seen = self.weight[int(x.sum())]
        self.weight[3] += 1  # zeros are memory of the block itself
        return x + seen[0]


def test_units_that_need_values_are_run_once() -> None:
    Looking.tries = ()
    model = nn.Sequential(*(Looking() for _ in range(3)))
    names = find_units(model).names
    copies = RepeatedUnitProfiler(skeleton(model, names), names)
    for rows in (4, 2, 6):
        profile = copies.run((torch.ones(rows, 5),), {})
        assert [result.output.shape for result in profile.results.values()] == [(rows, 5)] * 3
    assert Looking.tries == ("meta", "cpu", "cpu", "cpu")
