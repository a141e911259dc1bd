"""Arguments for the methods of tensors, as text that is evaluated on one device and in parallel alike."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

DEFAULTS = (
    "",
    "0.5",
    "same(x)",
    "peer",
    "1",
    "0",
    "2",
    "same(x), same(x)",
    "0, 1",
    "(1, 0)",
    "dim=-1",
    "mask(x)",
    "mask(x), 0.5",
    "0.2, 0.8",
    "0, rows(x)",
    "0, rows(x), 0.5",
    "same(x.shape[-1], 3)",
    "same(x.shape[-1])",
    "3, 0, 1",
    "torch.float64",
    "[2, *x.shape]",
    "x",
)
"""Tried in this order with methods that `FORMS` does not have; those that one device takes become cases."""

_INDEXED = "0, places(x), same(x)"
FORMS: dict[str, tuple[str, ...]] = {
    "addbmm": ("same(3, x.shape[0], 2), same(3, 2, x.shape[1])",),
    "addcdiv": ("same(x), same(x), value=0.5", "peer, same(x)"),
    "addcmul": ("same(x), same(x), value=0.5", "peer, x.detach()"),
    "addmm": ("same(x.shape[0], 3), same(3, x.shape[1])", "x.detach() @ x.detach().T, peer"),
    "addmv": ("same(12, 3), same(3)",),
    "addr": ("same(x.shape[0]), same(x.shape[1])",),
    "allclose": ("same(x)", "x.detach().clone()", "peer"),
    "as_strided": ("(2, 3), (1, 2), 1",),
    "as_strided_scatter": ("same(2, 3), (3, 1), 1",),
    "as_subclass": ("torch.Tensor",),
    "apply_": ("lambda y: y + 1",),
    "backward": ("", "same(x)"),
    "baddbmm": ("same(4, 5, 3), same(4, 3, 8)",),
    "bernoulli": ("", "0.3"),
    "bincount": ("",),
    "bmm": ("same(4, 8, 3)",),
    "broadcast_to": ("(2, *x.shape)",),
    "cholesky": ("", "upper=True"),
    "cholesky_solve": ("torch.eye(8)",),
    "chunk": ("2", "3, -1"),
    "clamp": ("-0.1, 0.1", "min=same(x)"),
    "clip": ("-0.1, 0.1", "min=same(x)"),
    "conj_physical": ("",),
    "copysign": ("-1.0", "peer"),
    "copy_": ("same(x)", "peer", "1.5", "same(x).double()"),
    "cross": ("same(x), dim=0",),
    "diag_embed": ("",),
    "diagonal_scatter": ("same(min(x.shape))",),
    "diff": ("", "dim=0"),
    "dist": ("same(x)", "peer, 1"),
    "div": ("0.5", "same(x)", "peer, rounding_mode='floor'"),
    "divide": ("0.5", "peer, rounding_mode='trunc'"),
    "dot": ("same(x)", "peer"),
    "dsplit": ("2",),
    "equal": ("same(x)", "x.detach().clone()", "peer"),
    "expand": ("2, *x.shape", "x.shape"),
    "expand_as": ("same(2, *x.shape)",),
    "fill_": ("0.25", "peer.sum()"),
    "fill_diagonal_": ("0.5",),
    "flip": ("0", "(0, 1)"),
    "float_power": ("2", "same(x)"),
    "gather": ("0, places(x)", "1, places(x)"),
    "geometric_": ("0.4",),
    "ger": ("same(3)",),
    "hash_tensor": ("",),
    "histc": ("4, -1, 1",),
    "histogram": ("4",),
    "hsplit": ("2",),
    "index_add": ("0, rows(x), same(3, *x.shape[1:])",),
    "index_copy": ("0, rows(x), same(3, *x.shape[1:])",),
    "index_fill": ("0, rows(x), 0.5",),
    "index_put": ("(rows(x),), same(3, *x.shape[1:])", "(rows(x),), torch.ones(()), accumulate=True"),
    "index_reduce": ("0, rows(x), same(3, *x.shape[1:]), 'amax'",),
    "index_select": ("0, rows(x)", "1, rows(x)"),
    "inner": ("same(x)", "peer"),
    "is_set_to": ("same(x)",),
    "istft": ("4, center=False",),
    "kron": ("same(2, 2)",),
    "kthvalue": ("2", "2, 0"),
    "ldexp": ("2", "same(x)"),
    "lerp": ("same(x), 0.3", "peer, same(x)"),
    "log_normal_": ("", "0.5, 0.2"),
    "lu_solve": ("*torch.linalg.lu_factor(torch.eye(8))",),
    "map_": ("same(x), lambda y, z: y + z",),
    "map2_": ("same(x), same(x), lambda y, z, w: y + z * w",),
    "masked_fill": ("mask(x), 0.5", "x > 0, peer.sum()"),
    "masked_scatter": ("mask(x), same(x)",),
    "masked_select": ("mask(x)", "x.detach() > 0"),
    "matmul": ("same(x.shape[-1], 3)", "peer.T", "same(x.shape[-1])"),
    "matrix_power": ("2",),
    "mm": ("same(x.shape[-1], 3)", "peer.T"),
    "module_load": ("same(x)",),
    "moveaxis": ("0, 1",),
    "movedim": ("0, 1",),
    "multinomial": ("3", "3, True"),
    "mv": ("same(x.shape[-1])",),
    "mvlgamma": ("1",),
    "nan_to_num": ("", "0.5"),
    "narrow": ("0, 1, 3", "1, 2, 5"),
    "narrow_copy": ("0, 1, 3", "1, 2, 5"),
    "new_empty": ("(0, 3)",),
    "new_empty_strided": ("(0, 3), (3, 1)",),
    "new_full": ("(2, 3), 0.5",),
    "new_ones": ("2, 3",),
    "new_tensor": ("[1.0, 2.0]", "same(x)"),
    "new_zeros": ("2, 3",),
    "norm": ("", "1, 0", "dim=1"),
    "normal_": ("", "0.5, 0.2"),
    "ormqr": ("same(8), same(8, 3)",),
    "orgqr": ("same(8)",),
    "permute": ("(1, 0)",),
    "polygamma": ("1",),
    "prelu": ("torch.tensor(0.25)",),
    "put": ("rows(x), same(3)",),
    "quantile": ("0.3", "0.3, dim=1", "torch.tensor([0.2, 0.7])"),
    "nanquantile": ("0.3", "0.3, dim=1"),
    "random_": ("", "5"),
    "renorm": ("2, 0, 0.5",),
    "repeat": ("2, *[1] * x.dim()", "*[2] * x.dim()"),
    "repeat_interleave": ("2", "2, 0"),
    "reshape": ("-1", "2, -1"),
    "reshape_as": ("same(x.numel())",),
    "resize": ("2, 3",),
    "resize_": ("2, 3", "x.shape"),
    "resize_as": ("same(x)",),
    "resize_as_": ("same(2, 3)",),
    "register_hook": ("lambda g: g * 2",),
    "register_post_accumulate_grad_hook": ("lambda p: None",),
    "rot90": ("", "1, (0, 1)"),
    "scatter": (_INDEXED, "1, places(x), 0.5"),
    "scatter_add": (_INDEXED,),
    "scatter_reduce": (_INDEXED + ", 'sum'", _INDEXED + ", 'amax'"),
    "select": ("0, 1", "1, 2"),
    "select_scatter": ("same(*x.shape[1:]), 0, 1",),
    "set_": ("same(x)", ""),
    "slice_inverse": ("same(16, *x.shape[1:]), 0, 0, x.shape[0], 1",),
    "slice_scatter": ("same(3, *x.shape[1:]), 0, 1, 4",),
    "smm": ("same(x.shape[-1], 3)",),
    "softmax": ("0", "1", "-1, torch.float64"),
    "log_softmax": ("0", "1"),
    "sort": ("", "0, True"),
    "sparse_mask": ("same(x).to_sparse()",),
    "split": ("3", "5, 1", "[1, x.shape[0] - 1]"),
    "split_with_sizes": ("[1, x.shape[0] - 1]",),
    "sspaddmm": ("same(8, 8).to_sparse(), same(8, 8)",),
    "stft": ("4, window=torch.ones(4), return_complex=True",),
    "sum_to_size": ("(1, x.shape[1])",),
    "swapaxes": ("0, 1",),
    "swapdims": ("0, 1",),
    "take": ("rows(x)",),
    "take_along_dim": ("places(x), 0",),
    "tensor_split": ("3", "(1, 3), 1"),
    "tile": ("(2, 1)",),
    "to": ("torch.float64", "'cpu'", "same(x)", "torch.float32, copy=True", "'meta'"),
    "to_padded_tensor": ("0.0",),
    "topk": ("2", "3, 0"),
    "transpose": ("0, 1",),
    "triangular_solve": ("torch.eye(8)",),
    "type": ("", "torch.float64", "'torch.DoubleTensor'"),
    "type_as": ("same(x).double()",),
    "unflatten": ("0, (2, -1)",),
    "unfold": ("0, 3, 2",),
    "uniform_": ("", "0.2, 0.7"),
    "unique": ("", "return_inverse=True, return_counts=True", "dim=0"),
    "unique_consecutive": ("", "dim=0"),
    "unsafe_chunk": ("2",),
    "unsafe_split": ("3",),
    "unsafe_split_with_sizes": ("[1, x.shape[0] - 1]",),
    "vdot": ("same(x)",),
    "view": ("-1", "2, -1", "torch.int32"),
    "view_as": ("same(x.numel())",),
    "vsplit": ("2",),
    "where": ("mask(x), same(x)", "x > 0, peer"),
    # operators and protocols
    "__getitem__": ("0", "slice(1, 3)", "(slice(None), 2)", "rows(x)", "mask(x)", "..., None"),
    "__setitem__": ("0, 0.5", "(slice(None), 1), same(x.shape[0])", "mask(x), 0.5", "rows(x), peer[:3]"),
    "__contains__": ("0.25",),
    "__format__": ("''", "'.3f'"),
    "__reduce_ex__": ("2",),
    "__deepcopy__": ("{}",),
    "__array_wrap__": ("same(x).numpy()",),
    "__dlpack__": ("",),
}
"""By name, with or without the underscore of the in-place form."""

ASSIGNED: dict[str, tuple[str, ...]] = {
    "data": ("same(x)", "same(x).double()", "x.data * 0.5", "peer"),
    "grad": ("None", "same(x)", "x.detach() * 2", "peer"),
    "requires_grad": ("False", "True"),
    "real": ("same(x)",),
    "imag": ("same(x)",),
    "names": ("None",),
    "grad_dtype": ("None",),
}
"""Properties that are set."""

OPERATORS = tuple(
    "__abs__ __add__ __and__ __array__ __array_wrap__ __bool__ __complex__ __contains__ __deepcopy__ __delitem__ __div__ "
    "__dlpack__ __dlpack_device__ __eq__ __float__ __floordiv__ __format__ __ge__ __getitem__ __gt__ __hash__ __iadd__ "
    "__iand__ __idiv__ __ifloordiv__ __ilshift__ __imod__ __imul__ __index__ __int__ __invert__ __ior__ __ipow__ "
    "__irshift__ __isub__ __iter__ __itruediv__ __ixor__ __le__ __len__ __long__ __lshift__ __lt__ __matmul__ __mod__ "
    "__mul__ __ne__ __neg__ __nonzero__ __or__ __pos__ __pow__ __radd__ __rand__ __rdiv__ __reduce_ex__ __reversed__ "
    "__rfloordiv__ __rlshift__ __rmatmul__ __rmod__ __rmul__ __ror__ __rpow__ __rrshift__ __rshift__ __rsub__ __rtruediv__ "
    "__rxor__ __setitem__ __sub__ __truediv__ __xor__".split()
)


def names(**values: Any) -> dict[str, Any]:
    """What the text of arguments may name, next to `values`."""

    def same(*shape: Any) -> Tensor:
        like = shape[0] if isinstance(shape[0], Tensor) else None
        size = tuple(like.shape if like is not None else shape)
        count = torch.Size(size).numel()
        made = ((torch.arange(count) * 7 % max(count, 1)) / max(count, 1) * 0.8 + 0.1).reshape(size)
        if like is None or like.dtype.is_floating_point or like.dtype.is_complex:
            return made if like is None else made.to(like.dtype)
        return (made * 5).long().to(like.dtype) if like.dtype != torch.bool else made > 0.5

    def mask(x: Tensor) -> Tensor:
        return same(*x.shape) > 0.45

    def rows(x: Tensor) -> Tensor:
        return torch.tensor([0, 3, 1])

    def places(x: Tensor) -> Tensor:
        return torch.arange(x.numel()).reshape(tuple(x.shape)) * 5 % 4

    return {"torch": torch, "same": same, "mask": mask, "rows": rows, "places": places, **values}


def forms_of(name: str) -> tuple[tuple[str, ...], bool]:
    """The texts of arguments for a method, and whether they were written for it."""
    forms = FORMS.get(name) or FORMS.get(name.removesuffix("_"))
    return (forms, True) if forms else (DEFAULTS, False)
