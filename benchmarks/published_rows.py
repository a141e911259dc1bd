"""Training runs that others have published: the rows of the tables that `planner_published.py` predicts.

Nothing here is a prediction. Each table names its source; a row is a configuration, and its throughput, or that it ran out of
memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn


@dataclass(frozen=True)
class Scores:
    """The forward pass of attention over whole matrices of scores in one layer, as measured.

    Attributes:
        model, rows, length: makes a model of such layers; the batch.
        tp: tensor-parallel ranks.
        seconds: of one layer.
    """

    model: Callable[[], nn.Module]
    rows: int
    length: int
    tp: int
    seconds: float


@dataclass(frozen=True)
class Row:
    """One run.

    Attributes:
        name: in reports.
        model: makes it, on the meta device.
        gpus, rows, length: ranks, rows of the global batch, tokens of a row.
        published: throughput in the unit of the table; None: it ran out of memory.
        plan: keywords of `mw.plan`.
        compiled: pointwise operations ran fused.
        memory: GiB of a GPU, as published; None where nothing is.
        flops: operations of a step in the accounting of the source, where the unit is TFLOP/s.
        loss_bytes: bytes that the loss of that program holds on a GPU at its peak, besides those of ours.
        accumulated: batches of `rows` whose gradients it adds up in a step, without a pipeline.
        half_gradients: it keeps, adds up and sums gradients of two bytes each, where the plan has four.
        late_sums: it sums gradients over data ranks after the backward pass, all in one piece.
        scattered: of what crosses stages its tensor-parallel ranks send a part each and gather it, and wait for it.
        loss_traffic: bytes that its loss moves for a logit, both passes; None: as the plan's.
        update_traffic: bytes that its optimizer's step moves for a parameter, besides AdamW's own.
        scores: a layer of its program whose kernels on whole matrices of scores somebody has measured; None: as the plan's.
        bubble: idle time of its pipeline relative to that of our schedule.
        to_the_end: its recomputation runs each block to the end, where torch's stops when all saved tensors are there again.
        activations: bytes that its program keeps for the backward pass on the fullest rank; None: as the plan.
        divided_gradients: in a pipeline too, ranks that share gradients keep a shard of each, and whole ones of a single layer at
            a time, of the `layers` that a rank has.
        gathered: ends of names of modules whose results its tensor parallelism gathers, so that every rank computes with the
            whole until the next product (their_program.py).
    """

    name: str
    model: Callable[[], nn.Module]
    gpus: int
    rows: int
    length: int
    published: float | None
    plan: Mapping[str, Any]
    compiled: bool = False
    memory: float | None = None
    flops: float = 0.0
    loss_bytes: float = 0.0
    accumulated: int = 1
    half_gradients: bool = False
    late_sums: bool = False
    scattered: bool = False
    loss_traffic: float | None = None
    update_traffic: float = 0.0
    scores: Scores | None = None
    bubble: float = 1.0
    to_the_end: bool = False
    activations: float | None = None
    divided_gradients: bool = False
    layers: int = 1
    gathered: tuple[str, ...] = ()


@dataclass(frozen=True)
class Table:
    """Rows of one source on one kind of device.

    Attributes:
        source, cluster: where it is from, and the profile of its devices.
        precision: of the plans.
        unit: "tokens" per second and GPU, or "TFLOP/s" of a GPU.
    """

    source: str
    cluster: str
    precision: str
    unit: str
    rows: tuple[Row, ...] = field(repr=False)


def _repeating(
    module: nn.Module, q: Any, k: Any, v: Any, mask: Any, **others: Any
) -> tuple[torch.Tensor, None]:
    """Attention as torchtitan calls it: keys and values are repeated for each head of the queries."""
    times = q.shape[1] // k.shape[1]
    k, v = (t[:, :, None].expand(-1, -1, times, -1, -1).flatten(1, 2) for t in (k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).contiguous(), None


def _titan_attention() -> str:
    """The name under which transformers finds `_repeating`."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register("torchtitan", _repeating)
    return "torchtitan"


def llama(
    hidden: int, inner: int, layers: int, heads: int, key_heads: int, vocabulary: int, titan: bool = True
) -> nn.Module:
    """A Llama of these sizes; `titan`: with torchtitan's attention."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=vocabulary, hidden_size=hidden, intermediate_size=inner, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=key_heads, max_position_embeddings=131072, use_cache=False,
        attn_implementation=_titan_attention() if titan else "sdpa",
    )  # fmt: skip
    with torch.device("meta"):
        return LlamaForCausalLM(config)


class OneKernelNorm(nn.Module):
    """A norm in one kernel: "fused_rmsnorm" of torchtitan, and torch's own on GPUs since July 2025 (pytorch pull request 153666).

    Elsewhere torch composes it of several operations, the input in float32. A layer norm moves and keeps the same bytes.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x, self.weight.shape, self.weight)


def with_one_kernel_norms(model: nn.Module) -> nn.Module:
    """The model, whose modules named "...norm" are one kernel each."""
    with torch.device("meta"):
        for name, module in list(model.named_modules()):
            if name.endswith("norm"):
                model.set_submodule(name, OneKernelNorm(module.weight.shape[0]))
    return model


def llama3_8b() -> nn.Module:
    """Llama-3 8B."""
    return llama(4096, 14336, 32, 32, 8, 128256)


def llama3_70b() -> nn.Module:
    """Llama-3 70B."""
    return llama(8192, 28672, 80, 64, 8, 128256)


def llama3_405b() -> nn.Module:
    """Llama-3 405B."""
    return llama(16384, 53248, 126, 128, 8, 128256, titan=False)


def llama3_8b_fused() -> nn.Module:
    """Llama-3 8B, with norms of one kernel each."""
    return with_one_kernel_norms(llama3_8b())


def llama2_13b_fused() -> nn.Module:
    """Llama-2 13B, with norms of one kernel each."""
    return with_one_kernel_norms(llama(5120, 13824, 40, 40, 40, 32000))


def llama2_70b() -> nn.Module:
    """Llama-2 70B."""
    return llama(8192, 28672, 80, 64, 8, 32000)


def qwen3_32b() -> nn.Module:
    """Qwen3-32B, with norms of one kernel each."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=151936, hidden_size=5120, intermediate_size=25600, num_hidden_layers=64, num_attention_heads=64,
        num_key_value_heads=8, head_dim=128, max_position_embeddings=40960, use_cache=False, tie_word_embeddings=False,
        attn_implementation=_titan_attention(),
    )  # fmt: skip
    with torch.device("meta"):
        return with_one_kernel_norms(Qwen3ForCausalLM(config))


def gpt(hidden: int, layers: int, heads: int, length: int = 1024, attention: str = "sdpa") -> nn.Module:
    """GPT-3's shapes with a vocabulary of 51,200."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=51200, n_embd=hidden, n_layer=layers, n_head=heads, n_positions=length, use_cache=False,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, activation_function="gelu", attn_implementation=attention,
    )  # fmt: skip
    with torch.device("meta"):
        return GPT2LMHeadModel(config)


def megatron(hidden: int, layers: int, heads: int) -> nn.Module:
    """GPT as Megatron-LM ran it in 2021: whole matrices of scores, with scale, mask and softmax in one kernel, and dropout.

    Its other dropout is one kernel with the sum after it, which moves about the bytes of the sum alone.
    """
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    def attend(
        module: nn.Module, q: Any, k: Any, v: Any, mask: Any, **others: Any
    ) -> tuple[torch.Tensor, None]:
        weights = torch.softmax((q * q.shape[-1] ** -0.5) @ k.transpose(-1, -2), -1)
        weights = F.dropout(weights, 0.1)
        return (weights @ v).transpose(1, 2).contiguous(), None

    ALL_ATTENTION_FUNCTIONS.register("megatron", attend)
    return gpt(hidden, layers, heads, 2048, "megatron")


def _titan(
    model: Callable[[], nn.Module], gpus: int, rows: int, length: int, vocabulary: int, **others: Any
) -> Row:
    """torchtitan: FSDP over all ranks that tensor parallelism leaves; `rows`: of one FSDP rank.

    Its loss is torch's own, which keeps a log-softmax and fills two gradients in float32, where ours fills one
    (cross_entropy_rows.py). Over shards of the vocabulary (torch.distributed.tensor.parallel.loss) two more are there: of the
    exponentials and of the sum.
    """
    tp, recompute = others.pop("tp", 1), others.pop("recompute", "full")
    data = gpus // tp
    made = f"{gpus} GPUs, FSDP {data}" + (f" x TP {tp}" if tp > 1 else "") + f", {rows} rows each"
    plan = {"dp": data, "zero": 3, "tp": tp, "cp": 1, "pp": 1, "ep": 1}
    if recompute is not None:
        plan["recompute"] = recompute
    if tp > 1:
        plan["sequence_parallel"] = True
    name = others.pop("name", "")
    compiled = ", compiled" if others.get("compiled") else ""
    text = f"{name + ', ' if name else ''}{made}{compiled}"
    others["loss_bytes"] = (1 if tp == 1 else 3) * 4.0 * rows * length * vocabulary / tp
    return Row(text, model, gpus, rows * data, length, plan=plan, **others)


def _titan_llama(gpus: int, compiled: bool, published: float, memory: float) -> Row:
    return _titan(
        llama3_8b,
        gpus,
        2,
        8192,
        128256,
        recompute="alternate",
        compiled=compiled,
        published=published,
        memory=memory,
    )


LLAMA = Table(
    "torchtitan, benchmarks/llama3_h100_202412_torchtitan.md: Llama-3 8B, selective recomputation",
    "h100-96gb", "bf16", "tokens",
    (
        _titan_llama(8, False, 5762, 82.4), _titan_llama(8, True, 6667, 77.0),
        _titan_llama(128, False, 5605, 67.0), _titan_llama(128, True, 6514, 62.0),
    ),
)  # fmt: skip


def _titan_qwen(gpus: int, rows: int, tp: int, published: float | None, **others: Any) -> Row:
    """torchtitan of September 2025.

    Its recomputation no longer stopped early (pull request 1580), except where a compiler drops what nobody reads; its tensor
    parallelism gathered the normalized queries and keys (issue 1867, mended in October).
    """
    gathered = ("q_norm", "k_norm") if tp > 1 else ()
    return _titan(
        qwen3_32b, gpus, rows, 4096, 151936, tp=tp, published=published, gathered=gathered,
        to_the_end=not others.get("compiled", False), **others,
    )  # fmt: skip


QWEN = Table(
    "torchtitan, pull request 1690: Qwen3-32B, sequences of 4,096, full recomputation",
    "h100-96gb", "bf16", "tokens",
    (
        _titan_qwen(8, 2, 1, 1614), _titan_qwen(8, 2, 1, 1874, memory=81.85, compiled=True),
        _titan_qwen(32, 8, 4, 1139), _titan_qwen(32, 16, 8, 876, memory=43.45),
        _titan_qwen(32, 32, 8, 883, memory=70.79), _titan_qwen(64, 32, 8, 873, memory=63.27),
        _titan_qwen(16, 8, 1, None), _titan_qwen(32, 16, 2, None), _titan_qwen(32, 64, 8, None),
    ),
)  # fmt: skip
"""The rows of FSDP 8 x TP 4 and of FSDP 16 are as the project's issue quotes them; of TP 4 the rows of a rank are not known."""

TENSOR = Table(
    "torchtitan, benchmarks/asyncTP_llama3_h100_2025-06_torchtitan.md: Llama-3.1, tensor parallelism that does not overlap",
    "h100-96gb", "bf16", "tokens",
    (
        _titan(llama3_70b, 256, 16, 8192, 128256, tp=8, name="70B, full", compiled=True, published=597.3),
        _titan(
            llama3_8b, 64, 12, 8192, 128256, tp=8, name="8B, selective op", recompute="alternate", compiled=True, published=4378
        ),
    ),
)  # fmt: skip
"""Nothing was chosen on these rows."""

A100 = Table(
    "torchtitan, docs/performance.md of 2024-06: 64 A100",
    "dgx-a100", "bf16", "tokens",
    (
        _titan(llama3_8b_fused, 64, 1, 8192, 128256, name="Llama-3 8B, selective op", recompute="alternate", published=2973),
        _titan(llama3_70b, 64, 1, 8192, 128256, name="Llama-3 70B, full", published=331),
        _titan(llama2_13b_fused, 64, 2, 4096, 32000, name="Llama-2 13B, none", recompute=None, published=2162),
        _titan(llama2_13b_fused, 64, 2, 4096, 32000, name="Llama-2 13B, selective op", recompute="alternate", published=1904),
        _titan(llama2_70b, 64, 1, 4096, 32000, name="Llama-2 70B, selective op", recompute="alternate", published=355),
        _titan(llama2_70b, 64, 2, 4096, 32000, name="Llama-2 70B, full", published=353),
        _titan(llama2_70b, 64, 2, 4096, 32000, name="Llama-2 70B, selective op", recompute="alternate", published=None),
    ),
)  # fmt: skip

MEGATRON_ROWS = (  # billions, hidden, layers, heads, tp, pp, GPUs, batch, rows of a microbatch, TFLOP/s of a GPU
    (1.7, 2304, 24, 24, 1, 1, 32, 512, 16, 137),
    (3.6, 3072, 30, 32, 2, 1, 64, 512, 16, 138),
    (7.5, 4096, 36, 32, 4, 1, 128, 512, 16, 142),
    (18.4, 6144, 40, 48, 8, 1, 256, 1024, 8, 135),
    (39.1, 8192, 48, 64, 8, 2, 512, 1536, 4, 138),
    (76.1, 10240, 60, 80, 8, 4, 1024, 1792, 2, 140),
    (145.6, 12288, 80, 96, 8, 8, 1536, 2304, 2, 148),
    (310.1, 16384, 96, 128, 8, 16, 1920, 2160, 1, 155),
    (529.6, 20480, 105, 128, 8, 35, 2520, 2520, 1, 163),
    (1008.0, 25600, 128, 160, 8, 64, 3072, 3072, 1, 163),
)

MEGATRON_LOSS = 52
"""Bytes for a logit (megatron/mpu/cross_entropy.py): made float32, the maximum, the difference, exponentials, their sum, the
division, the product with the gradient, and made two bytes again."""

MEGATRON_UPDATE = 24
"""Bytes for a parameter (megatron/optimizer/optimizer.py): gradients made float32, unscaled, their norm, and parameters of two
bytes."""


MEGATRON_SCORES = Scores(lambda: megatron(6144, 1, 64), 4, 2048, 8, 1.3e-3)
"""A layer of 22B on A100: its backward pass takes 13.2 ms with products of scores, softmax and dropout run again and 11.9 without
(Korthikanti et al., 2022, table 4)."""


def _megatron(
    billions: float,
    hidden: int,
    layers: int,
    heads: int,
    tp: int,
    pp: int,
    gpus: int,
    batch: int,
    each: int,
    tflops: int,
) -> Row:
    """Rows of a microbatch, and who sums gradients, are those of the authors' script (Megatron-LM, examples/sc21/run_table_1.sh).

    Without a pipeline torch's DDP sums them during the backward pass, else Megatron-LM's own after it. Chunks of layers are as
    there; where it names none (39B, 1T), by section 5.1 the schedule is interleaved too.
    """
    # their equation 3; all activations are recomputed, each layer to its end (megatron/mpu/random.py, CheckpointFunction)
    flops = (
        96 * batch * 2048 * layers * hidden**2 * (1 + 2048 / (6 * hidden) + 51200 / (16 * layers * hidden))
    )
    plan = {"dp": gpus // tp // pp, "zero": 0, "tp": tp, "cp": 1, "pp": pp, "ep": 1, "recompute": "full"}
    if tp > 1:
        plan["sequence_parallel"] = False
    microbatches = batch // plan["dp"] // each
    if pp > 1:
        plan |= {"schedule": "interleaved", "microbatches": microbatches}
    name = f"GPT {billions}B, tp {tp}, pp {pp}, {gpus} GPUs"
    times = microbatches if pp == 1 else 1
    return Row(
        name, lambda: megatron(hidden, layers, heads), gpus, batch // times, 2048, tflops, plan,
        flops=flops / times, accumulated=times, half_gradients=True, late_sums=pp > 1, scattered=pp > 1, to_the_end=True,
        loss_traffic=MEGATRON_LOSS, update_traffic=MEGATRON_UPDATE, scores=MEGATRON_SCORES,
    )  # fmt: skip


MEGATRON = Table(
    "Narayanan et al., 2021 (arXiv 2104.04473), table 1",
    "dgx-a100", "fp16", "TFLOP/s", tuple(_megatron(*row) for row in MEGATRON_ROWS),
)  # fmt: skip


def _meta(gpus: int, cp: int, data: int, length: int, rows: int, tflops: int) -> Row:
    """Batches are of `rows` for each data rank. The paper counts as PaLM's (Chowdhery et al., 2022): whole matrices of scores.

    Each rank has eight stages of one layer (its figure 6 and section 3.3.2), where our schedule has two. Of them the second
    rank holds most: the first has one layer less. Gradients are sharded (3.3.2), and nothing is recomputed.
    """
    stages, ranks, hidden, inner, key_values = 8, 16, 16384, 53248, 2 * 8 * 128
    # microbatches in flight over all stages of the rank (Narayanan et al., 2021, 2.2)
    flying = min(2 * (ranks - 2) + (stages - 1) * ranks + 1, rows * stages)
    # of both norms the input and the output, queries, keys, values and the result of attention, and both halves of SwiGLU: a
    # sequence shard or heads' part of each. Meta's own operators gather again and make the product of SwiGLU again (xformers,
    # ops/seqpar.py and ops/swiglu_op.py)
    kept = 2 * (6 * hidden + key_values + 2 * inner) / 8 * length / cp
    batch = rows * data
    parameters = 403.7e9
    flops = batch * length * (6 * parameters + 12 * 126 * 16384 * length)
    plan = {"dp": data, "zero": 2, "tp": 8, "cp": cp, "pp": 16, "ep": 1, "microbatches": rows}
    plan |= {"schedule": "interleaved", "sequence_parallel": True}
    if cp > 1:
        # section 3.3.2: keys and values are all-gathered
        plan["context_attention"] = "all_gather"
    name = f"{gpus} GPUs, tp 8, cp {cp}, pp 16, dp {data}, {length} tokens"
    return Row(name, llama3_405b, gpus, batch, length, tflops, plan, flops=flops, bubble=2 / stages,
        activations=flying * kept, divided_gradients=True, layers=stages,
    )  # fmt: skip


META = Table(
    "Llama Team, 2024 (arXiv 2407.21783), table 4: Llama-3 405B",
    "dgx-h100", "bf16", "TFLOP/s",
    (
        _meta(8192, 1, 64, 8192, 32, 430), _meta(16384, 1, 128, 8192, 16, 400),
        _meta(16384, 16, 8, 131072, 16, 380),
    ),
)  # fmt: skip

TABLES = {
    "torchtitan": LLAMA, "qwen": QWEN, "tensor": TENSOR, "a100": A100, "megatron": MEGATRON, "meta": META,
}  # fmt: skip
