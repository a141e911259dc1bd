"""The models of the demo: unmodified transformers classes with random weights, small enough for two CPU cores.

Each has 4 layers and about 5 million parameters. Dropout is on, at 0.1, wherever the architecture has it.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from torch import nn

from meshwright.demo.tasks import BYTES, IMAGE_SIZE, ByteImage, MaskedByte, NextByte, _Rows
from meshwright_dtensor.errors import UsageError


@dataclass(frozen=True)
class Recipe:
    """How to make one model and its data.

    model, config: names in transformers. settings: keywords of the config. length: the keyword for the sequence length, if
    there is one. rows: the dataset.
    """

    model: str
    config: str
    settings: Mapping[str, Any]
    length: str | None
    rows: type[_Rows]

    def make(self, sequence_length: int) -> nn.Module:
        """A new model, initialised from torch's default generator. Raises UsageError without transformers."""
        try:
            transformers = importlib.import_module("transformers")
        except ImportError as error:
            raise UsageError("the demo's models need transformers; pip install 'meshwright[demo]'") from error
        # it warns about every config that names no loss
        transformers.logging.set_verbosity_error()
        length = {self.length: sequence_length} if self.length else {}
        config = getattr(transformers, self.config)(**self.settings, **length)
        return getattr(transformers, self.model)(config)


_LENGTH = "max_position_embeddings"
_NO_TOKENS = {"bos_token_id": None, "eos_token_id": None, "use_cache": False}
_LAYERS = {"num_hidden_layers": 4, "num_attention_heads": 8}
_ENCODER = {
    **_LAYERS,
    "hidden_size": 336,
    "intermediate_size": 1344,
    "hidden_dropout_prob": 0.1,
    "attention_probs_dropout_prob": 0.1,
}
_GPT2 = {"n_embd": 336, "n_layer": 4, "n_head": 8, "resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1}
_LLAMA = {"hidden_size": 320, "intermediate_size": 960, "num_key_value_heads": 4, "attention_dropout": 0.1}
_VIT = {"image_size": IMAGE_SIZE, "patch_size": 4, "num_channels": 1, "num_labels": ByteImage.KINDS}
_TEXT = {"vocab_size": BYTES, **_NO_TOKENS}
_MASKED = {"vocab_size": BYTES + 4}

RECIPES: Mapping[str, Recipe] = MappingProxyType(
    {
        "gpt2": Recipe("GPT2LMHeadModel", "GPT2Config", {**_TEXT, **_GPT2}, "n_positions", NextByte),
        "llama": Recipe("LlamaForCausalLM", "LlamaConfig", {**_TEXT, **_LAYERS, **_LLAMA}, _LENGTH, NextByte),
        "bert": Recipe("BertForMaskedLM", "BertConfig", {**_MASKED, **_ENCODER}, _LENGTH, MaskedByte),
        "vit": Recipe("ViTForImageClassification", "ViTConfig", {**_VIT, **_ENCODER}, None, ByteImage),
    }
)
