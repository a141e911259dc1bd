"""ZeRO on real ranks: the training loop of one device, with states, gradients and parameters sharded over ranks."""

from __future__ import annotations

import contextlib
import copy
import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from parallel_models import WIDTH, Block, Language, batch_of, full, loop, make, plan_of, same
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from meshwright_dtensor.comm.log import communication
from meshwright_dtensor.errors import PlanError, UnsupportedError
from meshwright_dtensor.plan import ParallelPlan
from meshwright_dtensor.testing.rank_pool import RankPool
from meshwright_parallel import clip_grad_norm_, parallelize
from meshwright_parallel.engine import flat_shards
from meshwright_parallel.engine.buckets import Single
from meshwright_parallel.engine.grad_reduction import reduction_of
from meshwright_parallel.engine.param_group import ParamGroup, UnshardState
from meshwright_parallel.engine.unshard import UnshardEngine
from meshwright_parallel.strategies import zero as strategy

STAGES = (1, 2, 3)
CASES = [
    (1, {"zero": 2}),
    (2, {"dp": 2, "zero": 2}),
    (2, {"zero": 4}),  # the vocabulary of 13 leaves some parameters whole
    (3, {"dp": 2, "zero": 2}),
    (3, {"zero": 2, "tp": 2}),
]


def zero_plan(stage: int, **degrees: int) -> ParallelPlan:
    return plan_of(degrees=degrees, zero={"stage": stage})


@contextlib.contextmanager
def moved_alone(nbytes: int) -> Iterator[None]:
    """Inside, tensors of at least `nbytes` have collectives of their own, without copies."""
    original, flat_shards.SINGLE_BYTES = flat_shards.SINGLE_BYTES, nbytes
    try:
        yield
    finally:
        flat_shards.SINGLE_BYTES = original


def trained(rank: int, world_size: int, plan: ParallelPlan, dropout: float, alone: int) -> Any:
    dtype = torch.float64
    expected = loop(make(dropout, dtype), torch.nn.utils.clip_grad_norm_)
    with moved_alone(alone):
        return expected, loop(parallelize(make(dropout, dtype), plan), clip_grad_norm_)


@pytest.mark.slow
@pytest.mark.parametrize("alone", [1, 2**19])
@pytest.mark.parametrize(("stage", "degrees"), CASES)
def test_training_equals_one_device(
    rank_pool: RankPool, stage: int, degrees: dict[str, int], alone: int
) -> None:
    world_size = 2 if degrees == {"zero": 2} else 4
    for expected, actual in rank_pool.run(world_size, trained, zero_plan(stage, **degrees), 0.3, alone):
        same(actual, expected)


def cut_small(rank: int, world_size: int, stage: int) -> Any:
    """As `trained` and `scenarios`, with small parameters sharded unevenly, so that some ranks have empty shards."""
    import parallel_models

    original = strategy.UNEVEN, parallel_models.WIDTH, parallel_models.VOCABULARY
    strategy.UNEVEN, parallel_models.WIDTH, parallel_models.VOCABULARY = 1, 6, 9
    try:
        plan = zero_plan(stage, zero=world_size)
        model = parallelize(make(), plan)
        with torch.no_grad():
            parts = {n: p.to_local().numel() for n, p in model.named_parameters()}  # type: ignore[attr-defined]
        expected, actual = trained(rank, world_size, plan, 0.3, 1)
        return parts, [("trained", expected, actual), *each_scenario(model)]
    finally:
        strategy.UNEVEN, parallel_models.WIDTH, parallel_models.VOCABULARY = original


@pytest.mark.slow
@pytest.mark.parametrize("stage", STAGES)
def test_ranks_may_have_empty_shards(rank_pool: RankPool, stage: int) -> None:
    parts = []
    for local, results in rank_pool.run(4, cut_small, stage):
        parts.append(local)
        alike(results)
    few = [name for name in parts[0] if any(not local[name] for local in parts)]
    assert "embed.weight" in few and "blocks.0.up.weight" not in few  # 9 x 6 over four ranks, and 12 x 6


def without_reduction(rank: int, world_size: int, stage: int) -> Any:
    model = parallelize(make(), zero_plan(stage, zero=2))
    engine = reduction_of(model)
    assert engine is not None
    engine.remove()
    model(**batch_of()).backward()
    return {n: full(p.grad) for n, p in model.named_parameters()}


@pytest.mark.slow
def test_without_the_engine_no_gradient_arrives(rank_pool: RankPool) -> None:
    for actual in rank_pool.run(2, without_reduction, 3):
        assert all(value is None for value in actual.values())


# ---------------------------------------------------------------------------- the same code on one device and on many
def gradients(model: nn.Module) -> dict[str, torch.Tensor | None]:
    return {n: full(p.grad) for n, p in model.named_parameters()}


def accumulated(model: Language) -> Any:
    for seed in range(3):
        model(**batch_of(seed=seed)).backward()
    return gradients(model)


def two_forwards_one_backward(model: Language) -> Any:
    losses = [model(**batch_of(seed=seed)) for seed in range(2)]
    sum(losses).backward()  # type: ignore[union-attr]
    return gradients(model)


def two_backwards(model: Language) -> Any:
    loss = model(**batch_of())
    loss.backward(retain_graph=True)
    once = gradients(model)
    loss.backward()
    return once, gradients(model)


def evaluated(model: Language) -> Any:
    with torch.no_grad():
        before = full(model(**batch_of()))
        model.blocks[0].up.weight.data.mul_(2)  # a write that autograd does not see
        torch._foreach_mul_([model.blocks[1].up.weight], 0.5)
        middle = full(model(**batch_of()))
        model.norm_like = None
        model.embed.weight.copy_(
            torch.arange(model.embed.weight.numel(), dtype=torch.float32).view_as(model.embed.weight) / 100
        )
        with torch.inference_mode():
            after = full(model(**batch_of()))
    return before, middle, after


def used_outside(model: Language) -> Any:
    """A weight that another function reads, before and after the forward, and a penalty on the values themselves."""
    penalty = model.blocks[0].up.weight.square().sum()
    logits = model(batch_of()["ids"])
    more = (
        F.linear(logits.mean(1)[:, : model.embed.embedding_dim], model.blocks[1].down.weight.t())
        .square()
        .sum()
    )
    (logits.square().mean() + 0.1 * penalty + 0.1 * more + model.embed.weight.full_tensor().sum()
     if isinstance(model.embed.weight, DTensor)
     else logits.square().mean() + 0.1 * penalty + 0.1 * more + model.embed.weight.sum()).backward()  # fmt: skip
    return gradients(model)


def a_part_alone(model: Language) -> Any:
    h = model.embed(batch_of()["ids"])
    model.blocks[0](h).square().mean().backward()
    return gradients(model)


def thawed(model: Language) -> Any:
    model(**batch_of()).backward()
    model.head.bias.requires_grad_(True)
    model.blocks[0].requires_grad_(False)
    model(**batch_of()).backward()
    actual = gradients(model)
    model.head.bias.requires_grad_(False)
    model.blocks[0].requires_grad_(True)
    return actual


def asked_for(model: Language) -> Any:
    chosen = [model.blocks[0].up.weight, model.head.weight]
    actual = torch.autograd.grad(model(**batch_of()), chosen)
    return [full(g) for g in actual], gradients(model)


def checkpointed(model: Language) -> Any:
    for block in model.blocks:
        block.forward = lambda x, local=block: checkpoint(Block.forward, local, x, use_reentrant=False)  # type: ignore[method-assign]
    try:
        model(**batch_of()).backward()
        return gradients(model)
    finally:
        for block in model.blocks:
            del block.forward


def failed(model: Language) -> Any:
    """A pass that raises adds nothing; on one device a part stays, which is removed here."""
    model(**batch_of()).backward()
    before = {n: None if p.grad is None else p.grad.clone() for n, p in model.named_parameters()}
    loss = model(**batch_of(seed=5))
    handle = model.blocks[0].register_full_backward_hook(lambda *_: 1 / 0)
    again = model(**batch_of(seed=6))
    handle.remove()
    with pytest.raises(ZeroDivisionError):
        again.backward()
    if not isinstance(model.embed.weight, DTensor):
        for name, p in model.named_parameters():
            p.grad = before[name]
    kept = gradients(model)
    loss.backward()
    return kept, gradients(model)


def copied(model: Language) -> Any:
    twin = copy.deepcopy(model)
    assert twin.head.weight is twin.embed.weight
    twin(**batch_of()).backward()
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.1)
    optimizer.step()
    return gradients(twin), gradients(model), full(twin(**batch_of())), full(model(**batch_of()))


def loaded(model: Language) -> Any:
    model.load_state_dict(make(seed=9).state_dict())
    return full(model(**batch_of())), {n: full(t) for n, t in model.state_dict().items()}


def changed_in_between(model: Language) -> Any:
    """An optimizer step between forward and backward is an error, as on one device."""
    loss = model(**batch_of())
    loss.backward(retain_graph=True)
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    model.zero_grad()
    model(**batch_of())
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    model.zero_grad()
    model(**batch_of()).backward()
    return gradients(model)


SCENARIOS: tuple[Callable[[Language], Any], ...] = (
    accumulated, two_forwards_one_backward, two_backwards, evaluated, used_outside, a_part_alone, thawed, asked_for,
    checkpointed, failed, copied, loaded, changed_in_between,
)  # fmt: skip


def scenarios(rank: int, world_size: int, stage: int, alone: int) -> Any:
    with moved_alone(alone):
        model = parallelize(make(), zero_plan(stage, zero=2))
        return each_scenario(model)


def each_scenario(model: Language) -> Any:
    actual = []
    for scenario in SCENARIOS:
        single = make()
        model.load_state_dict(single.state_dict())
        model.zero_grad()
        actual.append((scenario.__name__, scenario(single), scenario(model)))
    return actual


def flat(tree: Any) -> list[Any]:
    if isinstance(tree, dict):
        return [x for name in tree for x in flat(tree[name])]
    return [x for item in tree for x in flat(item)] if isinstance(tree, (list, tuple)) else [tree]


@pytest.mark.slow
@pytest.mark.parametrize("alone", [1, 2**19])
@pytest.mark.parametrize("stage", STAGES)
def test_scenarios_equal_one_device(rank_pool: RankPool, stage: int, alone: int) -> None:
    for results in rank_pool.run(2, scenarios, stage, alone):
        alike(results)


def alike(results: list[tuple[str, Any, Any]]) -> None:
    """Each scenario has the result of one device."""
    for name, expected, actual in results:
        for want, got in zip(flat(expected), flat(actual), strict=True):
            assert (want is None) == (got is None), name
            if want is not None:
                torch.testing.assert_close(
                    got, want, atol=1e-5 * float(want.abs().max()), rtol=0, msg=lambda m, n=name: f"{n}: {m}"
                )


class Clamped(nn.Module):
    """Its forward writes to a parameter, after another of the same block was used."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(0.0) for _ in range(3))
        self.data = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            h = block.norm(x)
            if self.data:
                block.up.weight.data.clamp_(-0.2, 0.2)
            else:
                with torch.no_grad():
                    block.up.weight.mul_(0.9)
            x = x + block.down(F.gelu(block.up(h)))
        return x.square().mean()


def clamped(rank: int, world_size: int, stage: int, alone: int) -> Any:
    losses = []
    for parallel in (False, True):
        torch.manual_seed(0)
        model: Any = Clamped().double()
        with moved_alone(alone):
            model = parallelize(model, zero_plan(stage, zero=2)) if parallel else model
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        for step in range(4):
            model.data = step % 2 == 0
            loss = model(torch.linspace(-1, 1, 4 * WIDTH, dtype=torch.float64).view(4, WIDTH))
            loss.backward()
            losses.append((full(loss.detach()), gradients(model)))
            optimizer.step()
            optimizer.zero_grad()
    return losses


@pytest.mark.slow
@pytest.mark.parametrize("alone", [1, 2**19])
@pytest.mark.parametrize("stage", STAGES)
def test_forward_may_write_to_its_parameters(rank_pool: RankPool, stage: int, alone: int) -> None:
    for results in rank_pool.run(2, clamped, stage, alone):
        for (want, expected), (got, actual) in zip(results[:4], results[4:], strict=True):
            torch.testing.assert_close(got, want)
            torch.testing.assert_close(actual, expected)


# ---------------------------------------------------------------------------- memory, communication, errors
class Stack(nn.Module):
    """Six equal blocks and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(0.0) for _ in range(6))
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x).square().mean()


def measured(rank: int, world_size: int, stage: int, alone: int) -> Any:
    with moved_alone(alone):
        return measured_stack(stage)


def unshard_engine_of(model: torch.nn.Module) -> UnshardEngine | None:
    groups = model.__dict__.get("_meshwright_unit")
    return groups.engine if groups is not None else None


def buffer_bytes(group: ParamGroup) -> int:
    return group.numel * group.dtype.itemsize


def measured_stack(stage: int) -> Any:
    torch.manual_seed(0)
    model = parallelize(Stack(), ParallelPlan(world_size=2, degrees={"zero": 2}, zero={"stage": stage}))
    engine = unshard_engine_of(model)
    assert engine is not None
    x = torch.randn(4, WIDTH)
    peak: list[int] = []

    def measure(*_: Any) -> None:
        peak.append(sum(buffer_bytes(group) for group in engine.groups if group.buffer is not None))

    for block in model.blocks:
        block.register_forward_hook(measure)
        block.up.register_full_backward_hook(measure)
    for _ in range(3):
        model(x).backward()
    with communication() as log:
        model(x).backward()
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(parameters)
    optimizer.step()
    with torch.no_grad():
        local = sum(p.to_local().numel() for p in parameters)
        states = sum(s["exp_avg"].to_local().numel() for s in optimizer.state.values())
        grads = sum(p.grad.to_local().numel() for p in parameters)
    block_bytes = buffer_bytes(engine.groups[0])
    reduction = reduction_of(model)
    assert reduction is not None
    assert not any(isinstance(b, Single) and b.rows is not None for b in reduction._buckets)
    log.events = [event for event in log.events if event.function == "zero"]
    return local, states, grads, sum(p.numel() for p in parameters), max(peak), block_bytes, log.counts()


def in_flight(rank: int, world_size: int) -> int:
    """Most parameter groups at once whose all-gathers are launched and not yet waited for."""
    model = parallelize(Stack(), zero_plan(3, zero=2))
    engine = unshard_engine_of(model)
    assert engine is not None
    counts: list[int] = []
    start_unshard = ParamGroup.start_unshard

    def counted(group: ParamGroup) -> None:
        start_unshard(group)
        counts.append(sum(g.state is UnshardState.IN_FLIGHT for g in engine.groups))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ParamGroup, "start_unshard", counted)
        for _ in range(2):
            model(torch.randn(4, WIDTH)).backward()
    assert len(counts) >= 2 * (7 + 5)
    return max(counts)


def test_prefetch_starts_after_the_previous_group_is_unsharded(rank_pool: RankPool) -> None:
    assert rank_pool.run(2, in_flight) == [1, 1]


@pytest.mark.slow
@pytest.mark.host("accelerators copy large shards into buckets too")
@pytest.mark.parametrize("stage", STAGES)
def test_large_shards_have_their_own_collective(rank_pool: RankPool, stage: int) -> None:
    matrix = 12 * WIDTH * 4 // 2  # bytes of what a rank holds of it
    for local, states, grads, total, peak, block_bytes, counts in rank_pool.run(2, measured, stage, matrix):
        assert local == states == grads == total / 2
        if stage == 3:
            assert peak <= 3 * block_bytes  # with the prefetched one
        # two matrices per block, the rest of each block, and the head
        assert counts["zero", "forward", "all_gather"] == 6 * 3 + 1
        assert counts["zero", "backward", "reduce_scatter"] == 6 * 3 + 1


@pytest.mark.parametrize("stage", (2, 3))
def test_memory_is_sharded_and_bounded(rank_pool: RankPool, stage: int) -> None:
    for local, states, grads, total, peak, block_bytes, counts in rank_pool.run(2, measured, stage, 2**19):
        assert local == states == grads == total / 2
        head = 2 * (WIDTH + 1) * 4
        if stage == 3:
            assert peak <= 2 * block_bytes + head  # of six
            assert counts == {
                ("zero", "forward", "all_gather"): 7,
                # the last block and the parameters outside of blocks are still unsharded
                ("zero", "backward", "all_gather"): 5,
                ("zero", "backward", "reduce_scatter"): 7,
            }
        else:
            assert peak == 6 * block_bytes + head
            assert counts == {("zero", "forward", "all_gather"): 7, ("zero", "backward", "reduce_scatter"): 7}


def refused(rank: int, world_size: int) -> None:
    model = parallelize(make(), zero_plan(3, zero=2))
    with pytest.raises(UnsupportedError, match="create_graph"):
        model(**batch_of()).backward(create_graph=True)
    with pytest.raises(UnsupportedError, match="gradient hook"):
        model.embed.weight.register_hook(lambda g: g)
    with pytest.raises(UnsupportedError, match="to_local"):
        model.embed.weight.to_local()
    with pytest.raises(PlanError, match="says what the ranks along zero shard"):
        parallelize(make(), plan_of(degrees={"zero": 2}))
    with pytest.raises(PlanError, match="no ranks to shard over"):
        parallelize(make(), plan_of(degrees={"dp": 2}, zero={"stage": 1}))


def test_unsupported_uses_raise(rank_pool: RankPool) -> None:
    rank_pool.run(2, refused)


def dropped(rank: int, world_size: int) -> list[bool]:
    model = parallelize(make(), zero_plan(3, zero=2))
    model(**batch_of()).backward()
    left = [weakref.ref(unshard_engine_of(model)), weakref.ref(model.embed.weight)]
    del model
    gc.collect()
    return [reference() is not None for reference in left]


def test_dropped_model_is_freed(rank_pool: RankPool) -> None:
    assert rank_pool.run(2, dropped) == [[False, False]] * 2
