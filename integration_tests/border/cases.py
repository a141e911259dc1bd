"""What a case of the sweep is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .subjects import Subject


@dataclass(frozen=True)
class Case:
    """One use of one name of torch.

    Attributes:
        area: such as "torch.Tensor", a row of the summary. `name`: of torch, such as "Tensor.add".
        form: on what, and with which arguments; unique for the name.
        run: gives what the user would get. It is called with the model of one device, and with the parallel one.
        setup: one of `SETUPS`.
        trains: whether a step of training follows, whose loss and gradients are compared too.
        typed: only the type of the result is compared, such as that of an address.
    """

    area: str
    name: str
    form: str
    run: Callable[[Subject], Any]
    setup: str = "bare"
    trains: bool = False
    typed: bool = False

    @property
    def key(self) -> str:
        """The name of the case."""
        return f"{self.name} | {self.form}"
