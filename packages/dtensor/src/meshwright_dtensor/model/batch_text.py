"""A batch as text, by which ranks find out that they were given different ones.

A plain tensor is the global value, so every rank must be given the same. Text with checksums of the values is compared in
the first calls of a model and in every 64th one after that.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import torch

from meshwright_dtensor._torch.core import pytree
from meshwright_dtensor.model.device import random_sums
from meshwright_dtensor.utils.checksum import checksum

SAME_BATCH = (
    "a plain tensor is the whole batch, so give every rank the same: seed samplers alike and leave DistributedSampler out; or "
    "loop over mw.shard_loader(loader), which reads each rank's part of it; or, where each data rank is to keep rows of its own, "
    'over mw.shard_loader(loader, rows="local")'
)
"""The rule and the ways out, for errors."""
SAME_RANDOM = (
    "and the model draws from them (dropout, say), where all ranks must have those of one device: seed every rank alike "
    "(torch.manual_seed), and draw equally often on each"
)
_RANDOM = "; random state values "
_FIRST_CALLS, _EVERY = 3, 64
# larger tensors are compared by so many evenly spread elements
_SAMPLES = 2**16


def is_compared(number: int) -> bool:
    """Whether ranks compare what they were given in this call or step, counted from 0."""
    return number < _FIRST_CALLS or number % _EVERY == 0


@dataclass
class BatchTexts:
    """Describes the batches of one model, one after the other; `calls` counts them."""

    calls: int = 0

    def describe(self, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[str, bool]:
        """The batch of the next call as text, and whether ranks compare the values in this call."""
        compared = is_compared(self.calls)
        self.calls += 1
        return describe(args, kwargs, values=compared), compared


def describe(args: Sequence[Any], kwargs: dict[str, Any], *, values: bool = False) -> str:
    """Names, shapes and dtypes of the tensors of a batch, and its other plain values: the same on every rank.

    `values`: with checksums of plain tensors; global tensors have a part of the value on each rank.
    """
    shown = []
    for path, leaf in pytree.tree_flatten_with_path((tuple(args), kwargs))[0]:
        name = ".".join(str(getattr(key, "key", getattr(key, "idx", key))) for key in path[1:])
        if isinstance(leaf, torch.Tensor):
            form = f"{name} {list(leaf.shape)} {str(leaf.dtype).removeprefix('torch.')}"
            shown.append(f"{form} values {_sum(leaf):x}" if values else form)
        elif leaf is not None:
            plain = isinstance(leaf, (bool, int, float, str))
            shown.append(f"{name}={leaf if plain else type(leaf).__name__}")
    return "; ".join(shown)


def with_random_state(text: str, device: torch.device) -> str:
    """The text of a batch for a model that draws random numbers, which must be the same on every rank too."""
    return f"{text}{_RANDOM}{random_sums(device)}"


def split_random_state(text: str) -> tuple[str, str]:
    """The text of the batch alone, and that of the random state, "" for none."""
    batch, _, state = text.partition(_RANDOM)
    return batch, state


def difference(who: str, text: str, other: str, than: str = "rank 0") -> str:
    """What the rank `who` was given that `than` was not, and the fix. `text`, `other`: what `than` and what `who` was given."""
    if split_random_state(text)[0] == split_random_state(other)[0]:
        return f"{who} has other random numbers than {than}, {SAME_RANDOM}"
    return f"{who} was given another batch than {than} ({first_difference(text, other)}); {SAME_BATCH}"


def first_difference(text: str, other: str) -> str:
    """The first leaf in which two descriptions differ."""
    for leaf, other_leaf in zip_longest(text.split("; "), other.split("; "), fillvalue="nothing"):
        if leaf != other_leaf:
            form, other_form = (described.partition(" values ")[0] for described in (leaf, other_leaf))
            return f"the values of {form} differ" if form == other_form else f"{form} against {other_form}"
    return "nothing"


def _sum(tensor: torch.Tensor) -> int:
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.layout != torch.strided:
        return 0
    try:
        total = checksum(tensor, samples=_SAMPLES if tensor.numel() > 2 * _SAMPLES else None)
    except (RuntimeError, NotImplementedError):
        # under functorch transforms and for special dtypes there are no values to read
        return 0
    return zlib.crc32(total.to_bytes(8))
