"""The device of a model: its batches there, and its random numbers."""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from meshwright_dtensor._torch.core import pytree
from meshwright_dtensor._torch.modes import without_functorch
from meshwright_dtensor.devices import device_of


def on_device(batch: Any, device: torch.device) -> Any:
    """`batch`, a pytree, with its tensors on `device`."""
    return pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.to(device), batch)


def generator_of(device: torch.device) -> torch.Generator:
    """The generator that random operations on `device` draw from, unless they are given another."""
    return device_of(device).generator(device)


def random_sums(device: torch.device) -> list[int]:
    """A checksum of the state of each generator that models on `device` draw from: the CPU's, and the device's own."""
    with without_functorch():
        return [zlib.crc32(each.get_state().numpy().tobytes()) for each in _generators(device)]


@contextlib.contextmanager
def random_kept_on_error(device: torch.device) -> Iterator[None]:
    """An error inside leaves random numbers as they were before: ranks may have drawn more or fewer of them by then."""
    states = [(each, each.get_state()) for each in _generators(device)]
    try:
        yield
    except BaseException:
        for generator, state in states:
            generator.set_state(state)
        raise


def _generators(device: torch.device) -> list[torch.Generator]:
    generators = [torch.default_generator, generator_of(device)]
    return generators[:1] if generators[0] is generators[1] else generators


def forked_random(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Inside, random numbers may be drawn on the CPU and on `device`; after it, the generators are as before."""
    return _restored(_generators(device))


@contextlib.contextmanager
def _restored(generators: Sequence[torch.Generator]) -> Iterator[None]:
    states = [(each, each.get_state()) for each in generators]
    try:
        yield
    finally:
        for generator, state in states:
            generator.set_state(state)
