"""Tensors of pipeline stages: the parameters and buffers of a stage, those of other stages, and what is computed from them.

Every rank has an object for each of them, with the shape of one device.  The ranks of the stage hold the value, as a mesh
parameter or a stored value; elsewhere it is a tensor on the meta device.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NoReturn

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from meshwright_dtensor._torch import core
from meshwright_dtensor.errors import UnsupportedError
from meshwright_dtensor.parameter import MeshParameter
from meshwright_dtensor.tensor.global_tensor import GlobalTensor
from meshwright_dtensor.tensor.staged import Staged

Tensor = torch.Tensor


def _registered(method: str) -> Callable[..., Any]:
    """The method of this name for hooks of gradients: called on the ranks that hold the value, as in a step."""

    def register(self: Any, hook: Callable[[Any], Any]) -> Any:
        model: Any = self.whole_model
        agreed = model.agreed_hook(hook)
        run = agreed if self.here else lambda _: None
        handle, error = None, None
        with held([self]):
            try:
                handle = getattr(value_of(self), method)(run)
            except Exception as raised:
                error = raised
        if not model.inside:
            # only the holders know whether the gradient is put together later, by ZeRO
            model.raise_on_all(error, f"{method} was refused on another rank of the pipeline")
        elif error is not None:
            raise error
        return handle

    return register


class StageValue(Staged):
    """What all tensors of stages have.

    Attributes:
        whole_model: the `WholeModel` that they belong to.
        holders: ranks of the pipeline axis that hold the value.
        held_class: the class of the value itself, where the object is the value; None where it is in ``_value``.
    """

    whole_model: Any
    holders: frozenset[int]
    held_class: type | None = None
    device: torch.device

    @property
    def here(self) -> bool:
        """Whether this rank holds the value."""
        return self.whole_model.rank in self.holders

    @property
    def grad(self) -> Any:
        """The gradient; None on every rank, or on none."""
        model = self.whole_model
        if model.inside:
            # an optimizer that steps each parameter by itself
            return held_gradient(self) if self.here else None
        model.agree_on_gradients()
        gradient = held_gradient(self)
        return None if gradient is None else staged(gradient, model, self.holders, model.device)

    @grad.setter
    def grad(self, value: Any) -> None:
        set_held_gradient(self, value)

    @grad.deleter
    def grad(self) -> None:
        set_held_gradient(self, None)

    def full_tensor(self, *, grad_placements: Any = None) -> Tensor:
        """The value as a plain tensor on every rank of all stages (a collective call), connected to autograd."""
        return self.whole_model.exchange([self])[0].full_tensor()  # type: ignore[no-any-return]

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        # not a collective call
        with held([self]):
            return repr(self)

    register_hook = _registered("register_hook")
    register_post_accumulate_grad_hook = _registered("register_post_accumulate_grad_hook")

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        raise UnsupportedError(
            f"{func} reached a value of one pipeline stage below __torch_function__ (functorch, torch.compile, a scripted "
            "function or a C++ extension); pass x.full_tensor(), the whole value"
        )

    def _refuse_memory(self, *_: Any) -> NoReturn:
        raise UnsupportedError(
            f"pickle, copy or memory of a value of shape {list(self.shape)} that only some pipeline stages hold. Take "  # type: ignore[attr-defined]
            "mw.full_state_dict(model), whose values are plain and whole (on rank 0, save_pretrained(path, state_dict=...) takes "
            "them); mw.save(path, model=model, optimizer=optimizer), which any layout loads; or mw.export(path, model=model) for "
            "from_pretrained"
        )

    __reduce_ex__ = data_ptr = storage = untyped_storage = _refuse_memory  # type: ignore[assignment]
    is_shared = share_memory_ = set_ = _refuse_memory

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        copy: Any = self.detach().clone()  # type: ignore[attr-defined]
        if isinstance(self, torch.nn.Parameter):
            core.mark_as_parameter(copy)
            copy.requires_grad_(self.requires_grad)  # type: ignore[attr-defined]
        memo[id(self)] = copy
        return copy


class StageTensor(StageValue, torch.Tensor):  # type: ignore[misc]
    """A parameter or buffer of another stage, or a value computed from tensors of one stage."""

    _value: Tensor

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        shape, dtype = list(self._value.shape), self._value.dtype
        return f"StageTensor({shape}, {dtype}, held by rank {min(self.holders)} of the pipeline)"

    # torch.distributed.checkpoint: each rank saves and loads its part
    def __create_write_items__(self, name: str, _: Any) -> Any:
        return core.checkpoint_items(name, self._value) if self.here else []

    def __create_chunk_list__(self) -> Any:
        return core.checkpoint_chunks(self._value) if self.here else []

    def __get_tensor_shard__(self, index: Any) -> Tensor:
        value: Any = self._value
        return value.__get_tensor_shard__(index) if isinstance(value, DTensor) else value  # type: ignore[no-any-return]

    @property
    def device_mesh(self) -> DeviceMesh:
        """The mesh of this rank's stage."""
        return self.whole_model.mesh  # type: ignore[no-any-return]

    def to_local(self) -> Tensor:
        """This rank's part; no elements where other ranks hold the value."""
        if not self.here:
            return torch.empty(0, dtype=self._value.dtype, device=self.device)
        return self._value.to_local() if hasattr(self._value, "to_local") else self._value


class StageParameter(StageValue, MeshParameter):  # type: ignore[misc]
    """A mesh parameter of this rank's stage, outside of a step. Inside it is a MeshParameter again."""

    held_class = MeshParameter

    def copy_(self, other: Any, non_blocking: bool = False) -> StageParameter:
        """Overwrite the value; a plain tensor is the global value."""
        return self.__torch_function__(_copied, (), (self, other, non_blocking))  # type: ignore[no-any-return]


def _copied(x: Tensor, other: Any, non_blocking: bool) -> Tensor:
    """``x.copy_(other)`` by the method of its class."""
    return x.copy_(other, non_blocking)


# the kind of a function follows from its name
_copied.__name__ = "copy_"


class StageBuffer(StageValue, torch.Tensor):  # type: ignore[misc]
    """A buffer of this rank's stage, outside of a step. Inside it is an ordinary tensor again."""

    held_class = torch.Tensor


def staged(value: Any, model: Any, holders: frozenset[int], device: torch.device) -> Any:
    """The tensors in ``value`` as values that ``holders`` hold, on ``device``."""

    def one(x: Tensor) -> Any:
        # a function may return its operand
        if isinstance(x, StageValue):
            return x
        # the functions of other tensors would give the same metadata, ten times as slowly
        with contextlib.nullcontext() if isinstance(x, GlobalTensor) else core.stock_call():
            result: Any = core.wrapper_like(StageTensor, x, device)
        result._value, result.holders, result.whole_model = x, holders, model
        return result

    return one(value) if isinstance(value, Tensor) else core.pytree.tree_map_only(Tensor, one, value)


@contextlib.contextmanager
def held(values: Iterable[StageValue]) -> Iterator[None]:
    """Inside, these tensors are what they are in a step of the model."""
    # an operand may be there twice
    changed = list({id(x): x for x in values if x.held_class is not None}.values())
    kinds = [x.__class__ for x in changed]
    for x in changed:
        x.__class__ = x.held_class  # type: ignore[assignment]
    try:
        yield
    finally:
        for x, kind in zip(changed, kinds, strict=True):
            x.__class__ = kind


def value_of(x: Any) -> Any:
    """The value itself, or the meta tensor in its place."""
    return x._value if isinstance(x, StageTensor) else x


def meta_like(x: Tensor) -> Tensor:
    """A meta tensor with the shape, strides and dtype of ``x``."""
    return torch.empty_strided(tuple(x.size()), tuple(x.stride()), dtype=x.dtype, device="meta")


def held_gradient(x: Any) -> Any:
    """The gradient on this rank: of the value, or of the meta tensor in its place."""
    if isinstance(x, StageParameter):
        return MeshParameter.grad.fget(x)  # type: ignore[attr-defined]
    value = value_of(x)
    with core.stock_call(), held([value] if isinstance(value, StageBuffer) else []):
        return value.grad


def set_held_gradient(x: Any, gradient: Any) -> None:
    """Set the gradient of a value, from any tensor."""
    if isinstance(gradient, StageValue):
        covers = gradient.holders >= x.holders
        gradient = value_of(gradient) if covers else x.whole_model.exchange([gradient])[0]
    value = value_of(x)
    if isinstance(x, StageParameter):
        MeshParameter.grad.fset(x, gradient)  # type: ignore[attr-defined]
    elif gradient is None or x.here:
        with held([x]):
            value.grad = gradient
    else:
        value.grad = torch.empty(gradient.shape, dtype=gradient.dtype, device="meta")
