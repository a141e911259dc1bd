"""Activations that forward hooks of the user are given. Each is of one stage and one microbatch, and its graph is that of the
step, so a loss that is computed from one after the step cannot be differentiated."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from meshwright_dtensor.errors import UnsupportedError
from meshwright_pipeline._torch import during_module_calls, hooks_of, pre_hooks_of
from meshwright_pipeline.pytrees import tensors_of


class HookedActivations:
    """Makes gradients of activations an error outside of the steps of a model, where its hooks have kept them."""

    def __init__(self) -> None:
        self._in_step = False

    @contextlib.contextmanager
    def step(self, model: nn.Module, own: Mapping[nn.Module, frozenset[int]]) -> Iterator[None]:
        """Inside, stages run forwards and backwards. `own`: each module -> ids of the forward hooks that are ours."""
        # looked at in every step, so the modules without hooks cost two lookups each
        before = [m for m in own if (hooks := pre_hooks_of(m)) and not all(map(_is_ours, hooks.values()))]
        after = [m for m, ours in own.items() if hooks_of(m).keys() - ours]
        hooked = {*before, *after}
        names = {module: name for name, module in model.named_modules() if module in hooked} if hooked else {}
        with_arguments, with_output = frozenset(before), frozenset(after)

        def arguments(module: nn.Module, args: Any) -> None:
            if module in with_arguments:
                self._guard(f"an argument of module {names[module]!r}", args)

        def output(module: nn.Module, _: Any, result: Any) -> None:
            if module in with_output:
                self._guard(f"the output of module {names[module]!r}", result)

        outer, self._in_step = self._in_step, True
        try:
            with during_module_calls(arguments, output) if hooked else contextlib.nullcontext():
                yield
        finally:
            self._in_step = outer

    def _guard(self, what: str, values: Any) -> None:
        for tensor in tensors_of(values):
            if tensor.requires_grad and torch.is_grad_enabled():
                tensor.register_hook(partial(self._refuse, what))

    def _refuse(self, what: str, _: Tensor) -> None:
        if not self._in_step:
            raise UnsupportedError(
                f"a loss is computed from {what}, which a forward hook has kept. In a pipeline it is an activation of one stage "
                "and of one microbatch, and its graph ends with the step: compute this part of the loss in the forward of the "
                "model, or return its operands from the forward (and compute all of the loss outside of the "
                "model), or plan without pp"
            )


def _is_ours(hook: Any) -> bool:
    """Whether a forward pre-hook keeps no activation: one of meshwright, or of torch.nn.utils, which computes a weight."""
    return type(hook).__module__.startswith("torch.nn.utils.") or getattr(hook, "__module__", "").startswith(
        "meshwright_"
    )
