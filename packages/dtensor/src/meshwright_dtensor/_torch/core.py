"""Every private name of torch that this package uses, in one place: the page to read when torch changes."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from operator import attrgetter
from types import FunctionType
from typing import Any, TypeVar

import torch
import torch.autograd.graph as _autograd_graph
import torch.utils._pytree as _pytree
import torch.utils.checkpoint as _checkpoint
from torch import _ops
from torch._prims_common import suggest_memory_format
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils import _python_dispatch

# used everywhere, and private only by name
pytree = _pytree
TorchDispatchMode = _python_dispatch.TorchDispatchMode
OpOverload = _ops.OpOverload
F = TypeVar("F", bound=Callable[..., Any])


def entered_mesh() -> DeviceMesh | None:
    """The mesh of the innermost `with mesh:` of this thread."""
    from torch.distributed.device_mesh import _mesh_resources

    return _mesh_resources.mesh_stack[-1] if _mesh_resources.mesh_stack else None


def bind_apply(cls: type[torch.autograd.Function]) -> Callable[..., Any]:
    """``cls.apply`` without the functorch checks and keyword binding of the Python wrapper around it."""
    return torch._C._FunctionBase.__dict__["apply"].__get__(None, cls)


# bound, not wrapped: these run on every torch call of a model
# (class, data): a tensor of the class with the metadata of the data, 1 us
make_subclass = torch.Tensor._make_subclass


def wrapper_like(cls: type[torch.Tensor], tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A tensor of ``cls`` without memory, with the shape, strides and dtype of ``tensor``, on ``device``."""
    return torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined, no-any-return]
        cls, tensor.shape, strides=tensor.stride(), dtype=tensor.dtype, device=device
    )


# the memory format that torch's kernels give their result
memory_format_of = suggest_memory_format
any_autocast = torch._C._is_any_autocast_enabled


@contextmanager
def _without_log(name: str) -> Iterator[None]:
    logger = logging.getLogger(name)
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


quiet_fakes = partial(_without_log, "torch._subclasses.fake_tensor")
"""Inside, torch does not log a failed run on fake tensors: the caller handles the failure."""
quiet_exchanges = partial(_without_log, "torch.distributed.tensor._collective_utils")
"""Inside, torch does not warn that gloo changes the sharded dim by a gather: the value is right."""


dtensor_local: Callable[[DTensor], torch.Tensor] = attrgetter("_local_tensor")
"""The local tensor of a DTensor, without autograd."""


def set_dtensor_parts(tensor: DTensor, local: torch.Tensor, spec: Any) -> None:
    """Give a DTensor another local tensor of the same geometry, and its spec."""
    tensor._local_tensor = local
    tensor._spec = spec


def dtensor_spec(tensor: DTensor) -> Any:
    """The spec (mesh, placements, tensor meta) of a DTensor."""
    return tensor._spec


def dtensor_from(local: torch.Tensor, spec: Any) -> DTensor:
    """A DTensor over ``local`` with an existing spec, without checks and without autograd."""
    # not by calling the class: its __init__ does nothing but for torch.export, in a dozen calls
    return DTensor.__new__(DTensor, local, spec, requires_grad=False)


def storage_key(tensor: Any) -> int | None:
    """A key of the tensor's memory, unique while the memory lives; None of a value without one (a number, a sparse tensor)."""
    if not isinstance(tensor, torch.Tensor) or tensor.layout is not torch.strided:
        return None
    return tensor.untyped_storage()._cdata


def dtensor_like(local: torch.Tensor, tensor: DTensor) -> DTensor:
    """A DTensor over ``local`` with the placements of ``tensor``, without checks and without autograd."""
    spec: Any = tensor._spec
    if local.dtype != spec.tensor_meta.dtype:
        spec = replace(spec, tensor_meta=spec.tensor_meta._replace(dtype=local.dtype))
    return dtensor_from(local, spec)


def local_states(
    values: Mapping[str, Any], like: DTensor, kind: type[DTensor], numbers: Collection[str]
) -> dict[str, Any] | None:
    """``values`` with the local tensors of their DTensors, if all of these are of exactly this class and placed as ``like``.

    None if there are other tensors than those, and tensors of one number under the names in ``numbers``.
    """
    spec, parts = like._spec, dict(values)
    order = getattr(like, "_order", None)
    for name, value in values.items():
        if type(value) is kind and value._spec is spec and getattr(value, "_order", None) == order:
            parts[name] = value._local_tensor
        elif isinstance(value, torch.Tensor) and (
            type(value) is not torch.Tensor or name not in numbers or value.dim()
        ):
            return None
    return parts


def settled(tensor: DTensor) -> DTensor:
    """The same DTensor, once the collective that computes its local tensor has ended; torch waits only at the first use."""
    tensor._local_tensor = waited(tensor._local_tensor)
    return tensor


def count_write(tensor: DTensor) -> None:
    """Count a write to a DTensor that torch has not counted, for autograd and for compute copies."""
    if not tensor._local_tensor.is_inference():
        torch.autograd.graph.increment_version(tensor._local_tensor)


def copied_spec(tensor: DTensor) -> Any:
    """A spec equal to that of a DTensor, but another object."""
    return replace(tensor._spec)


def waited(local: torch.Tensor) -> torch.Tensor:
    """The result of a collective of stock DTensor, which returns a placeholder that waits at its first use."""
    from torch.distributed._functional_collectives import AsyncCollectiveTensor

    return local.trigger_wait() if isinstance(local, AsyncCollectiveTensor) else local


def share_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors, which may be meta tensors, share memory."""
    return torch._C._is_alias_of(a, b)  # type: ignore[attr-defined]


def weak_storage(storage: torch.UntypedStorage) -> Callable[[], torch.UntypedStorage | None]:
    """What gives the storage, held, while anything else holds it, and None afterwards."""
    from torch.multiprocessing.reductions import StorageWeakRef

    weak = StorageWeakRef(storage)
    return lambda: torch.UntypedStorage._new_with_weak_ptr(weak.cdata)


def op_name(op: Any) -> str:
    """The name of an overload's operator, such as "aten::zeros"."""
    return op._schema.name


def op_mutates(op: Any) -> bool:
    """Whether the overload writes into an argument."""
    return op._schema.is_mutable


def declared_writes(function: Any) -> frozenset[int | str]:
    """Positions and names of the arguments that an operator's schema says it writes to; empty for other functions.

    A kernel in C++, or one that writes through `.data`, changes no version counter. Of an operator with several overloads, those
    of all of them.
    """
    names = function.overloads() if isinstance(function, torch._ops.OpOverloadPacket) else ()
    overloads = (
        [function] if isinstance(function, torch._ops.OpOverload) else [getattr(function, n) for n in names]
    )
    return frozenset(
        place
        for op in overloads
        for position, argument in enumerate(op._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
        for place in (position, argument.name)
    )


def op_arguments(op: Any) -> dict[str, str]:
    """Argument names of an overload, in order, each with its type, such as "Tensor" or "SymInt[]"."""
    return {argument.name: str(argument.type) for argument in op._schema.arguments}


def op_returns_fresh_tensor(op: Any) -> bool:
    """Whether the overload returns exactly one tensor, which is no view of an argument."""
    returns = op._schema.returns
    return len(returns) == 1 and str(returns[0].type) == "Tensor" and returns[0].alias_info is None


def op_only_views(op: Any) -> bool:
    """Whether all that the overload returns are views of its arguments, or the arguments."""
    returns = op._schema.returns
    return bool(returns) and all(value.alias_info is not None for value in returns)


def op_draws(op: Any) -> bool:
    """Whether the overload draws from a generator."""
    return torch.Tag.nondeterministic_seeded in op.tags


def out_overload(op: Any) -> Any:
    """The overload of the same operator that writes into `out`, or None."""
    packet, overload = op._overloadpacket, op._overloadname
    names = {"default": ("out",), "Tensor": ("Tensor_out", "out")}.get(overload, (f"{overload}_out",))
    return next((getattr(packet, name) for name in names if name in packet.overloads()), None)


def replace_code(function: Any, donor: Any) -> Any:
    """Give ``function`` the code of ``donor`` (with as many free variables); return a function that runs the old code."""
    parts = function.__code__, function.__globals__, function.__name__, function.__defaults__
    original = FunctionType(*parts, function.__closure__)
    original.__kwdefaults__ = function.__kwdefaults__
    function.__code__ = donor.__code__
    return original


ENGINE = _autograd_graph._engine_run_backward.__code__
"""The code that runs a backward pass; hooks of tensors run in it."""


MODULE_CALL = torch.nn.Module._call_impl.__code__
"""The code that runs a module's hooks and its forward."""


def fake_mode_active() -> bool:
    """Whether a FakeTensorMode is active; it is below every ordinary mode, whichever was entered first."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None


def is_fake(x: Any) -> bool:
    """Whether ``x`` is a fake tensor (shapes without data)."""
    from torch._subclasses.fake_tensor import FakeTensor

    return isinstance(x, FakeTensor)


def stock_call() -> AbstractContextManager[Any]:
    """Inside, torch functions do not call ``__torch_function__`` of subclasses: DTensor's dispatch handles them."""
    return torch._C.DisableTorchFunctionSubclass()


def unwatched() -> AbstractContextManager[Any]:
    """Inside, no function mode sees torch functions: reading a shape under one takes ten times as long."""
    return torch._C.DisableTorchFunction()


def on_checkpointing(resume: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Torch's non-reentrant checkpointing runs ``resume(function)`` where it runs ``function`` again; idempotent.

    ``resume`` is called when the first run begins, in the thread of that run.
    """
    original = _checkpoint._checkpoint_without_reentrant_generator
    before = getattr(original, "_meshwright_resume", ())
    if resume in before:
        return

    def generator(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return original(resume(fn), *args, **kwargs)

    setattr(generator, "_meshwright_resume", (*before, resume))  # noqa: B010 - mypy knows no attributes of functions
    setattr(_checkpoint, "_checkpoint_without_reentrant_generator", generator)  # noqa: B010


COMPILED_ATTRIBUTES = tuple(
    "compile _torchdynamo_orig_callable _torchdynamo_wrapper_id __prepare_scriptable__".split()
)
"""Attributes of a module that `module.compile()`, `torch.compile(module)` and `torch.jit.script(module)` look up."""


def wrapped_attributes() -> tuple[str, ...]:
    """Attributes of a module that fully_shard and replicate, DistributedDataParallel, and parallelize_module read first of all."""
    from torch.distributed._composable.contract import STATE_KEY

    return str(STATE_KEY), "_ddp_params_and_buffers_to_ignore", "_distribute_module_applied"


FSDP_ATTRIBUTE = "_fsdp_flattened"
"""The attribute of a parameter that FullyShardedDataParallel reads first of all."""


def compiled_by(module: torch.nn.Module) -> str | None:
    """What has compiled a module: "torch.compile", "module.compile()" or "torch.jit"; None of an ordinary module."""
    if isinstance(module, torch.jit.ScriptModule):
        return "torch.jit"
    if module._compiled_call_impl is not None:
        return "module.compile()"
    wrapper = "_orig_mod" in module._modules and "dynamo_ctx" in vars(module)
    return "torch.compile" if wrapper or hasattr(module.forward, "_is_torch_compile") else None


def wrapped_by_compile(module: torch.nn.Module) -> torch.nn.Module | None:
    """The module that `torch.compile(module)` has wrapped; None of another module."""
    return module._modules["_orig_mod"] if "dynamo_ctx" in vars(module) else None


def swap_compiled_call(module: torch.nn.Module, call: Any = None) -> Any:
    """Give a module another compiled call (None: it runs as it is); returns what `module.compile()` has made of it."""
    before = module._compiled_call_impl
    if before is not call:
        module._compiled_call_impl = call
    return before


def without_tracing(function: F) -> F:
    """Let torch.compile call a function instead of tracing it. torch.compiler.disable would import the compiler."""
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    return function


def mark_as_parameter(tensor: Any) -> None:
    """Let `isinstance(tensor, nn.Parameter)` be true, whatever its class."""
    tensor._is_param = True


def module_tensors(module: torch.nn.Module) -> tuple[dict[str, Any], dict[str, Any]]:
    """The dicts in which a module holds its own parameters and buffers."""
    return module._parameters, module._buffers  # type: ignore[return-value]


def checkpoint_items(name: str, value: torch.Tensor) -> list[Any]:
    """What torch.distributed.checkpoint writes of a tensor on this rank."""
    from torch.distributed.checkpoint import planner_helpers

    return planner_helpers._create_write_items(name, value)


def checkpoint_chunks(value: torch.Tensor) -> list[Any]:
    """The parts of a tensor that torch.distributed.checkpoint reads on this rank."""
    from torch.distributed.checkpoint import planner_helpers

    return planner_helpers._create_chunk_list(value)
