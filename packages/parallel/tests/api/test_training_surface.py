"""The training surface: what scripts do to models, gradients and optimizers has the result of one device."""

from __future__ import annotations

import copy
import io
import logging
import math
import warnings
from typing import Any

import pytest
import torch
from torch import nn, optim
from torch.distributed.checkpoint import state_dict as dcp
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from training_cases import Net, adapted, differences, loss_of, optimizers, pair, train

from meshwright_dtensor.devices import HOST
from meshwright_dtensor.errors import UnsupportedError
from meshwright_dtensor.testing.on_device import device_type
from meshwright_dtensor.testing.rank_pool import RankPool
from meshwright_parallel import clip_grad_norm_, get_total_norm, parallelize

LAYOUTS = {"tp2": {"dp": 1, "tp": 2}, "dp2": {"dp": 2, "tp": 1}}
Degrees = dict[str, int]


@pytest.mark.slow
def test_every_optimizer_steps_as_on_one_device(rank_pool: RankPool) -> None:
    for actual in rank_pool.run(2, optimizers, {"dp": 1, "tp": 2}):
        assert {name: wrong for name, wrong in actual.items() if wrong} == {}


def _norms(rank: int, world_size: int, degrees: Degrees) -> None:
    for order in (2.0, 1.0, 3.0, math.inf):
        for ours in (True, False):
            single, many = pair(degrees)
            for model in (single, many):
                loss_of(model, 0).backward()
            want = nn.utils.clip_grad_norm_(single.parameters(), 0.1, order)
            if ours:
                before = get_total_norm([p.grad for p in many.parameters()], order)
                got = clip_grad_norm_(many.parameters(), 0.1, order)
                assert torch.equal(before, got)
            else:  # torch's own: stock DTensor would show one rank's part of the norm
                got = nn.utils.clip_grad_norm_(many.parameters(), 0.1, order)
            assert abs(float(got) - float(want)) <= 1e-6 * float(want)
            assert not differences(single, many, "gradient")
    assert float(many.up.weight.grad.norm()) == pytest.approx(float(single.up.weight.grad.norm()), rel=1e-6)


def _accumulation(rank: int, world_size: int, degrees: Degrees) -> None:
    single, many = pair(degrees)
    runs = [(model, optim.SGD(model.parameters(), 0.1, momentum=0.9)) for model in (single, many)]
    for step in range(6):
        for model, optimizer in runs:
            (loss_of(model, step) / 2).backward()
            if step % 2:
                optimizer.step()
                optimizer.zero_grad(set_to_none=step > 3)
    assert not differences(single, many)


def _groups_and_schedules(rank: int, world_size: int, degrees: Degrees) -> None:
    runs = []
    single, many = pair(degrees)
    for model in (single, many):
        named = list(model.named_parameters())
        groups: list[dict[str, Any]] = [
            {"params": [(n, p) for n, p in named if "norm" in n], "weight_decay": 0.0},
            {"params": [(n, p) for n, p in named if "norm" not in n]},
        ]
        optimizer = optim.AdamW(groups, lr=1e-2)
        runs.append((model, optimizer, optim.lr_scheduler.OneCycleLR(optimizer, 0.01, total_steps=10)))
    for step in range(3):
        for model, optimizer, schedule in runs:
            train([(model, optimizer)], [step])
            schedule.step()
    assert not differences(single, many)


def _frozen(rank: int, world_size: int, degrees: Degrees) -> None:
    """Frozen parts, then others: what is frozen, and when, changes while training."""
    single, many = pair(degrees)
    for model in (single, many):
        model.up.requires_grad_(False)
        model.emb.weight.requires_grad = False
    runs = [(m, optim.AdamW([p for p in m.parameters() if p.requires_grad])) for m in (single, many)]
    train(runs, range(2))
    assert many.up.weight.grad is None
    for model, optimizer in runs:
        model.up.requires_grad_(True)
        optimizer.add_param_group({"params": list(model.up.parameters()), "lr": 1e-2})
        model.down.bias.requires_grad = False
    train(runs, range(2, 4))
    assert not differences(single, many)
    single, many = pair(degrees, adapted)
    runs = [(m, optim.AdamW([p for p in m.parameters() if p.requires_grad], 1e-2)) for m in (single, many)]
    train(runs, range(3))
    assert not differences(single, many)
    assert [n for n, p in many.named_parameters() if p.grad is not None] == [
        "up.a",
        "up.b",
        "down.a",
        "down.b",
    ]


def _state_dicts(rank: int, world_size: int, degrees: Degrees) -> None:
    """Between one device and many, both ways, with torch's own calls, half way through training."""
    single, many = pair(degrees)
    runs = [(model, optim.AdamW(model.parameters(), 1e-2)) for model in (single, many)]
    train(runs, range(2))
    for key, value in many.state_dict().items():
        torch.testing.assert_close(value.full_tensor(), single.state_dict()[key], rtol=1e-5, atol=1e-6)
    options = dcp.StateDictOptions(full_state_dict=True)
    whole_model, whole_optimizer = dcp.get_state_dict(many, runs[1][1], options=options)
    sharded_model, sharded_optimizer = dcp.get_state_dict(many, runs[1][1])
    others = []
    for seed in (5, 6, 7):
        other = pair(degrees, seed=seed)[1]
        others.append((other, optim.AdamW(other.parameters(), 1e-2)))
    # one device -> many, by torch.nn and torch.optim
    others[0][0].load_state_dict(single.state_dict())
    others[0][1].load_state_dict(copy.deepcopy(runs[0][1].state_dict()))
    # one device -> many, and many -> many, by torch.distributed.checkpoint
    ones = dcp.get_state_dict(single, runs[0][1], options=options)
    dcp.set_state_dict(
        *others[1], model_state_dict=ones[0], optim_state_dict=copy.deepcopy(ones[1]), options=options
    )
    dcp.set_state_dict(
        *others[2], model_state_dict=sharded_model, optim_state_dict=copy.deepcopy(sharded_optimizer)
    )
    # many -> one device
    torch.manual_seed(8)
    back = Net()
    others.append((back, optim.AdamW(back.parameters(), 1e-2)))
    if rank == 0:
        assert whole_optimizer["state"]["up.weight"]["exp_avg"].shape == (32, 16)
    if whole_optimizer["state"]:
        dcp.set_state_dict(
            *others[3], model_state_dict=whole_model, optim_state_dict=copy.deepcopy(whole_optimizer)
        )
    else:
        others.pop()  # torch hands whole states to the first rank only
    train([*runs, *others], range(2, 4))
    for model, _ in [runs[1], *others]:
        assert not differences(single, model)


def _refusals(rank: int, world_size: int, degrees: Degrees) -> None:
    single, many = pair(degrees)
    with pytest.raises(UnsupportedError, match="assign=False"):
        many.load_state_dict(single.state_dict(), assign=True)
    with pytest.raises(RuntimeError, match=r"size mismatch for up\.weight"):
        many.load_state_dict({**single.state_dict(), "up.weight": torch.zeros(3, 3)})
    hooked = Net()
    hooked.up.weight.register_hook(lambda g: g)
    with pytest.raises(UnsupportedError, match="gradient hooks"):
        parallelize(hooked, many.parallel_plan)  # type: ignore[arg-type]
    optimizer = optim.SGD(many.parameters(), 0.1, momentum=0.9, fused=True)
    loss_of(many, 0).backward()
    optimizer.step()
    for entries in optimizer.state.values():  # set without load_state_dict, with another local shape
        entries["momentum_buffer"] = entries["momentum_buffer"].redistribute(
            placements=[torch.distributed.tensor.Replicate()] * 2
        )
    if degrees["tp"] > 1:
        with pytest.raises(UnsupportedError, match="fused=False"):
            optimizer.step()


def _copies(rank: int, world_size: int, degrees: Degrees) -> None:
    """Averages of weights, deep copies, and torch.save."""
    for average in (None, get_ema_multi_avg_fn(0.9)):
        single, many = pair(degrees)
        means = [AveragedModel(model, multi_avg_fn=average) for model in (single, many)]
        runs = [(model, optim.SGD(model.parameters(), 0.1)) for model in (single, many)]
        for step in range(3):
            train(runs, [step])
            for mean, (model, _) in zip(means, runs, strict=True):
                mean.update_parameters(model)
        assert not differences(means[0], means[1])
        with torch.no_grad():
            assert abs(float(loss_of(means[0], 5)) - float(loss_of(means[1], 5))) < 1e-6
    twin = copy.deepcopy(many)
    for model in (single, twin):
        model.zero_grad()
        loss_of(model, 8).backward()
    assert not differences(single, twin, "gradient")
    optimizer = optim.AdamW(twin.parameters())
    optimizer.step()
    state = (twin.state_dict(), optimizer.state_dict())
    if degrees["tp"] > 1:
        # a part of a value
        with pytest.raises(UnsupportedError, match="full_state_dict"):
            torch.save(state, io.BytesIO())
        return
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    weights, entries = torch.load(file)
    saved, kept = entries["state"][1]["exp_avg"], optimizer.state[twin.emb.weight]["exp_avg"]
    for plain, value in ((saved, kept), (weights["up.weight"], twin.up.weight)):
        assert type(plain) is torch.Tensor and torch.equal(plain, value.full_tensor())


def _quiet(rank: int, world_size: int, degrees: Degrees) -> None:
    """Ignores warnings of torch about tensors of one element and about gloo."""
    single, many = pair(degrees)
    heard: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: heard.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("torch.distributed.tensor._collective_utils")
    logger.addHandler(handler)
    weight, target = many.up.weight, [torch.distributed.tensor.Replicate(), torch.distributed.tensor.Shard(1)]
    stock = torch.distributed.tensor.distribute_tensor(
        torch.ones(4, 4), weight.device_mesh, [target[0], torch.distributed.tensor.Shard(0)]
    )
    try:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("error")
            for model in (single, many):
                for parameter in (p for p in model.parameters() if p.dim()):
                    parameter.mul_(torch.tensor([0.5]))
                    parameter.copy_(parameter + torch.tensor([0.25]))
            torch._logging.warning_once.cache_clear()
            moved = weight.redistribute(placements=target)
            assert heard == [] and torch.equal(moved.full_tensor(), weight.full_tensor())
            # the negative control: stock tensors are torch's own
            with pytest.raises(UserWarning, match="numel=1"):
                stock.mul_(torch.tensor([0.5]))
            torch._logging.warning_once.cache_clear()
            stock.redistribute(placements=target)
            on_cpu = device_type() == HOST.type
            assert ["alltoall" in text for text in heard] == [True] * (degrees["tp"] > 1 and on_cpu)
    finally:
        logger.removeHandler(handler)
    assert not differences(single, many)


SURFACES = (_quiet, _norms, _accumulation, _groups_and_schedules, _frozen, _state_dicts, _refusals, _copies)


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("surface", SURFACES, ids=lambda f: f.__name__[1:])
def test_training_script_equals_one_device(rank_pool: RankPool, surface: Any, layout: str) -> None:
    rank_pool.run(2, surface, LAYOUTS[layout])
