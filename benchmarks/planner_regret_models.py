"""The models of benchmarks/planner_regret.py: small, of shapes that favour one parallelism or another."""

from __future__ import annotations

import torch
from torch import nn

ROWS = 8
MODELS = ("deep", "wide", "moe", "long", "vocabulary", "gpt2")


def build(name: str) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """A small model of that shape, and a batch."""
    from transformers import (
        GPT2Config,
        GPT2LMHeadModel,
        LlamaConfig,
        LlamaForCausalLM,
        MixtralConfig,
        MixtralForCausalLM,
    )

    def llama(vocab: int, hidden: int, layers: int, inner: int) -> nn.Module:
        config = LlamaConfig(
            vocab_size=vocab, hidden_size=hidden, intermediate_size=inner, num_hidden_layers=layers,
            num_attention_heads=4, num_key_value_heads=4, max_position_embeddings=2048, use_cache=False,
            bos_token_id=0, eos_token_id=0,
        )  # fmt: skip
        return LlamaForCausalLM(config)

    torch.manual_seed(0)
    length = {"long": 512, "vocabulary": 64}.get(name, 128)
    vocab = {"vocabulary": 16384}.get(name, 512)
    if name == "deep":
        model = llama(vocab, 64, 12, 192)
    elif name == "wide":
        model = llama(vocab, 512, 2, 1536)
    elif name == "long":
        model = llama(vocab, 64, 3, 192)
    elif name == "vocabulary":
        model = llama(vocab, 128, 2, 384)
    elif name == "moe":
        moe = MixtralConfig(
            vocab_size=vocab, hidden_size=128, intermediate_size=256, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=4, num_local_experts=4, num_experts_per_tok=2,
            head_dim=32, max_position_embeddings=512, use_cache=False, bos_token_id=0, eos_token_id=0,
        )  # fmt: skip
        model = MixtralForCausalLM(moe)
    elif name == "gpt2":
        config = GPT2Config(
            vocab_size=vocab, n_embd=128, n_layer=4, n_head=4, n_positions=length, use_cache=False,
            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
        )  # fmt: skip
        model = GPT2LMHeadModel(config)
    else:
        raise SystemExit(f"--models {name}: known are {', '.join(MODELS)}")
    ids = torch.randint(1, vocab, (ROWS, length), generator=torch.Generator().manual_seed(1))
    return model, {"input_ids": ids, "labels": ids}
