"""Which architectures there are, and how a tiny one of each is made.

The lists are those of transformers' own registries. A config is made tiny by field name (sizes.py), also inside its
parts; what does not follow from names alone is data (overrides.py). Nothing is built before its size is known.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import nn
from transformers import CONFIG_MAPPING, PreTrainedConfig, PreTrainedModel
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from .overrides import OVERRIDES
from .sizes import HEAD_WIDTH, IMAGE, PATCH, SPECIAL, STAGED, TINY
from .subject import NotBuildable

MAX_PARAMETERS = 3_000_000

REGISTRIES: dict[str, Mapping[str, Any]] = {
    "causal-lm": modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    "masked-lm": modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    "seq2seq-lm": modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    "image": modeling_auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES,
}
"""Task -> type of model -> names of classes. The registries of classes would import every model that there is."""


SPEECH: dict[str, Mapping[str, Any]] = {"speech": modeling_auto.MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES}
"""For those that are asked for by name: the sweep over all is over REGISTRIES."""


@dataclass(frozen=True)
class Architecture:
    """One model class of transformers, and the task that it is trained for here."""

    name: str
    task: str


@functools.cache
def architectures() -> tuple[Architecture, ...]:
    """Every class of the four registries, each once, under the first task that lists it."""
    by_name: dict[str, Architecture] = {}
    for task in REGISTRIES:
        for _, name in _listed(task):
            by_name.setdefault(name, Architecture(name, task))
    return tuple(by_name.values())


def _listed(task: str) -> Iterator[tuple[str, str]]:
    """Type of model and class name, in the registry's order."""
    for kind, names in (REGISTRIES | SPEECH)[task].items():
        if kind in CONFIG_MAPPING_NAMES:
            for name in names if isinstance(names, (tuple, list)) else (names,):
                yield kind, name


def _classes(architecture: Architecture) -> tuple[type[PreTrainedConfig], type[PreTrainedModel]]:
    """The class of its config, and its own."""
    kind = next(kind for kind, name in _listed(architecture.task) if name == architecture.name)
    model = getattr(transformers, architecture.name)
    # a composite model is registered under its text part, too: its own config builds it
    attribute = model.config_class
    return (attribute if isinstance(attribute, type) else CONFIG_MAPPING[kind]), model


LAYERS = (
    "num_hidden_layers n_layer n_layers num_layers encoder_layers decoder_layers num_decoder_layers num_encoder_layers depth"
).split()


def build(architecture: Architecture, layers: int | None = None) -> nn.Module:
    """A tiny model in training mode; its values are drawn from torch's generator.

    `layers`: how many blocks it is to have instead of the fewest, where its config has a field for that.

    Raises NotBuildable with the reason.
    """
    config_class, model_class = _classes(architecture)
    try:
        with torch.device("meta"):
            size = sum(
                p.numel() for p in model_class(_config(config_class, architecture, layers)).parameters()
            )
        if size > MAX_PARAMETERS:
            raise NotBuildable(f"{size:,} parameters in its smallest form, more than {MAX_PARAMETERS:,}")
        return model_class(_config(config_class, architecture, layers)).train()
    except NotBuildable:
        raise
    except Exception as error:  # whatever a constructor raises is the reason
        raise NotBuildable(f"{type(error).__name__}: {' '.join(str(error).split())[:200]}") from error


def _config(
    config_class: type[PreTrainedConfig], architecture: Architecture, layers: int | None
) -> PreTrainedConfig:
    changes = dict(OVERRIDES.get(architecture.name, {}))
    if layers is not None:
        changes |= {name: layers for name in LAYERS if _has(config_class, name) and name not in changes}
    if architecture.task == "causal-lm" and _has(config_class, "is_decoder"):
        changes.setdefault("is_decoder", True)
    config = tiny(config_class, changes)
    if (
        architecture.task in ("seq2seq-lm", "speech")
        and getattr(config, "decoder_start_token_id", None) is None
    ):
        config.decoder_start_token_id = 0  # what their own examples set
        config.pad_token_id = getattr(config, "pad_token_id", None) or 0
    return config


def tiny(config_class: type[PreTrainedConfig], changes: Mapping[str, Any]) -> PreTrainedConfig:
    """A config whose sizes are those of sizes.py, also in its parts; `changes` (nested for parts) come last."""
    example = _example(config_class)
    settings: dict[str, Any] = {}
    for field in dataclasses.fields(config_class):
        if field.init and field.name not in config_class.sub_configs:
            small = shrunk(field.name, _usual(example, field))
            if small is not None:
                settings[field.name] = small
    if {"qk_nope_head_dim", "num_key_value_heads", "num_attention_heads"} <= settings.keys():
        settings["num_key_value_heads"] = settings["num_attention_heads"]  # latent attention has no groups
    for part in config_class.sub_configs:
        attribute = getattr(example, part, None)
        inner = changes.get(part, {})
        if isinstance(attribute, PreTrainedConfig) and isinstance(inner, Mapping):
            settings[part] = tiny(type(attribute), inner)
    settings |= {k: v for k, v in changes.items() if not isinstance(settings.get(k), PreTrainedConfig)}
    return _varied(config_class, example, settings, changes)


def _varied(
    config_class: type[PreTrainedConfig],
    example: PreTrainedConfig | None,
    settings: dict[str, Any],
    changes: Mapping[str, Any],
) -> PreTrainedConfig:
    """The config of `settings`, with one layer of each kind where two layers would not show them all."""
    kinds = list(dict.fromkeys(getattr(example, "layer_types", None) or ()))
    if len(kinds) < 2 or "layer_types" in changes or not _has(config_class, "layer_types"):
        return config_class(**settings)
    config = config_class(**settings)
    if set(config.layer_types) == set(kinds):
        return config
    settings = {**settings, "layer_types": kinds, "num_hidden_layers": len(kinds)}
    try:
        return config_class(**settings)
    except Exception:  # the config has its own opinion of the order
        return config


def _example(config_class: type[PreTrainedConfig]) -> PreTrainedConfig | None:
    try:
        return config_class()
    except Exception:  # some have no default form: their fields' own defaults serve
        return None


def _usual(example: PreTrainedConfig | None, field: dataclasses.Field[Any]) -> Any:
    try:
        return getattr(example, field.name, field.default)
    except RuntimeError:  # one that varies over layers has no value of its own
        return field.default


def shrunk(name: str, value: Any) -> Any:
    """The tiny value of a field whose usual value is `value`; None to leave it as it is."""
    if name == "head_dim" and value is None:
        return HEAD_WIDTH
    if value is None or isinstance(value, bool):
        return None
    if isinstance(value, (list, tuple)):
        return _shrunk_list(name, value)
    if not isinstance(value, int):
        return None
    if name.endswith(("token_id", "token_index")):
        return value % SPECIAL if value >= 0 else None
    if name in ("image_size", "crop_size"):
        return IMAGE
    if name == "patch_size":
        return min(value, PATCH)
    if name in ("num_key_value_heads", "num_kv_heads", "kv_n_heads", "swa_num_key_value_heads"):
        return min(value, 2)
    return min(value, TINY[name]) if name in TINY else None


def _shrunk_list(name: str, value: list[Any] | tuple[Any, ...]) -> Any:
    if name not in STAGED or not all(type(item) is int for item in value):
        return None
    stages = STAGED[name]
    return type(value)(stages[min(stage, len(stages) - 1)] for stage in range(len(value)))


def _has(config_class: type[PreTrainedConfig], name: str) -> bool:
    return any(field.name == name for field in dataclasses.fields(config_class))
