"""Refuse to pickle a parallel model: it has hooks, process groups and one rank's part of the values."""

from __future__ import annotations

from typing import Any, NoReturn

from torch import nn

from meshwright_dtensor.errors import UnsupportedError

_ATTRIBUTE = "_meshwright_pickling"


class _Refusal:
    """An attribute that cannot be pickled, of a model that can be copied."""

    def __reduce__(self) -> NoReturn:
        raise UnsupportedError(
            "a parallel model cannot be pickled or torch.saved: it has one rank's part of the values, hooks and process groups. "
            "Save mw.full_state_dict(model), whose values are plain and whole; or mw.save(path, model=model, optimizer=optimizer), "
            "which any layout loads; or mw.export(path, model=model) for from_pretrained"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> _Refusal:
        return self


def refuse_pickling(model: nn.Module) -> None:
    """Make pickling `model` raise UnsupportedError, with the ways to save it."""
    attributes = dict(model.__dict__)
    model.__dict__.clear()
    # first, since pickle would name the first hook that it cannot pickle
    model.__dict__.update({_ATTRIBUTE: _Refusal(), **attributes})
