"""Expert parallelism on transformers' own mixture-of-experts models, planned and applied: loss and every gradient are those
of one device, each rank holds its part of the experts, and no expert weight travels."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import pytest
import torch
from plan_once import plan_once
from torch import nn
from zoo import EXPERTS

import meshwright as mw
from meshwright_dtensor.comm.log import CommEvent, communication
from meshwright_dtensor.errors import PlanError, UsageError
from meshwright_dtensor.testing.rank_pool import RankPool
from meshwright_parallel.moe import detect
from meshwright_parallel.moe.probe import Rejected
from meshwright_parallel.verification.compare import compare, one_rounding_away

LATENT: Mapping[str, Any] = MappingProxyType(
    {
        "num_key_value_heads": 4,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 8,
        "v_head_dim": 8,
        "moe_intermediate_size": 24,
        "n_routed_experts": 8,
        "n_group": 4,
        "topk_group": 2,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
    }
)
SEQUENCES: Mapping[str, Any] = MappingProxyType(
    {"d_model": 32, "vocab_size": 96, "num_experts": 8, "decoder_start_token_id": 0}
)
FAMILIES: Mapping[str, tuple[str, Mapping[str, Any]]] = MappingProxyType(
    {
        "mixtral": (
            "Mixtral",
            {"num_local_experts": 8, "num_experts_per_tok": 2, "output_router_logits": True},
        ),
        "qwen3-moe": (
            "Qwen3Moe",
            {"head_dim": 8, "moe_intermediate_size": 24, "num_experts": 8, "num_experts_per_tok": 2},
        ),
        "olmoe": ("Olmoe", {"num_experts": 8, "num_experts_per_tok": 2, "eos_token_id": None}),
        "deepseek-v2": ("DeepseekV2", {**LATENT, "num_experts_per_tok": 2}),
        "deepseek-v3": ("DeepseekV3", {**LATENT, "num_experts_per_tok": 2}),
        "gpt-oss": (
            "GptOss",
            {"head_dim": 8, "num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": 8},
        ),
        "granite-moe": ("GraniteMoe", {"num_local_experts": 8, "num_experts_per_tok": 2}),
        "switch": (
            "SwitchTransformers",
            {
                **SEQUENCES,
                "d_kv": 8,
                "d_ff": 48,
                "num_layers": 2,
                "num_decoder_layers": 2,
                "num_sparse_encoder_layers": 1,
                "num_sparse_decoder_layers": 1,
                "num_heads": 4,
                "dropout_rate": 0.0,
                "expert_capacity": 4,
            },
        ),
        "nllb-moe": (
            "NllbMoe",
            {
                **SEQUENCES,
                **{f"{side}_layers": 2 for side in ("encoder", "decoder")},
                **{f"{side}_ffn_dim": 48 for side in ("encoder", "decoder")},
                **{f"{side}_attention_heads": 4 for side in ("encoder", "decoder")},
                **{f"{side}_sparse_step": 1 for side in ("encoder", "decoder")},
                **{f"{side}_layerdrop": 0.0 for side in ("encoder", "decoder")},
                **dict.fromkeys(
                    ("dropout", "attention_dropout", "activation_dropout", "moe_token_dropout"), 0.0
                ),
                "max_position_embeddings": 64,
                "pad_token_id": 1,
            },
        ),
        "dbrx": (
            "Dbrx",
            {
                "d_model": 32,
                "n_heads": 4,
                "n_layers": 2,
                "max_seq_len": 64,
                "vocab_size": 96,
                "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 1e4},
                "ffn_config": {
                    "ffn_hidden_size": 48,
                    "moe_num_experts": 8,
                    "moe_top_k": 2,
                    "hidden_size": 32,
                },
            },
        ),
    }
)


def make(family: str, implementation: str | None = None) -> nn.Module:
    import transformers

    name, settings = FAMILIES[family]
    plain = name in ("SwitchTransformers", "NllbMoe", "Dbrx")
    config = getattr(transformers, f"{name}Config")(**({} if plain else EXPERTS) | settings)
    if implementation is not None:
        config._experts_implementation = implementation
    kind = "ForConditionalGeneration" if "decoder_start_token_id" in settings else "ForCausalLM"
    torch.manual_seed(0)
    model: nn.Module = getattr(transformers, f"{name}{kind}")(config)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in model.parameters():  # some start as zeros, which routes every token alike
            if p.ndim > 1:
                p.normal_(0, 0.1, generator=generator)
    return model


def batch(rows: int = 4) -> dict[str, torch.Tensor]:
    ids = torch.randint(5, 90, (rows, 12), generator=torch.Generator().manual_seed(2))
    labels = ids.clone()
    labels[0, :5] = -100
    return {"input_ids": ids, "labels": labels}


@dataclass
class Told:
    loss: float
    wrong: list[Any] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    share: float = 1.0
    kinds: set[str] = field(default_factory=set)
    moved: set[tuple[str, str, str]] = field(default_factory=set)
    notes: tuple[str, ...] = ()


def _of_tokens(event: CommEvent) -> bool:
    """Whether it moves tokens along a data axis, to experts or back: not parameters, gradients, attention and losses."""
    if event.axis in ("ep", "tp") or event.function in ("data", "zero") or event.why.startswith("which"):
        return False
    where = event.module.split(".")
    return ".mlp" in event.module or (where[:-1] == ["model", "layers"] and event.function == "add")


def compared_with_one_device(
    rank: int, world_size: int, family: str, implementation: str | None, pins: dict[str, int]
) -> Told:
    single, near = make(family, implementation), make(family, implementation)
    model = copy.deepcopy(single)
    plan = plan_once(model, batch(), **pins)
    mw.parallelize(model, plan, batch=batch())
    one_rounding_away(near.parameters())
    torch.manual_seed(5)  # Switch's router draws noise
    with communication() as log:
        loss = model(**batch()).loss
        loss.backward()
    torch.manual_seed(5)
    expected = single(**batch()).loss
    expected.backward()
    torch.manual_seed(5)
    near(**batch()).loss.backward()
    want, got, near_gradients = ({n: p.grad for n, p in m.named_parameters()} for m in (single, model, near))
    missing = [n for n in want if (want[n] is None) != (got[n] is None)]
    held = [(n, p.detach()) for n, p in model.named_parameters() if ".experts." in n]
    return Told(
        abs(float(loss.full_tensor().detach()) - float(expected.detach())),
        [c for c in compare(0, "gradient", want, got, 1e-5, perturbed=near_gradients) if not c.ok],
        missing,
        sum(p.to_local().numel() for _, p in held) / sum(p.numel() for _, p in held),
        {e.kind for e in log.events if ".experts" in e.module},
        {(e.axis, e.kind, e.function) for e in log.events if _of_tokens(e)},
        tuple(plan.provenance.notes),
    )


def check(told: Told, share: float) -> None:
    assert told.loss <= 5e-6
    assert not told.wrong and not told.missing
    assert told.share == pytest.approx(share)
    assert told.kinds == {"all_to_all"}
    assert any(note.startswith("experts: ") for note in told.notes)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_is_that_of_one_device(rank_pool: RankPool, family: str) -> None:
    for told in rank_pool.run(2, compared_with_one_device, family, None, {"ep": 2, "tp": 1}):
        check(told, 1 / 2)


@pytest.mark.slow
@pytest.mark.parametrize("implementation", ["eager", "batched_mm"])
def test_the_implementations_of_experts(rank_pool: RankPool, implementation: str) -> None:
    for told in rank_pool.run(2, compared_with_one_device, "mixtral", implementation, {"ep": 2, "tp": 1}):
        check(told, 1 / 2)


@pytest.mark.slow
@pytest.mark.parametrize(
    "pins",
    [
        {"ep": 4, "tp": 1},
        {"ep": 2, "dp": 2},
        {"ep": 2, "tp": 2},
        {"ep": 2, "dp": 2, "zero": 3},
        {"ep": 2, "cp": 2},
    ],
    ids=str,
)
def test_mixtral_with_other_axes(rank_pool: RankPool, pins: dict[str, int]) -> None:
    for told in rank_pool.run(4, compared_with_one_device, "mixtral", None, pins):
        told.kinds &= {"all_to_all"}  # zero gathers its shards, of experts as of anything
        check(told, 1 / 4 if pins["ep"] == 4 or "zero" in pins or pins.get("tp") == 2 else 1 / 2)


ALONG = [{"dp": 2}, {"dp": 2, "zero": 3}, {"cp": 2}, {"dp": 2, "tp": 2}, {"dp": 2, "ep": 2}]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "pins"),
    [
        *(("mixtral", pins) for pins in ALONG),
        ("qwen3-moe", {"dp": 2}),
        ("olmoe", {"dp": 2, "tp": 2}),
        ("switch", {"dp": 2}),
    ],
    ids=str,
)
def test_tokens_stay_on_their_data_ranks(rank_pool: RankPool, family: str, pins: dict[str, int]) -> None:
    world = math.prod(n for axis, n in pins.items() if axis != "zero")
    for told in rank_pool.run(
        world, compared_with_one_device, family, None, {"dp": 1, "tp": 1, "ep": 1, **pins}
    ):
        assert told.loss <= 5e-6
        assert not told.wrong and not told.missing and not told.moved


@pytest.mark.slow
@pytest.mark.parametrize("family", ["switch", "nllb-moe"])
def test_experts_that_are_called_by_their_numbers(rank_pool: RankPool, family: str) -> None:
    """The number of an expert is a global value, of which the model makes the name of a module."""
    for told in rank_pool.run(2, compared_with_one_device, family, None, {"tp": 2, "dp": 1, "ep": 1}):
        assert told.loss <= 5e-6 and not told.wrong and not told.missing


def unproved(rank: int, world_size: int, pins: dict[str, int]) -> Told:
    kept = detect.probe
    try:
        detect.probe = lambda candidate: Rejected("for this test")  # type: ignore[assignment]
        return compared_with_one_device(rank, world_size, "mixtral", None, pins)
    finally:
        detect.probe = kept


@pytest.mark.slow
def test_without_a_proof_tokens_are_gathered(rank_pool: RankPool) -> None:
    for told in rank_pool.run(2, unproved, {"dp": 2, "tp": 1, "ep": 1}):
        assert told.loss <= 5e-6 and not told.wrong and not told.missing
        assert {kind for _, kind, _ in told.moved} >= {"all_gather", "all_reduce", "all_to_all"}


@pytest.mark.slow
def test_interleaved_experts_with_biases_are_divided_inside(rank_pool: RankPool) -> None:
    for told in rank_pool.run(4, compared_with_one_device, "gpt-oss", None, {"ep": 2, "tp": 2}):
        told.kinds &= {"all_to_all"}
        assert told.share < 0.3  # all but the biases of what is added up
        check(told, told.share)


def trained(rank: int, world_size: int) -> list[str]:
    """Three steps of AdamW with clipped gradients; names of what differs."""
    plan = plan_once(make("mixtral"), batch(), ep=2, tp=1)
    report = mw.verify(
        lambda: make("mixtral"),
        batch(),
        plan,
        steps=3,
        max_norm=0.5,
        optimizer=torch.optim.AdamW,  # type: ignore[arg-type]
    )
    return [c.name for c in report.failures]


@pytest.mark.slow
def test_three_steps_of_mixtral(rank_pool: RankPool) -> None:
    for wrong in rank_pool.run(2, trained):
        assert not wrong


def test_degrees_that_cannot_be() -> None:
    with pytest.raises(PlanError, match="3 does not divide 8 experts"):
        mw.plan(make("mixtral"), batch(3), world_size=3, ep=3)
    with pytest.raises(UsageError, match="no combination of degrees multiplies to world_size 4"):
        mw.plan(make("mixtral"), batch(2), world_size=4, dp=2, ep=2)
    from zoo import causal, llama

    with pytest.raises(PlanError, match="no module of experts"):
        mw.plan(llama(), causal(128), world_size=2, ep=2)


def test_dropout_inside_experts_is_told_and_replicated() -> None:
    import transformers

    settings = {**FAMILIES["switch"][1], "dropout_rate": 0.1}
    model = transformers.SwitchTransformersForConditionalGeneration(
        transformers.SwitchTransformersConfig(**settings)
    )
    with pytest.raises(PlanError, match="random numbers while training"):
        mw.plan(model, batch(), world_size=2, ep=2)


@pytest.mark.slow
def test_states_of_experts_are_shared_once() -> None:
    """What ranks of ep have of the experts' states, ranks of zero divide: no part of it is forgotten."""

    def states(**pins: int) -> int:
        plan = mw.plan(make("mixtral"), batch(8), cluster="laptop-cpu", planner="manual", **pins)
        assert not isinstance(plan, list) and plan.predicted is not None
        return plan.predicted.memory_bytes["optimizer"]

    whole = states(world_size=2, dp=1, ep=2)
    assert states(world_size=4, dp=2, ep=2, zero=2) == pytest.approx(whole / 2, rel=0.02)
