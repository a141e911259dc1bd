"""The models of the demo: unmodified transformers classes with random weights, small enough for two CPU cores.

Each has 4 layers and about 5 million parameters. Dropout is on, at 0.1, wherever the architecture has it.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from torch import Tensor, nn

from meshwright.demo.tasks import BYTES, IMAGE_SIZE, ByteImage, MaskedByte, NextByte, _Rows
from meshwright_dtensor.errors import UsageError


@dataclass(frozen=True)
class Recipe:
    """How to make one model and its data.

    model, config: names in transformers. settings: sequence length -> keywords of the config. rows: the dataset.
    """

    model: str
    config: str
    settings: Callable[[int], dict[str, Any]]
    rows: type[_Rows]

    def make(self, sequence_length: int) -> nn.Module:
        """A new model, initialised from torch's default generator. Raises UsageError without transformers."""
        try:
            transformers = importlib.import_module("transformers")
        except ImportError as error:
            raise UsageError("the demo's models need transformers; pip install 'meshwright[demo]'") from error
        # it warns about every config that names no loss
        transformers.logging.set_verbosity_error()
        config = getattr(transformers, self.config)(**self.settings(sequence_length))
        return getattr(transformers, self.model)(config)

    def data(self, text: Tensor, sequence_length: int, rows: int, seed: int) -> _Rows:
        """The dataset of `rows` rows drawn from `text`."""
        return self.rows(text, sequence_length, rows, seed)


_NO_TOKENS = {"bos_token_id": None, "eos_token_id": None, "use_cache": False}
_LAYERS = {"num_hidden_layers": 4, "num_attention_heads": 8}
_ENCODER = {
    **_LAYERS,
    "hidden_size": 336,
    "intermediate_size": 1344,
    "hidden_dropout_prob": 0.1,
    "attention_probs_dropout_prob": 0.1,
}


def _gpt2(length: int) -> dict[str, Any]:
    size = {"vocab_size": BYTES, "n_positions": length, "n_embd": 336, "n_layer": 4, "n_head": 8}
    return {**size, "resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1, **_NO_TOKENS}


def _llama(length: int) -> dict[str, Any]:
    size = {"vocab_size": BYTES, "max_position_embeddings": length, "hidden_size": 320, **_LAYERS}
    return {
        **size,
        "intermediate_size": 960,
        "num_key_value_heads": 4,
        "attention_dropout": 0.1,
        **_NO_TOKENS,
    }


def _bert(length: int) -> dict[str, Any]:
    return {"vocab_size": BYTES + 4, "max_position_embeddings": length, **_ENCODER}


def _vit(length: int) -> dict[str, Any]:
    images = {"image_size": IMAGE_SIZE, "patch_size": 4, "num_channels": 1}
    return {**images, "num_labels": ByteImage.KINDS, **_ENCODER}


RECIPES: Mapping[str, Recipe] = MappingProxyType(
    {
        "gpt2": Recipe("GPT2LMHeadModel", "GPT2Config", _gpt2, NextByte),
        "llama": Recipe("LlamaForCausalLM", "LlamaConfig", _llama, NextByte),
        "bert": Recipe("BertForMaskedLM", "BertConfig", _bert, MaskedByte),
        "vit": Recipe("ViTForImageClassification", "ViTConfig", _vit, ByteImage),
    }
)
