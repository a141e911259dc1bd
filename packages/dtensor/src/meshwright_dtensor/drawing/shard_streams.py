"""A random stream for each shard: a rank draws its part and nothing else, and copies of a shard draw the same numbers.

The stream is derived from the state of the generator and from the part of the tensor that the rank holds, by a hash (SHAKE-128,
FIPS 202): streams of other parts, or of another draw, have nothing in common. The generator moves on alike on all ranks. So
the numbers are those of one layout: what restores the generator (a checkpoint, recomputation) restores them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from meshwright_dtensor.sharding.boxes import Place

_WORDS = 624
_HEADER = 3
"""Of the state of a generator on a CPU, numbers of 64 bits before its words."""


@contextmanager
def shard_stream(
    generator: torch.Generator,
    device: torch.device,
    shape: Sequence[int],
    place: Place,
    seed_stream: Callable[[torch.Generator, Any], None],
) -> Iterator[None]:
    """Inside, the generator has the stream of `place` in a tensor of `shape`; afterwards it is one draw further than before.

    Every rank enters it for a draw, whatever its part is. `seed_stream`: that of the device (`devices.Device`).
    """
    before = generator.get_state()
    torch.empty(1, device=device).uniform_(generator=generator)
    after = generator.get_state()
    key = hashlib.shake_128(before.numpy().tobytes())
    key.update(repr((tuple(shape), _spans(place))).encode())
    seed_stream(generator, key)
    try:
        yield
    finally:
        generator.set_state(after)


def _spans(place: Place) -> tuple[object, ...]:
    """The place in one form, whether it is a box or a region."""
    return tuple(dim if isinstance(dim[0], tuple) else (dim,) for dim in place)


def state_of_words(like: torch.Tensor, key: Any) -> torch.Tensor:
    """A state of a CPU's generator with the words of a hash: `manual_seed` takes 32 bits only, too few for a long run."""
    words = key.digest(4 * _WORDS)
    state = torch.zeros_like(like)
    numbers = state.view(torch.int64)
    # one number is left before the words are renewed, which mixes them; the next is the first
    state.view(torch.int32)[2:4] = 1
    numbers[_HEADER : _HEADER + _WORDS] = (
        torch.frombuffer(bytearray(words), dtype=torch.int32).to(torch.int64) & 0xFFFFFFFF
    )
    return state
