"""Dropout masks on a GPU: those that torch's fused kernels draw, and the generator ends where they leave it."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from meshwright_dtensor import dropout_noise
from meshwright_dtensor.errors import UnsupportedError
from meshwright_dtensor.sharding.boxes import dim_order_of, has_gaps, strides_of

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="kernels of GPUs")]
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
