"""The planner on real models: Megatron's plan for Llama-3-8B, and what is planned is what is executed."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from meshwright_dtensor.comm.log import communication
from meshwright_dtensor.testing.rank_pool import RankPool
from meshwright_parallel import auto_parallelize
from meshwright_planner import plan
from meshwright_planner.clusters.registry import LAPTOP_CPU

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 4096,
    "max_position_embeddings": 64,
}

OTHERS: dict[str, tuple[str, dict[str, Any]]] = {
    "bloom": ("bloom", {}),
    "qwen3": ("qwen3", {"num_key_value_heads": 4, "head_dim": 16}),
    "neox": ("gpt_neox", {}),
    "falcon": ("falcon", {"new_decoder_architecture": False, "multi_query": True, "alibi": False}),
    "phi3": ("phi3", {"num_key_value_heads": 4, "pad_token_id": 0}),
}
"""Family and what differs from the common sizes."""


def build(name: str) -> torch.nn.Module:
    """A small model of a family, with weights from a fixed seed."""
    import transformers as tf

    torch.manual_seed(0)
    if name == "llama":
        model = tf.LlamaForCausalLM(tf.LlamaConfig(**SIZES))
    elif name == "one-kv-head":
        model = tf.LlamaForCausalLM(tf.LlamaConfig(**{**SIZES, "num_key_value_heads": 1, "vocab_size": 4099}))
    elif name == "gpt2":
        model = tf.GPT2LMHeadModel(
            tf.GPT2Config(n_embd=64, n_layer=3, n_head=4, vocab_size=4096, n_positions=64, attn_pdrop=0.0)
        )
    elif name == "t5":
        model = tf.T5ForConditionalGeneration(
            tf.T5Config(
                d_model=64,
                d_kv=8,
                d_ff=128,
                num_layers=3,
                num_heads=8,
                vocab_size=4096,
                decoder_start_token_id=0,
            )
        )
    elif name == "vit":
        config = tf.ViTConfig(
            hidden_size=64, num_hidden_layers=3, num_attention_heads=4, intermediate_size=128, image_size=32, patch_size=8,
            hidden_dropout_prob=0.1, num_labels=16,
        )  # fmt: skip
        model = tf.ViTForImageClassification(config)
    elif name == "mixtral":
        model = tf.MixtralForCausalLM(tf.MixtralConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2))
    elif name in OTHERS:
        family, changes = OTHERS[name]
        sizes = {key: value for key, value in SIZES.items() if key != "num_key_value_heads"}
        config = tf.AutoConfig.for_model(family, **{**sizes, **changes})
        model = tf.AutoModelForCausalLM.from_config(config)
    else:
        raise ValueError(name)
    if name != "vit":
        model.config.use_cache = False
    return model.train()


def example(rows: int = 4, length: int = 32, of: str = "") -> dict[str, torch.Tensor]:
    """Tokens with some labels ignored, or pictures."""
    if of == "vit":
        pictures = torch.randn(rows, 3, 32, 32, generator=torch.Generator().manual_seed(1))
        return {"pixel_values": pictures, "labels": torch.arange(rows)}
    ids = torch.randint(5, 100, (rows, length), generator=torch.Generator().manual_seed(1))
    labels = ids.clone()
    labels[0, :3] = -100
    return {"input_ids": ids, "labels": labels}


def step(rank: int, world_size: int, name: str, pins: dict[str, Any]) -> tuple[Any, ...]:
    """One parallel step; returns losses, the worst relative gradient error, planned and executed collectives on tp."""
    batch, reference, model = example(of=name), build(name), build(name)
    torch.manual_seed(5)
    expected = reference(**batch).loss
    expected.backward()
    auto_parallelize(model, batch, cluster="laptop-cpu", **pins)
    torch.manual_seed(5)
    with communication() as log:
        loss = model(**batch).loss
        loss.backward()
    worst = 0.0
    for parameter, single_parameter in zip(model.parameters(), reference.parameters(), strict=True):
        if single_parameter.grad is not None:
            difference = (parameter.grad.full_tensor() - single_parameter.grad).abs().max()
            # the gradient of the bias of keys is rounding
            worst = max(worst, float(difference / single_parameter.grad.abs().max().clamp(min=1e-3)))
    executed: Counter[tuple[str, str, str]] = Counter()
    planned: Counter[tuple[str, str, str]] = Counter()
    for event in log.events:
        if event.axis == "tp":
            executed[event.phase, event.kind, "calls"] += event.function != "cross_entropy"
            executed[event.phase, event.kind, "bytes"] += event.nbytes
    for c in model.parallel_plan.collectives:
        if c.axis == "tp":
            # inside a composite the plan knows the bytes, not in how many pieces they go
            planned[c.phase, c.kind, "calls"] += c.count * (
                not c.why.startswith("inside ") and "for cross_entropy" not in c.why
            )
            planned[c.phase, c.kind, "bytes"] += c.count * c.nbytes
    return float(expected), float(loss.full_tensor()), worst, dict(planned), dict(executed)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "one-kv-head", "gpt2", "t5", "mixtral", "vit", *OTHERS])
def test_what_is_planned_is_executed(rank_pool: RankPool, name: str) -> None:
    # where the sequence is sharded, both calls of a dropout of ViT are placed differently
    pins = {"tp": 2, **({"sequence_parallel": True} if name == "vit" else {})}
    expected, loss, worst, planned, executed = rank_pool.run(2, step, name, pins)[0]
    assert loss == pytest.approx(expected, rel=1e-6)
    assert worst < 1e-5
    assert planned == executed and any(key[2] == "bytes" and size for key, size in planned.items())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "mixtral"])
def test_two_axes(rank_pool: RankPool, name: str) -> None:
    expected, loss, worst, planned, executed = rank_pool.run(4, step, name, {"dp": 2, "tp": 2})[0]
    assert loss == pytest.approx(expected, rel=1e-6)
    assert worst < 1e-5 and planned == executed


def along_data(rank: int, world_size: int) -> tuple[Any, ...]:
    """(kind, phase, bytes) planned and executed on dp, and how many parameters there are."""
    model = auto_parallelize(build("mixtral"), example(), cluster="laptop-cpu", dp=world_size)
    with communication() as log:
        model(**example()).loss.backward()
    executed = [(e.kind, e.phase, e.nbytes) for e in log.events if e.function != "cross_entropy"]
    planned = [(c.kind, c.phase, c.nbytes) for c in model.parallel_plan.collectives for _ in range(c.count)]
    return planned, executed, len(list(model.parameters()))


@pytest.mark.slow
def test_data_ranks_of_experts_sum_gradients_and_nothing_else(rank_pool: RankPool) -> None:
    planned, executed, parameters = rank_pool.run(2, along_data)[0]
    assert (
        {entry[:2] for entry in planned} == {entry[:2] for entry in executed} == {("all_reduce", "backward")}
    )
    flags = 4 * parameters  # of each parameter: whether there was a gradient
    assert sum(size for *_, size in executed) == sum(size for *_, size in planned) + flags


def test_llama_3_8b_on_eight_devices_is_megatrons_plan() -> None:
    import transformers as tf

    config = tf.LlamaConfig(
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=128256,
        max_position_embeddings=8192,
        use_cache=False,
    )
    with torch.device("meta"):
        model = tf.LlamaForCausalLM(config).bfloat16().train()
    ids = torch.ones(1, 4096, dtype=torch.long)
    result = plan(model, {"input_ids": ids, "labels": ids}, cluster="dgx-h100", world_size=8, tp=8)
    assert not isinstance(result, list)
    states = {name: result.parameter_states(name)["tp"] for name, _ in model.named_parameters()}
    for layer in range(32):
        prefix = f"model.layers.{layer}"
        for part in (
            "self_attn.q_proj",
            "self_attn.k_proj",
            "self_attn.v_proj",
            "mlp.gate_proj",
            "mlp.up_proj",
        ):
            assert states[f"{prefix}.{part}.weight"] == 0
        for part in ("self_attn.o_proj", "mlp.down_proj"):
            assert states[f"{prefix}.{part}.weight"] == 1
        assert states[f"{prefix}.input_layernorm.weight"] == "I"
    assert states["lm_head.weight"] == 0
    # sequence parallelism, found: two gathers and two scatters a layer each way
    calls = Counter[tuple[str, str]]()
    for c in result.collectives:
        if c.module.startswith("model.layers.*") and c.nbytes == 4096 * 4096 * 2:
            calls[c.phase, c.kind] += c.count
    for phase in ("forward", "backward"):
        assert calls[phase, "all_gather"] == 64 and calls[phase, "reduce_scatter"] == 64
    assert all(p.is_meta for p in model.parameters())
    assert len(result.parameters) < 12 and len(result.to_json()) < 20_000


def test_a_pipeline_alone_lays_no_operation_over_a_mesh() -> None:
    """What a mesh costs the host is not paid where ranks hold different modules and nothing else."""
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(4)))
    plain = replace(LAPTOP_CPU, hides_launch=False, launch_s=0.0)

    def compute(dispatch: float, **degrees: int) -> float:
        cluster = replace(plain, dispatch_s=dispatch)
        result = plan(model, torch.randn(4, 16), world_size=2, cluster=cluster, planner="manual", **degrees)
        return float(result.predicted.compute_seconds)

    assert compute(1e-3, pp=2, microbatches=2) == compute(0.0, pp=2, microbatches=2)
    assert compute(1e-3, dp=2) == pytest.approx(compute(0.0, dp=2) + 4e-3)
