"""Copies of values on several ranks: a bit that flips on one of them is found and named, under every plan."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import meshwright as mw
from meshwright_checkpoint import ReplicaError
from meshwright_checkpoint.state.replicas import _who
from meshwright_dtensor.errors import UsageError
from meshwright_dtensor.mesh.mesh import extremes
from meshwright_dtensor.parameter import MeshParameter
from meshwright_dtensor.stages.optimizers import own_state
from meshwright_dtensor.testing.rank_pool import RankPool
from meshwright_dtensor.utils.checksum import checksum

ROWS, WIDTH = 8, 12


class Net(nn.Module):
    """Blocks with a batch norm, whose first and last weights are one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(17, WIDTH)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 24), nn.GELU(), nn.Linear(24, WIDTH))
            for _ in range(2)
        )
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 17, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.full((5,), 0.5))

    def forward(self, ids: torch.Tensor) -> dict[str, torch.Tensor]:
        x = self.embed(ids)
        for block in self.blocks:
            x = x + block(x) * self.scale[0]
        logits = self.head(self.norm(x))
        return {"loss": nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())}


def trained(plan: dict[str, Any]) -> tuple[nn.Module, torch.optim.Optimizer, dict[str, torch.Tensor]]:
    """A parallel model after two steps, with the gradients of a third."""
    torch.manual_seed(0)
    batch = {"ids": torch.randint(17, (ROWS, 6))}
    model = mw.auto_parallelize(Net(), batch, **plan)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(3):
        optimizer.zero_grad()
        model(**batch)["loss"].backward()
        if step < 2:
            optimizer.step()
    return model, optimizer, batch


def locals_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, torch.Tensor]]:
    """What this rank holds in a copy, by kind."""
    for name, parameter in model.named_parameters():
        if not isinstance(parameter, MeshParameter) or not parameter.to_local().numel():
            continue
        yield f"parameter {name!r}", parameter.to_local()
        yield f"gradient of {name!r}", parameter.grad.to_local()
        yield f"optimizer state 'exp_avg' of {name!r}", optimizer.state[parameter]["exp_avg"].to_local()
    yield from ((f"buffer {name!r}", buffer) for name, buffer in model.named_buffers())


def flipped(rank: int, ranks: int, plan: dict[str, Any], what: list[str]) -> list[tuple[int, str]]:
    """For each of these values: the last rank that holds it, and the error with one bit flipped there; "" for none."""
    model, optimizer, _ = trained(plan)
    mw.check_replicas(model, optimizer)
    errors = []
    for name in what:
        with torch.no_grad(), own_state(model, optimizer):
            local = dict(locals_of(model, optimizer)).get(name)
        where = extremes([-1 if local is None else rank], None)[0][1]
        flip_bit(local if rank == where else None)
        errors.append((where, raised(lambda: mw.check_replicas(model, optimizer))))
        flip_bit(local if rank == where else None)
    mw.check_replicas(model, optimizer)
    return errors


@torch.no_grad()
def flip_bit(local: torch.Tensor | None, bit: int = 0) -> None:
    """Flip one bit of the last element."""
    if local is not None:
        local.detach().view(-1)[-1:].view(torch.int32).bitwise_xor_(1 << bit)


def raised(call: Callable[[], object]) -> str:
    try:
        call()
    except ReplicaError as error:
        return str(error)
    return ""


NORM, LINEAR = "blocks.1.0.weight", "blocks.1.1.weight"
CASES = [
    pytest.param(2, {"tp": 2}, {NORM: True, LINEAR: False}, id="tp2"),
    pytest.param(2, {"zero": 3}, {LINEAR: False}, id="zero3"),
    pytest.param(4, {"dp": 2, "zero": 2, "zero_degree": 2}, {LINEAR: True}, id="dp2-zero2"),
    pytest.param(4, {"pp": 2, "dp": 2}, {LINEAR: True}, id="pp2-dp2"),
    pytest.param(2, {"pp": 2}, {"embed.weight": True, LINEAR: False}, id="pp2"),
]
"""Ranks, plan, and parameters: whether more than one rank holds the same part."""


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "plan", "copied"), CASES)
def test_a_flipped_bit_is_found(
    rank_pool: RankPool, ranks: int, plan: dict[str, Any], copied: dict[str, bool]
) -> None:
    kinds = ("parameter", "gradient of", "optimizer state 'exp_avg' of")
    what = {f"{kind} {name!r}": has for name, has in copied.items() for kind in kinds}
    errors_of_ranks = rank_pool.run(ranks, flipped, plan, [*what, "buffer 'scale'"])
    assert all(errors == errors_of_ranks[0] for errors in errors_of_ranks)
    *of_parameters, (_, of_buffer) = errors_of_ranks[0]
    for (text, has), (where, error) in zip(what.items(), of_parameters, strict=True):
        # a part that one rank alone holds has no copy
        assert error.startswith(text) and f"rank {where}" in error if has else not error, (text, error)
    assert of_buffer.startswith("buffer 'scale' at [0:5] differs") and f"rank {ranks - 1}" in of_buffer


def watched(rank: int, ranks: int) -> tuple[list[int], str]:
    """Steps until a flipped bit of a state is found."""
    model, optimizer, batch = trained({"dp": 2})
    watch = mw.watch_replicas(model, optimizer, interval=3)
    done: list[int] = []
    parameter = next(p for name, p in model.named_parameters() if name == LINEAR)
    if rank == 1:
        flip_bit(optimizer.state[parameter]["exp_avg_sq"].to_local(), 20)

    def train() -> None:
        for step in range(7):
            optimizer.zero_grad()
            model(**batch)["loss"].backward()
            optimizer.step()
            done.append(step)

    error = raised(train)
    watch.remove()
    optimizer.step()
    return done, error


def test_a_watch_finds_it_within_its_steps(rank_pool: RankPool) -> None:
    for done, error in rank_pool.run(2, watched):
        assert done == [0, 1]
        assert LINEAR in error and "rank 0 and rank 1" in error


def counted(rank: int, ranks: int) -> tuple[int, int, int, int]:
    """Bytes that a check reads and sends, and those of the gradients and of all that AdamW reads and writes in a step."""
    model, optimizer, _ = trained({"dp": 2})
    read, sent, send = [], [], torch.distributed.all_to_all_single

    def checksum_of(tensor: torch.Tensor) -> int:
        read.append(tensor.nbytes)
        return checksum(tensor)

    def sending(output: torch.Tensor, given: torch.Tensor, *more: Any, **keywords: Any) -> Any:
        sent.append(given.nbytes)
        return send(output, given, *more, **keywords)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("meshwright_checkpoint.state.replicas.checksum", checksum_of)
        patch.setattr(torch.distributed, "all_to_all_single", sending)
        mw.check_replicas(model, optimizer)
    gradients = sum(parameter.grad.to_local().nbytes for parameter in model.parameters())
    # parameters, gradients and two states are read, all but the gradients written
    return sum(read), sum(sent), gradients, 7 * gradients


def test_a_check_every_100_steps_costs_less_than_a_hundredth_of_the_optimizer(rank_pool: RankPool) -> None:
    for read, sent, gradients, moved in rank_pool.run(2, counted):
        # each value once
        assert 4 * gradients <= read < 4.1 * gradients and read < 0.01 * 100 * moved
        # two numbers for each, where every step sends the gradients
        assert 0 < sent < 0.01 * 100 * gradients


def refused(rank: int, ranks: int) -> list[str]:
    model, optimizer, _ = trained({"dp": 2})
    messages = []
    for interval in (0, -1, 1.5, True):
        with pytest.raises(UsageError) as caught:
            mw.watch_replicas(model, optimizer, interval=interval)  # type: ignore[arg-type]
        messages.append(str(caught.value))
    return messages


def test_steps_that_are_none_are_refused(rank_pool: RankPool) -> None:
    assert all("give a number of steps" in text for texts in rank_pool.run(2, refused) for text in texts)


def test_one_device_has_no_copies() -> None:
    mw.check_replicas(Net())


def test_ranks_are_blamed_only_by_a_majority() -> None:
    assert _who([[0, 1, 3], [2]]) == "rank 2 from ranks 0, 1, 3"
    assert _who([[2, 3], [0, 1]]) == "ranks 0, 1 and ranks 2, 3 have different ones"
    assert _who([[1], [0]]) == "rank 0 and rank 1 have different ones"
    # the largest group, and not more than half
    assert _who([[4], [0, 1], [2], [3]]) == "ranks 0, 1 and rank 2 and rank 3 and rank 4 have different ones"
    assert _who([[4], [0, 1], [2, 3]]) == "ranks 0, 1 and ranks 2, 3 and rank 4 have different ones"
