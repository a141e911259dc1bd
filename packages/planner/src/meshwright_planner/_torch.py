"""All private torch names that the planner uses."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils._pytree as _pytree
import torch.utils.checkpoint as _checkpoint
from torch import nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedOperatorException,
    in_kernel_invocation_manager,
)
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from meshwright_dtensor.devices import HOST

DATA_DEPENDENT: tuple[type[Exception], ...] = (
    DataDependentOutputException,
    DynamicOutputShapeException,
    GuardOnDataDependentSymNode,
    UnsupportedOperatorException,
)
"""Errors of a run on fake tensors when the program needs a value."""


# private only by name
pytree = _pytree


def storage_key(tensor: torch.Tensor) -> int | None:
    """An integer that is equal for tensors that share memory while both live; None where there is no storage."""
    try:
        with torch._C.DisableTorchFunction():
            return int(tensor.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):
        return None


def fake_mode() -> FakeTensorMode:
    """A mode in which new tensors are fake; the model's own real tensors may be mixed in."""
    return FakeTensorMode(allow_non_fake_inputs=True)


def fake_like(
    mode: FakeTensorMode, tensor: torch.Tensor, device: torch.device, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """A fake tensor with the geometry of `tensor` on `device`, made without reading `tensor` and outside of all modes."""
    with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
        meta = torch.empty_strided(tensor.shape, tensor.stride(), dtype=dtype or tensor.dtype, device="meta")
        return FakeTensor(mode, meta, device)


_META_OPS = frozenset(
    getattr(getattr(torch.ops.aten, packet), overload)
    for packet, _, overload in (
        name.partition(".")
        for name in (
            "view.default _unsafe_view.default transpose.int t.default permute.default expand.default unsqueeze.default "
            "squeeze.dim slice.Tensor select.int split.Tensor split_with_sizes.default cat.default clone.default "
            "mm.default bmm.default addmm.default mul.Tensor add.Tensor sub.Tensor div.Tensor neg.default "
            "pow.Tensor_Scalar rsqrt.default exp.default sin.default cos.default tanh.default sigmoid.default "
            "silu.default gelu.default mean.dim sum.dim_IntList amax.default where.self _to_copy.default "
            "_softmax.default _log_softmax.default"
        ).split()
    )
)
"""Operations whose results on fake tensors always equal those of torch's meta kernels."""


def argument(op: Any, args: tuple[Any, ...], name: str) -> Any:
    """The positional argument of an operation with this name; None if it is not passed."""
    place = [given.name for given in op._schema.arguments].index(name)
    return args[place] if place < len(args) else None


_META_KEYWORDS = frozenset({"dtype", "alpha", "memory_format"})
"""Keywords that do not set the device of a result."""


def meta_result(mode: FakeTensorMode, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The result of a common operation on fake tensors of one device, from torch's meta kernel; None for other operations.

    FakeTensorMode uses the same kernel or decomposes, and takes ten times as long.
    """
    if func not in _META_OPS or not kwargs.keys() <= _META_KEYWORDS:
        return None
    devices = set[torch.device]()
    for given in args:
        for x in given if type(given) is list else (given,):
            if isinstance(x, FakeTensor):
                if x.fake_mode is not mode or x.constant is not None:
                    return None
                devices.add(x.fake_device)
            elif isinstance(x, torch.Tensor):
                return None
    if len(devices) != 1:
        return None
    with in_kernel_invocation_manager(mode):
        out = func(*args, **kwargs)
    (device,) = devices
    if isinstance(out, torch.Tensor):
        return FakeTensor(mode, out, device)
    return type(out)(FakeTensor(mode, x, device) for x in out)


def as_parameter(fake: torch.Tensor, requires_grad: bool) -> torch.Tensor:
    """Make a fake tensor a parameter, as nn.Parameter does, but without a detached copy."""
    fake.requires_grad_(requires_grad)
    fake._is_param = True  # type: ignore[attr-defined]
    return fake


def is_fake(tensor: torch.Tensor) -> bool:
    """Whether `tensor` is fake."""
    return isinstance(tensor, FakeTensor)


def forward_hooks(module: nn.Module) -> dict[int, Callable[..., Any]]:
    """A module's forward hooks, by their numbers."""
    return module._forward_hooks


def hooks_inside(block: nn.Module) -> tuple[Any, ...] | None:
    """The hooks of modules below `block`: (module, code of each); None if some are not plain forward hooks.

    Hooks of the block itself run outside of its forward.
    """
    hooks = []
    for name, module in block.named_modules():
        if not name or not (module._forward_hooks or module._forward_pre_hooks):
            continue
        if module._forward_pre_hooks or module._forward_hooks_with_kwargs:
            return None
        hooks.append((name, tuple(getattr(h, "__code__", type(h)) for h in module._forward_hooks.values())))
    return tuple(hooks)


def own_tensors(module: nn.Module) -> tuple[dict[str, nn.Parameter | None], dict[str, torch.Tensor | None]]:
    """The tables of a module's own parameters and buffers."""
    return module._parameters, module._buffers


def convert_by(module: nn.Module, convert: Callable[..., nn.Module]) -> None:
    """Make `convert` handle `module.to` and its like for this module."""
    kept: Any = module
    kept._apply = convert


def writes(tensor: torch.Tensor) -> int:
    """The number of writes to the tensor."""
    return int(tensor._version)


class _Computed(torch.autograd.Function):
    """Makes a tensor that requires a gradient and is no leaf."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, make: Callable[[], torch.Tensor]) -> torch.Tensor:  # type: ignore[override]
        return make()


def computed(make: Callable[[], torch.Tensor]) -> torch.Tensor:
    """The new tensor that `make` returns, as if it had been computed from something that requires a gradient."""
    with torch._C.DisableTorchFunction():
        # makes the result require a gradient
        anchor = torch.empty(0, requires_grad=True, device=HOST)
        return _Computed.apply(anchor, make)  # type: ignore[no-untyped-call,no-any-return]


SavingHooks = tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]
"""The pack and unpack hooks of saved tensors."""


def saving_hooks() -> SavingHooks | None:
    """The current saved-tensor hooks; None without hooks."""
    hooks: SavingHooks | None = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return hooks


def saving_hooks_above(last: Callable[..., Any]) -> list[SavingHooks]:
    """All saved-tensor hooks that were pushed after `last`, innermost first; only the innermost is called."""
    removed: list[SavingHooks] = []
    while (hooks := saving_hooks()) is not None and hooks[0] is not last:
        removed.append(hooks)
        torch._C._autograd._pop_saved_tensors_default_hooks()
    for pack, unpack in reversed(removed):
        torch._C._autograd._push_saved_tensors_default_hooks(pack, unpack)
    return removed


def checkpoint_of(hooks: SavingHooks) -> Any:
    """The frame of a non-reentrant checkpoint, if the hooks belong to one; else None."""
    if isinstance(hooks[0], _ObservedHook):
        return hooks[0].frame
    return next((x for x in _enclosed(hooks[0]) if isinstance(x, _checkpoint._CheckpointFrame)), None)


def _enclosed(function: Callable[..., Any]) -> Iterator[Any]:
    """The closure variables of a function."""
    for cell in getattr(function, "__closure__", None) or ():
        # an empty cell
        with contextlib.suppress(ValueError):
            yield cell.cell_contents


@dataclass(frozen=True)
class _ObservedHook:
    """The pack hook of a checkpoint, with an observer."""

    frame: Any
    pack: Callable[[torch.Tensor], Any]
    observe: Callable[[torch.Tensor], object]

    def __call__(self, tensor: torch.Tensor) -> Any:
        self.observe(tensor)
        return self.pack(tensor)


def observe_checkpoint(observe: Callable[[torch.Tensor], object]) -> Callable[[torch.Tensor], Any] | None:
    """Make `observe` see every tensor that autograd saves in the innermost checkpoint; returns the new pack hook."""
    hooks = saving_hooks()
    if hooks is None:
        return None
    observed = _ObservedHook(checkpoint_of(hooks), hooks[0], observe)
    # replaces the innermost hooks: the checkpoint pops the innermost ones at its end
    torch._C._autograd._pop_saved_tensors_default_hooks()
    torch._C._autograd._push_saved_tensors_default_hooks(observed, hooks[1])
    return observed


def checkpoint_saved(frame: Any) -> int:
    """The number of tensors saved so far in a checkpoint."""
    return len(frame.weak_holders)


def checkpoint_stops(frame: Any) -> bool:
    """Whether recomputation of a checkpoint stops when all saved tensors are there."""
    return bool(frame.early_stop)


def checkpoint_results(frame: Any) -> Any:
    """The results that a selective checkpoint saves, by operation and number of the call; None without a policy."""
    modes = (x for x in _enclosed(frame.recompute_fn) if isinstance(x, _checkpoint._CachedTorchDispatchMode))
    return next((mode.storage for mode in modes), None)


def checkpoint_kept(result: Any) -> list[torch.Tensor]:
    """The tensors of an entry of `checkpoint_results`; empty if the call is recomputed."""
    values = [getattr(x, "val", None) for x in pytree.tree_leaves(result)]
    return [x for x in values if isinstance(x, torch.Tensor)]


@contextlib.contextmanager
def reentrant_checkpoints(around: Callable[[], contextlib.AbstractContextManager[None]]) -> Iterator[None]:
    """Inside, torch's reentrant checkpoints run their forward with gradients enabled, and inside `around()`.

    Unpatched, they do so in recomputation only, and the forward pass leaves no sign of them.
    """
    original = _checkpoint.CheckpointFunction.__dict__["forward"]

    def forward(ctx: Any, function: Callable[..., Any], *rest: Any) -> Any:
        def run(*args: Any) -> Any:
            with torch.enable_grad(), around():
                return pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, function(*args))

        result = original.__func__(ctx, run, *rest)
        # the function of autograd keeps its context, which must not keep whoever watches
        ctx.run_function = function
        return result

    _checkpoint.CheckpointFunction.forward = staticmethod(forward)  # type: ignore[method-assign]
    try:
        yield
    finally:
        _checkpoint.CheckpointFunction.forward = original  # type: ignore[method-assign]


NOT, LEAF, COMPUTED = 0, 1, 2
"""Whether a tensor required a gradient when it was used, and whether it was a leaf."""


def gradient_kinds(tensors: list[torch.Tensor]) -> tuple[int, ...]:
    """NOT, LEAF or COMPUTED for each of these tensors."""
    with torch._C.DisableTorchFunction():
        return tuple([(LEAF if t.is_leaf else COMPUTED) if t.requires_grad else NOT for t in tensors])


def function_of(tensor: torch.Tensor) -> Any:
    """The call of a torch.autograd.Function that made a tensor; None if a torch operation did."""
    try:
        made = tensor.grad_fn
    except RuntimeError:
        # a view that was made without gradients, of a tensor that was then written to
        return None
    return made if isinstance(made, torch.autograd.function.BackwardCFunction) else None


def receives_gradient(function: Any, tensor: torch.Tensor) -> bool:
    """Whether a tensor receives a gradient from a call of a Function, as in `function_of`."""
    before = [given for given, _ in function.next_functions if given is not None]
    if tensor.grad_fn is not None:
        return any(given is tensor.grad_fn for given in before)
    return any(getattr(given, "variable", None) is tensor for given in before)
