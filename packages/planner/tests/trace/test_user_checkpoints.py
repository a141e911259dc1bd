"""A model's own checkpoints: what they run again and what they keep, against torch in real runs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

import pytest
import torch
from counting import counted as bytes_of
from operations import BOOK, Net, counted, kept, planned, profiled, through
from planner_models import LAPTOP_CPU, DataLike, host_of
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
    set_checkpoint_early_stop,
)

from meshwright_dtensor.plan import Prediction
from meshwright_dtensor.strategy import Link, PlanRequest, SearchRequest, StrategyCost
from meshwright_planner import EagerPlanner, profile_model
from meshwright_planner.trace.batch import Batch
from meshwright_planner.trace.recorder.record import record

aten = torch.ops.aten
Run = Callable[[nn.ModuleList, torch.Tensor], torch.Tensor]


def each(reentrant: bool, stride: int = 1) -> Run:
    """Every so manyth block runs again."""

    def run(blocks: nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
        for n, block in enumerate(blocks):
            x = block(x) if n % stride else checkpoint(block, x, use_reentrant=reentrant)
        return x

    return run


def segments(reentrant: bool, *sizes: int) -> Run:
    """`stride` blocks are recomputed together; the last blocks are not."""

    def run(blocks: nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
        first = 0
        for size in sizes:
            some = list(blocks)[first : first + size]
            x = checkpoint(partial(through, some), x, use_reentrant=reentrant)
            first += size
        return through(list(blocks)[first:], x)

    return run


def nested(outer: bool, inner: bool, followed: bool = True) -> Run:
    """Recomputed halves with recomputed blocks; `followed`: something that keeps its input follows it."""

    def half(blocks: list[nn.Module], x: torch.Tensor) -> torch.Tensor:
        x = each(inner)(nn.ModuleList(blocks), x)
        return x * x if followed else x

    def run(blocks: nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
        for some in (list(blocks)[:3], list(blocks)[3:]):
            x = checkpoint(partial(half, some), x, use_reentrant=outer)
        return x

    return run


def _to_the_end(blocks: nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
    with set_checkpoint_early_stop(False):
        return each(False)(blocks, x)


def _of_features(blocks: nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        x = each(False)(nn.ModuleList(list(blocks)[:3]), x)
    return each(False)(nn.ModuleList(list(blocks)[3:]), x)


def _detached(blocks: nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
    """The output of one block is only read, without gradients: it is never recomputed."""
    y = each(False)(nn.ModuleList(list(blocks)[:3]), x)
    return y + checkpoint(blocks[3], y, use_reentrant=False).detach()


CASES: dict[str, Run] = {
    "each": each(False),
    "each, reentrant": each(True),
    "every other": each(False, 2),
    "every other, reentrant": each(True, 2),
    "pairs": segments(False, 2, 2, 2),
    "pairs, reentrant": segments(True, 2, 2, 2),
    "uneven": segments(False, 2, 1, 2, 1),
    "the first two": segments(False, 2),
    "all together": segments(False, 6),
    "nested": nested(False, False),
    "nested, nothing after": nested(False, False, followed=False),
    "nested, reentrant": nested(True, True),
    "reentrant in one that is not": nested(False, True),
    "one that is not in a reentrant one": nested(True, False),
    "to the end": _to_the_end,
    "of features": _of_features,
    "detached": _detached,
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad:UserWarning")
def test_recomputed_flops_are_counted(name: str) -> None:
    model, batch = Net(CASES[name]), Batch.of(torch.randn(2, 10, 16))
    assert planned(model, batch) == profiled(model, batch) == counted(model, batch)
    assert record(model, batch, BOOK.composites).activation_bytes == kept(model, batch)


def selective(*kept_ops: Any) -> Run:
    """Each block runs again, but for these operations."""
    contexts = partial(create_selective_checkpoint_contexts, list(kept_ops))
    return partial(_with_policy, contexts)


def _with_policy(
    contexts: Callable[[], tuple[Any, Any]], blocks: nn.ModuleList, x: torch.Tensor
) -> torch.Tensor:
    for block in blocks:
        x = checkpoint(block, x, use_reentrant=False, context_fn=contexts)
    return x


def _every_other() -> tuple[Any, Any]:
    """A policy that keeps every other product."""
    met = [0]

    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        product = op is aten.addmm.default
        met[0] += product
        return CheckpointPolicy.MUST_SAVE if product and met[0] % 2 else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


@pytest.mark.parametrize(
    ("run", "products"),
    [
        (selective(aten.addmm.default), (96, 32)),
        (selective(aten.mm.default), ()),
        (partial(_with_policy, _every_other), (96,)),
    ],
)
def test_operations_saved_by_a_policy_are_not_recomputed(run: Run, products: tuple[int, ...]) -> None:
    """`products`: columns of the results that each block keeps."""
    model, batch = Net(run), Batch.of(torch.randn(2, 10, 16))
    assert planned(model, batch) == profiled(model, batch) == counted(model, batch)
    tape = record(model, batch, BOOK.composites)
    assert tape.activation_bytes == kept(model, batch) + 6 * 4 * 2 * 10 * sum(products)


def test_attention_saved_by_a_policy_is_not_recomputed() -> None:
    """Torch's counter is not asked: it knows nothing of the operation that is kept."""
    run = selective(aten._scaled_dot_product_flash_attention_for_cpu.default)
    attention = 2 * 2.0 * 2 * 10 * 10 * 32
    batch = Batch.of(torch.randn(2, 10, 16))
    (forward, back), (same, less) = planned(Net(each(False)), batch), planned(Net(run), batch)
    assert (same, less) == (forward, back - 6 * attention)
    more = record(Net(run), batch, BOOK.composites).activation_bytes - kept(Net(run), batch)
    assert more == 6 * 4 * (2 * 10 * 32 + 2 * 4 * 10)  # its output, and one number per row and head


def test_frozen_blocks_are_recomputed_only_where_gradients_flow() -> None:
    for prefix in (("first", "blocks.0", "blocks.1", "blocks.2"), ("blocks.3", "blocks.4")):
        model, batch = Net(each(False)), Batch.of(torch.randn(2, 10, 16))
        for name, p in model.named_parameters():
            p.requires_grad_(not name.startswith(prefix))
        assert planned(model, batch) == counted(model, batch)


def test_profile_names_recomputed_modules() -> None:
    result = profile_model(Net(each(False, 2)), torch.randn(2, 10, 16))
    tokens = 2 * 10
    forward = 2.0 * tokens * 32 * 96 + 2 * 2.0 * tokens * 10 * 32  # not the last product, which keeps nothing
    assert [result[f"blocks.{n}"].again_flops for n in range(6)] == [forward, 0] * 3
    assert result["blocks.0.out"].again_flops == 0 < result["blocks.0.qkv"].again_flops
    assert result["blocks.0"].backward_flops == result["blocks.1"].backward_flops


def predicted(model: nn.Module, recompute: str | None = None) -> Prediction:
    """What is predicted of a step on one rank."""
    batch = {"x": torch.randn(64, 128, 16)}
    request = PlanRequest(cluster=LAPTOP_CPU, world_size=1, recompute=recompute)
    result = EagerPlanner(host_of()).plan(model, batch, request)[0].predicted
    assert result is not None
    return result


def test_user_checkpoints_are_predicted_like_planned_recomputation() -> None:
    default, requested, without = (
        predicted(Net(run), recompute)
        for run, recompute in ((each(False), None), (through, "full"), (through, None))
    )
    assert default.compute_seconds == requested.compute_seconds > without.compute_seconds
    assert default.memory_bytes == requested.memory_bytes
    assert default.split is not None and requested.split is not None
    (ours,), (theirs,) = default.split.stages, requested.split.stages
    assert (ours.forward_seconds, ours.backward_seconds) == (theirs.forward_seconds, theirs.backward_seconds)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["each", "each, reentrant", "pairs", "all together"])
def test_memory_equals_that_of_a_real_step(name: str) -> None:
    """What they run again is there again while it goes back."""
    model = Net(CASES[name])
    counted_bytes = bytes_of(model, {"x": torch.randn(64, 128, 16)})
    assert predicted(model).memory_bytes["total"] == pytest.approx(counted_bytes, rel=0.01)


class Asking(DataLike):
    """Remembers what operations it was told of."""

    requested: ClassVar[list[float]] = []

    def cost(self, request: SearchRequest, degree: int, link: Link) -> StrategyCost:
        self.requested.append(request.sizes.flops)
        return super().cost(request, degree, link)


def test_strategies_get_recomputed_flops() -> None:
    Asking.requested.clear()
    model = Net(each(False))
    request = PlanRequest(cluster=LAPTOP_CPU, world_size=2)
    EagerPlanner(host_of(Asking)).plan(model, (torch.randn(4, 10, 16),), request)
    forward, back = counted(model, Batch.of(torch.randn(2, 10, 16)))
    assert min(Asking.requested) == forward + back


def test_checkpointed_blocks_are_copied() -> None:
    model, batch = Net(each(False), blocks=12), Batch.of(torch.randn(2, 10, 16))
    assert len(record(model, batch, BOOK.composites).copied) == 9  # all but the first two and the last
    assert planned(model, batch) == counted(model, batch)
