"""Small models for tests: unmodified transformers classes and one plain module, each with a batch.

Every case trains: dropout is on wherever the architecture has it. Sizes are small and often odd on purpose.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

ROWS, TOKENS = 4, 12
IGNORED = -100
EXPERTS: Mapping[str, Any] = MappingProxyType(
    {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 96,
        "max_position_embeddings": 64,
    }
)
"""Sizes that small mixtures of experts have in common, by the names of transformers."""


@dataclass(frozen=True)
class Case:
    """A model factory, and a factory of its batch. Both are called with torch's default generator seeded."""

    model: Callable[[], nn.Module]
    batch: Callable[[], dict[str, Tensor]]


def _tokens(vocabulary: int, rows: int = ROWS, tokens: int = TOKENS) -> Tensor:
    return torch.randint(5, vocabulary, (rows, tokens), generator=torch.Generator().manual_seed(11))


def causal(vocabulary: int) -> dict[str, Tensor]:
    """Token ids and equal labels, some of them ignored, unevenly over rows and columns."""
    ids = _tokens(vocabulary)
    labels = ids.clone()
    labels[0, :9] = IGNORED
    labels[1, 2:5] = IGNORED
    labels[3] = IGNORED
    return {"input_ids": ids, "labels": labels}


def llama(**changes: Any) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    settings: dict[str, Any] = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "vocab_size": 128,
        "max_position_embeddings": 32,
        "attention_dropout": 0.1,
    }
    return LlamaForCausalLM(LlamaConfig(**{**settings, **changes}))


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(
        GPT2Config(
            n_embd=32,
            n_layer=2,
            n_head=4,
            vocab_size=128,
            n_positions=32,
            bos_token_id=None,
            eos_token_id=None,
        )
    )


def bert() -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    return BertForMaskedLM(
        BertConfig(
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=64,
            vocab_size=128,
            max_position_embeddings=32,
        )
    )


def bert_batch() -> dict[str, Tensor]:
    """Padded rows of different lengths; two bytes in seven are asked for."""
    ids = _tokens(128)
    mask = torch.ones_like(ids)
    mask[1, 9:] = 0
    mask[2, 5:] = 0
    labels = ids.masked_fill(torch.arange(ids.numel()).reshape(ids.shape) % 7 > 1, IGNORED)
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def vit() -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    return ViTForImageClassification(
        ViTConfig(
            image_size=12,
            patch_size=4,
            num_channels=3,
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=64,
            num_labels=5,
            hidden_dropout_prob=0.1,
            attention_probs_dropout_prob=0.1,
        )
    )


def vit_batch() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(12)
    return {
        "pixel_values": torch.randn(ROWS, 3, 12, 12, generator=generator),
        "labels": torch.randint(5, (ROWS,), generator=generator),
    }


def t5() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    return T5ForConditionalGeneration(
        T5Config(
            d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, vocab_size=128, decoder_start_token_id=0
        )
    )


def t5_batch() -> dict[str, Tensor]:
    """Source and target of different lengths."""
    return {"input_ids": _tokens(128), "labels": causal(128)["labels"][:, :7].clone()}


def mixtral() -> nn.Module:
    from transformers import MixtralConfig, MixtralForCausalLM

    return MixtralForCausalLM(
        MixtralConfig(
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            vocab_size=128,
            max_position_embeddings=32,
            num_local_experts=4,
            num_experts_per_tok=2,
        )
    )


def opt() -> nn.Module:
    from transformers import OPTConfig, OPTForCausalLM

    return OPTForCausalLM(
        OPTConfig(
            hidden_size=32,
            ffn_dim=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            vocab_size=128,
            max_position_embeddings=32,
            word_embed_proj_dim=32,
        )
    )


def qwen3() -> nn.Module:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    return Qwen3ForCausalLM(
        Qwen3Config(
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
            vocab_size=128,
            max_position_embeddings=32,
        )
    )


class Plain(nn.Module):
    """A module as people write them: an if on the data's shape, an in-place op, a loop, a buffer."""

    scale: Tensor

    def __init__(self, width: int = 24, classes: int = 7) -> None:
        super().__init__()
        self.embed = nn.Linear(10, width)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(3))
        self.norm = nn.LayerNorm(width)
        self.dropout = nn.Dropout(0.2)
        self.head = nn.Linear(width, classes)
        self.register_buffer("scale", torch.linspace(0.5, 1.5, width))

    def forward(self, x: Tensor, labels: Tensor) -> Any:
        from types import SimpleNamespace

        if x.dim() == 3 and x.size(1) > 4:
            x = x[:, :4]
        x = self.embed(x)
        for number, layer in enumerate(self.layers):
            update = layer(self.norm(x))
            update *= self.scale
            update[:, 0] += 0.1 * number
            x = x + self.dropout(torch.relu(update))
        logits = self.head(x.mean(dim=1))
        return SimpleNamespace(loss=nn.functional.cross_entropy(logits, labels), logits=logits)


def plain_batch() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(13)
    return {
        "x": torch.randn(ROWS, 6, 10, generator=generator),
        "labels": torch.randint(7, (ROWS,), generator=generator),
    }


CASES: Mapping[str, Case] = MappingProxyType(
    {
        "llama": Case(llama, lambda: causal(128)),
        "llama-eager": Case(lambda: llama(attn_implementation="eager"), lambda: causal(128)),
        "llama-one-kv-head": Case(lambda: llama(num_key_value_heads=1), lambda: causal(128)),
        "llama-odd-heads": Case(
            lambda: llama(hidden_size=30, num_attention_heads=3, num_key_value_heads=3), lambda: causal(128)
        ),
        "llama-odd-vocabulary": Case(lambda: llama(vocab_size=131), lambda: causal(131)),
        "llama-tied": Case(lambda: llama(tie_word_embeddings=True), lambda: causal(128)),
        "gpt2": Case(gpt2, lambda: causal(128)),
        "bert": Case(bert, bert_batch),
        "vit": Case(vit, vit_batch),
        "t5": Case(t5, t5_batch),
        "mixtral": Case(mixtral, lambda: causal(128)),
        "opt": Case(opt, lambda: causal(128)),
        "qwen3": Case(qwen3, lambda: causal(128)),
        "plain": Case(Plain, plain_batch),
    }
)
