"""What stock DTensor gets wrong or refuses, each with a test that global tensors do not share it."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from meshwright_dtensor.api import as_mesh_parameter, distribute
from meshwright_dtensor.comm.log import communication
from meshwright_dtensor.mesh.context import MeshContext
from meshwright_dtensor.mesh.layout import layout_of
from meshwright_dtensor.tensor.global_tensor import wrap
from meshwright_dtensor.testing.on_device import device_type, seeded
from meshwright_dtensor.testing.rank_pool import RankPool


def mesh_of(world):
    return init_device_mesh(device_type(), (world,), mesh_dim_names=("tp",))


def weight_over(value, mesh, state):
    placement = Shard(state) if isinstance(state, int) else Replicate()
    return as_mesh_parameter(distribute_tensor(value.detach(), mesh, [placement]), (state,))


def partial(value, mesh, rank, world):
    """``value`` as a partial sum of random shares."""
    context = MeshContext.of(mesh)
    shares = torch.randn((world - 1, *value.shape), generator=seeded(3))
    local = shares[rank] if rank < world - 1 else value - shares.sum(0)
    return wrap(local, layout_of(context, ("P",), value.shape, value.dtype))


def close(actual, expected):
    actual = actual.full_tensor() if hasattr(actual, "full_tensor") else actual
    torch.testing.assert_close(actual, expected)


def case_mean_loss_with_ignored_labels(rank, world, mesh):
    """Stock: 2.390 for 3.258, since Partial(avg) knows nothing of how many labels count on each rank."""
    logits, labels = torch.randn(8, 16), torch.randint(0, 16, (8,))
    labels[5:] = -100
    labels[0] = -100
    for state in ("I", 0, 1):
        for reduction in ("mean", "sum", "none"):
            a = logits.clone().requires_grad_()
            b = distribute(logits, mesh, [state]).requires_grad_()
            target = distribute(labels, mesh, [0]) if state == 0 else labels
            expected = F.cross_entropy(a, labels, reduction=reduction)
            actual = F.cross_entropy(b, target, reduction=reduction)
            close(actual, expected)
            expected.sum().backward()
            actual.sum().backward()
            close(b.grad, a.grad)


def case_cumsum_with_a_negative_dim(rank, world, mesh):
    """Stock: cumsum(-1) of a tensor sharded on its last dim gives the sums of the shards."""
    x = torch.randn(3, 8)
    for dim in (-1, 1):
        close(distribute(x, mesh, [1]).cumsum(dim), x.cumsum(dim))
        close(torch.cumsum(distribute(x, mesh, [1]), dim=dim), x.cumsum(dim))


def case_vocabulary_parallel_embedding_read_twice(rank, world, mesh):
    """Stock: the _MaskPartial output of a vocabulary-parallel embedding can be read once."""
    table, ids = torch.randn(10, 4), torch.tensor([[0, 9, 5], [4, 5, 2]])
    plain = table.clone().requires_grad_()
    parameter = weight_over(table, mesh, 0)
    x, y = F.embedding(ids, plain), F.embedding(distribute(ids, mesh, ["I"]), parameter)
    a, b = (x * x + x.tanh()).sum(), (y * y + y.tanh()).sum()
    close(b, a)
    a.backward()
    b.backward()
    close(parameter.grad, plain.grad)


def case_nonlinear_use_of_a_partial(rank, world, mesh):
    """A Partial value must be reduced before dropout, an activation, or a product with itself."""
    value = torch.randn(6, 5)
    x = partial(value, mesh, rank, world)
    for f in (
        torch.relu,
        torch.exp,
        lambda v: v * v,
        lambda v: v + 1,
        lambda v: v.clamp(min=0),
        lambda v: v > 0,
    ):
        close(f(x), f(value))
    torch.manual_seed(8)
    expected = F.dropout(value, 0.3)
    torch.manual_seed(8)
    close(F.dropout(x, 0.3), expected)
    for off in (F.dropout(x, 0.3, training=False), F.dropout(x, 0.0)):
        assert off.global_layout.states == ("P",)  # the identity reduces nothing
        close(off, value)
    close(x.clone(), value)  # stock drops the Partial
    close(x.to(torch.bfloat16), value.to(torch.bfloat16))  # summed before it is rounded
    close(x.mean(), value.mean())


def case_uneven_heads(rank, world, mesh):
    """Stock: "Cannot unflatten unevenly sharded tensor" for three heads on two ranks."""
    x = torch.randn(2, 5, 12)
    for state in (0, 1, 2):
        y = distribute(x, mesh, [state]).view(2, 5, 3, 4).transpose(1, 2)
        close(y, x.view(2, 5, 3, 4).transpose(1, 2))


def case_cat_with_an_empty_tensor(rank, world, mesh):
    """The first step of transformers' cache: cat([tensor([]), x])."""
    x = torch.randn(4, 2, 6)
    for state in (0, 1, 2):
        close(torch.cat([torch.tensor([]), distribute(x, mesh, [state])], dim=-2), x)


def case_attention_mask_as_a_keyword(rank, world, mesh):
    """Stock: keyword tensors are not redistributed."""
    q, k, v = (torch.randn(4, 2, 6, 8) for _ in range(3))
    mask = torch.rand(4, 1, 6, 6) > 0.3
    mask[..., 0] = True
    expected = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    for state in (0, 1):
        here = [distribute(t, mesh, [state]) for t in (q, k, v)]
        close(F.scaled_dot_product_attention(*here, attn_mask=mask), expected)
        close(F.scaled_dot_product_attention(*here, attn_mask=distribute(mask, mesh, [0])), expected)


def case_ops_without_a_rule(rank, world, mesh):
    """Stock raises for nonzero, fill_.Tensor and the CPU's flash attention."""
    x = torch.randn(4, 6)
    for state in (0, 1):
        g = distribute(x, mesh, [state])
        close(torch.nonzero(g > 0), torch.nonzero(x > 0))
        close((g * 1).fill_(torch.tensor(2.0)), torch.full_like(x, 2.0))
        close(g[g > 0], x[x > 0])


def case_mean_over_uneven_shards(rank, world, mesh):
    """Stock: Partial(avg) weighs a short shard like a long one."""
    x = torch.randn(5, 3)
    g = distribute(x, mesh, [0])
    close(g.mean(), x.mean())
    close(g.mean(0), x.mean(0))
    close(g.var(0), x.var(0))


def case_head_norms_between_column_and_row(rank, world, mesh):
    """Stock module hooks: gradients of a norm over each head, inside a column-parallel region, off by up to 0.72."""
    torch.manual_seed(2)

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down = nn.Linear(8, 16, bias=False), nn.Linear(16, 8, bias=False)
            self.norm = nn.RMSNorm(4)

        def forward(self, x):
            heads = self.norm(self.up(x).view(*x.shape[:-1], 4, 4))
            return self.down(heads.flatten(-2)) + x

    plain, x = Block(), torch.randn(3, 5, 8)
    here = copy.deepcopy(plain)
    for name, state in (("up", 0), ("down", 1), ("norm", "I")):
        module = getattr(here, name)
        module.weight = weight_over(module.weight, mesh, state)
    plain(x).pow(2).sum().backward()
    with communication() as log:
        here(distribute(x, mesh, ["I"])).pow(2).sum().backward()
    assert {e.kind for e in log.events} == {"all_reduce"}
    for name in ("up", "down", "norm"):
        close(getattr(here, name).weight.grad, getattr(plain, name).weight.grad)


def case_convolution(rank, world, mesh):
    x, w = torch.randn(4, 6, 9), torch.randn(8, 6, 3)
    expected = F.conv1d(x, w)
    for xs, ws in ((0, "I"), (1, 1), ("I", 0)):
        close(F.conv1d(distribute(x, mesh, [xs]), weight_over(w, mesh, ws)), expected)


CASES = {name.removeprefix("case_"): f for name, f in list(globals().items()) if name.startswith("case_")}


def run(rank, world, name):
    torch.manual_seed(0)
    CASES[name](rank, world, mesh_of(world))
    return True


ON_THREE = {
    "mean_loss_with_ignored_labels",
    "cumsum_with_a_negative_dim",
    "nonlinear_use_of_a_partial",
    "mean_over_uneven_shards",
}
RUNS = [(name, 2) for name in CASES] + [(name, 3) for name in CASES if name in ON_THREE]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "world"), RUNS)
def test_errors_of_stock_dtensor_do_not_occur(rank_pool: RankPool, name: str, world: int):
    assert all(rank_pool.run(world, run, name))


def stock_is_still_wrong(rank, world):
    """The control: if stock DTensor is right one day, these tests no longer tell the two apart."""
    mesh = mesh_of(world)
    x = torch.ones(2, 8)
    return torch.equal(distribute_tensor(x, mesh, [Shard(1)]).cumsum(-1).full_tensor(), x.cumsum(-1))


def test_stock_dtensor_still_has_its_errors(rank_pool: RankPool):
    assert rank_pool.run(2, stock_is_still_wrong) == [False, False]
