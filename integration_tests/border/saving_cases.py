"""`torch.save`, `torch.load` and the rest of `torch.serialization`, and copies, of what a model has."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import serialization

from .cases import Case
from .subjects import Subject

AREA = "torch.serialization"


def _saved(value: Any, **options: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, **options)


def _loaded(made: Subject) -> Any:
    """A file of one device's values, loaded into the model."""
    values = {name: torch.full(tuple(x.shape), 0.01) for name, x in made.model.state_dict().items()}
    return made.model.load_state_dict(_saved(values))


SAVED: dict[str, Callable[[Subject], Any]] = {
    "a state dict": lambda s: s.model.state_dict(),
    "a parameter": lambda s: s.model.b.weight,
    "a gradient": lambda s: s.model.b.weight.grad,
    "a buffer": lambda s: s.model.c.scale,
    "an activation": lambda s: s.activation().detach(),
    "a loss": lambda s: s.loss().detach(),
    "states": lambda s: s.optimizer.state_dict(),
    "states of one": lambda s: s.optimizer.state[s.model.b.weight]["exp_avg"],
    "whole tensors": lambda s: {
        k: v.full_tensor() if hasattr(v, "full_tensor") else v for k, v in s.model.state_dict().items()
    },
    "values on the CPU": lambda s: {k: v.detach().cpu().clone() for k, v in s.model.state_dict().items()},
}


def names() -> list[str]:
    """The public functions."""
    return [f"serialization.{name}" for name in serialization.__all__]


def saving_cases() -> Iterator[Case]:
    """Each value is written and read by torch, by pickle, and copied."""
    ways: dict[str, Callable[[Any], Any]] = {
        "serialization.save": lambda x: _saved(x),
        "serialization.load": lambda x: _saved(x, weights_only=False),
        "pickle": lambda x: pickle.loads(pickle.dumps(x)),
        "copy.deepcopy": copy.deepcopy,
        "copy.copy": copy.copy,
    }
    for name, way in ways.items():
        for what, value in SAVED.items():
            yield Case(AREA, name, what, _both(way, value), "optimizer")
    yield Case(AREA, "serialization.load", "into the model", _loaded, "backward", trains=True)
    yield Case(AREA, "serialization.skip_data", "a state dict", _skipped, "backward")


def _both(way: Callable[[Any], Any], value: Callable[[Subject], Any]) -> Callable[[Subject], Any]:
    return lambda made: way(value(made))


def _skipped(made: Subject) -> Any:
    file = io.BytesIO()
    with serialization.skip_data():
        torch.save(made.model.state_dict(), file)
    return len(file.getvalue()) > 0
