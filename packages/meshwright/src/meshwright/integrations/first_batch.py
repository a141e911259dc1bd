"""The first batch of a data loader, and what a training step calls the model with for it: the example that a plan is made for."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any, NoReturn

from torch import Generator, nn


def first_batch(batches: Iterable[Any], loaders: Iterable[Any]) -> Any:
    """The first of the batches, which come from the data loaders; the next loop reads it again, in the same order.

    The global random streams are the caller's to restore.
    """
    loaders = list(loaders)
    generators = {id(g): g for loader in loaders for g in _generators(loader)}
    kept = [(generator, generator.get_state()) for generator in generators.values()]
    # those of torchdata go on from a state that was loaded into them
    stateful = [(loader, loader.state_dict()) for loader in loaders if hasattr(loader, "load_state_dict")]
    try:
        return next(iter(batches))
    finally:
        for generator, state in kept:
            generator.set_state(state)
        for loader, states in stateful:
            loader.load_state_dict(states)


def _generators(loader: Any) -> Iterable[Generator]:
    sampler = getattr(loader, "sampler", None)
    batch_sampler = getattr(loader, "batch_sampler", None)
    for holder in (loader, sampler, batch_sampler, getattr(batch_sampler, "sampler", None)):
        generator = getattr(holder, "generator", None)
        if isinstance(generator, Generator):
            yield generator


class Called(BaseException):
    """Ends a call of a module before it begins. `batch`: its arguments, as a batch."""

    def __init__(self, module: nn.Module, batch: Any) -> None:
        super().__init__()
        self.module = module
        self.batch = batch


def tell_call(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> NoReturn:
    """A forward pre-hook (`with_kwargs=True`) that raises `Called`."""
    if args and kwargs:
        names = inspect.signature(module.forward).bind_partial(*args).arguments
        args, kwargs = (), {**names, **kwargs}
    raise Called(module, args or kwargs)
