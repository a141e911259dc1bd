"""Permuted DTensors: gradients and optimizer states of a parameter with an interval shard.

Stock DTensor takes such a tensor for a plain shard of the *permuted* value.  That is right for elementwise functions and
wrong for all others.  So the tensor carries its layout: elementwise results have it too, reductions over all elements are
allowed, and functions that depend on the order are refused, or give true order (``full_tensor``).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Placement

from meshwright_dtensor._torch.core import dtensor_like, dtensor_local, dtensor_spec, pytree, stock_call
from meshwright_dtensor.comm.log import Site
from meshwright_dtensor.comm.redistribute import convert
from meshwright_dtensor.errors import UnsupportedError
from meshwright_dtensor.mesh.layout import Layout, states_of, stock_layout, stored_placement
from meshwright_dtensor.sharding.boxes import dense_strides, read_region
from meshwright_dtensor.sharding.intervals import IntervalShard
from meshwright_dtensor.sharding.states import States
from meshwright_dtensor.stored.elementwise import on_local_parts
from meshwright_dtensor.stored.mesh_value import mesh_value
from meshwright_dtensor.stored.serialization import WholeMemory
from meshwright_dtensor.trace.function_kinds import Args, Function

Tensor = torch.Tensor

_QUERIES = frozenset(
    "size dim stride __len__ __repr__ __format__ is_floating_point is_complex __hash__ backward __set__ __delete__ numel "
    "requires_grad_ data_ptr untyped_storage element_size nelement ndimension is_contiguous to_local _is_view "
    "register_hook get_device".split()
)
"""Functions whose result is no tensor, and does not depend on the order of the elements."""
_REDUCTIONS = frozenset(
    "norm vector_norm linalg_vector_norm _foreach_norm sum mean max min amax amin any all count_nonzero".split()
)
"""Functions whose result does not depend on the order of the elements, if they reduce all of them."""
_COPIES = frozenset(
    "__get__ detach clone contiguous to cpu cuda type float double half bfloat16 zeros_like ones_like full_like empty_like".split()
)
"""Functions whose result, if it is a tensor of the same shape, has the same order of elements."""

_SITE = Site(function="canonical")


class PermutedDTensor(WholeMemory, DTensor):
    """A DTensor with the layout of a parameter that has an interval shard.

    ``to_local()`` is this rank's part in the order of its intervals; ``full_tensor()`` and ``redistribute()`` give true order.
    """

    _layout: Layout
    _order: States

    def full_tensor(self, *, grad_placements: Sequence[Placement] | None = None) -> Tensor:
        """The whole value in true order on every rank (a collective call)."""
        return convert(dequantized(dtensor_local(self)), self._layout, self._layout.context.replicated)

    def redistribute(  # type: ignore[override]
        self, device_mesh: Any = None, placements: Sequence[Placement] | None = None, **options: Any
    ) -> DTensor:
        """A stock DTensor in true order with these placements (a collective call)."""
        return redistributed(self, self._layout, placements, device_mesh, options)


def is_quantized_in_blocks(local: Tensor) -> bool:
    """Whether a local tensor is a subclass of codes and scales, such as the optimizer states of torchao."""
    # Tensor itself has dequantize()
    return hasattr(local, "__tensor_flatten__") and hasattr(local, "dequantize")


def dequantized(local: Tensor) -> Tensor:
    """A local tensor, of codes and scales of blocks the numbers that they stand for: other parts have other blocks."""
    return local.dequantize() if is_quantized_in_blocks(local) else local


def with_order_of(first: Any, result: DTensor) -> DTensor:
    """``result``, computed elementwise from ``first``, with the element order of ``first``."""
    layout = permuted_layout(first)
    if layout is None or type(result) is not DTensor:
        return result
    return as_permuted(result, layout.with_dtype(result.dtype))


def is_permuted(states: Iterable[Any]) -> bool:
    """Whether any state is an interval shard."""
    return any(isinstance(s, IntervalShard) for s in states)


def as_permuted(dtensor: DTensor, layout: Layout) -> DTensor:
    """``dtensor`` as a PermutedDTensor of ``layout``, if that has an interval shard."""
    if not is_permuted(layout.states):
        return dtensor
    dtensor.__class__ = PermutedDTensor
    dtensor._layout = layout  # type: ignore[attr-defined]
    dtensor._order = layout.states  # type: ignore[attr-defined]
    return dtensor


def placed_dtensor(local: Tensor, layout: Layout) -> DTensor:
    """A DTensor over this rank's part that carries its layout, which may be another than that of a parameter of its shape."""
    dtensor: Any = stock_dtensor(
        local, layout, layout.shape, dense_strides(tuple(layout.shape), tuple(range(layout.ndim)))
    )
    dtensor.__class__ = PermutedDTensor
    dtensor._layout, dtensor._order = layout, layout.states
    return dtensor  # type: ignore[no-any-return]


def permuted_layout(x: Any) -> Layout | None:
    """The layout of a parameter or DTensor with an interval shard, else None."""
    return None if getattr(x, "_order", None) is None else x._layout  # type: ignore[no-any-return]


def elementwise(func: Function, args: Args, kwargs: Mapping[str, Any]) -> Any:
    """Run a torch function by stock DTensor on permuted tensors; results of the same shape get their layout.

    Returns: NotImplemented where the order of the elements counts, or an operand has another layout.
    """
    name = getattr(func, "__name__", str(func))
    with stock_call():
        if name in _QUERIES:
            return func(*args, **kwargs)
        operands = [x for x in pytree.tree_leaves((args, dict(kwargs))) if isinstance(x, DTensor)]
        layouts = {x.shape: layout for x in operands if (layout := permuted_layout(x)) is not None}
        if any((layout := layouts.get(x.shape)) is not None and not _goes_with(x, layout) for x in operands):
            return NotImplemented
        result = on_local_parts(func, name, args, kwargs)
        if result is NotImplemented and name in _COPIES:
            result = func(*args, **kwargs)
        if result is not NotImplemented:
            seen = {id(x) for x in operands}
            for out in pytree.tree_leaves(result):
                if isinstance(out, DTensor) and id(out) not in seen and out.shape in layouts:
                    as_permuted(out, layouts[out.shape].with_dtype(out.dtype))
        elif name in _REDUCTIONS and len(args) == 1 and "dim" not in kwargs:
            result = func(*args, **kwargs)
    return result


def _goes_with(x: DTensor, layout: Layout) -> bool:
    other = permuted_layout(x)
    if other is not None:
        return other.states == layout.states
    return all(p.is_replicate() for p in x.placements) and x.dim() == 0


def redistributed(
    x: DTensor,
    layout: Layout,
    placements: Sequence[Placement] | None,
    device_mesh: Any,
    options: Mapping[str, Any],
) -> DTensor:
    """The value of ``x`` as a stock DTensor in true order.

    Raises UnsupportedError: another mesh, or placements that stock DTensor does not know.
    """
    if (device_mesh is not None and device_mesh != layout.mesh) or any(options.values()):
        raise UnsupportedError(
            "redistribute of a tensor with an interval shard takes placements on its own mesh only; redistribute the result"
        )
    states = layout.states if placements is None else states_of(placements, layout.shape, layout.context)
    return _converted(x, layout, states)


def canonical(x: DTensor, parameter: DTensor | None = None) -> DTensor:
    """A stock DTensor of the same value in true order, for state dicts and checkpoints.

    Args:
        x: a parameter, gradient or optimizer state; a collective call where it has an interval shard, else ``x`` itself.
        parameter: the parameter of ``x``, needed where stock DTensor made ``x`` and its layout is lost.
    """
    layout = permuted_layout(x)
    if layout is None and parameter is not None and x.shape == parameter.shape:
        layout = permuted_layout(parameter)
    if layout is None:
        return x
    return _converted(x, layout, layout.states)


def _converted(x: DTensor, layout: Layout, states: States) -> DTensor:
    """In these states, with an interval shard as a plain shard."""
    target = layout.with_states(tuple(int(s) if isinstance(s, int) else s for s in states))
    with torch.no_grad():
        local = convert(dequantized(dtensor_local(x).detach()), layout, target.states, _SITE)
    return stock_dtensor(local, target, layout.shape, dtensor_spec(x).stride)


def stock_dtensor(local: Tensor, layout: Layout, shape: torch.Size, stride: tuple[int, ...]) -> DTensor:
    """A stock DTensor of this global ``shape`` over ``local``, with the mesh and the states of ``layout``."""
    placements = [stored_placement(s) for s in layout.states]
    return DTensor.from_local(local, layout.mesh, placements, run_check=False, shape=shape, stride=stride)


def like_parameter(x: Tensor, parameter: DTensor) -> DTensor:
    """``x``, a global value or a stock DTensor in true order, laid out as ``parameter`` (a collective call for a DTensor).

    The inverse of :func:`canonical`: for optimizer states that were loaded.

    Raises UnsupportedError: another shape.
    """
    layout: Layout = parameter._layout  # type: ignore[attr-defined]
    if x.shape != layout.shape:
        raise UnsupportedError(
            f"a tensor of shape {list(x.shape)} does not go with a parameter of shape {list(layout.shape)}"
        )
    return as_permuted(dtensor_like(local_part_of(x, layout), parameter), layout.with_dtype(x.dtype))


def local_part_of(x: Tensor, layout: Layout) -> Tensor:
    """This rank's part in ``layout`` of a global value or a DTensor, a new tensor without autograd."""
    if not isinstance(x, DTensor):
        return read_region(x.detach(), layout.region).clone()
    source = permuted_layout(x) or stock_layout(x)
    if source.context.mesh != layout.context.mesh:
        raise UnsupportedError(
            f"a DTensor over {source.context.mesh} does not go with a parameter over {layout.context.mesh}; give its full_tensor()"
        )
    with torch.no_grad():
        local = dtensor_local(x).detach()
        part = convert(local, source, layout.states, _SITE)
        return local.clone() if part is local else part


def install_true_order(model: nn.Module) -> None:
    """Make state dicts of ``model`` hold true order: a parameter with an interval shard becomes a stock DTensor of chunks.

    Taking a state dict is then a collective call where a module has such parameters.  ``load_state_dict`` takes those
    DTensors, and plain tensors, which are global values.
    """
    for module in model.modules():
        if any(permuted_layout(p) is not None for p in module.parameters(recurse=False)):
            module.register_state_dict_post_hook(_true_order)


def _true_order(module: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: Any) -> None:
    for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
        held = state_dict.get(prefix + name)
        # with keep_vars=True it is the parameter itself
        if isinstance(held, PermutedDTensor):
            state_dict[prefix + name] = mesh_value(canonical(held, parameter))  # type: ignore[arg-type]
