"""The work of the modules of a model in order of execution, for strategies that divide a model by modules."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, replace

import torch

from meshwright_dtensor.sharding.states import State
from meshwright_dtensor.strategy import ModuleWork, ParameterSize, SearchRequest, StrategyCost
from meshwright_dtensor.trace.graph import Node
from meshwright_planner.cost.operations import FORWARD
from meshwright_planner.cost.prices import along
from meshwright_planner.memory.peak import Replay
from meshwright_planner.memory.savers import SavedByRun
from meshwright_planner.placement.problem import Placement, PlacementProblem


@dataclass(frozen=True)
class ModuleRun:
    """Consecutive operations of one module, independent of their sizes.

    Args:
        module: its full name.
        kinds: the representatives of its operations.
        parameters: names of the parameters that they read.
        inputs: (value, its representative, module that made it).
        outputs: see ModuleWork.
    """

    module: str
    kinds: tuple[int, ...]
    parameters: frozenset[str]
    inputs: tuple[tuple[int, int, str], ...]
    outputs: tuple[tuple[int, frozenset[int], bool], ...] = ()


@dataclass(frozen=True)
class ModuleRuns:
    """The operations of a tape in the order of execution, consecutive ones of one module together.

    Args:
        runs: one after the other.
        run_of: node -> number of its run.
        kept: recomputation -> tensors saved by each run; a cache.
    """

    runs: tuple[ModuleRun, ...]
    run_of: tuple[int, ...]
    kept: dict[Hashable, SavedByRun]


def module_runs(problem: PlacementProblem) -> ModuleRuns:
    """The runs of a problem's tape; the outputs of the model enter a last run without operations."""
    tape, quotient = problem.tape, problem.quotient
    makers: dict[int, str] = {}
    runs_found: list[ModuleRun] = []
    run_of: list[int] = []
    # per run, value -> the inputs that it depends on
    made_of: list[dict[int, frozenset[int]]] = []
    for module, nodes in itertools.groupby(enumerate(tape.nodes), lambda entry: entry[1].module):
        kinds: list[int] = []
        read: set[str] = set()
        entering: dict[int, None] = {}
        made: dict[int, frozenset[int]] = {}
        for index, node in nodes:
            kinds.append(quotient.node(index))
            run_of.append(len(runs_found))
            sources: set[int] = set()
            for ref in node.ins:
                name = tape.values[ref.i].name
                if name is not None and name.startswith("param:"):
                    read.add(name.removeprefix("param:"))
                if ref.i in made:
                    sources |= made[ref.i]
                elif ref.i in makers:
                    entering[ref.i] = None
                    sources.add(ref.i)
            of = _NOTHING if _reads_only_shape(node) else frozenset(sources)
            made.update((ref.i, of) for ref in node.outs)
        runs_found.append(_run(problem, module, kinds, read, entering, makers))
        makers.update(dict.fromkeys(made, module))
        made_of.append(made)
    returned = dict.fromkeys(i for i in tape.returned if i in makers)
    runs_found.append(_run(problem, "", (), (), returned, makers))
    consumed = {value for run in runs_found for value, _, _ in run.inputs}
    runs = [
        replace(run, outputs=tuple((v, of, tape.grad[v]) for v, of in made.items() if v in consumed))
        for run, made in zip(runs_found, [*made_of, {}], strict=True)
    ]
    return ModuleRuns(tuple(runs), tuple(run_of), {})


_NOTHING: frozenset[int] = frozenset()


def _run(
    problem: PlacementProblem,
    module: str,
    kinds: Iterable[int],
    read: Iterable[str],
    entering: Iterable[int],
    makers: Mapping[int, str],
) -> ModuleRun:
    entered = tuple((i, problem.quotient.value(i), makers[i]) for i in entering)
    return ModuleRun(module, tuple(kinds), frozenset(read), entered)


def _reads_only_shape(node: Node) -> bool:
    """Whether an operation reads only the shape of its input."""
    return "_like." in node.name or node.name.startswith("aten.new_")


def module_work(
    replay: Replay, runs: ModuleRuns | None = None, recompute: Hashable = ()
) -> tuple[ModuleWork, ...]:
    """The work of one rank in the order of execution.

    `runs`: the runs of the problem, if known; `recompute`: the recompute rules applied to its saved tensors.
    """
    problem, placement = replay.problem, replay.placement
    tape, quotient, share = problem.tape, problem.quotient, problem.costs.share
    runs = module_runs(problem) if runs is None else runs
    if recompute not in runs.kept:
        runs.kept[recompute] = SavedByRun.of(problem, runs.run_of)
    alone, common = runs.kept[recompute].bytes(problem, placement, len(runs.runs))
    seconds = {k: option.seconds for k, option in placement.options.items()}
    forward = {k: option.seconds * option.forward for k, option in placement.options.items()}
    temporary = {
        k: max(replay.backward_alive[n] + replay.gradient.get(n, 0.0), replay.forward_alive[n])
        for k, n in replay.place.items()
    }
    output_gradients = {k: _output_gradient_bytes(problem, placement, k) for k in replay.place}
    states: dict[int, State] = {}
    for k in replay.place:
        for ref, state in zip(tape.nodes[k].outs, placement.options[k].outs):
            states[quotient.value(ref.i)] = state
    by_kinds: dict[
        tuple[int, ...], tuple[float, float, float, float]
        # copies of a block have equal work
    ] = {}
    work = []
    for number, run in enumerate(runs.runs):
        same = by_kinds.get(run.kinds)
        if same is None:
            whole = sum(seconds[k] for k in run.kinds)
            same = by_kinds[run.kinds] = (
                whole,
                max((temporary[k] for k in run.kinds), default=0.0),
                sum(output_gradients[k] for k in run.kinds),
                sum(forward[k] for k in run.kinds) / whole if whole else FORWARD,
            )
        work.append(
            ModuleWork(
                run.module,
                same[0],
                alone[number],
                run.parameters,
                frozenset(
                    (i, made, math.ceil(tape.values[i].nbytes * share(states.get(like, "I"))))
                    for i, like, made in run.inputs
                ),
                frozenset(common[number].items()),
                *same[1:],
                run.outputs,
            )
        )
    return tuple(work)


def _output_gradient_bytes(problem: PlacementProblem, placement: Placement, k: int) -> float:
    """Bytes of the gradients of the outputs of a node that computes with a trained parameter; they wait for the weight half."""
    tape, node = problem.tape, problem.tape.nodes[k]
    # with recomputation a backward is not split
    if placement.again:
        return 0.0
    pairs = zip(node.ins, tape.flows[k], strict=True)
    if not any(flows and (tape.values[r.i].name or "").startswith("param:") for r, flows in pairs):
        return 0.0
    outs = zip(node.outs, placement.options[k].outs, strict=True)
    return sum(tape.values[r.i].nbytes * problem.costs.share(s) for r, s in outs if tape.grad[r.i])


def parameter_sizes(
    units: Iterable[Iterable[tuple[str, torch.Tensor]]],
    dtype: torch.dtype | None,
    problem: PlacementProblem,
    placement: Placement,
) -> tuple[dict[str, ParameterSize], ...]:
    """The parameters of each unit by name, with their sizes on one rank under a placement.

    `dtype`: compute dtype; None for their own.
    """
    tape, degrees = problem.tape, problem.costs.degrees

    def size(name: str, p: torch.Tensor) -> ParameterSize:
        value = tape.parameters.get(name)
        state = "I" if value is None else placement.stored.get(problem.quotient.value(value), "I")
        shape, sharded_dims = list(p.shape), []
        for dim, degree in zip(along(state), degrees):
            if isinstance(dim, int) and degree > 1:
                shape[dim] = -(-shape[dim] // degree)
                sharded_dims.append(int(dim))
        cast = dtype.itemsize if dtype is not None and p.is_floating_point() else p.element_size()
        return ParameterSize(tuple(shape), tuple(sharded_dims), (p.element_size(), cast), p.requires_grad)

    return tuple({name: size(name, p) for name, p in dim} for dim in units)


def inside_of(request: SearchRequest, cost: StrategyCost, up: Callable[[float], int]) -> SearchRequest:
    """The request for other strategies when one rank holds a part of the modules."""
    busy = cost.compute - cost.idle
    return replace(
        request,
        sizes=replace(
            request.sizes,
            parameter_bytes=up(request.sizes.parameter_bytes * cost.parameters),
            gradient_bytes=up(request.sizes.gradient_bytes * cost.gradients),
            activation_bytes=up(request.sizes.activation_bytes * cost.activations),
            flops=request.sizes.flops * busy,
        ),
        step=replace(
            request.step,
            forward_seconds=request.step.forward_seconds * busy,
            backward_seconds=request.step.backward_seconds * busy * cost.input_gradient_share,
        ),
    )
