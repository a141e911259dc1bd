"""Refuses `resize_token_embeddings` of a parallel model: transformers would put plain parameters in place of distributed ones."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from meshwright_dtensor.errors import UsageError

_NAME = "resize_token_embeddings"


@dataclass
class _FixedEmbeddings:
    """Replaces `resize_token_embeddings`. Calls that change nothing pass."""

    model: nn.Module
    size: int

    def __call__(
        self, new_num_tokens: int | None = None, pad_to_multiple_of: int | None = None, *_: Any
    ) -> Any:
        size = self.size if new_num_tokens is None else new_num_tokens
        size += -size % (pad_to_multiple_of or 1)
        if size != self.size:
            raise UsageError(
                f"{_NAME}({size}) of a parallel model with {self.size} token embeddings: their placement is planned for that size; "
                "resize before parallelize()"
            )
        return self.model.get_input_embeddings()  # type: ignore[operator]


def refuse_resizing(model: nn.Module) -> None:
    """Make `resize_token_embeddings` raise UsageError; of every module of `model` that has it."""
    for module in model.modules():
        if callable(getattr(module, _NAME, None)):
            try:
                size = int(module.get_input_embeddings().weight.shape[0])  # type: ignore[operator, union-attr]
            except (AttributeError, NotImplementedError):
                # patches, pixels: nothing that transformers could resize
                continue
            module.__dict__[_NAME] = _FixedEmbeddings(module, size)
