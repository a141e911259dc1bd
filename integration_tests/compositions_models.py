"""Models for compositions: those of the zoo and one more with fused projections, on a batch that many axes can divide."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from zoo import CASES, IGNORED, Case

ROWS, TOKENS = 8, 16


def batch() -> dict[str, Tensor]:
    """Token ids and equal labels, some of them ignored, unevenly over rows and columns."""
    ids = torch.randint(5, 128, (ROWS, TOKENS), generator=torch.Generator().manual_seed(11))
    labels = ids.clone()
    labels[0, :9] = IGNORED
    labels[1, 2:5] = IGNORED
    labels[3] = IGNORED
    labels[6, ::2] = IGNORED
    return {"input_ids": ids, "labels": labels}


def phi3() -> nn.Module:
    """Query, key and value in one projection, gate and up in another."""
    from transformers import Phi3Config, Phi3ForCausalLM

    settings: dict[str, Any] = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 128,
        "max_position_embeddings": 32,
        "pad_token_id": 0,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    return Phi3ForCausalLM(Phi3Config(**settings))


MAKERS = {name: CASES[name].model for name in ("llama", "llama-tied", "gpt2", "mixtral")} | {"phi3": phi3}
MODELS: Mapping[str, Case] = MappingProxyType({name: Case(model, batch) for name, model in MAKERS.items()})
