"""Compares the batches of all ranks: rows of its own on each rank would train on a batch that nobody has given."""

from __future__ import annotations

import zlib
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from meshwright_dtensor.errors import UsageError
from meshwright_dtensor.model.batch_text import SAME_BATCH, BatchTexts, first_difference
from meshwright_parallel.ranks import differing

_ATTRIBUTE = "_meshwright_batch_texts"


def install_batch_check(model: nn.Module, mesh: DeviceMesh) -> None:
    """Compare the batches of all ranks in the first calls of `model`, and in every 64th one after that.

    The model then raises `UsageError`, on every rank, which names the first tensor and rank that differ.
    """
    if mesh.size() == 1:
        return
    texts, device = BatchTexts(), torch.device(mesh.device_type)
    model.__dict__[_ATTRIBUTE] = texts

    def check(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        texts = model.__dict__.get(_ATTRIBUTE)
        if isinstance(texts, BatchTexts):
            text, compared = texts.describe(args, kwargs)
            if compared:
                _check_ranks_agree(text, device)

    model.register_forward_pre_hook(check, prepend=True, with_kwargs=True)


def _check_ranks_agree(text: str, device: torch.device) -> None:
    if not differing([zlib.crc32(text.encode())], device):
        return
    texts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(texts, text)
    rank = next(rank for rank, other in enumerate(texts) if other != texts[0])
    raise UsageError(
        f"rank {rank} was given another batch than rank 0 ({first_difference(texts[0], texts[rank])}); {SAME_BATCH}"
    )
