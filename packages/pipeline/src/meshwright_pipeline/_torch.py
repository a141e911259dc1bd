"""Every private name of torch that this package uses."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.overrides as overrides
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode
from torch.utils import _python_dispatch, _pytree
from torch.utils.weak import WeakIdKeyDictionary as _WeakIdKeyDictionary

from meshwright_dtensor.model.device import generator_of

pytree = _pytree
TorchDispatchMode = _python_dispatch.TorchDispatchMode
WeakTensorKeys = _WeakIdKeyDictionary
"""A dict with tensors as keys, by identity, that keeps none of them alive."""

_MODULE_ATTRIBUTES = frozenset(vars(nn.Module()))


def is_framework_attribute(name: str) -> bool:
    """Whether torch or meshwright has given a module this attribute. Of a module that two models share, say, ours tells of both."""
    return name in _MODULE_ATTRIBUTES or name.startswith("_meshwright_")


def is_container(kind: type) -> bool:
    """Whether pytree takes objects of a type apart: a registered type or a named tuple."""
    return kind in _pytree.SUPPORTED_NODES or issubclass(kind, tuple)


def op_name(op: Any) -> str:
    """The name of an overload's operator without its namespace, such as "zeros_like"."""
    return str(op._schema.name).split("::")[1]


def named_arguments(op: Any, args: Any, kwargs: Any) -> dict[str, Any]:
    """The arguments of a call of an overload by name, defaults included."""
    arguments = {argument.name: argument.default_value for argument in op._schema.arguments}
    arguments.update(zip(arguments, args, strict=False))
    arguments.update(kwargs)
    return arguments


def written_arguments(op: Any) -> list[str]:
    """The names of the arguments that an overload writes to."""
    return [a.name for a in op._schema.arguments if a.alias_info is not None and a.alias_info.is_write]


def memory_of(tensor: torch.Tensor) -> int | None:
    """The same number for tensors that share memory, while one of them is there; None for sparse and nested ones."""
    with without_functions():
        if tensor.layout is not torch.strided or tensor.is_nested:
            return None
        return tensor.untyped_storage()._cdata


def has_own_memory(tensor: torch.Tensor) -> bool:
    """Whether torch has allocated the memory of a tensor: not that of an array of numpy, say."""
    with without_functions():
        return tensor.layout is torch.strided and tensor.untyped_storage().resizable()


def draws(op: Any, args: Any, kwargs: Any) -> bool:
    """Whether a call of an overload draws random numbers. Attention draws none where its dropout is 0."""
    if torch.Tag.nondeterministic_seeded not in op.tags:
        return False
    return bool(named_arguments(op, args, kwargs).get("dropout_p", True))


def uses_other_generator(kwargs: Mapping[str, Any]) -> bool:
    """Whether an operation with these arguments draws from another generator than the default one."""
    given = kwargs.get("generator")
    if given is None:
        return False
    default: Any = generator_of(given.device)
    return bool(given._cdata != default._cdata)


def normalises_by_batch(module: nn.Module) -> bool:
    """Whether a module normalises by batch statistics: in training, or without running statistics."""
    return isinstance(module, _BatchNorm) and (
        module.training or (module.running_mean is None and module.running_var is None)
    )


def hooks_of(module: nn.Module) -> Mapping[int, Callable[..., Any]]:
    """The forward hooks of a module by their ids."""
    return module._forward_hooks


def hook_tables(module: nn.Module) -> tuple[dict[int, Any], ...]:
    """The forward hooks and pre-hooks of a module, and which of them take keyword arguments or always run, by their ids."""
    return (
        module._forward_hooks,
        module._forward_hooks_with_kwargs,
        module._forward_hooks_always_called,
        module._forward_pre_hooks,
        module._forward_pre_hooks_with_kwargs,
    )


def remove_hooks(module: nn.Module, unwanted: Callable[[Callable[..., Any]], bool]) -> None:
    """Remove the forward hooks of a module that are `unwanted`."""
    for number, hook in list(module._forward_hooks.items()):
        if unwanted(hook):
            del module._forward_hooks[number]


def pre_hooks_of(module: nn.Module) -> Mapping[int, Callable[..., Any]]:
    """The forward pre-hooks of a module by their ids."""
    return module._forward_pre_hooks


def weight_hooks(module: nn.Module) -> list[Callable[..., Any]]:
    """The forward pre-hooks of torch.nn.utils, which compute a weight: spectral_norm, weight_norm, pruning."""
    hooks = module._forward_pre_hooks.values()
    return [hook for hook in hooks if type(hook).__module__.startswith("torch.nn.utils.")]


def computes_weight(module: nn.Module, name: str) -> bool:
    """Whether a hook of torch.nn.utils computes this attribute from parameters."""
    names = [(getattr(hook, "name", ""), getattr(hook, "_tensor_name", "")) for hook in weight_hooks(module)]
    return any(name in each for each in names)


@contextlib.contextmanager
def forward_hooks(module: nn.Module, hooks: Mapping[int, Callable[..., Any]]) -> Iterator[None]:
    """Inside, a module has exactly these forward hooks."""
    before = dict(module._forward_hooks)
    module._forward_hooks.clear()
    module._forward_hooks.update(hooks)
    try:
        yield
    finally:
        module._forward_hooks.clear()
        module._forward_hooks.update(before)


@contextlib.contextmanager
def during_module_calls(before: Callable[..., None], after: Callable[..., None]) -> Iterator[None]:
    """Inside, every call of a module runs `before(module, args)` and `after(module, args, output)`, before its own hooks."""
    with register_module_forward_pre_hook(before), register_module_forward_hook(after):
        yield


def replace_call(model: nn.Module, call: Callable[..., Any]) -> None:
    """Make `model(...)` be `call(...)`."""
    model.__dict__["_call_impl"] = call


def ordinary_call(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`model(...)` as it is without `replace_call`: hooks and forward."""
    return nn.Module._call_impl(model, *args, **kwargs)


def without_subclasses() -> contextlib.AbstractContextManager[Any]:
    """Inside, torch functions do not dispatch to tensor subclasses."""
    return torch._C.DisableTorchFunctionSubclass()  # type: ignore[no-any-return]


def without_functions() -> contextlib.AbstractContextManager[Any]:
    """Inside, torch functions dispatch neither to tensor subclasses nor to modes that follow the functions of a model."""
    return torch._C.DisableTorchFunction()  # type: ignore[no-any-return]


def apply_own(function: type[torch.autograd.Function], *args: Any) -> Any:
    """`function.apply(*args)` on ordinary tensors, without the looks that a Function of a model gets."""
    return super(torch.autograd.Function, function).apply(*args)  # type: ignore[misc]


def function_mode() -> TorchFunctionMode | None:
    """The innermost function mode that is on."""
    return overrides._get_current_function_mode()  # type: ignore[no-any-return]


def pop_function_mode(mode: TorchFunctionMode) -> bool:
    """Turn a function mode off, if it is the innermost of those that are on; returns whether it was."""
    if function_mode() is not mode:
        return False
    overrides._pop_mode()
    return True


def push_function_mode(mode: TorchFunctionMode) -> None:
    """Turn a function mode on again that `pop_function_mode` has turned off."""
    overrides._push_mode(mode)


def leaf_of(parameter: nn.Parameter) -> torch.Tensor:
    """The leaf at which autograd accumulates the gradient of a parameter, ordinary or over a mesh."""
    copy = getattr(parameter, "_copy", None)
    if copy is not None:
        return copy.leaf()  # type: ignore[no-any-return]
    return parameter._local_tensor if isinstance(parameter, DTensor) else parameter


def stored_dtype(parameter: nn.Parameter) -> torch.dtype:
    """The dtype of a parameter's memory; during a forward, one over a mesh shows the dtype of its compute copy."""
    return (parameter._local_tensor if isinstance(parameter, DTensor) else parameter).dtype


def at_end_of_backward(callback: Callable[[], None]) -> None:
    """Call `callback` once at the end of the running backward pass, after callbacks that are already queued."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)  # type: ignore[attr-defined]


def tensors_in(module: nn.Module) -> list[dict[str, Any]]:
    """The dicts in which a module holds its own parameters and buffers."""
    return [module._parameters, module._buffers]


def parameters_of(modules: Iterable[nn.Module]) -> list[tuple[nn.Module, str, nn.Parameter]]:
    """The parameters of these modules without those of their submodules: (module, name in it, parameter)."""
    return [
        (module, name, parameter)
        for module in modules
        for name, parameter in module._parameters.items()
        if parameter is not None
    ]


@contextlib.contextmanager
def parameters_swapped(pairs: list[tuple[nn.Module, str, torch.Tensor]]) -> Iterator[None]:
    """Inside, modules hold these tensors in place of their parameters."""
    before = [(module, name, module._parameters[name]) for module, name, _ in pairs]
    for module, name, tensor in pairs:
        module._parameters[name] = tensor  # type: ignore[assignment]
    try:
        yield
    finally:
        for module, name, old in before:
            module._parameters[name] = old


def local_gradient(parameter: nn.Parameter) -> torch.Tensor | None:
    """This rank's part of a parameter's gradient (the same memory)."""
    return parameter.grad._local_tensor if isinstance(parameter.grad, DTensor) else parameter.grad


def leaf_variable(node: torch.autograd.graph.Node) -> torch.Tensor | None:
    """The leaf of an AccumulateGrad node; None of any other node."""
    return node.variable if type(node).__name__ == "AccumulateGrad" else None  # type: ignore[attr-defined, no-any-return]
