"""Unmodified transformers models built in `deferred_init` equal those of one device, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from meshwright_dtensor.deferred.materialize import deferred_init, is_deferred

LANGUAGE: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "vocab_size": 99,
    "max_position_embeddings": 64,
}


def config(name: str, **settings: Any) -> Any:
    return getattr(transformers, name)(**settings)


CASES: dict[str, tuple[str, Callable[[], Any]]] = {
    "gpt2": (
        "AutoModelForCausalLM",
        lambda: config("GPT2Config", n_embd=32, n_layer=2, n_head=4, vocab_size=99, n_positions=64),
    ),
    "llama": ("AutoModelForCausalLM", lambda: config("LlamaConfig", **LANGUAGE, num_key_value_heads=2)),
    "llama tied": (
        "AutoModelForCausalLM",
        lambda: config("LlamaConfig", **LANGUAGE, tie_word_embeddings=True),
    ),
    "bert": ("AutoModelForMaskedLM", lambda: config("BertConfig", **LANGUAGE)),
    "vit": (
        "AutoModelForImageClassification",
        lambda: config(
            "ViTConfig",
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=48,
            image_size=16,
            patch_size=4,
        ),
    ),
    "t5": (
        "AutoModelForSeq2SeqLM",
        lambda: config("T5Config", d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, vocab_size=99),
    ),
    "mixtral": (
        "AutoModelForCausalLM",
        lambda: config("MixtralConfig", **LANGUAGE, num_key_value_heads=2, num_local_experts=4),
    ),
    "mamba": (
        "AutoModelForCausalLM",
        lambda: config("MambaConfig", hidden_size=32, num_hidden_layers=2, state_size=8, vocab_size=99),
    ),
    "wav2vec2": (  # a weight norm on its positional convolution
        "AutoModelForCTC",
        lambda: config(
            "Wav2Vec2Config",
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=48,
            conv_dim=(16, 16),
            conv_kernel=(5, 3),
            conv_stride=(2, 2),
            num_conv_pos_embeddings=8,
            num_conv_pos_embedding_groups=2,
        ),
    ),
}


def build(name: str, **settings: Any) -> nn.Module:
    auto, make = CASES[name]
    torch.manual_seed(7)
    return getattr(transformers, auto).from_config(make(), **settings)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", CASES)
def test_every_value_equals_one_device(name: str, dtype: torch.dtype) -> None:
    plain = build(name, dtype=dtype)
    end = torch.get_rng_state()
    with deferred_init(min_bytes=256):
        model = build(name, dtype=dtype)
    assert torch.equal(torch.get_rng_state(), end)
    assert is_deferred(model)
    want = {**dict(plain.named_parameters()), **dict(plain.named_buffers())}
    got = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    assert got.keys() == want.keys()
    for key, tensor in want.items():
        assert got[key].dtype == tensor.dtype and got[key].stride() == tensor.stride(), key
        assert torch.equal(got[key], tensor), key
    for key, parameter in model.named_parameters():
        assert is_deferred(parameter) == (parameter.nbytes >= 256), key
    ties = [
        sorted(key for key, parameter in built.named_parameters(remove_duplicate=False) if parameter is tied)
        for built in (plain, model)
        for tied in built.parameters()
    ]
    half = len(ties) // 2
    assert ties[:half] == ties[half:]


def test_another_seed_gives_other_values() -> None:
    """The negative control of the comparison."""
    plain = build("llama")
    torch.manual_seed(8)
    with deferred_init(min_bytes=256):
        other = getattr(transformers, CASES["llama"][0]).from_config(CASES["llama"][1]())
    assert not torch.equal(plain.lm_head.weight, other.lm_head.weight)
