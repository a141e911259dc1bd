"""The summed loss of whole rows: torch's value, its gradients of both orders, and its temporary tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.utils._python_dispatch import TorchDispatchMode

from meshwright_dtensor.api import distribute
from meshwright_dtensor.rules.composites.cross_entropy_rows import RowsLoss
from meshwright_dtensor.testing.on_device import device_type, seeded
from meshwright_dtensor.testing.rank_pool import RankPool, fake_group

Tensor = torch.Tensor


def torch_loss(logits: Tensor, target: Tensor, ignore: int) -> Tensor:
    return F.cross_entropy(logits, target, ignore_index=ignore, reduction="sum")


def our_loss(logits: Tensor, target: Tensor, ignore: int) -> Tensor:
    total = RowsLoss.apply(logits, target, ignore)
    assert isinstance(total, Tensor)
    return total


def case(rows: int, classes: int, ignored: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = seeded(rows * classes)
    logits = torch.randn(rows, classes, generator=generator, dtype=dtype) * 5
    target = torch.randint(0, classes, (rows,), generator=generator)
    target[:ignored] = -100
    return logits.requires_grad_(), target


class Made(TorchDispatchMode):
    """Counts new tensors of a size."""

    def __init__(self, numel: int) -> None:
        super().__init__()
        self.numel, self.known, self.count = numel, set[int](), 0
        self.kept: list[Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and result.numel() == self.numel:
            self.kept.append(result)  # so that no address is used twice
            if result.data_ptr() not in self.known:
                self.count += 1
            self.known.add(result.data_ptr())
        return result


class Softmaxes(TorchDispatchMode):
    """Counts them."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten._softmax.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("rows", "classes", "ignored"),
    [(7, 11, 0), (13, 5, 4), (6, 3, 6), (0, 9, 0), (1, 1, 0), (701, 997, 13)],  # the last in parts
)
def test_summed_loss_equals_torch_to_the_bit(
    rows: int, classes: int, ignored: int, dtype: torch.dtype
) -> None:
    results = []
    for loss in (our_loss, torch_loss):
        logits, target = case(rows, classes, ignored, dtype)
        total = loss(logits, target, -100)
        (total * 0.37).backward()
        results.append((total.detach(), logits.grad))
    (ours, gradient), (theirs, expected) = results
    assert torch.equal(ours, theirs)
    torch.testing.assert_close(gradient, expected, rtol=0, atol=4 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("ignore", [0, 3])
def test_any_class_can_be_ignored(ignore: int) -> None:
    logits, target = case(9, 4, 0, torch.float32)
    target[4] = ignore
    assert torch.equal(our_loss(logits, target, ignore), torch_loss(logits, target, ignore))


def test_second_derivative() -> None:
    logits, target = case(5, 4, 2, torch.float64)
    factor = torch.tensor(1.5, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(lambda x, f: our_loss(x, target, -100) * f, (logits, factor))


def test_target_out_of_bounds_raises_as_torch() -> None:
    logits, target = case(4, 6, 0, torch.float32)
    target[2] = 6
    with pytest.raises(IndexError, match="out of bounds"):
        our_loss(logits, target, -100)
    with pytest.raises(IndexError, match="Target -1 is out of bounds"):
        our_loss(logits, target.fill_(-1), -100)


def test_only_the_gradient_has_the_size_of_the_logits() -> None:
    counts = []
    for loss in (our_loss, torch_loss):
        logits, target = case(32, 17, 3, torch.float32)
        total = loss(logits, target, -100)
        with Made(logits.numel()) as made:
            torch.autograd.grad(total, logits)
        counts.append(made.count)
    assert counts[0] == 1 < counts[1]


def test_loss_allocates_no_tensor_of_the_size_of_the_logits() -> None:
    counts = []
    for loss in (our_loss, torch_loss):
        logits, target = case(700, 1024, 3, torch.float32)
        with Made(logits.numel()) as made:
            loss(logits, target, -100)
        counts.append(made.count)
    assert counts == [0, 1]


def of_other_targets(rank: int, world_size: int) -> list[str]:
    """What torch refuses is refused: of one rank, and of rows that ranks share."""
    mesh = init_device_mesh(device_type(), (world_size,), mesh_dim_names=("dp",))
    results = []
    for dtype in (torch.int32, torch.bool, torch.int8):
        logits, target = case(8, 5, 0, torch.float32)
        plain = distribute(logits.detach(), mesh, [Shard(0)])
        with pytest.raises((RuntimeError, NotImplementedError)) as refused:
            F.cross_entropy(plain, distribute(target.to(dtype), mesh, [Shard(0)]))
        results.append(str(refused.value))
    return results


@pytest.mark.parametrize("ranks", [1, 2])
def test_targets_that_torch_rejects_are_rejected(ranks: int, rank_pool: RankPool) -> None:
    for outcome in rank_pool.run(ranks, of_other_targets):
        assert all("expected target dtype" in text for text in outcome), outcome


def on_a_mesh_of_one(rank: int, world_size: int) -> list[bool]:
    mesh = init_device_mesh(device_type(), (1,), mesh_dim_names=("dp",))
    results = []
    for dtype in (torch.bfloat16, torch.float32):
        logits, target = case(37, 19, 5, dtype)
        expected = F.cross_entropy(logits, target)
        ours = F.cross_entropy(distribute(logits.detach(), mesh, [Replicate()]), target)
        results.append(torch.equal(ours.full_tensor(), expected.detach()))
    return results


def test_means_of_one_rank_are_those_of_torch_in_low_precision_too(rank_pool: RankPool) -> None:
    assert rank_pool.run(1, on_a_mesh_of_one) == [[True, True]]


def of_rows_to_be_ignored(rank: int, world_size: int) -> list[bool]:
    """Means whose rows all, or on one rank, are ignored, and rows of NaN among them: value and gradient are those of torch."""
    mesh = init_device_mesh(device_type(), (world_size,), mesh_dim_names=("dp",))
    results = []
    for ignored, wrong in ((8, 0), (4, 0), (8, 3), (4, 3)):
        whole, target = case(8, 5, ignored, torch.float64)
        whole = whole.detach()
        whole[:wrong, 1] = torch.nan
        both = []
        for logits in (whole.clone(), distribute(whole, mesh, [Shard(0)])):
            logits.requires_grad_()
            aim = target if type(logits) is Tensor else distribute(target, mesh, [Shard(0)])
            loss = F.cross_entropy(logits, aim)
            (gradient,) = torch.autograd.grad(loss, logits)
            both.append(
                [
                    tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
                    for tensor in (loss, gradient)
                ]
            )
        results += [
            torch.allclose(a, b, rtol=0, atol=1e-15, equal_nan=True) for a, b in zip(*both, strict=True)
        ]
    return results


@pytest.mark.parametrize("ranks", [1, 2])
def test_ignored_rows_have_the_gradient_of_torch(ranks: int, rank_pool: RankPool) -> None:
    """The mean of no rows is NaN, and its gradient zero: a step whose batch is all padding changes nothing."""
    assert rank_pool.run(ranks, of_rows_to_be_ignored) == [[True] * 8] * ranks


def shared(rank: int, world_size: int) -> dict[str, bool]:
    """The gradient that is computed while ranks wait: its value, when it is computed, and that it is used once."""
    mesh = init_device_mesh(device_type(), (world_size,), mesh_dim_names=("dp",))
    results = {}
    whole, target = case(14, 11, 3, torch.float64)
    expected = F.cross_entropy(whole, target)
    (gradient,) = torch.autograd.grad(expected, whole)

    def loss(value: Tensor) -> Tensor:
        return F.cross_entropy(value, distribute(target, mesh, [Shard(0)]))

    def near(some: Any) -> bool:
        return torch.allclose(some.full_tensor(), gradient, rtol=0, atol=1e-15)

    logits = distribute(whole.detach(), mesh, [Shard(0)]).requires_grad_()
    with Softmaxes() as made:
        first = loss(logits)
    results["made in the forward"] = made.count == 1
    with Softmaxes() as made:
        (once,) = torch.autograd.grad(first, logits, retain_graph=True)
    results["made once"] = made.count == 0 and near(once)
    (twice,) = torch.autograd.grad(first, logits, retain_graph=True)
    results["again"] = near(twice)
    kept = once.full_tensor().clone()
    twice.mul_(2)
    results["its own"] = torch.equal(once.full_tensor(), kept)
    with torch.no_grad(), Softmaxes() as made:
        loss(logits)
    results["not without gradients"] = made.count == 0
    with Softmaxes() as made:
        loss(logits.detach())
    results["not for what needs none"] = made.count == 0
    loss(logits)  # its graph is gone, and with it what was made
    with Softmaxes() as made:
        some = [loss(logits)]
    results["once more"] = made.count == 1
    with Softmaxes() as made:
        some += [loss(logits) for _ in range(3)]
    results["not where backwards come later"] = made.count == 0
    results["late"] = all(near(torch.autograd.grad(tensor, logits)[0]) for tensor in some)
    return results


def test_gradient_is_computed_during_the_all_reduce(rank_pool: RankPool) -> None:
    for results in rank_pool.run(2, shared):
        assert all(results.values()), results


def test_small_logits_have_the_gradient_of_torch_to_the_bit() -> None:
    with fake_group(2):
        mesh = init_device_mesh(device_type(), (2,), mesh_dim_names=("tp",))
        for rows, saved in ((8, 0), (4096, 1)):
            # 64 classes: 2 KiB, and 1 MiB and more for each thread
            rows *= torch.get_num_threads() + 1 if rows > 8 else 1
            logits, target = case(rows, 64, 3, torch.float32)
            gradients = []
            for x, y in (
                (logits, target),
                (distribute(logits, mesh, ["I"]), distribute(target, mesh, ["I"])),
            ):
                logits.grad = None
                with Softmaxes() as softmaxes:
                    F.cross_entropy(x, y).backward()
                gradients.append(logits.grad)
            assert softmaxes.count == saved
            assert saved or torch.equal(*gradients)
            assert torch.allclose(*gradients)
