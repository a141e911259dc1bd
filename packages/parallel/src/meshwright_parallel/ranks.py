"""Check that all ranks start with the same plugins, plan, parameters, buffers and random state, and go on alike: with the same
calls, batches, random numbers and options of optimizers."""

from __future__ import annotations

import uuid
import warnings
import zlib
from collections.abc import Iterable
from itertools import zip_longest
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from meshwright_dtensor.deferred.materialize import is_deferred
from meshwright_dtensor.errors import UsageError
from meshwright_dtensor.mesh.context import MeshContext
from meshwright_dtensor.mesh.mesh import extremes
from meshwright_dtensor.model.batch_text import SAME_RANDOM, BatchTexts, difference, is_compared
from meshwright_dtensor.model.device import random_sums
from meshwright_dtensor.plan import ParallelPlan
from meshwright_dtensor.plugins import PluginHost, compare_across_ranks, discover_on_all_ranks
from meshwright_dtensor.utils.checksum import checksum
from meshwright_dtensor.utils.names import listing

_SAMPLES = 64
_ROUNDINGS = 16
"""Largest difference of a tensor, in roundings of its largest value, that passes for an initialisation that is not reproducible."""
_ATTRIBUTE, _STEPS = "_meshwright_batch_texts", "_meshwright_steps"


def same_plugins(plugins: PluginHost | None) -> PluginHost:
    """The plugins to use (None: the installed ones), after comparing them across ranks. All ranks must call it.

    A rank with other plugins would plan differently or raise alone, and the others would wait for it.

    Raises PluginError: on every rank, if a rank has other plugins or a broken one.
    """
    if plugins is None:
        return discover_on_all_ranks()
    compare_across_ranks(plugins)
    return plugins


def check_ranks_agree(model: nn.Module, plan: ParallelPlan, device: torch.device, *, values: bool) -> None:
    """Raise on every rank unless all ranks have the same plan, parameters, buffers and random state.

    Values are compared bit for bit, by checksum. Those that differ by rounding become those of rank 0, with a warning, and so do
    floating-point buffers where parameters and random state are alike. Of a deferred tensor 64 elements are compared, so that its
    file is not read. Without `values` only names, shapes and plans are compared.

    Raises UsageError: naming the first tensor that differs, and the fix.
    """
    named = [
        *(("parameter", name, tensor) for name, tensor in model.named_parameters()),
        *(("buffer", name, tensor) for name, tensor in model.named_buffers()),
    ]
    labels = [f"{kind} {name!r} of shape {tuple(t.shape)}" for kind, name, t in named]
    sums = [checksum(t, samples=_SAMPLES if is_deferred(t) else None) for _, _, t in named] if values else []
    states = random_sums(device)
    sums += states
    labels += [
        "the state of torch's default random generator",
        "the state of torch's random generator on the accelerator",
    ][: len(states)]
    check_plans(plan)
    _check_structures(labels, [f"{t.dtype}{' (deferred)' * is_deferred(t)}" for _, _, t in named])
    different = differing(sums) if values else []
    alike = not different or different[-1] < len(named)
    for index in different:
        # where seeds and parameters are alike: memory that nothing has filled, or statistics of each rank
        near = not (alike and index < len(named) and named[index][0] == "buffer")
        if index < len(named) and _take_first(named[index][2], near):
            warnings.warn(
                f"{labels[index]} differs between ranks{' by rounding' if near else ', while all parameters are alike'}: its "
                "initialisation is not reproducible, and all ranks take the values of rank 0",
                stacklevel=2,
            )
            continue
        rank, first, other = first_other(f"{sums[index]} {torch.initial_seed()}")
        seeds = [text.split()[1] for text in (first, other)]
        seeded = f", with seed {seeds[1]} and not {seeds[0]}" if seeds[0] != seeds[1] else ""
        raise UsageError(
            f"{labels[index]} differs between ranks (rank {rank} has another than rank 0{seeded}), but all ranks must start with "
            "the same model; seed every rank alike (torch.manual_seed) before the model is built, or load the same weights"
        )


def check_plans(plan: ParallelPlan) -> None:
    """Raise UsageError, on every rank, unless all ranks execute the same plan."""
    if differing([zlib.crc32(plan.executed_json().encode())]):
        rank, first, other = first_other(plan.executed_json())
        lines = ParallelPlan.from_json(first).diff(ParallelPlan.from_json(other))
        raise UsageError(
            f"ranks were given different plans: from rank 0 to rank {rank}, {listing(lines, 4)}; load the same file, or plan "
            "on one rank and share the plan"
        )


def _check_structures(labels: list[str], kinds: list[str]) -> None:
    """Raise UsageError, on every rank, unless all ranks have tensors of the same names, shapes and dtypes."""
    structure = zlib.crc32("\n".join([*labels, *kinds]).encode())
    if differing([structure, len(labels)]):
        rows = [f"{label}, {kind}" for label, kind in zip(labels, kinds, strict=False)]
        rank, first, other = first_other("\n".join(rows))
        pairs = zip_longest(first.split("\n"), other.split("\n"), fillvalue="nothing")
        mine, its = next(pair for pair in pairs if pair[0] != pair[1])
        raise UsageError(
            f"ranks hold different models: rank 0 has {mine} where rank {rank} has {its}; build the same model from the same "
            "configuration on every rank, deferred on all or on none"
        )


@torch.no_grad()
def _take_first(tensor: torch.Tensor, near: bool) -> bool:
    """Give a floating-point tensor the values of rank 0, with `near` if they differ by rounding only, on all ranks; whether it
    has them (a collective call)."""
    if is_deferred(tensor) or not (tensor.is_floating_point() or tensor.is_complex()):
        return False
    first = tensor.detach().contiguous().clone()
    dist.broadcast(first, src=0)
    far = (first - tensor).abs().max()
    # in half precision a rounding is far: nothing but equal values is near
    rounding = min(torch.finfo(tensor.dtype).eps, torch.finfo(torch.float32).eps)
    if near and extremes([int(far <= _ROUNDINGS * rounding * first.abs().max())], None) != [(1, 1)]:
        return False
    tensor.copy_(first)
    return True


def install_batch_check(model: nn.Module, mesh: DeviceMesh, device: torch.device) -> None:
    """Compare the batches of all ranks in the first calls of `model`, and in every 64th one after that.

    Rows of its own on each rank would train on a batch that nobody has given. The model then raises `UsageError`, on every
    rank, which names the first tensor and rank that differ. So it does where it has drawn random numbers, and ranks had other ones.
    """
    if mesh.size() == 1:
        return
    model.__dict__[_ATTRIBUTE] = BatchTexts()
    # of the call that runs, where ranks have different random numbers
    different: list[list[int]] = []

    def check(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        texts = model.__dict__.get(_ATTRIBUTE)
        different.clear()
        if isinstance(texts, BatchTexts):
            text, compared = texts.describe(args, kwargs)
            if compared:
                states = random_sums(device)
                if _compare_batches(text, states):
                    different.append(states)

    def check_draws(*_: Any) -> None:
        if different and different.pop() != random_sums(device):
            raise UsageError(f"ranks have different random numbers, {SAME_RANDOM}")

    model.register_forward_pre_hook(check, prepend=True, with_kwargs=True)
    model.register_forward_hook(check_draws)


def check_options(optimizer: torch.optim.Optimizer) -> None:
    """Compare the options of an optimizer (learning rates and others) between ranks, in the steps in which batches are compared.

    Raises UsageError: they differ, on every rank; with the first option that does.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    # in the optimizer: it may be copied, and have any attributes
    steps = optimizer.__dict__[_STEPS] = optimizer.__dict__.get(_STEPS, -1) + 1
    if not is_compared(steps):
        return
    options = [
        f"{name}={_plain(value)} in group {number}"
        for number, group in enumerate(optimizer.param_groups)
        for name, value in group.items()
        if name not in ("params", "param_names")
    ]
    if not differing([zlib.crc32("; ".join(options).encode())]):
        return
    of_ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(of_ranks, options)
    rank = next(rank for rank, other in enumerate(of_ranks) if other != of_ranks[0])
    first, other = next(pair for pair in zip_longest(of_ranks[0], of_ranks[rank]) if pair[0] != pair[1])
    raise UsageError(
        f"rank {rank} steps {type(optimizer).__name__} with {other}, rank 0 with {first}. Each rank steps its part of the same "
        "parameters, so options must be equal: compute them from what every rank has (losses and metrics are global), not from the "
        "rank or a clock"
    )


def _plain(value: Any) -> Any:
    """An option, as it is shown."""
    if isinstance(value, torch.Tensor):
        return value.tolist() if value.numel() == 1 else list(value.shape)
    return (
        value if isinstance(value, (bool, int, float, str, tuple, list, type(None))) else type(value).__name__
    )


def install_call_order(model: nn.Module, mesh: DeviceMesh) -> None:
    """Compare the calls of `model`, and of collectives outside of it, between ranks (see `CallOrder`). All ranks must call it."""
    if mesh.size() == 1 or dist.get_backend() == "fake":
        return
    calls = MeshContext.of(mesh).calls
    ((_, name),) = extremes([0 if dist.get_rank() else uuid.uuid4().int >> 66], None)
    calls.compare_as(str(name))

    def enter(model: nn.Module, args: tuple[Any, ...]) -> None:
        kind = "training" if model.training else "evaluation"
        calls.enter(f"call of {type(model).__name__}, {kind}, gradients {torch.is_grad_enabled()}")

    def leave(*_: Any) -> None:
        calls.leave()

    model.register_forward_pre_hook(enter, prepend=True)
    model.register_forward_hook(leave, always_call=True)


def _compare_batches(text: str, random_states: list[int]) -> bool:
    """Whether ranks have different random numbers. Raises UsageError: they have different batches."""
    different = differing([zlib.crc32(text.encode()), *random_states])
    if 0 in different:
        rank, first, other = first_other(text)
        raise UsageError(difference(f"rank {rank}", first, other))
    return bool(different)


def first_other(text: str) -> tuple[int, str, str]:
    """The first rank that has another text than rank 0, and the texts of both (a collective call, of ranks that differ)."""
    texts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(texts, text)
    rank = next(rank for rank, other in enumerate(texts) if other != texts[0])
    return rank, texts[0], texts[rank]


def differing(values: Iterable[int]) -> list[int]:
    """Indices at which `values` are not the same on all ranks."""
    return [i for i, (least, most) in enumerate(extremes(list(values), None)) if least != most]
