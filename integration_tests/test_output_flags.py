"""What layers compute, wanted by flags of a configuration (hidden states, attentions), and losses of it: as on one device."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch import nn

import meshwright as mw
from meshwright_dtensor.testing.rank_pool import RankPool
from meshwright_parallel.verification.compare import compare, one_rounding_away

SIZES: Mapping[str, Any] = MappingProxyType(
    {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "vocab_size": 96,
        "max_position_embeddings": 64,
    }
)
MODELS: Mapping[str, tuple[str, Mapping[str, Any]]] = MappingProxyType(
    {
        "LlamaForCausalLM": ("LlamaConfig", {**SIZES, "num_key_value_heads": 2}),
        "BertForMaskedLM": (
            "BertConfig",
            {**SIZES, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
        ),
        "T5ForConditionalGeneration": (
            "T5Config",
            {
                "d_model": 32,
                "d_kv": 8,
                "d_ff": 48,
                "num_layers": 3,
                "num_heads": 4,
                "vocab_size": 96,
                "dropout_rate": 0.0,
                "decoder_start_token_id": 0,
            },
        ),
    }
)


def make(name: str) -> nn.Module:
    import transformers

    config_name, settings = MODELS[name]
    config = getattr(transformers, config_name)(**settings, attn_implementation="eager")
    config.output_hidden_states = config.output_attentions = True
    torch.manual_seed(0)
    model: nn.Module = getattr(transformers, name)(config)
    return model


def batch() -> dict[str, torch.Tensor]:
    ids = torch.randint(5, 90, (4, 8), generator=torch.Generator().manual_seed(2))
    return {"input_ids": ids, "labels": ids}


def outputs(model: nn.Module) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor | None]]:
    """Everything that was asked for, and the gradients of a loss of all of it (a teacher's, say)."""
    out = model(**batch())
    wanted = {
        f"{key}.{i}": value
        for key in out
        if "hidden_states" in key or "attentions" in key
        for i, value in enumerate(out[key] if isinstance(out[key], tuple) else ())
    }
    loss = out.loss + sum(value.square().mean() for value in wanted.values())
    loss.backward()
    return {"loss": loss, **wanted}, {name: p.grad for name, p in model.named_parameters()}


def compared_with_one_device(
    rank: int, world_size: int, name: str, pins: dict[str, int]
) -> tuple[int, list[Any]]:
    single, near = make(name), make(name)
    one_rounding_away(near.parameters())
    model = mw.auto_parallelize(copy.deepcopy(single), batch(), **pins)
    (want, want_gradients), (_, near_gradients), (got, gradients) = map(outputs, (single, near, model))
    compared = compare(0, "loss", want, got, 1e-5)
    compared += compare(0, "gradient", want_gradients, gradients, 1e-5, perturbed=near_gradients)
    return len(got), [c for c in compared if not c.ok]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world", "pins"), [(2, {"dp": 2}), (2, {"tp": 2}), (4, {"dp": 2, "tp": 2})], ids=str
)
@pytest.mark.parametrize("name", MODELS)
def test_states_of_layers_are_those_of_one_device(
    rank_pool: RankPool, name: str, world: int, pins: dict[str, int]
) -> None:
    for count, wrong in rank_pool.run(world, compared_with_one_device, name, pins, timeout=120):
        assert not wrong and count >= 10
