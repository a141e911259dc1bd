"""Every public method and property of `torch.Tensor`, and its operators, on what a user can reach of a model."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from functools import cache
from typing import Any

import torch
from torch import Tensor

from meshwright_dtensor.trace.function_kinds import is_in_place

from .arguments import ASSIGNED, OPERATORS, forms_of, names
from .cases import Case
from .subjects import Subject

AREA = "torch.Tensor"
SETUPS = {
    "parameter": "bare",
    "no_grad parameter": "bare",
    "gradient": "backward",
    "state": "optimizer",
    "state_dict": "bare",
    "buffer": "bare",
    "activation": "bare",
    "loss": "bare",
}
"""What the methods are called on -> what the model must have."""
_MATRICES = (
    "b.weight",
    "c.weight",
    "a.bias",
    "b.weight:int",
    "b.weight:bool",
    "b.weight:complex",
    "c.weight:positive",
)
_OWN = ("own", "own:int", "own:bool")
LIMITS = {
    "parameter": 4,
    "no_grad parameter": 3,
    "gradient": 2,
    "state": 1,
    "state_dict": 1,
    "buffer": 2,
    "activation": 2,
    "loss": 1,
}
"""Forms of arguments of a method that has none of its single."""

ADDRESSES = frozenset(
    "data_ptr const_data_ptr storage untyped_storage __hash__ __reduce_ex__ __dlpack__ grad_fn".split()
)
UNSAFE = frozenset("index storage_type record_stream new volatile reinforce pin_memory is_pinned".split())
"""Deprecated or of another device: they fail, or abort, on one device too."""
ILL_CONDITIONED = frozenset(
    "__rmod__ det geqrf hash_tensor inverse logdet lu pinverse qr slogdet svd".split()
)


def _derived(x: Any, how: str) -> Any:
    if how == "int":
        return (x.detach() * 20).to(torch.int64)
    if how == "bool":
        return x.detach() > 0
    if how == "complex":
        return torch.complex(x.detach(), x.detach() * 0.5)
    return x.detach() @ x.detach().T + torch.eye(8) if how == "positive" else x


def _found(made: Subject, kind: str, source: str) -> tuple[Any, Any]:
    """The tensor, and one of its shape that another stage holds."""
    parameters = dict(made.model.named_parameters())
    name, _, how = source.partition(":")
    peer: Any = None
    if kind == "buffer":
        x: Any = made.model.c.scale
        peer = parameters["emb.weight"].detach()[0]
    elif kind == "activation":
        x = made.activation()
    elif kind == "loss":
        x = made.loss()
    else:
        p = parameters[name]
        x = {
            "parameter": lambda: p,
            "no_grad parameter": lambda: p,
            "gradient": lambda: p.grad,
            "state": lambda: made.optimizer.state[p]["exp_avg"],
            "state_dict": lambda: made.model.state_dict()[name],
        }[kind]()
        first = parameters["a.weight"].detach()
        peer = {
            "b.weight": lambda: first.T,
            "c.weight": lambda: first[:8],
            "a.bias": lambda: parameters["b.weight"].detach()[0],
        }[name]()
    return _derived(x, how), _derived(peer, how) if peer is not None else None


def _backward(result: Any) -> None:
    """The gradients of what was computed, as of a loss."""
    total: Any = None
    for x in result if isinstance(result, (list, tuple)) else [result]:
        if isinstance(x, Tensor) and x.requires_grad and not x.is_leaf and x.numel():
            values = x.real if x.is_complex() else x
            weights = torch.linspace(0.5, 1.5, values.numel(), dtype=values.dtype).reshape(
                tuple(values.shape)
            )
            part = (values * weights).sum()
            total = part if total is None else total + part
    if total is not None:
        total.backward()


def _called(x: Any, peer: Any, name: str, form: str) -> Any:
    """What the method gives, or the attribute."""
    namespace = names(x=x, peer=peer)
    if form == "get":
        return getattr(x, name)
    if form.startswith("= "):
        setattr(x, name, eval(form[2:], namespace))
        return getattr(x, name)
    namespace["call"] = lambda *args, **kwargs: getattr(x, name)(*args, **kwargs)
    try:
        return eval(f"call{form}", namespace)
    finally:
        # a function of the form refers to it, and may be remembered
        namespace.clear()


def tensor_case(name: str, on: str, form: str) -> Case:
    """The case of these three texts: a method, the tensor it is called on, and its arguments or "get" or "set"."""
    *words, source = on.split()
    kind = " ".join(words)

    def run(made: Subject) -> Any:
        with torch.no_grad() if kind == "no_grad parameter" else nullcontext():
            x, peer = _found(made, kind, source)
            result = _called(x, peer, name, form)
            if (
                form[0] == "("
                and kind in ("parameter", "activation", "loss")
                and not name.startswith("__")
                and name != "backward"
            ):
                _backward(result)
            if is_in_place(name):
                # the tensor itself was written
                return [result if name != "__setitem__" else None, x.detach()]
            return result

    # the representation names the part that is shown
    typed = name in ADDRESSES or (name, form) == ("__format__", "('')")
    return Case(AREA, f"Tensor.{name}", f"{on} | {form}", run, SETUPS[kind], typed=typed)


def _candidates(name: str, sources: Iterable[str]) -> Iterator[tuple[str, str, bool]]:
    """Source, form, and whether the form was written for the method."""
    called = callable(getattr(Tensor, name))
    for source in sources:
        if called:
            forms, single = forms_of(name)
            yield from ((source, f"({form})", single) for form in forms)
        else:
            yield source, "get", True
            yield from ((source, f"= {form}", True) for form in ASSIGNED.get(name, ()))


def public_names() -> list[str]:
    """The public attributes of a tensor, and its operators."""
    return [name for name in dir(Tensor) if not name.startswith("_") or name in OPERATORS]


def _stand_in(shape: Sequence[int], how: str, leaf: bool) -> tuple[Any, Any]:
    """A tensor of one device in place of the model's, and its peer."""
    count = torch.Size(shape).numel()
    x = (torch.arange(count) * 7 % 11 / 11 - 0.4).reshape(tuple(shape))
    if leaf and not how:
        x.requires_grad_()
    return _derived(x, how), _derived(x.detach() * 0.5, how)


_SHAPES = {
    "b.weight": (8, 12),
    "c.weight": (8, 8),
    "a.bias": (12,),
    "buffer": (8,),
    "activation": (4, 5, 8),
    "loss": (),
}


def _accepted(single: str, name: str) -> list[tuple[str, str]]:
    """Source and form of the calls that one device takes: of the first source with any. `single`: a kind with one tensor, or ""."""
    cases: list[tuple[str, str]] = []
    for source, form, written in _candidates(name, _OWN if single else _MATRICES):
        if cases and (source != cases[0][0] or (not written and len(cases) >= max(LIMITS.values()))):
            break
        place, _, how = source.partition(":")
        try:
            leaf = not single and not is_in_place(name)
            x, peer = _stand_in(_SHAPES[single or place], how, leaf)
            with nullcontext() if leaf else torch.no_grad():
                _called(x, peer, name, form)
        except Exception:
            continue
        cases.append((source, form))
    return cases


def _defined(kind: str, name: str) -> bool:
    """Whether the case is there: out-of-place methods of parameters record gradients, and what was computed is rounded."""
    if kind in ("parameter", "no_grad parameter"):
        return is_in_place(name) == (kind != "parameter")
    return kind not in ("gradient", "state", "activation", "loss") or name not in ILL_CONDITIONED


@cache
def accepted() -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Keys of the cases that one device takes, and the names without one."""
    keys: list[str] = []
    untried: list[str] = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in public_names():
            if name in UNSAFE:
                continue
            by_group = {single: _accepted(single, name) for single in ("", "buffer", "activation", "loss")}
            cases = [
                f"Tensor.{name} | {kind} {source} | {form}"
                for kind, limit in LIMITS.items()
                if _defined(kind, name)
                for source, form in by_group[kind if kind in by_group else ""][:limit]
            ]
            keys += cases
            untried += [] if cases else [name]
    return tuple(keys), tuple(untried)
