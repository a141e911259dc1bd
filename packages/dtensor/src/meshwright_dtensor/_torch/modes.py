"""Modes of torch that are on for this thread: inference mode, dispatch modes and keys, functorch transforms, backward passes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch.autograd.forward_ad as _forward_ad
import torch.overrides as _overrides
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode_stack

from meshwright_dtensor._torch.core import pytree


def in_backward() -> bool:
    """Whether this thread runs a backward pass."""
    return torch._C._current_graph_task_id() != -1


def with_function_modes(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function``, with those function modes of now that have ``in_second_runs``, whenever it runs.

    A forward that runs again for its backward pass runs in that, and autograd has no function modes there.
    """
    stack = _overrides._get_current_function_mode_stack()
    modes = [mode for mode in stack if getattr(mode, "in_second_runs", False)]
    if not modes:
        return function

    def run(*args: Any, **kwargs: Any) -> Any:
        there = _overrides._get_current_function_mode_stack()
        missing = [mode for mode in modes if mode not in there]
        for mode in missing:
            _overrides._push_mode(mode)
        try:
            return function(*args, **kwargs)
        finally:
            for _ in missing:
                _overrides._pop_mode()

    return run


function_mode_is_on: Callable[[], bool] = torch._C._is_torch_function_mode_enabled
"""Whether a function mode sees the torch functions that are called: torch.device("cuda") as a context is one."""
classes_are_asked: Callable[[], bool] = torch._C._is_torch_function_enabled
"""Whether classes with ``__torch_function__`` are asked for the calls with their tensors."""
transform_level: Callable[[], int | None] = torch._C._functorch.maybe_current_level
"""The number of functorch transforms that are running, None without one."""


def functorch_active() -> bool:
    """Whether a functorch transform (vmap, grad, jvp...) is running."""
    return transform_level() is not None


def has_tangent(x: torch.Tensor) -> bool:
    """Whether a forward-mode derivative is computed of a plain tensor (functorch's jvp, or torch.autograd.forward_ad)."""
    if _forward_ad._current_level < 0:
        return False
    while torch._C._functorch.is_functorch_wrapped_tensor(x):
        # of nested transforms, any of which may be a jvp
        if torch._C._functorch.is_gradtrackingtensor(x):
            return True
        x = torch._C._functorch.get_unwrapped(x)
    return _forward_ad.unpack_dual(x).tangent is not None


def outside_functorch(x: torch.Tensor) -> torch.Tensor:
    """The tensor that functorch transforms have wrapped; any other tensor itself."""
    while torch._C._functorch.is_functorch_wrapped_tensor(x):
        x = torch._C._functorch.get_unwrapped(x)
    return x


def without_functorch() -> AbstractContextManager[Any]:
    """Inside, no functorch transform of the caller is on: values of tensors that it has not wrapped can be read."""
    return temporarily_clear_interpreter_stack()


@contextmanager
def without_inference_mode() -> Iterator[None]:
    """Inside, `torch.inference_mode()` of the caller is `torch.no_grad()`.

    Under inference mode a dispatch mode sees composite operations whole: dropout in evaluation is a random operation there.
    """
    if not torch.is_inference_mode_enabled():
        yield
        return
    with torch.inference_mode(False), torch.no_grad():
        yield


def recordable(tree: Any) -> Any:
    """Copies of the tensors of inference mode, which autograd may record outside of it; anything else as it is."""
    return pytree.tree_map_only(torch.Tensor, lambda x: x.clone() if x.is_inference() else x, tree)


def without_modes() -> AbstractContextManager[Any]:
    """Run outside of every dispatch mode (a FakeTensorMode of the caller, say)."""
    return _disable_current_modes()


@contextmanager
def kept_dispatch_keys() -> Iterator[None]:
    """Restores the dispatch keys of this thread at exit: an exception inside of torch may leave others."""
    include, exclude = torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()
    with torch._C._ForceDispatchKeyGuard(include, exclude):
        yield


def fake_mode() -> AbstractContextManager[Any]:
    """A fresh FakeTensorMode that lets real tensors in as constants."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode(allow_non_fake_inputs=True)


def dispatch_modes() -> list[Any]:
    """The dispatch modes of this thread, the outermost first."""
    return list(_get_current_dispatch_mode_stack())
