"""When a step holds most: what is kept, which gradients are there, and what is alive beside them, moment by moment.

The backward pass is replayed over the representative nodes.  Of a repeated block two copies are looked at: the first that
runs backward, with everything before it still kept and no gradients of the others, and the last, the other way round; in
between both change in proportion, so the most is at one of the two.  In the forward pass what is kept only grows, so the last
copy is the one; beside it is what lives there (living.py).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType

from meshwright_dtensor.trace.graph import Node
from meshwright_planner.cost.operations import COPIES
from meshwright_planner.memory.liveness import Living
from meshwright_planner.placement.problem import Placement, PlacementProblem
from meshwright_planner.placement.saved_bytes import SavedPlaces
from meshwright_planner.trace.op_kinds import VIEWS, base_name
from meshwright_planner.trace.tape import Tape


@dataclass(frozen=True)
class Moment:
    """Parts of what autograd keeps and of all gradients, and the bytes of what is alive beside them.

    `copied`: bytes of gradients that are there twice where an engine copies them into buckets.  `stepping`: the optimizer steps,
    and where it takes all parameters together makes so many copies of them.
    """

    kept: float
    gradients: float
    transient_bytes: float
    copied: float = 0.0
    stepping: bool = False
    copies: float = 0.0

    def covers(self, other: Moment) -> bool:
        """Whether no less of anything is there than at another."""
        kept, grown = self.kept >= other.kept, self.gradients >= other.gradients
        return (
            kept and grown and self.transient_bytes >= other.transient_bytes and self.copied >= other.copied
        )


def updating(sizes: Sequence[float], optimizer: str, together: bool) -> Moment:
    """The optimizer's step.

    Args:
        sizes: bytes of the parameters that it steps, in order.
        optimizer: name in COPIES.
        together: all parameters may be stepped at once, as on accelerators, not only one after the other.
    """
    made = COPIES[optimizer]
    beside = max((made.last * a + made.own * b for a, b in itertools.pairwise((0.0, *sizes))), default=0.0)
    return Moment(0.0, 1.0, beside, stepping=True, copies=made.together if together else 0.0)


def moments(replay: Replay, update: Moment) -> tuple[Moment, ...]:
    """The moments at which a step may hold most; `update`: that of the optimizer."""
    best: list[Moment] = []
    fuller: Moment | None = None  # one of the best: what covered the last one mostly covers the next
    for one in replay.moments():
        if fuller is not None and fuller.covers(one):
            continue
        fuller = next((o for o in best if o.covers(one)), None)
        if fuller is None:
            best = [o for o in best if not one.covers(o)]
            best.append(one)
            fuller = one
    return (*best, update)


def at_peak(
    memory: Mapping[str, int],
    when: Iterable[Moment],
    bucket: float = 0.0,
    always: float = 0.0,
    copies: bool = True,
    stepped: float | None = None,
) -> dict[str, int]:
    """Bytes by part at the moment that holds most, of the bytes that each part has at most.

    `bucket`: bytes of gradients that come at once: StrategyCost.bucket, all where microbatches add up.
    `always`: bytes of gradients that are there at every moment.
    `copies`: an engine with buckets copies even large gradients into them (shared ones go from where they lie).
    `stepped`: bytes of gradients when the optimizer steps: of those that are shared, shards alone; None for all of them.
    """
    coming = memory["gradients"] - always

    def parts(moment: Moment) -> tuple[float, float, float]:
        if moment.stepping and stepped is not None:
            twice = moment.copies * stepped
            return (
                0.0,
                moment.gradients * max(0.0, stepped - always) + always,
                max(moment.transient_bytes, twice),
            )
        made = moment.gradients * coming
        # where microbatches add up, the gradients of those before are there from the start of a backward pass
        if moment.gradients < 1.0 and (moment.gradients or (math.isinf(bucket) and moment.kept)):
            made = min(made + bucket, coming)
        return (
            moment.kept * memory["activations"],
            made + always,
            max(moment.transient_bytes, moment.copies * memory["gradients"])
            + (moment.copied if bucket and copies else 0),
        )

    most = max(map(parts, when), key=sum, default=(memory["activations"], memory["gradients"], 0.0))
    kept, gradients, beside = (round(part) for part in most)
    return {**memory, "activations": kept, "gradients": gradients, "temporaries": beside}


class Replay:
    """The representative nodes with what each keeps, the gradients that it completes, and what is alive at it."""

    def __init__(
        self,
        problem: PlacementProblem,
        placement: Placement,
        again: Mapping[int, float] = MappingProxyType({}),
    ) -> None:
        """`again`: representative node -> bytes of its module that are alive while that runs again."""
        self.problem, self.placement, self.again = problem, placement, again
        self.nodes = list(problem.quotient.nodes)
        self.place = {k: n for n, k in enumerate(self.nodes)}
        self.count = [problem.quotient.node_count[k] for k in self.nodes]
        self.root: dict[int, int] = {}
        self.maker: dict[int, int] = {}
        self.last: dict[int, int] = {}
        self.size: dict[int, float] = {}
        self.gradient: dict[int, float] = {}  # place -> bytes of the gradients that it completes, of one copy
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
        for n in reversed(range(len(self.nodes))):
            k = self.nodes[n]
            for ref, flows in zip(tape.nodes[k].ins, tape.flows[k], strict=True):
                value = quotient.value(ref.i)
                name = tape.values[ref.i].name or ""
                if name.startswith("param:") and flows and value not in done:
                    done.add(value)
                    state = self.placement.stored.get(value, "I")
                    size = tape.values[ref.i].nbytes * share(state)
                    self.gradient[n] = self.gradient.get(n, 0.0) + size

    def _kept(self) -> list[float]:
        """Bytes that each keeps, of all copies; a storage belongs to the first that keeps it."""
        problem, costs = self.problem, self.problem.costs
        saved, options = problem.tape.saved, self.placement.options
        parts = {k: costs.part(costs.split((*options[k].ins, *options[k].outs))) for k in self.nodes}
        found = [0.0] * len(self.nodes)
        for place, k in SavedPlaces.of(problem).owned:
            found[self.place[k]] += problem.kept_bytes(saved[place]) * parts[k]
        return found

    def moments(self) -> Iterable[Moment]:
        """Of each node, forward, and in the first and in the last copy of its block that runs backward."""
        kept, count = self.kept, self.count
        own = [self.gradient.get(n, 0.0) * count[n] for n in range(len(kept))]
        whole, grown = sum(kept) or 1.0, sum(own) or 1.0
        # up to each place, so that stretches are differences: there are thousands of nodes
        kept_to, own_to = ([0.0, *itertools.accumulate(some)] for some in (kept, own))
        ends = [n for n in range(1, len(kept)) if count[n] != count[n - 1]]
        for low, high in zip([0, *ends], [*ends, len(kept)], strict=True):
            copies = count[low] if low < len(count) else 1
            before, after = kept_to[low], own_to[-1] - own_to[high]
            inside, made = kept_to[high] - before, own_to[high] - own_to[low]
            for n in range(low, high):
                here = (kept_to[n + 1] - before) / copies
                rest = (copies - 1) / copies
                yield Moment((before + inside * rest + here) / whole, 0.0, self.ahead[n])
                # a gradient of a parameter lies where it was made until its node has run, then where gradients lie
                while_it_runs = (
                    (own_to[high] - own_to[n + 1]) / copies,
                    self.alive[n] + own[n] / copies,
                    0.0,
                )
                behind_it = ((own_to[high] - own_to[n]) / copies, self.left[n], own[n] / copies)
                first, last = (before + inside * rest + here) / whole, (before + here) / whole
                for there, beside, copied in (while_it_runs, behind_it) if own[n] else (while_it_runs,):
                    yield Moment(first, (after + there) / grown, beside, copied)
                    if copies > 1:
                        yield Moment(last, (after + made * rest + there) / grown, beside, copied)

    @cached_property
    def ahead(self) -> list[float]:
        """By place, the bytes that are alive while it runs forward beside what is kept by then."""
        return Living.of(self.problem).bytes(self.problem, self.placement)

    @cached_property
    def alive(self) -> list[float]:
        """By place, the bytes of the gradients of values while it runs backward, and of what is there since it ran again."""
        moved, living = self._moved(), self._living(0)
        return [
            living[n] + self._inside(n) + moved.get(n, 0.0) + self.again.get(k, 0.0)
            for n, k in enumerate(self.nodes)
        ]

    @cached_property
    def left(self) -> list[float]:
        """The same when it has run: of what it takes, no more of what it makes."""
        return [size + self.again.get(k, 0.0) for size, k in zip(self._living(1), self.nodes, strict=True)]

    def _moved(self) -> dict[int, float]:
        """Place -> bytes of the largest gradient that is there twice: as a node makes it, and brought where it goes."""
        found: dict[int, float] = {}
        costs = self.problem.costs
        for conversion in self.placement.conversions:
            if conversion.phase == "backward":
                made = conversion.collective
                part = 1 / costs.ranks(made) if made.kind in ("reduce_scatter", "all_to_all") else 1.0
                for node, _ in conversion.consumers:
                    n = self.place.get(node)
                    if n is not None:
                        found[n] = max(found.get(n, 0.0), made.nbytes * part)
        return found

    def _living(self, behind: int) -> list[float]:
        """By place, bytes of gradients of values that its node or a later one takes, made at least `behind` places before."""
        count = len(self.nodes)
        changes = [0.0] * (count + 1)
        for root, maker in self.maker.items():
            begin, end = maker + behind, min(self.last.get(root, count), count - 1) + 1
            if root in self.size and begin < end:
                changes[begin] += self.size[root]
                changes[end] -= self.size[root]
        return list(itertools.accumulate(changes[:-1]))

    def _inside(self, n: int) -> float:
        """Bytes that a node makes and gives up while it runs backward."""
        node = self.problem.tape.nodes[self.nodes[n]]
        return 0.0 if _by_rows(self.problem.tape, node) else self._of_torch(n)

    def _of_torch(self, n: int) -> float:
        """The same where torch computes a loss: the gradient of the logarithms, before that of the scores."""
        node = self.problem.tape.nodes[self.nodes[n]]
        if base_name(node) != "cross_entropy":
            return 0.0
        return self.size.get(self.root.get(self.problem.quotient.value(node.ins[0].i), -1), 0.0)

    @cached_property
    def more_without_mesh(self) -> float:
        """Bytes more where the model runs on plain tensors: by torch's own loss."""
        return max((self._of_torch(n) - self._inside(n) for n in range(len(self.nodes))), default=0.0)


def _by_rows(tape: Tape, node: Node) -> bool:
    """Whether the loss is computed by rules.composites.rows_loss, or over shards of classes, which make no other gradient."""
    if base_name(node) != "cross_entropy":
        return False
    logits = tape.values[node.ins[0].i]
    _, _, weight, _, reduction, smoothing = node.args
    simple = weight is None and smoothing == 0.0 and reduction == "mean"
    return simple and len(logits.shape) == 2 and logits.dtype.itemsize >= 4
