"""A batch for each task: global values, the same on every rank. Labels are ignored unevenly over rows."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from .catalogue import Architecture
from .sizes import PLAIN_IMAGE, SPECIAL, VOCABULARY

ROWS, TOKENS, TARGETS = 4, 16, 8
FRAMES, SAMPLES = 64, 800
IGNORED = -100

ONE_LENGTH = frozenset({"FSMTForConditionalGeneration"})
"""Encoder-decoders whose labels must be as long as their source."""


def batch_of(architecture: Architecture, model: nn.Module) -> dict[str, Tensor]:
    """What `model` is called with."""
    if architecture.task == "image":
        return images(model)
    taken = inspect.signature(model.forward).parameters
    if "input_ids" not in taken and "labels" in taken and architecture.task in ("seq2seq-lm", "speech"):
        return {**features(model), "labels": targets(TARGETS)}
    if architecture.task == "masked-lm":
        return masked(taken)
    if getattr(model.config, "is_encoder_decoder", False):
        length = TOKENS if architecture.name in ONE_LENGTH else TARGETS
        return {"input_ids": tokens(TOKENS), "labels": targets(length)}
    return {"input_ids": tokens(TOKENS), "labels": targets(TOKENS)}


def tokens(length: int) -> Tensor:
    """Token ids of shape [ROWS, length], none of them special."""
    return torch.randint(SPECIAL, VOCABULARY, (ROWS, length), generator=_generator())


def targets(length: int) -> Tensor:
    """The ids of `tokens(length)`; the first row is ignored but for its end, the last one but for its first token.

    A causal model shifts labels by one, so that for it the last row is ignored wholly.
    """
    labels = tokens(length)
    labels[0, : length - 3] = IGNORED
    labels[1, 2:5] = IGNORED
    labels[3, 1:] = IGNORED
    return labels


def masked(taken: Any) -> dict[str, Tensor]:
    """Padded rows of different lengths; two tokens in seven are asked for."""
    ids = tokens(TOKENS)
    batch = {"input_ids": ids}
    if "attention_mask" in taken:
        mask = torch.ones_like(ids)
        mask[1, 12:] = 0
        mask[2, 7:] = 0
        batch["attention_mask"] = mask
    hidden = torch.arange(ids.numel()).reshape(ids.shape) % 7 > 1
    return {**batch, "labels": ids.masked_fill(hidden, IGNORED)}


def images(model: nn.Module) -> dict[str, Tensor]:
    """Pixels of the size that the model's config asks for, and a class per row."""
    config: Any = model.config
    vision = getattr(config, "vision_config", config)
    channels = getattr(vision, "num_channels", 3)
    size = getattr(vision, "image_size", PLAIN_IMAGE)
    height, width = size if isinstance(size, (tuple, list)) else (size, size)
    classes = max(2, int(getattr(config, "num_labels", 2)))
    name = "pixel_values"
    if name not in inspect.signature(model.forward).parameters:
        name = str(getattr(model, "main_input_name", "inputs"))
    return {
        name: torch.randn(ROWS, channels, height, width, generator=_generator()),
        "labels": torch.randint(classes, (ROWS,), generator=_generator()),
    }


def features(model: nn.Module) -> dict[str, Tensor]:
    """Sound: a spectrogram or a wave, as the model calls it."""
    name = str(getattr(model, "main_input_name", "input_features"))
    if name == "input_values":
        return {name: torch.randn(ROWS, SAMPLES, generator=_generator())}
    config: Any = getattr(model.config, "audio_config", None) or model.config
    bins = getattr(config, "num_mel_bins", 80)
    exact = type(model).__name__.startswith("Whisper")  # it takes one length, twice its positions
    frames = 2 * int(config.max_source_positions) if exact else FRAMES
    return {name: torch.randn(ROWS, bins, frames, generator=_generator())}


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(11)
