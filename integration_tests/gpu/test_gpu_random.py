"""Dropout masks on a GPU: those that torch's fused kernels draw, and the generator ends where they leave it."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from meshwright_dtensor import dropout_noise
from meshwright_dtensor.drawing import gpu
from meshwright_dtensor.drawing.held import Held, Target
from meshwright_dtensor.drawing.whole import Kind, Whole
from meshwright_dtensor.errors import UnsupportedError
from meshwright_dtensor.random import MOST_BYTES, Part, run_random
from meshwright_dtensor.sharding.boxes import Place, copy_region, dim_order_of, has_gaps, strides_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="a kernel that needs a GPU"),
]
HALF = (torch.bfloat16, torch.float16)
KERNELS = {
    "math": (SDPBackend.MATH, (torch.float32, torch.float64, *HALF)),
    "efficient": (SDPBackend.EFFICIENT_ATTENTION, (torch.float32, *HALF)),
    "flash": (SDPBackend.FLASH_ATTENTION, HALF),
}
P = 0.25


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, *HALF], ids=str)
@pytest.mark.parametrize("shape", [(3,), (7, 5), (4, 6, 130), (2, 3, 129, 257)], ids=str)
def test_dropout(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x = torch.ones(shape, dtype=dtype, device="cuda")
    spread = torch.ones(*shape, 2, dtype=dtype, device="cuda")[..., 0]
    for like in (x, x.transpose(0, -1), spread, spread.transpose(0, -1), x[:1].expand_as(x)):
        torch.manual_seed(5)
        expected, ends = F.dropout(like, P), torch.cuda.get_rng_state()
        torch.manual_seed(5)
        of_like, order = tuple(like.shape), dim_order_of(torch.empty_like(like))
        strides = strides_of(of_like, order, has_gaps(like, of_like))
        noise = dropout_noise.dropout_noise_(like.new_empty_strided(of_like, strides), P)
        assert torch.equal(noise, expected)
        assert torch.equal(torch.cuda.get_rng_state(), ends)


@pytest.mark.parametrize(
    ("kernel", "dtype"),
    [(name, dtype) for name, (_, dtypes) in KERNELS.items() for dtype in dtypes],
    ids=str,
)
@pytest.mark.parametrize(("rows", "columns"), [(64, 64), (7, 48), (130, 200)])
def test_attention(kernel: str, dtype: torch.dtype, rows: int, columns: int) -> None:
    """Of equal scores, the values of an identity matrix show which weights are kept."""
    backend = KERNELS[kernel][0]
    masks: tuple[torch.dtype | None, ...] = (None,) if kernel == "flash" else (None, torch.bool, dtype)
    cases = itertools.product(masks, (False, True), (False, True), (False, True))
    for mask_dtype, causal, grad, by_columns in cases:
        if (causal and (mask_dtype is not None or rows != columns)) or (by_columns and mask_dtype is None):
            continue
        q = torch.zeros(2, 3, rows, 64, dtype=dtype, device="cuda", requires_grad=grad)
        k = torch.zeros(2, 3, columns, 64, dtype=dtype, device="cuda")
        mask = None
        if mask_dtype is not None:
            mask = torch.zeros(2, 1, rows, columns, dtype=mask_dtype, device="cuda")
            mask = ~mask if mask_dtype == torch.bool else mask
            # kernels that want the elements of a row side by side leave it to others
            mask = mask.mT.contiguous().mT if by_columns else mask
        whole = torch.empty(2, 3, rows, columns, device="cuda")
        expected, ends = [], []
        with sdpa_kernel([backend, SDPBackend.MATH] if by_columns else backend):
            # 64 columns at a time: flash takes values as wide as the queries
            for start in range(0, columns, 64):
                v = torch.eye(columns, dtype=dtype, device="cuda")[:, start : start + 64]
                v = F.pad(v, (0, 64 - v.shape[1])).expand(2, 3, -1, -1)
                torch.manual_seed(9)
                # an offset into the stream, and another seed than is small
                torch.rand(3, device="cuda")
                out = F.scaled_dot_product_attention(q, k, v, mask, dropout_p=P, is_causal=causal)
                expected.append(out[..., : columns - start] > 0)
                ends.append(torch.cuda.get_rng_state())
            torch.manual_seed(9)
            torch.rand(3, device="cuda")
            dropout_noise.attention_noise_(whole, P, (q, k, v, mask), (3, 64, 64), causal, None)
        seen = torch.ones(rows, columns, dtype=torch.bool, device="cuda")
        seen = seen.tril() if causal else seen
        assert torch.equal((whole > 0) & seen, torch.cat(expected, -1))
        assert torch.equal(torch.cuda.get_rng_state(), ends[0])
        assert torch.allclose(whole.max(), torch.tensor(1 / (1 - P)), rtol=1e-2)


def test_a_kernel_whose_mask_cannot_be_had_is_refused() -> None:
    whole = torch.empty(2, 3, 64, 64, device="cuda")
    q = torch.zeros(2, 3, 64, 64, device="cuda", dtype=torch.bfloat16)
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION), pytest.raises(UnsupportedError, match="enable_cudnn_sdp"):
        dropout_noise.attention_noise_(whole, P, (q, q, q, None), (3, 64, 64), False, None)


DRAWS: dict[str, Any] = {
    "uniform_": (torch.ops.aten.uniform_.default, (-1.0, 3.0)),
    "bernoulli_": (torch.ops.aten.bernoulli_.float, (0.3,)),
    "random_": (getattr(torch.ops.aten.random_, "from"), (-5, 100)),
    "normal_": (torch.ops.aten.normal_.default, (1.0, 2.0)),
    "exponential_": (torch.ops.aten.exponential_.default, (0.7,)),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, *HALF], ids=str)
@pytest.mark.parametrize("name", DRAWS)
def test_parts_are_drawn_alone(name: str, dtype: torch.dtype) -> None:
    """Rows, columns and several intervals of a tensor of eight million elements; a part of it in memory, and no warning."""
    op, rest = DRAWS[name]
    shape = (4096, 2051)
    places: tuple[Place, ...] = (
        ((1024, 512), (0, 2051)),
        ((0, 4096), (100, 4)),
        (((0, 5), (900, 70)), ((3, 40), (2000, 51))),
    )
    for order, place in itertools.product(((0, 1), (1, 0)), places):
        torch.manual_seed(7)
        whole = op(
            torch.empty_strided(shape, strides_of(shape, order, False), dtype=dtype, device="cuda"), *rest
        )
        ends = torch.cuda.get_rng_state()
        expected = copy_region(whole, place)
        del whole
        got = torch.empty_like(expected)
        # trials are made once
        for _ in range(2):
            torch.manual_seed(7)
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            run_random(op, (got, *rest), {}, [Part(shape, order, place)])
            assert torch.equal(got, expected)
            assert torch.equal(torch.cuda.get_rng_state(), ends)
        assert torch.cuda.max_memory_allocated() - before < MOST_BYTES


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, *HALF], ids=str)
def test_masks_of_parts_are_counted_up_to(dtype: torch.dtype) -> None:
    """Those of the fused kernel of dropout, for counts of elements that vectors of 8, 4, 2 and 1 divide."""
    for columns in (2048, 2052, 2050, 2051):
        shape, place = (4096, columns), ((0, 4096), (7, 3))
        torch.manual_seed(11)
        expected = copy_region(F.dropout(torch.ones(shape, dtype=dtype, device="cuda"), P), place)
        ends = torch.cuda.get_rng_state()
        kind = Kind("dropout_noise_", (P,))
        stream = torch.cuda.default_generators[torch.cuda.current_device()]
        held = Held.of(shape, (0, 1), place)
        whole = Whole(
            lambda full: dropout_noise.dropout_noise_(full, P), dtype, torch.device("cuda"), True, False, stream, kind=kind
        )  # fmt: skip
        way = gpu.chosen(whole, held)
        assert way is not None
        assert "by_counting" in way.__qualname__
        torch.manual_seed(11)
        got = torch.empty_like(expected)
        way(whole, held, Target((got,)))
        assert torch.equal(got, expected)
        assert torch.equal(torch.cuda.get_rng_state(), ends)
