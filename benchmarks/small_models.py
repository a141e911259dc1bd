"""Models that benchmarks/planner_*.py run for real: small, seeded, without dropout."""

from __future__ import annotations

import torch
from torch import nn

Batch = dict[str, torch.Tensor]


def llama(vocabulary: int, hidden: int, layers: int, inner: int, positions: int = 2048) -> nn.Module:
    """With four heads."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocabulary, hidden_size=hidden, intermediate_size=inner, num_hidden_layers=layers,
        num_attention_heads=4, num_key_value_heads=4, max_position_embeddings=positions, use_cache=False,
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def mixtral(vocabulary: int, hidden: int, layers: int, inner: int, positions: int = 512) -> nn.Module:
    """With four heads and four experts, of which two take each token."""
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(0)
    config = MixtralConfig(
        vocab_size=vocabulary, hidden_size=hidden, intermediate_size=inner, num_hidden_layers=layers,
        num_attention_heads=4, num_key_value_heads=4, num_local_experts=4, num_experts_per_tok=2,
        head_dim=32, max_position_embeddings=positions, use_cache=False, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return MixtralForCausalLM(config)


def gpt2(vocabulary: int, hidden: int, layers: int, positions: int) -> nn.Module:
    """With four heads."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=vocabulary, n_embd=hidden, n_layer=layers, n_head=4, n_positions=positions, use_cache=False,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return GPT2LMHeadModel(config)


def tokens(vocabulary: int, rows: int, length: int) -> Batch:
    """Random ones, which are their own labels."""
    ids = torch.randint(1, vocabulary, (rows, length), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "labels": ids}
