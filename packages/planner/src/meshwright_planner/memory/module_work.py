"""The work of the modules of a model in order of execution, for strategies that divide a model by modules."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch

from meshwright_dtensor.strategy import ModuleWork, ParameterSize
from meshwright_planner.cost.operations import FORWARD
from meshwright_planner.cost.prices import along
from meshwright_planner.memory.peak import Replay
from meshwright_planner.placement.problem import RESULT, Placement, PlacementProblem


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
class SavedByRun:
    """The saved tensors of a tape by module run, without parameters and buffers.

    Args:
        inner: (place in `tape.saved`, run, representative node) of tensors that the recorder never saw.
        shared: storage -> run -> (place, representative node, slot, output); slot: see `SavedTensors.slot`.
    """

    inner: tuple[tuple[int, int, int], ...]
    shared: dict[int, dict[int, list[tuple[int, int, int | None, bool]]]]

    @staticmethod
    def of(problem: PlacementProblem, run_of: Sequence[int]) -> SavedByRun:
        """The saved tensors of a problem's tape; `run_of`: node -> its run."""
        tape, representative = problem.tape, problem.quotient.node
        inner: list[tuple[int, int, int]] = []
        shared: dict[int, dict[int, list[tuple[int, int, int | None, bool]]]] = {}
        for place, item in enumerate(tape.saved):
            run, k = run_of[item.node], representative(item.node)
            if item.root is None:
                inner.append((place, run, k))
            elif not tape.lasts(item.root):
                slot = problem.saved.slot(item)
                entry = (place, k, slot, item.output)
                shared.setdefault(item.root, {}).setdefault(run, []).append(entry)
        return SavedByRun(tuple(inner), shared)

    def bytes(
        self, problem: PlacementProblem, placement: Placement, runs: int
    ) -> tuple[list[float], list[dict[int, float]]]:
        """Per run, the bytes that it alone saves, and by storage the bytes that other runs save too."""
        saved, costs, options = problem.tape.saved, problem.costs, placement.options
        parts = {k: costs.part(costs.split((*o.ins, *o.outs))) for k, o in options.items()}
        either = {k: tuple(costs.part(costs.split(s)) for s in (o.ins, o.outs)) for k, o in options.items()}
        alone, common = [0.0] * runs, [dict[int, float]() for _ in range(runs)]
        for place, run, k in self.inner:
            alone[run] += problem.saved.nbytes(saved[place]) * parts[k]
        for root, of in self.shared.items():
            sizes: dict[int, float] = {}
            for run, entries in of.items():
                most = 0.0
                for place, k, slot, output in entries:
                    states = options[k].outs if output else options[k].ins
                    part = costs.share(states[slot]) if slot is not None else either[k][output]
                    most = max(most, saved[place].nbytes * part)
                sizes[run] = most
            if len(sizes) == 1:
                ((run, size),) = sizes.items()
                alone[run] += size
            else:
                most = max(sizes.values())
                for run in sizes:
                    common[run][root] = most
        return alone, common


def _module_runs(problem: PlacementProblem) -> tuple[list[ModuleRun], list[int]]:
    """The runs of a tape in order, the last without operations for the model's outputs, and the run of each node."""
    tape, quotient = problem.tape, problem.quotient
    makers: dict[int, str] = {}

    def inputs_of(values: Iterable[int]) -> tuple[tuple[int, int, str], ...]:
        return tuple((i, quotient.value(i), makers[i]) for i in values)

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
            if "_like." in node.name or node.name.startswith("aten.new_"):
                # reads only the shape of its input
                sources = set()
            of = frozenset(sources)
            made.update((ref.i, of) for ref in node.outs)
        runs_found.append(ModuleRun(module, tuple(kinds), frozenset(read), inputs_of(entering)))
        makers.update(dict.fromkeys(made, module))
        made_of.append(made)
    returned = dict.fromkeys(i for i in tape.returned if i in makers)
    runs_found.append(ModuleRun("", (), frozenset(), inputs_of(returned)))
    consumed = {value for run in runs_found for value, _, _ in run.inputs}
    runs = [
        replace(run, outputs=tuple((v, of, tape.grad[v]) for v, of in made.items() if v in consumed))
        for run, made in zip(runs_found, [*made_of, {}], strict=True)
    ]
    return runs, run_of


def module_work(replay: Replay) -> tuple[ModuleWork, ...]:
    """The work of one rank in the order of execution."""
    problem, placement = replay.problem, replay.placement
    tape, quotient, share = problem.tape, problem.quotient, problem.costs.share
    runs, run_of = quotient.memo.once("runs", lambda: _module_runs(problem))
    kept = quotient.memo.once(("saved by run", tape.recompute), lambda: SavedByRun.of(problem, run_of))
    alone, common = kept.bytes(problem, placement, len(runs))
    sent, returned = collective_seconds(problem, placement)
    forward = {k: option.seconds * option.forward + sent[k] for k, option in placement.options.items()}
    seconds = {k: option.seconds + sent[k] + returned[k] for k, option in placement.options.items()}
    place, gradient, backward = replay.place, replay.gradient, replay.backward_alive
    alive = {k: max(backward[n] + gradient.get(n, 0.0), replay.forward_alive[n]) for k, n in place.items()}
    output_gradients = {k: _output_gradient_bytes(problem, placement, k) for k in place}
    outputs = ((r, s) for k in place for r, s in zip(tape.nodes[k].outs, placement.options[k].outs))
    states = {quotient.value(ref.i): state for ref, state in outputs}
    # copies of a block have equal work
    by_kinds: dict[tuple[int, ...], tuple[float, float, float, float]] = {}
    inside: dict[tuple[int, ...], tuple[float, float]] = {}
    work = []
    for number, run in enumerate(runs):
        same = by_kinds.get(run.kinds)
        if same is None:
            whole = sum(seconds[k] for k in run.kinds)
            same = by_kinds[run.kinds] = (
                whole,
                max((alive[k] for k in run.kinds), default=0.0),
                sum(output_gradients[k] for k in run.kinds),
                sum(forward[k] for k in run.kinds) / whole if whole else FORWARD,
            )
            inside[run.kinds] = sum(sent[k] for k in run.kinds), sum(returned[k] for k in run.kinds)
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
                inside[run.kinds],
            )
        )
    # what makes the results whole
    if both := sent[RESULT] + returned[RESULT]:
        passes = sent[RESULT], returned[RESULT]
        work[-1] = replace(work[-1], seconds=both, forward=passes[0] / both, collectives=passes)
    return tuple(work)


def collective_seconds(
    problem: PlacementProblem, placement: Placement
) -> tuple[defaultdict[int, float], defaultdict[int, float]]:
    """Representative node (RESULT for the model's results) -> seconds of the collectives of one copy in the forward pass, and in
    the backward pass with those of recomputation. A collective that several consumers share counts at the first.
    """
    counts, runs = problem.quotient.node_count, problem.tape.again
    sent, returned = defaultdict[int, float](float), defaultdict[int, float](float)
    for k, option in placement.options.items():
        if option.collectives:
            once = sum(map(problem.costs.collective, option.collectives))
            sent[k] += once
            returned[k] += option.inner_seconds - once
    for c in placement.conversions:
        nodes = [k for k, _ in c.consumers if k != RESULT]
        first = min(nodes, default=RESULT)
        seconds = problem.costs.collective(c.collective) * c.count / counts.get(first, 1)
        if c.phase == "backward":
            returned[first] += seconds
            continue
        # as often as the consumers run
        times = 1.0 + max((runs[k] for k in nodes), default=0)
        times *= 1 + max((placement.again.get(k, 0.0) for k in nodes), default=0.0)
        sent[first] += seconds / times
        returned[first] += seconds - seconds / times
    return sent, returned


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
    """The parameters of each unit by name, with their sizes on one rank; `dtype`: compute dtype, None for their own."""
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
