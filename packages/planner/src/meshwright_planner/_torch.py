"""The private parts of torch that the planner touches, all in one place."""

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
from torch.utils._python_dispatch import TorchDispatchMode

LOOKS_AT_DATA: tuple[type[Exception], ...] = (
    DataDependentOutputException,
    DynamicOutputShapeException,
    GuardOnDataDependentSymNode,
    UnsupportedOperatorException,
)
"""What a run on fake tensors raises when the program needs to know a value."""


# private only by name
pytree = _pytree
DispatchMode = TorchDispatchMode


def storage_key(tensor: torch.Tensor) -> int | None:
    """An integer that is equal for tensors that share memory while both live; None where there is no storage."""
    try:
        with torch._C.DisableTorchFunction():
            return int(tensor.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):
        return None


def fake_mode() -> FakeTensorMode:
    """A mode in which new tensors are fake; real tensors that the model made for itself may be mixed in."""
    return FakeTensorMode(allow_non_fake_inputs=True)


def fake_like(
    mode: FakeTensorMode, tensor: torch.Tensor, device: torch.device, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """A fake tensor with the geometry of `tensor` on `device`; the memory of `tensor` is not read, and no mode sees it made."""
    with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
        meta = torch.empty_strided(tensor.shape, tensor.stride(), dtype=dtype or tensor.dtype, device="meta")
        return FakeTensor(mode, meta, device)


_SHAPED = frozenset(
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
"""Operations whose results on fake tensors are those of torch's kernels for the meta device, whatever the values."""


def argument(op: Any, args: tuple[Any, ...], name: str) -> Any:
    """The positional argument of an operation that has this name; None where it is left at its default."""
    place = [given.name for given in op._schema.arguments].index(name)
    return args[place] if place < len(args) else None


_HARMLESS = frozenset({"dtype", "alpha", "memory_format"})
"""Keywords that do not say where a result is."""


def shaped(mode: FakeTensorMode, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What a common operation on fake tensors of one device gives, asked of torch's kernel for the meta device itself.

    FakeTensorMode asks the same, or decomposes, and takes ten times as long. None where it has to be asked.
    """
    if func not in _SHAPED or not kwargs.keys() <= _HARMLESS:
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
    """A fake tensor that nobody else has, made a parameter: as nn.Parameter does it, but for a detached copy."""
    fake.requires_grad_(requires_grad)
    fake._is_param = True  # type: ignore[attr-defined]
    return fake


def is_fake(tensor: torch.Tensor) -> bool:
    """Whether `tensor` is fake already."""
    return isinstance(tensor, FakeTensor)


def forward_hooks(module: nn.Module) -> dict[int, Callable[..., Any]]:
    """The table of a module's forward hooks, by their numbers."""
    return module._forward_hooks


def hooks_inside(block: nn.Module) -> tuple[Any, ...] | None:
    """Which hooks are hung on modules below `block`: (module, code of each); None where some are not plain forward hooks.

    Hooks of the block itself run outside of its forward.
    """
    found = []
    for name, module in block.named_modules():
        if not name or not (module._forward_hooks or module._forward_pre_hooks):
            continue
        if module._forward_pre_hooks or module._forward_hooks_with_kwargs:
            return None
        found.append((name, tuple(getattr(h, "__code__", type(h)) for h in module._forward_hooks.values())))
    return tuple(found)


def own_tensors(module: nn.Module) -> tuple[dict[str, nn.Parameter | None], dict[str, torch.Tensor | None]]:
    """The tables of a module's own parameters and buffers."""
    return module._parameters, module._buffers


def convert_by(module: nn.Module, convert: Callable[..., nn.Module]) -> None:
    """Have `convert` do what `module.to` and its like ask of this module."""
    kept: Any = module
    kept._apply = convert


def writes(tensor: torch.Tensor) -> int:
    """How often torch has counted a write to the tensor."""
    return int(tensor._version)


class _Computed(torch.autograd.Function):
    """A tensor that requires a gradient and is no leaf."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, make: Callable[[], torch.Tensor]) -> torch.Tensor:  # type: ignore[override]
        return make()


def computed(make: Callable[[], torch.Tensor]) -> torch.Tensor:
    """The new tensor that `make` returns, as if it had been computed from something that requires a gradient."""
    with torch._C.DisableTorchFunction():
        anchor = torch.empty(0, requires_grad=True)  # only says that there is a gradient
        return _Computed.apply(anchor, make)  # type: ignore[no-untyped-call,no-any-return]


SavingHooks = tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]
"""What packs and unpacks the tensors that autograd keeps."""


def saving_hooks() -> SavingHooks | None:
    """The hooks that autograd gives to now what it keeps; None where there are none."""
    found: SavingHooks | None = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return found


def saving_hooks_above(last: Callable[..., Any]) -> list[SavingHooks]:
    """All hooks that were set since `last` was, innermost first; those outside get nothing while others are inside."""
    found: list[SavingHooks] = []
    while (hooks := saving_hooks()) is not None and hooks[0] is not last:
        found.append(hooks)
        torch._C._autograd._pop_saved_tensors_default_hooks()
    for pack, unpack in reversed(found):
        torch._C._autograd._push_saved_tensors_default_hooks(pack, unpack)
    return found


def checkpoint_of(hooks: SavingHooks) -> Any:
    """What torch's non-reentrant checkpoint knows of one call, where the hooks are its own; else None."""
    if isinstance(hooks[0], _Looking):
        return hooks[0].frame
    return next((x for x in _enclosed(hooks[0]) if isinstance(x, _checkpoint._CheckpointFrame)), None)


def _enclosed(function: Callable[..., Any]) -> Iterator[Any]:
    """What a function takes from the one that it was made in."""
    for cell in getattr(function, "__closure__", None) or ():
        with contextlib.suppress(ValueError):  # a cell that nothing was put into
            yield cell.cell_contents


@dataclass(frozen=True)
class _Looking:
    """The hook of a checkpoint that packs what autograd keeps, and one that sees it."""

    frame: Any
    pack: Callable[[torch.Tensor], Any]
    look: Callable[[torch.Tensor], object]

    def __call__(self, tensor: torch.Tensor) -> Any:
        self.look(tensor)
        return self.pack(tensor)


def look_at_checkpoint(look: Callable[[torch.Tensor], object]) -> Callable[[torch.Tensor], Any] | None:
    """Have `look` see what autograd gives to the innermost hooks, which are those of a checkpoint; what packs it now."""
    hooks = saving_hooks()
    if hooks is None:
        return None
    looking = _Looking(checkpoint_of(hooks), hooks[0], look)
    # in its place: who set it takes away what is innermost then
    torch._C._autograd._pop_saved_tensors_default_hooks()
    torch._C._autograd._push_saved_tensors_default_hooks(looking, hooks[1])
    return looking


def checkpoint_saved(frame: Any) -> int:
    """How many tensors autograd has kept so far in a checkpoint."""
    return len(frame.weak_holders)


def checkpoint_stops(frame: Any) -> bool:
    """Whether a checkpoint that runs again stops as soon as all is there that was saved."""
    return bool(frame.early_stop)


def checkpoint_results(frame: Any) -> Any:
    """Where the policy of a selective checkpoint keeps results, by operation and number of the call; None without one."""
    found = (x for x in _enclosed(frame.recompute_fn) if isinstance(x, _checkpoint._CachedTorchDispatchMode))
    return next((mode.storage for mode in found), None)


def checkpoint_kept(result: Any) -> list[torch.Tensor]:
    """The tensors of an entry of `checkpoint_results`; none where it says that the call runs again."""
    values = [getattr(x, "val", None) for x in pytree.tree_leaves(result)]
    return [x for x in values if isinstance(x, torch.Tensor)]


@contextlib.contextmanager
def reentrant_checkpoints(around: Callable[[], contextlib.AbstractContextManager[None]]) -> Iterator[None]:
    """While open, torch's reentrant checkpoints run their function with gradients, and inside of `around()`.

    So they do when they run it again; in the forward pass they run it without, and nothing shows that they do.
    """
    own = _checkpoint.CheckpointFunction.__dict__["forward"]

    def forward(ctx: Any, function: Callable[..., Any], *rest: Any) -> Any:
        def run(*args: Any) -> Any:
            with torch.enable_grad(), around():
                return pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, function(*args))

        return own.__func__(ctx, run, *rest)

    _checkpoint.CheckpointFunction.forward = staticmethod(forward)  # type: ignore[method-assign]
    try:
        yield
    finally:
        _checkpoint.CheckpointFunction.forward = own  # type: ignore[method-assign]


NOT, LEAF, COMPUTED = 0, 1, 2
"""Whether a tensor required a gradient when it was used, and whether it was the end of where that goes."""


def asked(tensors: list[torch.Tensor]) -> tuple[int, ...]:
    """What each of these tensors asks for that are used now: NOT, LEAF or COMPUTED."""
    with torch._C.DisableTorchFunction():
        return tuple([(LEAF if t.is_leaf else COMPUTED) if t.requires_grad else NOT for t in tensors])


def function_of(tensor: torch.Tensor) -> Any:
    """The call of a torch.autograd.Function that made a tensor; None where torch's own operations did."""
    made = tensor.grad_fn
    return made if isinstance(made, torch.autograd.function.BackwardCFunction) else None


def takes(function: Any, tensor: torch.Tensor) -> bool:
    """Whether a call of a Function, as in `function_of`, hands a gradient to a tensor that requires one."""
    before = [given for given, _ in function.next_functions if given is not None]
    if tensor.grad_fn is not None:
        return any(given is tensor.grad_fn for given in before)
    return any(getattr(given, "variable", None) is tensor for given in before)
