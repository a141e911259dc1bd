"""Unmodified transformers models built in `deferred_init` equal those of one device, bit for bit, alone and by ranks together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import meshwright as mw
from meshwright_dtensor.deferred.mapped_files import is_shared
from meshwright_dtensor.deferred.materialize import deferred_init, is_deferred
from meshwright_dtensor.testing.rank_pool import RankPool

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


class Fills(TorchDispatchMode):
    """Counts the fills of the random initialisation that this rank computes."""

    calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        self.calls += name in ("aten::normal_", "aten::uniform_") and args[0].nbytes >= 256
        return func(*args, **(kwargs or {}))


LAYOUTS: dict[str, dict[str, int]] = {
    "tp2": {"tp": 2},
    "zero3": {"dp": 2, "zero": 3},
    "pp2": {"pp": 2, "microbatches": 2},
}
IDS = {"input_ids": torch.arange(64).view(4, 16) % 99, "labels": torch.arange(64).view(4, 16) % 99}


def laid_out(rank: int, world_size: int, name: str, pins: dict[str, int]) -> Any:
    """Every value of a model that ranks build together, the state of the generator, and the fills on this rank."""
    with Fills() as fills, deferred_init(min_bytes=256):
        model = build(name)
    end = torch.get_rng_state()
    assert all(is_shared(p.untyped_storage()) == (p.nbytes >= 256) for p in model.parameters())
    mw.auto_parallelize(
        model, IDS, global_batch_size=4, dp=pins.get("dp", 1), **{k: v for k, v in pins.items() if k != "dp"}
    )
    return mw.full_state_dict(model), end, fills.calls


@pytest.mark.parametrize(
    ("name", "layout"),
    [("gpt2", "tp2"), ("gpt2", "pp2"), ("llama tied", "zero3"), ("llama tied", "pp2"), ("mixtral", "tp2")],
)
def test_ranks_build_one_model_for_any_layout(rank_pool: RankPool, name: str, layout: str) -> None:
    with Fills() as alone:
        plain = build(name)
    end = torch.get_rng_state()
    want = plain.state_dict()
    results = rank_pool.run(2, laid_out, name, LAYOUTS[layout])
    assert sorted(calls > 0 for _, _, calls in results) == [False, True]
    assert sum(calls for _, _, calls in results) == alone.calls > 0
    assert all(torch.equal(state, end) for _, state, _ in results)
    # rank 0 has it
    got = results[0][0]
    assert got.keys() == want.keys()
    for key, tensor in want.items():
        assert torch.equal(got[key], tensor), key
