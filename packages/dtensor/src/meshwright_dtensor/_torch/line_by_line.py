"""Functions of torch that are written in Python, to be run line by line where what they call is what counts.

Their own code begins with a question for tensors that override torch functions, and hands the whole call to those. In the
copies here the answer is no, so that the tensors are asked for each function inside.
"""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType, MappingProxyType
from typing import Any

import torch.nn.functional as F

_UNASKED = dict.fromkeys(("has_torch_function", "has_torch_function_variadic"), lambda *tensors: False)


def _unasking(function: Any) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        # the names as they are now: a library may have replaced a function of torch
        names = {**vars(F), **_UNASKED}
        copy = FunctionType(function.__code__, names, argdefs=function.__defaults__)
        copy.__kwdefaults__ = function.__kwdefaults__
        return copy(*args, **kwargs)

    return run


LINE_BY_LINE: MappingProxyType[Callable[..., Any], Callable[..., Any]] = MappingProxyType(
    {function: _unasking(function) for function in (F.multi_head_attention_forward, F.gaussian_nll_loss)}
)
"""Function -> the same, whose inner functions are seen by tensors and modes. The loss reads values before it computes; the
layers of torch call the attention, whose projections are to be divided by heads like those of any other layer."""
