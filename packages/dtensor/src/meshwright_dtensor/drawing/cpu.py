"""Numbers of one device on CPUs: all of them are drawn, in pieces, and those of other ranks are dropped.

On Intel processors, kernels of MKL take one number from torch's generator for a whole tensor, as the seed of a stream of their own
(MCG31m1, of the documentation of MKL's vector statistics). Their stream from any place on is that of another seed.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from meshwright_dtensor.drawing.held import Held, Target
from meshwright_dtensor.drawing.whole import Way, Whole, agrees
from meshwright_dtensor.utils.host import HOST

_BLOCK = 16
_TRIAL = (1027, 3)
_TRIAL_PIECE = 1024


def in_sequence(whole: Whole, held: Held, target: Target) -> None:
    """Draw along memory, piece after piece."""
    buffer = whole.buffer(whole.piece + _BLOCK)
    drawn, total = 0, held.total
    while drawn < total:
        left = total - drawn
        # the last piece is never shorter than a block
        count = left if left < whole.piece + _BLOCK else whole.piece
        piece = buffer[:count]
        whole.draw(piece)
        held.put(target, piece, drawn)
        drawn += count


_MULTIPLIER, _MODULUS = 1132489760, 2**31 - 1


def from_seed(whole: Whole, held: Held, target: Target) -> None:
    """Draw the pieces in which the rank has elements, each from the seed of its place."""
    before = whole.generator.get_state()
    whole.draw(whole.buffer(1))
    after = whole.generator.get_state()
    word = _last_word(whole.generator, before, after)
    if word is None:
        # not such a draw, which the trial shows
        return
    seed = word % _MODULUS or 1
    at, total = held.first_from(0), held.total
    while at is not None:
        count = min(whole.piece, total - at)
        piece = whole.buffer(count)
        whole.generator.set_state(_state_before(before, pow(_MULTIPLIER, at, _MODULUS) * seed % _MODULUS))
        whole.draw(piece)
        held.put(target, piece, at)
        at = held.first_from(at + count)
    whole.generator.set_state(after)


def _last_word(generator: torch.Generator, before: torch.Tensor, after: torch.Tensor) -> int | None:
    """The last of the one or two words of 32 bits by which a generator went on; None if it were more."""
    generator.set_state(before)
    both = int(torch.empty((), dtype=torch.int64, device=HOST).random_(-(2**63), None, generator=generator))
    generator.set_state(before)
    for shift in (32, 0):
        torch.empty((), dtype=torch.int32, device=HOST).random_(generator=generator)
        if torch.equal(generator.get_state(), after):
            return both >> shift & 0xFFFFFFFF
    return None


def _state_before(like: torch.Tensor, word: int) -> torch.Tensor:
    """A state of which the next two words are `word`: that of MT19937, whose output is undone, step by step."""
    y = word ^ word >> 18
    y ^= (y << 15) & 0xEFC60000
    x = y
    for _ in range(4):
        x = y ^ (x << 7) & 0x9D2C5680
    y = x & 0xFFFFFFFF
    y ^= y >> 11 ^ y >> 22
    state = like.clone()
    # words that are left, whether there is a seed, and the place of the next word
    state.view(torch.int32)[2:6] = torch.tensor([600, 1, 0, 0], dtype=torch.int32, device=HOST)
    state.view(torch.int64)[3:5] = y
    return state


def chosen(whole: Whole) -> Way | None:
    """A way that gives the numbers of one device; None if no one does, which depends on op, build and processor."""
    few = replace(whole, piece=_TRIAL_PIECE)
    return next((way for way in (in_sequence, from_seed) if agrees(way, few, *_TRIAL)), None)
