"""compile="auto": the repeated blocks in which fused operations save enough of the step are compiled.

The saving is that of `cost/fusion.py`, on one rank with the placements of the plan, less the time of the calls of regions.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from meshwright_dtensor._torch.inductor import inductor_lacks
from meshwright_dtensor.devices import default_device
from meshwright_dtensor.model.blocks import has_forward, repeated_blocks
from meshwright_dtensor.plan import CompileRule
from meshwright_dtensor.rules.node import needs_data
from meshwright_dtensor.sharding.states import States
from meshwright_dtensor.trace.graph import Node
from meshwright_dtensor.utils.bytesize import human_seconds
from meshwright_dtensor.utils.names import count_of
from meshwright_planner.clusters.local_machine import PREFIX
from meshwright_planner.cost.fusion import Fusion
from meshwright_planner.cost.prices import Work, work_of
from meshwright_planner.evaluation.candidate import Candidate
from meshwright_planner.evaluation.context import Setting
from meshwright_planner.recompute.region import recomputed_blocks
from meshwright_planner.trace.op_kinds import base_name

LEAST_PART = 0.01
"""The part of the predicted step that compiling a pattern of blocks has to save. Of less, errors of predictions and the time of a
compilation leave little. Blocks that were predicted to save 2 to 4% saved 3 to 6% (`benchmarks/compiled_regions.py`)."""

CALL_OPERATIONS = 15
"""The host's time for a call of a region, forward and backward, in operations of eager mode: 160 us and 11 us, both measured on
one core of a server with blocks of 8 and 32 operations."""

FEWEST = 3
"""Operations of a module that is worth a call."""


@dataclass(frozen=True)
class CompileChoice:
    """What was decided: the rules, and a note for each pattern with its predicted saving in seconds per step."""

    rules: tuple[CompileRule, ...] = ()
    notes: tuple[str, ...] = ()


def compile_choice(setting: Setting, candidate: Candidate) -> CompileChoice:
    """Decide for each pattern of repeated blocks whether its calls run compiled.

    Where the plan is for the machine at hand, inductor has to be able to generate code there.
    """
    patterns = repeated_blocks(setting.model)
    if not patterns:
        text = f"compile='auto': nothing is compiled, because this {type(setting.model).__name__} has no repeated blocks"
        return CompileChoice(notes=(text,))
    if setting.cluster.name.startswith(PREFIX):
        lacks = inductor_lacks(default_device().name)
        if lacks is not None:
            return CompileChoice(notes=(f"compile='auto': nothing is compiled, because {lacks}",))
    savings = _BlockSavings(setting, candidate)
    rules, notes = [], []
    for pattern in patterns:
        rule = CompileRule(pattern=pattern)
        seconds, modules = savings.of(rule)
        part = seconds / candidate.step_seconds if candidate.step_seconds else 0.0
        saved = f"{human_seconds(seconds)} of a step, {100 * part:.1f}%" if seconds > 0 else "nothing"
        if seconds > 0 and part >= LEAST_PART:
            rules.append(rule)
            decision = f"runs compiled, which is predicted to save {saved}; the prediction of the step is that of eager execution"
        else:
            decision = f"is not compiled, which would save {saved}: less than {100 * LEAST_PART:g}%"
        notes.append(f"compile='auto': {pattern} ({count_of(modules, 'module')}) {decision}")
    return CompileChoice(tuple(rules), tuple(notes))


class _BlockSavings:
    """Seconds per step that compiling modules saves on one rank, under the placements of a candidate."""

    def __init__(self, setting: Setting, candidate: Candidate) -> None:
        self._model, self._candidate = setting.model, candidate
        problem = candidate.problem
        self._tape, self._merged, self._legality = problem.tape, problem.quotient, problem.legality
        self._fusion = Fusion(problem.tape, problem.costs, self._work, self._states)
        self._works: dict[int, Work] = {}
        self._recomputed = recomputed_blocks(self._tape, candidate.recompute)
        # nodes of one block -> its saving, equal for blocks that are alike
        self._known: dict[tuple[int, ...], tuple[float, float]] = {}
        cluster = setting.cluster
        launches = cluster.launch_s + cluster.backward_launch_s + cluster.host_s
        launches += cluster.dispatch_s if problem.costs.meshed else 0.0
        # on a device that runs asynchronously the host has the time of eager operations to make a call
        self._call = 0.0 if cluster.hides_launch else CALL_OPERATIONS * launches
        # ranks that hold different modules share the saving
        self._sharers = 1
        for axis, strategy in setting.strategies.items():
            self._sharers *= candidate.degrees.get(axis, 1) if strategy.divides else 1

    def of(self, rule: CompileRule) -> tuple[float, int]:
        """Seconds per step that a rule saves, and how many modules it compiles."""
        outermost: list[str] = []
        for name, module in self._model.named_modules():
            inside = any(name.startswith(f"{outer}.") for outer in outermost)
            if name and not inside and rule.matches(name) and has_forward(module):
                outermost.append(name)
        seconds = sum(self._saving(region) for name in outermost for region in self._regions(name))
        return seconds * self._candidate.placement.times / self._sharers, len(outermost)

    def _regions(self, name: str) -> Iterator[str]:
        """The modules that run compiled where `name` is named: itself, or modules inside of it where it cannot be one graph."""
        nodes = self._tape.module_nodes.get(name, ())
        if len(nodes) < FEWEST:
            return
        within = any(outer.startswith(f"{name}.") for outer in self._recomputed)
        if not within and not any(self._needs_values(self._tape.nodes[i]) for i in nodes):
            yield name
            return
        for child, _ in self._model.get_submodule(name).named_children():
            yield from self._regions(f"{name}.{child}")

    def _saving(self, name: str) -> float:
        """Seconds that one call of a region saves, in one microbatch."""
        rule = next((r for outer, r in self._recomputed.items() if f"{name}.".startswith(f"{outer}.")), None)
        if rule is not None and rule.policy != "full":
            # recomputation that keeps some results runs as it is
            return 0.0
        nodes = self._tape.module_nodes[name]
        key = tuple(map(self._merged.node, nodes))
        if key not in self._known:
            saving = self._fusion.saving(nodes)
            self._known[key] = saving.forward, saving.backward
        forward, backward = self._known[key]
        return forward * (1 if rule is None else 2) + backward - self._call

    def _work(self, index: int) -> Work:
        index = self._merged.node(index)
        if index not in self._works:
            tape, legality = self._tape, self._legality
            moved = legality.flops(index), legality.backward(index), tape.again[index]
            self._works[index] = work_of(tape.nodes[index], tape.values, tape.flows[index], *moved)
        return self._works[index]

    def _states(self, index: int) -> tuple[States, States]:
        option = self._candidate.placement.options[self._merged.node(index)]
        return option.ins, option.outs

    def _needs_values(self, node: Node) -> bool:
        """Whether the shape of its result follows from values, so that no graph can have it."""
        if base_name(node) not in ("index", "index_put", "index_put_"):
            return needs_data(node)
        return any(self._tape.values[ref.i].dtype in (torch.bool, torch.uint8) for ref in node.ins[1:])
