"""The memory peak of a step: saved tensors, gradients and temporaries, moment by moment.

The backward pass is simulated over the representative nodes.  Of a repeated block two copies are examined: the first that
runs backward, when all tensors before it are still saved and the other copies have no gradients yet, and the last, with the
opposite.  In between both change linearly, so the peak is at one of the two.  In the forward pass saved tensors only grow, so
the last copy counts, with the temporaries of `memory/liveness.py`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from meshwright_dtensor.trace.graph import Node
from meshwright_planner.cost.optimizers import copies_of
from meshwright_planner.memory.liveness import forward_alive
from meshwright_planner.placement.problem import Placement, PlacementProblem
from meshwright_planner.trace.op_kinds import VIEWS, base_name
from meshwright_planner.trace.tape import Tape


@dataclass(frozen=True)
class Moment:
    """One moment of a step.

    Args:
        kept: fraction of the saved tensors that are alive.
        gradients: fraction of the gradients that are complete.
        transient_bytes: bytes of temporaries.
        bucket_copy: bytes of gradients that exist twice while an engine copies them into buckets.
        stepping: the optimizer step.
        copies: temporary copies of all parameters in a foreach step.
    """

    kept: float
    gradients: float
    transient_bytes: float
    bucket_copy: float = 0.0
    stepping: bool = False
    copies: float = 0.0

    def dominates(self, other: Moment) -> bool:
        """Whether every part is at least as large as at another moment."""
        return (
            self.kept >= other.kept
            and self.gradients >= other.gradients
            and self.transient_bytes >= other.transient_bytes
            and self.bucket_copy >= other.bucket_copy
        )


def optimizer_moment(sizes: Sequence[float], optimizer: str, together: bool) -> Moment:
    """The optimizer step; `sizes`: bytes of the trained parameters, in order; `together`: in a foreach step, if it has one."""
    made = copies_of(optimizer)
    pairs = itertools.pairwise((0.0, *sizes))
    temporary = max((made.previous * a + made.current * b for a, b in pairs), default=0.0)
    return Moment(0.0, 1.0, temporary, stepping=True, copies=made.together if together else 0.0)


def moments(replay: Replay, update: Moment) -> tuple[Moment, ...]:
    """The moments that may be the peak of a step; `update`: that of the optimizer."""
    best: list[Moment] = []
    # one of the best: it mostly dominates the next moment too
    dominating: Moment | None = None
    for moment in replay.moments():
        if dominating is not None and dominating.dominates(moment):
            continue
        dominating = next((o for o in best if o.dominates(moment)), None)
        if dominating is None:
            best = [o for o in best if not moment.dominates(o)]
            best.append(moment)
            dominating = moment
    return (*best, update)


def at_peak(
    memory: Mapping[str, int],
    when: Iterable[Moment],
    bucket: float = 0.0,
    always: float = 0.0,
    copies: bool = True,
    stepped: float | None = None,
) -> dict[str, int]:
    """Bytes by part at the peak of a step, from the maximum of each part.

    `bucket`: bytes of gradients that become complete together: StrategyCost.bucket, all when microbatches accumulate.
    `always`: bytes of gradients that are there at every moment.
    `copies`: an engine with buckets copies even large gradients into them (not sharded ones).
    `stepped`: bytes of gradients in the optimizer step: only shards of sharded ones; None: all of them.
    """
    coming = memory["gradients"] - always

    def parts(moment: Moment) -> tuple[float, float, float]:
        if moment.stepping and stepped is not None:
            twice = moment.copies * stepped
            gradients = moment.gradients * max(0.0, stepped - always) + always
            return 0.0, gradients, max(moment.transient_bytes, twice)
        made = moment.gradients * coming
        # when microbatches accumulate, earlier gradients are there from the start of a backward pass
        if moment.gradients < 1.0 and (moment.gradients or (math.isinf(bucket) and moment.kept)):
            made = min(made + bucket, coming)
        return (
            moment.kept * memory["activations"],
            made + always,
            max(moment.transient_bytes, moment.copies * memory["gradients"])
            + (moment.bucket_copy if bucket and copies else 0),
        )

    most = max(map(parts, when), key=sum, default=(memory["activations"], memory["gradients"], 0.0))
    kept, gradients, temporary = (round(part) for part in most)
    return {**memory, "activations": kept, "gradients": gradients, "temporaries": temporary}


class Replay:
    """The representative nodes with the bytes that each saves, the gradients that it completes, and temporaries."""

    def __init__(
        self, problem: PlacementProblem, placement: Placement, again: Mapping[int, float] | None = None
    ) -> None:
        """`again`: representative node -> bytes of its module that are alive during recomputation."""
        self.problem, self.placement, self.again = problem, placement, again or {}
        self.nodes = list(problem.quotient.nodes)
        self.place = {k: n for n, k in enumerate(self.nodes)}
        self.count = [problem.quotient.node_count[k] for k in self.nodes]
        self.root: dict[int, int] = {}
        self.maker: dict[int, int] = {}
        self.last: dict[int, int] = {}
        self.size: dict[int, float] = {}
        # place -> bytes of the parameter gradients that one copy completes
        self.gradient: dict[int, float] = {}
        self._values()
        self.kept = self._kept()

    def _values(self) -> None:
        tape, quotient, share = self.problem.tape, self.problem.quotient, self.problem.costs.share
        done: set[int] = set()
        for n, k in enumerate(self.nodes):
            node, option = tape.nodes[k], self.placement.options[k]
            view = base_name(node) in VIEWS and node.op is not None
            for ref, state in zip(node.outs, option.outs):
                value = quotient.value(ref.i)
                if not tape.grad[ref.i]:
                    continue
                source = quotient.value(node.ins[0].i) if view and node.ins else value
                self.root[value] = self.root.get(source, source)
                self.maker.setdefault(self.root[value], n)
                self.size.setdefault(self.root[value], tape.values[ref.i].nbytes * share(state))
            for ref in node.ins:
                value = quotient.value(ref.i)
                root = self.root.get(value)
                if root is not None:
                    self.last[root] = n
        for n, k in reversed(list(enumerate(self.nodes))):
            for ref, flows in zip(tape.nodes[k].ins, tape.flows[k], strict=True):
                value = quotient.value(ref.i)
                name = tape.values[ref.i].name or ""
                if name.startswith("param:") and flows and value not in done:
                    done.add(value)
                    state = self.placement.stored.get(value, "I")
                    size = tape.values[ref.i].nbytes * share(state)
                    self.gradient[n] = self.gradient.get(n, 0.0) + size

    def _kept(self) -> list[float]:
        """Bytes that each node saves, of all copies; a storage belongs to the first node that saves it."""
        problem, costs = self.problem, self.problem.costs
        saved, options = problem.tape.saved, self.placement.options
        parts = {k: costs.part(costs.split((*options[k].ins, *options[k].outs))) for k in self.nodes}
        sizes = [0.0] * len(self.nodes)
        for place, k in problem.saved.places.owned:
            sizes[self.place[k]] += problem.saved.nbytes(saved[place]) * parts[k]
        return sizes

    def moments(self) -> Iterable[Moment]:
        """The moments of each node: forward, and backward in the first and in the last copy of its block."""
        kept, count = self.kept, self.count
        gradients = [self.gradient.get(n, 0.0) * count[n] for n in range(len(kept))]
        whole, grown = sum(kept) or 1.0, sum(gradients) or 1.0
        # prefix sums: there are thousands of nodes
        kept_to, own_to = ([0.0, *itertools.accumulate(some)] for some in (kept, gradients))
        ends = [n for n in range(1, len(kept)) if count[n] != count[n - 1]]
        for low, high in zip([0, *ends], [*ends, len(kept)], strict=True):
            copies = count[low] if low < len(count) else 1
            before, after = kept_to[low], own_to[-1] - own_to[high]
            inside, made = kept_to[high] - before, own_to[high] - own_to[low]
            for n in range(low, high):
                here = (kept_to[n + 1] - before) / copies
                rest = (copies - 1) / copies
                yield Moment((before + inside * rest + here) / whole, 0.0, self.forward_alive[n])
                # a parameter gradient is a temporary until its node has run, then it may be copied to a bucket
                alive, gradient = self.backward_alive[n], gradients[n] / copies
                while_it_runs = ((own_to[high] - own_to[n + 1]) / copies, alive + gradient, 0.0)
                after_it = ((own_to[high] - own_to[n]) / copies, self.alive_after[n], gradient)
                first, last = (before + inside * rest + here) / whole, (before + here) / whole
                both = (while_it_runs, after_it) if gradient else (while_it_runs,)
                for there, temporary, copied in both:
                    yield Moment(first, (after + there) / grown, temporary, copied)
                    if copies > 1:
                        yield Moment(last, (after + made * rest + there) / grown, temporary, copied)

    @cached_property
    def forward_alive(self) -> list[float]:
        """Per node, the bytes that are alive while it runs forward, in addition to saved tensors."""
        return forward_alive(self.problem, self.placement)

    @cached_property
    def backward_alive(self) -> list[float]:
        """Per node, the bytes of activation gradients and recomputed tensors while it runs backward."""
        moved, living, tape = self._moved_gradients(), self._alive_gradients(0), self.problem.tape
        nodes, loss = list(enumerate(self.nodes)), self._torch_loss_bytes
        inner = [0.0 if _by_rows(tape, tape.nodes[k]) else loss(n) for n, k in nodes]
        return [living[n] + inner[n] + moved.get(n, 0.0) + self.again.get(k, 0.0) for n, k in nodes]

    @cached_property
    def alive_after(self) -> list[float]:
        """The same after it has run: only gradients of its inputs."""
        alive = self._alive_gradients(1)
        return [size + self.again.get(k, 0.0) for size, k in zip(alive, self.nodes, strict=True)]

    def _moved_gradients(self) -> dict[int, float]:
        """Place -> bytes of the largest gradient that exists twice: before and after its conversion."""
        sizes: dict[int, float] = {}
        costs = self.problem.costs
        for conversion in self.placement.conversions:
            if conversion.phase == "backward":
                made = conversion.collective
                part = 1 / costs.ranks(made) if made.kind in ("reduce_scatter", "all_to_all") else 1.0
                for node, _ in conversion.consumers:
                    n = self.place.get(node)
                    if n is not None:
                        sizes[n] = max(sizes.get(n, 0.0), made.nbytes * part)
        return sizes

    def _alive_gradients(self, distance: int) -> list[float]:
        """Per node, bytes of gradients of values that it or a later node reads, made at least `distance` places earlier."""
        count = len(self.nodes)
        changes = [0.0] * (count + 1)
        for root, maker in self.maker.items():
            begin, end = maker + distance, min(self.last.get(root, count), count - 1) + 1
            if root in self.size and begin < end:
                changes[begin] += self.size[root]
                changes[end] -= self.size[root]
        return list(itertools.accumulate(changes[:-1]))

    def _torch_loss_bytes(self, n: int) -> float:
        """Bytes that torch's own cross entropy allocates and frees: the gradient of the log-probabilities."""
        node = self.problem.tape.nodes[self.nodes[n]]
        if base_name(node) != "cross_entropy":
            return 0.0
        return self.size.get(self.root.get(self.problem.quotient.value(node.ins[0].i), -1), 0.0)

    @cached_property
    def more_without_mesh(self) -> float:
        """Additional bytes when the model runs on plain tensors, with torch's own loss."""
        tape = self.problem.tape
        by_rows = (n for n, k in enumerate(self.nodes) if _by_rows(tape, tape.nodes[k]))
        return max(map(self._torch_loss_bytes, by_rows), default=0.0)


def _by_rows(tape: Tape, node: Node) -> bool:
    """Whether the loss is computed by rules.composites.rows_loss or over class shards, without an inner gradient."""
    if base_name(node) != "cross_entropy":
        return False
    logits = tape.values[node.ins[0].i]
    _, _, weight, _, reduction, smoothing = node.args
    simple = weight is None and smoothing == 0.0 and reduction == "mean"
    return simple and len(logits.shape) == 2 and logits.dtype.itemsize >= 4
