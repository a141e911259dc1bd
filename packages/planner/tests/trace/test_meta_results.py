"""Results of common operations on fake tensors, asked of torch's kernels for the meta device: as FakeTensorMode has them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from meshwright_planner import _torch

aten = torch.ops.aten
MODE = _torch.fake_mode()
CPU = torch.device("cpu")


def fake(
    *shape: int, dtype: torch.dtype = torch.bfloat16, stride: tuple[int, ...] | None = None
) -> torch.Tensor:
    plain = torch.empty(shape, dtype=dtype, device="meta")
    laid = plain if stride is None else torch.empty_strided(shape, stride, dtype=dtype, device="meta")
    return _torch.fake_like(MODE, laid, CPU)


FULL, SMALL = fake(2, 8, 16), fake(1, 8, 16)
TURNED, SPREAD = fake(2, 8, 16, stride=(128, 1, 8)), fake(2, 8, 16, stride=(0, 16, 1))
APART = fake(2, 8, 16, stride=(512, 64, 2))
WIDE, SCALAR = fake(2, 8, 16, dtype=torch.float32), fake(dtype=torch.float32)
WHOLE, TRUE = fake(3, dtype=torch.long), fake(2, 8, 16, dtype=torch.bool)
LEFT, RIGHT = fake(16, 24), fake(24, 16)

CALLS: list[tuple[Any, ...]] = [
    *((aten.view.default, x, size) for x in (FULL, WIDE) for size in ([16, 16], [2, 8, 4, 4], [-1, 16], [256])),
    *((aten._unsafe_view.default, FULL, size) for size in ([16, 16], [2, -1])),
    *((aten.transpose.int, x, 1, 2) for x in (FULL, TURNED)),
    (aten.t.default, LEFT),
    (aten.permute.default, TURNED, [2, 0, 1]),
    (aten.expand.default, SMALL, [4, 8, 16]),
    *((aten.unsqueeze.default, x, dim) for x in (FULL, TURNED) for dim in (0, 1, -1)),
    (aten.squeeze.dim, SMALL, 0),
    (aten.squeeze.dim, FULL, 0),
    (aten.slice.Tensor, FULL, 2, 3, 9),
    (aten.slice.Tensor, TURNED, 1, 0, 2**63 - 1),
    (aten.select.int, FULL, 1, 3),
    (aten.split.Tensor, FULL, 4, 1),
    (aten.split_with_sizes.default, FULL, [3, 13], -1),
    *((aten.cat.default, pair, 1) for pair in ([FULL, FULL], [TURNED, TURNED], [FULL, WIDE])),
    *((aten.clone.default, x) for x in (TURNED, SPREAD, APART)),
    (aten.clone.default, TURNED, {"memory_format": torch.contiguous_format}),
    (aten.mm.default, LEFT, RIGHT),
    (aten.bmm.default, FULL, fake(2, 16, 3, stride=(48, 1, 16))),
    (aten.addmm.default, fake(24), fake(5, 16), LEFT),
    *((aten.mul.Tensor, x, y) for x in (FULL, TURNED, SPREAD, APART) for y in (FULL, TURNED, WIDE, SCALAR)),
    (aten.add.Tensor, FULL, SMALL),
    (aten.add.Tensor, FULL, FULL, {"alpha": 2}),
    (aten.sub.Tensor, TURNED, TURNED),
    (aten.div.Tensor, WHOLE, WHOLE),
    *((aten.pow.Tensor_Scalar, x, power) for x in (FULL, WHOLE) for power in (2, 2.0)),
    *(
        (op.default, x)
        for op in (aten.neg, aten.rsqrt, aten.exp, aten.sin, aten.cos, aten.tanh, aten.sigmoid, aten.silu, aten.gelu)
        for x in (FULL, TURNED, APART, WIDE)
    ),
    (aten.exp.default, WHOLE),
    *((aten.mean.dim, x, dims, keeps) for x in (FULL, TURNED) for dims in ([-1], [0, 1]) for keeps in (True, False)),
    (aten.sum.dim_IntList, TRUE, [0]),
    (aten.sum.dim_IntList, FULL, [0, 1], False, {"dtype": torch.float32}),
    (aten.amax.default, TURNED, [-1], True),
    (aten.where.self, TRUE, FULL, WIDE),
    *((aten._to_copy.default, x, {"dtype": torch.float32}) for x in (FULL, TURNED, SPREAD, APART, WIDE, TRUE)),
    *((aten._softmax.default, x, -1, False) for x in (WIDE, TURNED)),
    (aten._log_softmax.default, WIDE, 1, False),
]  # fmt: skip


def geometry(x: torch.Tensor, given: list[torch.Tensor]) -> tuple[Any, ...]:
    ours = _torch.storage_key(x)
    of = next((n for n, tensor in enumerate(given) if _torch.storage_key(tensor) == ours), None)
    return type(x), x.shape, x.stride(), x.storage_offset(), x.dtype, x.device, x.requires_grad, of


@pytest.mark.parametrize("call", CALLS, ids=lambda call: str(call[0]))
def test_meta_results_equal_fake_tensor_mode(call: tuple[Any, ...]) -> None:
    func, *args = call
    kwargs = args.pop() if isinstance(args[-1], dict) else {}
    given = [
        x for arg in args for x in (arg if isinstance(arg, list) else [arg]) if isinstance(x, torch.Tensor)
    ]
    ours, torchs = _torch.meta_result(MODE, func, tuple(args), kwargs), func(*args, **kwargs)
    assert type(ours) is type(torchs)
    several = isinstance(ours, (tuple, list))
    pairs = zip(ours, torchs, strict=True) if several else [(ours, torchs)]
    assert all(geometry(a, given) == geometry(b, given) for a, b in pairs)


def test_all_meta_operations_are_tested() -> None:
    assert {call[0] for call in CALLS} == _torch._META_OPS


def test_other_operations_have_no_meta_result() -> None:
    """Real tensors, fakes of another mode, another device, results elsewhere, and other operations."""
    other = _torch.fake_like(_torch.fake_mode(), torch.empty(2, 8, 16, device="meta"), CPU)
    elsewhere = _torch.fake_like(MODE, torch.empty(2, 8, 16, device="meta"), torch.device("cuda:0"))
    for args in ((FULL, torch.ones(1)), (FULL, other), (FULL, elsewhere), ([FULL, torch.ones(1)],)):
        assert _torch.meta_result(MODE, aten.mul.Tensor, args, {}) is None
    assert (
        _torch.meta_result(MODE, aten._to_copy.default, (FULL,), {"device": torch.device("cuda:0")}) is None
    )
    assert _torch.meta_result(MODE, aten.add_.Tensor, (FULL, FULL), {}) is None
