"""The modules of a region with their parameters, buffers and hooks: read in every call, in few steps where nothing changed."""

from __future__ import annotations

import operator
from typing import Any

from torch import Tensor, nn

from meshwright_dtensor._torch.core import dtensor_local, module_tensors
from meshwright_dtensor.parameter import MeshParameter
from meshwright_dtensor.trace.module_stack import counted_in
from meshwright_parallel._torch.core import own_children, own_hooks
from meshwright_parallel.compile.call_values import CannotKey, key_of

OUR_HOOKS = "meshwright_dtensor.trace.module_stack"
"""The module of the hooks that say which module is running; they change nothing."""


class RegionParts:
    """A module and all inside of it, as they were when a region was called first.

    Attributes:
        modules: in the order of `module.modules()`.
        counted: names of those whose forwards a plan tells apart.
    """

    def __init__(self, module: nn.Module) -> None:
        self.modules = list(module.modules())
        self.counted = counted_in(self.modules)
        tensors = [module_tensors(each) for each in self.modules]
        self._parameters = [of_parameters for of_parameters, _ in tensors]
        self._buffers = [of_buffers for _, of_buffers in tensors]
        self._of_children = [own_children(each) for each in self.modules]
        self._children = self._current_children()
        self._hooks = [hooks for each in self.modules[1:] for hooks in own_hooks(each)]
        self._checked: Any = None

    def _current_children(self) -> list[Any]:
        return [child for children in self._of_children for child in children.values()]

    def forms(self) -> Any:
        """Equal where one graph can run: forwards, forms of parameters and buffers. Raises CannotKey: modules or hooks changed."""
        children = self._current_children()
        if len(children) != len(self._children) or not all(map(operator.is_, children, self._children)):
            raise CannotKey("modules inside of it were replaced")
        hooks = [len(each) for each in self._hooks]
        # not the forward of the region itself: a pipeline replaces it for a step, and it would keep what that step holds
        inner = [each.__dict__.get("forward") for each in self.modules[1:]]
        if (hooks, inner) != self._checked:
            self._check_hooks(inner)
            self._checked = (hooks, inner)
        parameters = tuple(
            [
                (p._key, dtensor_local(p).requires_grad)
                if isinstance(p, MeshParameter)
                else (p.shape, p.requires_grad)
                for of_module in self._parameters
                for p in of_module.values()
                if p is not None
            ]
        )
        current = self.buffers()
        if any(type(b) is not Tensor for b in current):
            raise CannotKey("its code has assigned a buffer a value of the mesh, and does so in every call")
        buffers = tuple([key_of(b, [], []) for b in current])
        return parameters, buffers, tuple([type(each).forward for each in self.modules])

    def buffers(self) -> list[Any]:
        """The buffers of the modules."""
        return [b for of_module in self._buffers for b in of_module.values() if b is not None]

    def _check_hooks(self, forwards: list[Any]) -> None:
        for module, forward in zip(self.modules[1:], forwards, strict=True):
            name = type(module).__name__
            if forward is not None and not getattr(forward, "is_region", False):
                raise CannotKey(f"a module inside, {name}, has a forward of its own")
            for hook in [hook for hooks in own_hooks(module) for hook in hooks.values()]:
                if hook.__module__ != OUR_HOOKS:
                    raise CannotKey(f"a module inside, {name}, has a hook of {hook.__module__}")
