"""Torch functions on tensors of pipeline stages: on the ranks that hold the operands, or on exchanged values on every rank.

A function of operands that the same ranks hold runs there, and on meta tensors elsewhere: its result is held by these
ranks.  Operands of different stages, and whatever reads values into Python, are exchanged first: the result is then an
ordinary global tensor, the same on every rank.  All ranks decide alike, from shapes and holders.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from meshwright_dtensor._torch.core import any_autocast, pytree, stock_call
from meshwright_dtensor.devices import moves
from meshwright_dtensor.errors import UnsupportedError
from meshwright_dtensor.model.compiled import refuse_traced_call
from meshwright_dtensor.stages import stage_tensor
from meshwright_dtensor.stages.exchange import exchanged_by_id, refuse_inside
from meshwright_dtensor.stages.on_meta import (
    Values,
    draw,
    form_of,
    map_arguments,
    meta_alone,
    on_metas,
    rehearsed,
    remember,
    tried,
)
from meshwright_dtensor.stored.writes import check_data
from meshwright_dtensor.tensor.foreach import writes_lists
from meshwright_dtensor.tensor.global_tensor import version_of
from meshwright_dtensor.trace.function_kinds import (
    DATA_DEPENDENT,
    PYTHON_WRITES,
    VIEWS,
    Args,
    Function,
    Kwargs,
    differentiated,
    is_in_place,
    kind_of,
)

Tensor = torch.Tensor

_DEVICE = frozenset({torch.Tensor.device, torch.Tensor.is_cpu, torch.Tensor.is_cuda, torch.Tensor.is_meta})
_QUERIES = frozenset(
    "size dim stride numel is_floating_point is_complex is_signed __len__ element_size nelement ndimension is_contiguous "
    "dim_order is_inference is_conj is_neg requires_grad_ retain_grad register_hook "
    "register_post_accumulate_grad_hook __hash__ is_same_size _is_view _has_compatible_shallow_copy_type".split()
)
"""Functions that ask about a tensor, not for its value."""
_READS = (DATA_DEPENDENT - VIEWS) | frozenset(
    "backward bernoulli multinomial poisson binomial normal _make_dual cholesky cholesky_inverse inverse pinverse svd lu "
    "lu_solve matrix_power new_empty logaddexp logaddexp2".split()
)
"""Functions that take the value on every rank: what is drawn, or whether they or their backward raise, may depend on it. Those
of linalg too."""


def stage_call(cls: type, func: Function, types: Any, args: Args = (), kwargs: Kwargs | None = None) -> Any:
    """``__torch_function__`` of tensors of stages."""
    kwargs = kwargs or {}
    name = getattr(func, "__name__", "")
    operands = _operands(args, kwargs)
    special = _special(func, name, args, kwargs, operands)
    if special is not NotImplemented:
        return special
    refuse_traced_call()
    refuse_inside(operands)
    if "device" in kwargs and kwargs["device"] == operands[0].device:
        kwargs = {key: value for key, value in kwargs.items() if key != "device"}
    written = _written(func, name, args, kwargs)
    if written:
        return _write(func, name, args, kwargs, operands, written)
    common = frozenset.intersection(*(x.holders for x in operands))
    # autocast does not act on meta tensors
    if (
        name in _READS
        or name.startswith("linalg_")
        or not common
        or any_autocast()
        or _records_others(args, kwargs, common)
    ):
        return _exchanged(func, args, kwargs, operands)
    return _where_held(func, args, kwargs, operands, common)


def _special(func: Function, name: str, args: Args, kwargs: Kwargs, operands: Values) -> Any:
    """The result of a function that asks, moves, or takes lists; NotImplemented for all others."""
    attribute = getattr(func, "__self__", None) if name in ("__get__", "__set__", "__delete__") else None
    if attribute in _DEVICE or name == "get_device":
        with stock_call():
            return func(*args, **kwargs)
    if name in ("requires_grad_", "retain_grad", "backward") or attribute is torch.Tensor.requires_grad:
        _refuse_recording(name, args, kwargs)
    if name in _QUERIES or (attribute is not None and kind_of(func) == ""):
        return _on_values(func, args, kwargs)
    if func is torch.autograd.grad:
        return _gradients(args, kwargs)
    if name.startswith(("_foreach", "_amp_foreach", "_fused")):
        groups = _groups(args)
        return NotImplemented if len(groups) == 1 else _in_groups(func, args, kwargs, groups)
    if moves(name) and isinstance(args[0], stage_tensor.StageValue):
        return _moved(func, name, args, kwargs)
    if (getattr(func, "__module__", None) or "").startswith("torch.distributed"):
        raise UnsupportedError(
            f"torch.distributed.{name} is given a value that only some pipeline stages hold. "
            "Every rank reads the same whole value from it already, and gradients are those of the whole batch, so nothing has to "
            "be exchanged: use it as it is, or pass x.full_tensor()"
        )
    return NotImplemented


def install() -> None:
    """Let these rules run the functions of all tensors of stages; idempotent."""
    for kind in (stage_tensor.StageTensor, stage_tensor.StageParameter, stage_tensor.StageBuffer):
        kind.__torch_function__ = classmethod(stage_call)  # type: ignore[assignment]


def _operands(args: Any, kwargs: Any) -> list[stage_tensor.StageValue]:
    values: list[stage_tensor.StageValue] = []
    map_arguments(
        lambda x: values.append(x) if isinstance(x, stage_tensor.StageValue) else None, (args, kwargs)
    )
    return values


def _records_others(args: Any, kwargs: Any, holders: frozenset[int]) -> bool:
    """Whether autograd records an operand that others than `holders` have too: its gradient must arrive there."""
    return torch.is_grad_enabled() and any(
        isinstance(x, Tensor) and getattr(x, "holders", None) != holders and x.requires_grad
        for x in pytree.tree_leaves((args, kwargs))
    )


def _refuse_recording(name: str, args: Args, kwargs: Kwargs) -> None:
    """Refuse what would make autograd stop at a value of a stage that is no parameter, or at parameters that are named."""
    if name == "backward":
        refused = len(args) > 4 or kwargs.get("inputs") is not None
    else:
        refused = (
            not isinstance(args[0], torch.nn.Parameter)
            and name != "__get__"
            and (*args[1:], *kwargs.values()) != (False,)
        )
    if refused:
        raise UnsupportedError(
            f"{name} for values of pipeline stages: gradients arrive at all parameters, and there alone; use torch.autograd.grad"
        )


# ---- one set of ranks holds the operands
def _where_held(func: Function, args: Args, kwargs: Kwargs, operands: Values, common: frozenset[int]) -> Any:
    """The result where the operands are held, and a meta tensor elsewhere."""
    model = operands[0].whole_model
    here = model.rank in common
    with stock_call():
        recorded = torch.is_grad_enabled() and any(stage_tensor.value_of(x).requires_grad for x in operands)
    key = None if recorded or kwargs.get("requires_grad") else form_of(func, args, kwargs)
    outcome = model.results_on_meta.get(key)
    if outcome is None:
        with torch.set_grad_enabled(torch.is_grad_enabled() and not here):
            outcome = tried(func, args, kwargs, operands)
        if key is not None and outcome is not None:
            remember(model.results_on_meta, key, outcome)
    if outcome is None:
        return _exchanged(func, args, kwargs, operands)
    if type(outcome[0]) is int:
        return operands[outcome[0]]
    result = outcome[0] if key is None else pytree.tree_map_only(Tensor, torch.Tensor.detach, outcome[0])
    if here:
        result = _on_values(func, args, kwargs)
    elif outcome[1]:
        draw(func, args, kwargs)
    return stage_tensor.staged(result, model, common, model.device)


def _on_values(func: Function, args: Args, kwargs: Kwargs) -> Any:
    """``func`` on the values themselves, or on the meta tensors in their place; an operand that it returns is itself again."""
    operands = _operands(args, kwargs)
    with stage_tensor.held(operands):
        result = func(
            *map_arguments(stage_tensor.value_of, args), **map_arguments(stage_tensor.value_of, kwargs)
        )
    for x in operands:
        if result is stage_tensor.value_of(x):
            return x
    return result


def _moved(func: Function, name: str, args: Args, kwargs: Kwargs) -> Any:
    """``x.to(...)``: on another device, or of another dtype, where it is held."""
    x, given = args[0], [*args[1:], *kwargs.values()]
    like = [a for a in given if isinstance(a, Tensor)]
    devices = [torch.device(a) for a in given if isinstance(a, (str, torch.device))]
    devices += [*(a.device for a in like), x.device if name == "to" else torch.device(name)]
    dtype = next((a for a in (*given, *(a.dtype for a in like)) if isinstance(a, torch.dtype)), x.dtype)
    if devices[0] == x.device:
        # non_blocking, copy
        flags = [a for a in args if isinstance(a, bool)]
        options = {key: value for key, value in kwargs.items() if key in ("copy", "memory_format")}
        return _where_held(torch.Tensor.to, (x, dtype, False, *flags[1:]), options, [x], x.holders)
    moved = _on_values(func, args, kwargs) if x.here else stage_tensor.value_of(x).to(dtype)
    return stage_tensor.staged(moved, x.whole_model, x.holders, devices[0])


# ---- writes
def _written(func: Function, name: str, args: Args, kwargs: Kwargs) -> list[Any]:
    """The tensors that the call writes to."""
    if kwargs.get("out") is not None:
        return pytree.tree_leaves(kwargs["out"])
    if name.startswith("_f") and writes_lists(name):
        return list(args[0])
    writes = kind_of(func) in ("write", "fill", "init", "set data") or kwargs.get("inplace") is True
    return [args[0] if args else kwargs.get("tensor")] if writes or is_in_place(name) else []


def _write(
    func: Function, name: str, args: Args, kwargs: Kwargs, operands: Values, written: list[Any]
) -> Any:
    """Write where the target is held; operands that are not held there are exchanged first."""
    if not all(isinstance(x, Tensor) for x in written):
        raise UnsupportedError(
            f"{name} of tensors of pipeline stages; use mw.GradScaler for torch's, or write to one tensor after the other"
        )
    if not all(isinstance(x, stage_tensor.StageValue) for x in written):
        return _exchanged(func, args, kwargs, operands)
    _check_write(func, name, args, written[0])
    needed = frozenset.union(*(x.holders for x in written))
    ids = {id(x) for x in written}
    others = [x for x in operands if id(x) not in ids and not x.holders >= needed]
    others += [x for x in written if not x.holders >= needed]
    if any(id(x) in ids for x in others):
        raise UnsupportedError(
            f"{name} writes to tensors of several pipeline stages at once; write to one after the other"
        )
    if others:
        args, kwargs, _ = _substituted(args, kwargs, others)
    result, draws = rehearsed(func, args, kwargs, operands)
    if result is NotImplemented:
        return result
    if written[0].whole_model.rank in needed:
        _on_values(func, args, kwargs)
    elif name not in PYTHON_WRITES:
        _write_elsewhere(func, args, kwargs, draws)
    # items, attributes and lists are set without a result
    out = written[0] if kwargs.get("out") is None else kwargs["out"]
    return None if name.startswith(("_f", "__set")) else out


def _check_write(func: Function, name: str, args: Args, target: Any) -> None:
    if name in PYTHON_WRITES and target.requires_grad:
        raise RuntimeError(
            f"Can't call {name}() on Variable that requires grad. Use var.detach().{name}() instead."
        )
    if kind_of(func) == "set data":
        check_data(*map(stage_tensor.value_of, args))


def _write_elsewhere(func: Function, args: Args, kwargs: Kwargs, draws: bool) -> None:
    """The write on a rank that does not hold its target: what autograd records of it, and the random numbers of the holders."""
    if torch.is_grad_enabled():
        with meta_alone():
            on_metas(func, args, kwargs, {})
    if draws:
        draw(func, args, kwargs)


# ---- on every rank
def _substituted(args: Args, kwargs: Kwargs, values: Values) -> tuple[Args, Kwargs, list[Any]]:
    """The arguments with these values exchanged, and the exchanged values."""
    by_id = exchanged_by_id(values)
    return *map_arguments(lambda x: by_id.get(id(x), x), (args, kwargs)), list(by_id.values())


def _exchanged(func: Function, args: Args, kwargs: Kwargs, operands: Values) -> Any:
    args, kwargs, wholes = _substituted(args, kwargs, operands)
    before = [version_of(x._local) for x in wholes]
    result = func(*args, **kwargs)
    if [version_of(x._local) for x in wholes] != before:
        raise UnsupportedError(
            f"{getattr(func, '__name__', func)} writes to a copy of a value of a pipeline stage; write the new value with copy_()"
        )
    return result


# ---- lists
def _groups(args: Args) -> dict[frozenset[int], list[int]]:
    """Ranks that hold members of lists, or none for those that every rank has -> places in the lists."""
    lists = [a for a in args if isinstance(a, (list, tuple)) and len(a) == len(args[0])]
    groups: dict[frozenset[int], list[int]] = {}
    for i, members in enumerate(zip(*lists, strict=True)):
        holders = (x.holders for x in members if isinstance(x, stage_tensor.StageValue))
        groups.setdefault(frozenset[int]().union(*holders), []).append(i)
    return groups


def _in_groups(func: Function, args: Args, kwargs: Kwargs, groups: dict[frozenset[int], list[int]]) -> Any:
    """A ``_foreach`` function on lists, once for all members that the same ranks hold."""
    lists = [isinstance(a, (list, tuple)) and len(a) == len(args[0]) for a in args]
    results: list[Any] = [None] * len(args[0])
    for places in groups.values():
        part = [[a[i] for i in places] if is_list else a for a, is_list in zip(args, lists, strict=True)]
        result = func(*part, **kwargs)
        for i, x in zip(places, () if result is None else result, strict=False):
            results[i] = x
    return None if getattr(func, "__name__", "").endswith("_") else results


# ---- gradients
def _computed_with_own(inputs: Sequence[Any], operands: Values, given: Kwargs) -> Sequence[Any]:
    """The gradients on this rank. A step runs backward on every rank, whatever inputs are named: this rank's are added."""
    parameters = operands[0].whole_model.parameters.values() if operands else ()
    added = [p for p in parameters if getattr(p, "here", True) and p.requires_grad]
    with stage_tensor.held(_operands([*inputs, *added], {})):
        targets = [stage_tensor.value_of(x) for x in (*inputs, *added)]
        return torch.autograd.grad(inputs=targets, allow_unused=True, **given)[: len(inputs)]


def _gradients(args: Args, kwargs: Kwargs) -> Any:
    """``torch.autograd.grad``: on each rank the gradients of its own inputs; None on all ranks, or on none."""
    names = "outputs inputs grad_outputs retain_graph create_graph only_inputs allow_unused".split()
    given = dict(zip(names, args, strict=False)) | kwargs
    if given.get("create_graph"):
        raise UnsupportedError(
            "torch.autograd.grad(create_graph=True) of values of pipeline stages; leave it out, or plan without pp"
        )
    inputs = differentiated(given.pop("inputs"))
    zeros = given.pop("materialize_grads", False)
    may_be_unused = given.pop("allow_unused", False) or zeros
    of_outputs = _operands((), given)
    if of_outputs:
        _, given, _ = _substituted((), given, of_outputs)
    operands = _operands(inputs, {})
    computed = _computed_with_own(inputs, operands, given)
    results: list[Any] = list(computed)
    mine = [
        isinstance(x, stage_tensor.StageValue) and x.here and g is not None
        for x, g in zip(inputs, computed, strict=True)
    ]
    present = operands[0].whole_model.agreed(mine) if operands else mine
    for i, x in enumerate(inputs):
        if isinstance(x, stage_tensor.StageValue):
            gradient = results[i] if x.here else stage_tensor.meta_like(stage_tensor.value_of(x))
            results[i] = (
                stage_tensor.staged(gradient, x.whole_model, x.holders, x.device) if present[i] else None
            )
        if results[i] is None and not may_be_unused:
            raise RuntimeError(
                "One of the differentiated Tensors appears to not have been used in the graph. Set allow_unused=True if this "
                "is the desired behavior."
            )
        if results[i] is None and zeros:
            results[i] = torch.zeros_like(x)
    return tuple(results)
