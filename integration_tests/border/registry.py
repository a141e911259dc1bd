"""All cases, by key."""

from __future__ import annotations

from functools import cache

from . import autograd_cases as in_autograd
from . import module_cases as in_modules
from . import optimizer_cases as in_optimizers
from . import saving_cases as in_saving
from . import utils_cases as in_utils
from .autograd_cases import autograd_cases
from .cases import Case
from .loop_cases import loop_cases
from .module_cases import module_cases
from .optimizer_cases import optimizer_cases
from .saving_cases import saving_cases
from .subjects import LOOP_PLANS
from .tensor_cases import AREA, accepted, tensor_case
from .utils_cases import utils_cases


@cache
def written() -> dict[str, Case]:
    """The cases that are written one by one."""
    made = (loop_cases, module_cases, utils_cases, optimizer_cases, autograd_cases, saving_cases)
    return {case.key: case for cases in made for case in cases()}


def all_keys() -> list[str]:
    """Of every case."""
    return [*written(), *accepted()[0]]


def keys_of(plan: str) -> list[str]:
    """Of the cases that are tried under this plan."""
    return [case.key for case in loop_cases()] if plan in LOOP_PLANS else all_keys()


def case_of(key: str) -> Case:
    """The case of this key."""
    if key in written():
        return written()[key]
    name, on, form = key.split(" | ", 2)
    return tensor_case(name.removeprefix("Tensor."), on, form)


def area_of(key: str) -> str:
    """The row of the summary."""
    return written()[key].area if key in written() else AREA


def untried() -> list[str]:
    """Public names without a case."""
    have = {case.name for case in written().values()}
    public = [f"Module.{name}" for name in in_modules.names()]
    public += [f"utils.{name}" for name in in_utils.names()]
    public += [f"optim.{name}" for name in in_optimizers.names()]
    public += [*in_autograd.names(), *in_saving.names()]
    return [f"Tensor.{name}" for name in accepted()[1]] + [name for name in public if name not in have]
