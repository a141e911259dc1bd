"""Real models, recorded: every row of every op they run is right, and hardly any op of theirs has to stay replicated."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from meshwright_dtensor.rules import NodeView, RuleBook, check
from meshwright_dtensor.rules.node import numel
from meshwright_dtensor.trace.graph import Node, Recorder, Value

transformers = pytest.importorskip("transformers")

SMALL: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 96,
    "max_position_embeddings": 64,
}


def text() -> dict[str, torch.Tensor]:
    """Token ids [2, 16], labels and mask."""
    ids = torch.randint(0, 90, (2, 16))
    return {"input_ids": ids, "labels": ids.clone(), "attention_mask": torch.ones_like(ids)}


def images() -> dict[str, torch.Tensor]:
    """Pixels [2, 3, 32, 32] and labels."""
    return {"pixel_values": torch.randn(2, 3, 32, 32), "labels": torch.randint(0, 10, (2,))}


MODELS: dict[str, tuple[str, dict[str, Any], Callable[[], dict[str, torch.Tensor]]]] = {
    "Llama": ("LlamaForCausalLM", {**SMALL, "num_key_value_heads": 2, "use_cache": False}, text),
    "Llama eager": ("LlamaForCausalLM", {**SMALL, "attn_implementation": "eager"}, text),
    "GPT2": (
        "GPT2LMHeadModel",
        {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "vocab_size": 96},
        text,
    ),
    "Bert": ("BertForMaskedLM", SMALL, text),
    "ViT": (
        "ViTForImageClassification",
        {**SMALL, "image_size": 32, "patch_size": 8, "num_labels": 10},
        images,
    ),
    "T5": (
        "T5ForConditionalGeneration",
        {
            "d_model": 32,
            "d_kv": 8,
            "d_ff": 64,
            "num_layers": 2,
            "num_heads": 4,
            "vocab_size": 96,
            "decoder_start_token_id": 0,
        },
        text,
    ),
    "Mixtral": (
        "MixtralForCausalLM",
        {**SMALL, "num_key_value_heads": 2, "num_local_experts": 4, "use_cache": False},
        text,
    ),
    "OPT": (
        "OPTForCausalLM",
        {
            "hidden_size": 32,
            "word_embed_proj_dim": 32,
            "ffn_dim": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "vocab_size": 96,
            "max_position_embeddings": 64,
        },
        text,
    ),
}
UNCOMPARED = ("aten._grouped_mm", "aten.empty")
"""Takes no float64; holds nothing to compare."""

# what is one position's own, or needs all of its input: counters, sorts of one dim, windows of a table
WHOLE = frozenset("aten." + name for name in "arange sort floor_divide index_put_ slice cumsum".split())


def record(name: str) -> tuple[list[Node], list[Value]]:
    """The nodes of one forward in training mode."""
    architecture, settings, batch = MODELS[name]
    cls = getattr(transformers, architecture)
    torch.manual_seed(0)
    model = cls(cls.config_class(**settings)).train()
    inputs = batch()
    recorder = Recorder(RuleBook.first_party().composites, [*model.parameters(), *inputs.values()])
    with recorder:
        model(**inputs)
    return recorder.nodes, recorder.values


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", MODELS)
def test_rows_of_a_real_model(name: str) -> None:
    book = RuleBook.first_party()
    nodes, values = record(name)
    assert len(nodes) > 30
    seen: set[str] = set()
    for node in nodes:
        view = NodeView.of(node, values, 2)
        rows = book.strategies(view)
        large = any(numel(shape) > 4 for shape in view.in_shapes + view.out_shapes)
        assert (
            len(rows) > 1
            or not large
            or ".".join(node.name.split(".")[:2]) in WHOLE
            or not view.out_shapes[0]
        ), node
        key = f"{node.name} {view.in_shapes} {[a for a in node.args if not hasattr(a, 'i')]}"
        if key in seen or not node.ins or node.op is None or node.name.startswith(UNCOMPARED):
            continue
        seen.add(key)
        for row in rows[1:]:
            assert check(view, row), f"{node} {view.in_shapes}: {row}"
