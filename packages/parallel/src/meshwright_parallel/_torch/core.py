"""The private names of torch that this package uses, except those of checkpointing."""

from __future__ import annotations

import sys
import time
import weakref
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from meshwright_dtensor._torch.core import dtensor_from
from meshwright_dtensor.devices import HOST
from meshwright_dtensor.parameter import MeshParameter
from meshwright_dtensor.utils.names import path_name

RELEASE_SECONDS = 1.0
"""How long a backward pass that has raised is waited for, at most."""


def at_end_of_backward(callback: Callable[[], None]) -> None:
    """Call `callback` once, when the current backward pass has finished. One that raises frees it, see `release_failed_passes`."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)  # type: ignore[attr-defined]
    release_failed_passes().add(callback)


def release_failed_passes() -> weakref.WeakSet[Callable[[], None]]:
    """Let a backward pass that raises free its callbacks before the error is passed on; idempotent.

    On an accelerator a thread of the device runs the pass. It tells the caller of the error first, and frees the pass then: the
    caller could look at gradients, or clear them, before they are restored.

    Returns:
        The callbacks of passes that run.
    """
    original: Any = torch.autograd._engine_run_backward  # type: ignore[attr-defined]
    callbacks: weakref.WeakSet[Callable[[], None]] | None = getattr(original, "_meshwright_callbacks", None)
    if callbacks is not None:
        return callbacks
    added: weakref.WeakSet[Callable[[], None]] = weakref.WeakSet()

    def run(*args: Any, **kwargs: Any) -> Any:
        # those of passes around this one
        outer = _identities(added)
        try:
            return original(*args, **kwargs)
        except BaseException:
            end = time.monotonic() + RELEASE_SECONDS
            while _identities(added) - outer and time.monotonic() < end:
                time.sleep(1e-4)
            raise

    setattr(run, "_meshwright_callbacks", added)  # noqa: B010 - mypy knows no attributes of functions
    setattr(torch.autograd, "_engine_run_backward", run)  # noqa: B010
    return added


def _identities(callbacks: weakref.WeakSet[Callable[[], None]]) -> set[int]:
    while True:
        try:
            return {id(callback) for callback in callbacks}
        except RuntimeError:
            # another thread has added one meanwhile
            continue


def gradient_is_captured() -> bool:
    """Inside a hook of a leaf tensor: whether `torch.autograd.grad` captures the gradient (it is not accumulated)."""
    node = torch._C._current_autograd_node()
    try:
        torch._C._will_engine_execute_node(node)  # type: ignore[attr-defined]
    except RuntimeError:
        # torch raises for a leaf under autograd.grad
        return True
    return False


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """The local tensor of a DTensor (no copy, no autograd), or the tensor itself."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def leaf_of(parameter: torch.Tensor) -> torch.Tensor:
    """The leaf at which autograd accumulates: the compute copy or local tensor of a mesh parameter, else the tensor itself."""
    if not isinstance(parameter, MeshParameter):
        return parameter
    return local_of(parameter) if parameter._copy is None else parameter._copy.leaf()


def add_in_place(tensors: Sequence[torch.Tensor], more: Sequence[torch.Tensor]) -> None:
    """`tensors[i] += more[i]`, with few kernels."""
    if tensors:
        torch._foreach_add_(list(tensors), list(more))


def with_local(like: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    """A stock DTensor with the placements of `like` and the local tensor `local`; `local` itself if `like` is plain."""
    if not isinstance(like, DTensor):
        return local
    return dtensor_from(local, like._spec)


def scale_in_place(tensors: Sequence[torch.Tensor], factor: torch.Tensor) -> None:
    """Multiply each tensor by a 0-dim factor, with one kernel per device and dtype where torch has one."""
    for device, group in _by_device_and_dtype(tensors):
        torch._foreach_mul_(group, factor.to(device))


def unscale_in_place(
    tensors: Sequence[torch.Tensor], inverse: torch.Tensor, found_inf: torch.Tensor
) -> torch.Tensor:
    """Multiply by `inverse`; returns a 0-dim tensor like `found_inf` that is 1 if an element was inf or nan."""
    for device, group in _by_device_and_dtype(tensors):
        flag = found_inf.to(device)
        torch._amp_foreach_non_finite_check_and_unscale_(group, flag, inverse.to(device))
        found_inf = torch.maximum(found_inf, flag.to(found_inf.device))
    return found_inf


def _by_device_and_dtype(tensors: Sequence[torch.Tensor]) -> list[tuple[torch.device, list[torch.Tensor]]]:
    groups: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for tensor in tensors:
        groups.setdefault((tensor.device, tensor.dtype), []).append(tensor)
    return [(device, group) for (device, _), group in groups.items()]


def copy_all(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """`to.copy_(value)` for each pair (to, value), with few kernels; without autograd."""
    if pairs:
        torch._foreach_copy_([to for to, _ in pairs], [value.detach() for _, value in pairs])


def count_write(tensors: Sequence[torch.Tensor]) -> None:
    """Increment version counters after writes that autograd did not see."""
    for tensor in tensors:
        torch.autograd.graph.increment_version(tensor)


def versions(parameters: Sequence[DTensor]) -> list[int]:
    """Sum of the version counters of each parameter and of its local tensor."""
    with torch._C.DisableTorchFunctionSubclass():
        return [p._version + p._local_tensor._version for p in parameters]


def storage_key(tensor: torch.Tensor) -> int:
    """A key of the tensor's storage, unique while the storage lives."""
    return tensor.untyped_storage()._cdata


def is_only_user_after_accumulation(gradient: torch.Tensor) -> bool:
    """In the hook after accumulation: whether only `.grad` uses the memory of this gradient from now on.

    Autograd moves a gradient into `.grad` if it holds the only reference, but that may be a view of memory in use.
    """
    uses, references = _uses(gradient)
    # one more: autograd's own tensor still exists
    return uses <= _single_use()[0] + 1 and references <= _single_use()[1]


def is_only_user(tensor: torch.Tensor) -> bool:
    """Whether no other tensor, array or Python storage object uses the memory of this tensor."""
    uses, references = _uses(tensor)
    return uses <= _single_use()[0] and references <= _single_use()[1]


def _uses(tensor: torch.Tensor) -> tuple[int, int]:
    """Reference counts of the storage, and of its one Python object, which is itself one use."""
    storage = tensor.untyped_storage()
    return torch._C._storage_Use_Count(storage._cdata), sys.getrefcount(storage)


@cache
def _single_use() -> tuple[int, int]:
    """The reference counts of a storage with a single tensor."""
    return _uses(torch.empty(1, device=HOST))


def backward_is_running() -> bool:
    """Whether this code is called from a backward pass."""
    return torch._C._current_graph_task_id() != -1


def saving_is_hooked() -> bool:
    """Whether saved-tensor hooks are in force here, or forbidden."""
    autograd: Any = torch._C._autograd
    return (
        autograd._saved_tensors_hooks_get_disabled_error_message() is not None
        or autograd._top_saved_tensors_default_hooks(False) is not None
    )


def map_tensors(
    change: Callable[[str, torch.Tensor], torch.Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The same arguments with every tensor replaced by `change(name, tensor)`, positional ones first.

    The name of a tensor is its position or keyword, then the path inside containers, joined by dots.
    """
    new_args = tuple([_map_one(change, str(index), value) for index, value in enumerate(args)])
    return new_args, {key: _map_one(change, key, value) for key, value in kwargs.items()}


def _map_one(change: Callable[[str, torch.Tensor], torch.Tensor], name: str, value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return change(name, value)
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    from torch.utils import _pytree as pytree

    def leaf(path: Any, x: Any) -> Any:
        return change(path_name((name, *path)), x) if isinstance(x, torch.Tensor) else x

    return pytree.tree_map_with_path(leaf, value)


def gradient_hooks(parameter: torch.Tensor) -> int:
    """How many hooks are registered on the gradient of a leaf tensor."""
    leaf = leaf_of(parameter)
    return len(leaf._backward_hooks or ()) + len(getattr(leaf, "_post_accumulate_grad_hooks", None) or ())


def module_parts(module: torch.nn.Module) -> dict[str, Any]:
    """torch's own dicts and sets in a module: parameters, buffers, children, hooks."""
    return {name: vars(module)[name] for name in _PARTS if name in vars(module)}


def own_children(module: torch.nn.Module) -> dict[str, Any]:
    """The dict of the modules that are attributes of a module."""
    return module._modules


def own_hooks(module: torch.nn.Module) -> list[dict[int, Any]]:
    """The dicts of the hooks of a module, forward and backward."""
    return [
        module._forward_pre_hooks,
        module._forward_hooks,
        module._backward_pre_hooks,
        module._backward_hooks,
    ]


_PARTS = tuple(name for name, value in vars(torch.nn.Module()).items() if isinstance(value, (dict, set)))
PARAMETERS, BUFFERS = "_parameters", "_buffers"
"""Keys of the parameters and buffers of the module itself in `module_parts`."""
