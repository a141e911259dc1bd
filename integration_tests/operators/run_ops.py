"""Operators on ranks against one device. Functions for a RankPool: top-level, all arguments by value."""

from __future__ import annotations

import random
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils import _pytree as pytree

from meshwright_dtensor.comm.log import communication
from meshwright_dtensor.errors import MeshwrightError
from meshwright_dtensor.mesh.context import MeshContext

from .catalogue import Sample, by_name, samples
from .judge import Outcome, Values, differs, of_errors, on_shards, short
from .layouts import Layouts, in_memory, layouts, on_mesh

SEED = 11
MORE = 8
"""Samples that are tried on shards only, of operators that have gathered their inputs in all others."""
VARIANTS = ("function", "method", "in-place", "out")


@dataclass(frozen=True)
class Case:
    """One call in one layout."""

    variant: str
    sample: int
    layouts: Layouts

    @property
    def label(self) -> str:
        """What is shown of the case."""
        more = "" if self.layouts.memory == "dense" else f", {self.layouts.memory}"
        return f"{self.variant} #{self.sample} {self.layouts.kind} {self.layouts.name}{more}"


def cases(op: Any, chosen: list[Sample], sizes: tuple[int, ...]) -> Iterator[Case]:
    """All layouts for the function; some for its other forms, and for parameters and stored values."""
    for place, sample in enumerate(chosen):
        activations = layouts(sample.tensors, sizes)
        for each in activations:
            yield Case("function", place, each)
        if place >= 2:
            continue
        if op.method_variant is not None:
            yield from (Case("method", place, each) for each in activations[1:3])
        if op.inplace_variant is not None:
            yield from (Case("in-place", place, each) for each in activations if each.memory != "transposed")
        if op.supports_out and _has_out(op, sample):
            yield from (Case("out", place, each) for each in activations[:3])
        for kind in ("parameter", "stored"):
            for each in layouts(sample.tensors, sizes, kind):
                if each.sharded:
                    yield Case("function", place, each)
                    if kind == "stored" and place == 0 and op.inplace_variant is not None:
                        yield Case("in-place", place, each)


def _has_out(op: Any, sample: Sample) -> bool:
    """Whether the function takes `out=` on one device: some raw operators list it under another overload."""
    try:
        _call(op, "out", *sample.filled([t.clone() for t in sample.tensors]))
    except Exception as error:
        return "failed to match" not in str(error) and not isinstance(error, TypeError)
    return True


def run_ops(
    rank: int,
    size: int,
    sizes: tuple[int, ...],
    names: list[str],
    count: int,
    progress: str,
    skipped: frozenset[str],
    device: str,
) -> list[Outcome]:
    """Every case of the operators `names`, with `count` samples of each, on a mesh of `sizes`.

    The name of the case that runs is in the file `progress`; cases in `skipped` are left out.
    """
    warnings.simplefilter("ignore")
    mesh = init_device_mesh(device, sizes, mesh_dim_names=("a", "b")[: len(sizes)])
    group = dist.new_group(list(range(size)))
    outcomes = []

    def run(name: str, op: Any, sample: Sample, case: Case) -> None:
        label = f"{name} {case.label}"
        if label in skipped:
            return
        if rank == 0:
            Path(progress).write_text(label)
        outcome = run_case(mesh, group, name, op, sample, case)
        if outcome is not None:
            outcomes.append(outcome)

    for name in names:
        op, first = by_name()[name], len(outcomes)
        chosen = samples(op, count + MORE, device)
        for case in cases(op, chosen[:count], sizes):
            run(name, op, chosen[case.sample], case)
        for place, sample in enumerate(chosen[count:], count):
            # whether it runs on shards at all
            if any(on_shards(outcome) for outcome in outcomes[first:]):
                break
            for each in layouts(sample.tensors, sizes):
                if each.sharded and each.name.startswith(("shards", "first sharded", "others sharded")):
                    run(name, op, sample, Case("function", place, each))
    return outcomes


def run_case(mesh: DeviceMesh, group: Any, name: str, op: Any, sample: Sample, case: Case) -> Outcome | None:
    """One case on one device and on the mesh; None if it is not one."""
    start = time.monotonic()
    single = _attempt(op, sample, case, lambda leaf, place: in_memory(leaf, case.layouts.memory))
    if single.error is not None and case.layouts.memory != "dense":
        # torch refuses this order of memory; parts may have another, on some ranks only
        return None
    tiers = MeshContext.of(mesh).report.tiers
    before = dict(tiers)
    with communication() as log:
        states = case.layouts.states
        parallel = _attempt(
            op, sample, case, lambda leaf, place: on_mesh(leaf, mesh, states[place], case.layouts), log
        )
    events = log.events[parallel.first_event : parallel.last_event]
    # not the results of parts of a reduction
    gathered = any(e.kind == "all_gather" and not e.function.startswith("inside ") for e in events)
    tier = max((t for t in tiers if tiers[t] > before[t]), default=0)
    outcome = Outcome(name, case.label, sharded=case.layouts.sharded, gathered=gathered, tier=tier)
    codes = torch.tensor([parallel.code, -parallel.code])
    dist.all_reduce(codes, dist.ReduceOp.MAX, group=group)
    if codes[0] != -codes[1]:
        outcome.kind, outcome.reason = "internal", f"only some ranks raise: {parallel.error!r}"
    elif single.error is not None or parallel.error is not None:
        outcome.kind, outcome.reason = of_errors(single.error, parallel.error)
    else:
        try:
            outcome.reason = differs(op, single.values(), parallel.values())
            outcome.kind = "silent" if outcome.reason else "equal"
        except Exception as error:  # of reading the result
            outcome.kind = "refused" if isinstance(error, MeshwrightError) else "internal"
            outcome.reason = f"reading the result: {short(error)}"
    outcome.seconds = time.monotonic() - start
    return outcome


@dataclass
class _Attempt:
    """What a call did: its results, or its error. `first_event` and `last_event` bound its communication."""

    results: Any = None
    gradients: list[Any] | None = None
    same: bool = True
    generator: Tensor | None = None
    error: Exception | None = None
    first_event: int = 0
    last_event: int = 0

    @property
    def code(self) -> int:
        """0: no error, 1: one of ours, 2: any other."""
        return 0 if self.error is None else 1 if isinstance(self.error, MeshwrightError) else 2

    def values(self) -> Values:
        """Everything as plain values (a collective call)."""
        leaves, spec = pytree.tree_flatten(self.results)
        results, gradients = [_whole(x) for x in leaves], [_whole(x) for x in self.gradients or []]
        assert self.generator is not None
        return Values(results, str(spec), gradients, self.same, self.generator)


def generators() -> Tensor:
    """The states of torch's generators."""
    states = [torch.get_rng_state()]
    if torch.cuda.is_initialized():
        states.append(torch.cuda.get_rng_state())
    return torch.cat(states)


def _restore(states: Tensor) -> None:
    size = torch.get_rng_state().numel()
    torch.set_rng_state(states[:size])
    if torch.cuda.is_initialized():
        torch.cuda.set_rng_state(states[size:])


def _whole(x: Any) -> Any:
    if isinstance(x, Tensor):
        return (x.full_tensor() if hasattr(x, "full_tensor") else x).detach()
    return x


def _attempt(
    op: Any, sample: Sample, case: Case, make: Callable[[Tensor, int], Any], log: Any = None
) -> _Attempt:
    made = _Attempt()
    trains = case.layouts.kind != "stored" and case.variant != "out"
    leaves = [
        t.clone().requires_grad_(trains and needs)
        for t, needs in zip(sample.tensors, sample.trains, strict=True)
    ]
    try:
        tensors = [make(leaf, place) for place, leaf in enumerate(leaves)]
        args, kwargs = sample.filled(tensors)
        random.seed(SEED)
        torch.manual_seed(SEED)
        made.first_event = len(log.events) if log else 0
        made.results, made.same = _call(op, case.variant, args, kwargs)
        made.last_event = len(log.events) if log else 0
        made.generator = generators()
        if trains and any(leaf.requires_grad for leaf in leaves):
            loss = _loss(sample.process(made.results))
            if loss is not None:
                loss.backward()
            read = tensors if case.layouts.kind == "parameter" else leaves
            made.gradients = [t.grad for t in read if t.requires_grad]
    except Exception as error:
        made.error = error
        made.last_event = made.last_event or (len(log.events) if log else 0)
    return made


def _call(op: Any, variant: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, bool]:
    """The result, and whether a written tensor is the result itself."""
    if variant == "function":
        return op.op(*args, **kwargs), True
    if variant == "method":
        return op.method_variant(*args, **kwargs), True
    if variant == "in-place":
        first = args[0].clone()
        result = op.inplace_variant(first, *args[1:], **kwargs)
        return (result, first), result is first
    with torch.no_grad():
        state = generators()
        expected = op.op(*args, **kwargs)
        _restore(state)
        out = pytree.tree_map(torch.zeros_like, expected)
        result = op.op(*args, **kwargs, out=out)
        # some functions return nothing
        pairs = zip(pytree.tree_leaves(result), pytree.tree_leaves(out), strict=False)
        return out, result is None or all(a is b for a, b in pairs)


def _loss(results: Any) -> Any:
    """The sum of all results that require grad, each times fixed numbers; None if there are none."""
    total = None
    for place, x in enumerate(pytree.tree_leaves(results)):
        if not isinstance(x, Tensor) or not x.requires_grad:
            continue
        generator = torch.Generator().manual_seed(place)
        weights = (
            torch.rand(tuple(x.shape), dtype=torch.float64, generator=generator).to(x.device, x.dtype) + 0.5
        )
        term = (x * weights).sum()
        term = torch.real(term) if term.is_complex() else term
        total = term if total is None else total + term
    return total
