"""What recomputation changes: what is kept, and what runs again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property

from meshwright_dtensor.plan import RecomputeRule
from meshwright_planner.costs.keeping import kept_bytes
from meshwright_planner.costs.operations import BACKWARD
from meshwright_planner.placing.placement import Placement, PlacementProblem
from meshwright_planner.placing.program import Conversion
from meshwright_planner.profile.tape import Saved, Tape
from meshwright_planner.recomputation.dropped import alive_again, dropped
from meshwright_planner.recomputation.stopping import last_again


def recomputed(
    problem: PlacementProblem, placement: Placement, rules: Sequence[RecomputeRule]
) -> tuple[PlacementProblem, Placement, dict[int, float]]:
    """The same placement where the modules that `rules` name run twice, and what they have alive while they do.

    A module keeps its inputs; with the policy "selective" also the results of its products and attention, which do not run
    again; with "alternate" those of attention and of every other product.  Its forward pass, and what it communicates in
    it, comes once more, as far as torch goes (see `stopping`).  The last answer: representative node -> bytes that its module
    has alive beside what it keeps.
    """
    region = _region(problem, rules)
    values, policy = problem.tape.values, region.policy
    kept = [item for item in problem.tape.saved if item[0] not in policy]
    kept += [Saved(*item, values[item[2]].nbytes) for item in region.kept]
    tape = replace(problem.tape, saved=kept, recompute=tuple(rules))
    other = problem.on(tape)
    like = problem.tape if problem.tape.origin is None else problem.tape.origin
    # a quotient serves tapes of their own too, which may keep other tensors; the answer holds on to the one it is of
    _, blocks = problem.quotient.once(
        ("dropped", id(like), tuple(rules)), lambda: (like, dropped(problem, region.block, kept))
    )
    again = region.again
    ahead = 1 / (1 + BACKWARD)
    options = {
        k: replace(
            o, seconds=o.seconds * (1 + again[k] * ahead), inner_seconds=o.inner_seconds * (1 + again[k])
        )
        for k, o in placement.options.items()
    }
    conversions = _communicated(placement, again)
    counts, costs = problem.quotient.node_count, problem.costs
    between = sum(costs.collective(c.collective) * c.count for c in conversions)
    inner = sum(o.inner_seconds * counts[k] for k, o in options.items())
    found = replace(
        placement,
        options=options,
        conversions=conversions,
        compute_seconds=sum(o.seconds * counts[k] for k, o in options.items()),
        communication_seconds=between + inner,
        saved_bytes=kept_bytes(other, placement),
        again=again,
        again_seconds=sum(o.seconds * again[k] * ahead * counts[k] for k, o in placement.options.items()),
    )
    return other, found, alive_again(problem, placement, blocks)


def communicated(
    problem: PlacementProblem, placement: Placement, rules: Sequence[RecomputeRule]
) -> list[Conversion]:
    """What is communicated between the nodes where the modules that `rules` name run twice."""
    return _communicated(placement, _region(problem, rules).again)


def _communicated(placement: Placement, again: Mapping[int, float]) -> list[Conversion]:
    return [
        replace(
            c,
            count=c.count + round(c.count * max((again[n] for n, _ in c.consumers if n in again), default=0)),
        )
        if c.phase == "forward"
        else c
        for c in placement.conversions
    ]


def _region(problem: PlacementProblem, rules: Sequence[RecomputeRule]) -> _Region:
    region: _Region = problem.quotient.once(("recomputed", tuple(rules)), lambda: _Region(problem, rules))
    return region


class _Region:
    """The nodes that run twice.

    Attributes:
        policy: node -> whether its results are kept.
        kept: node, storage and value of what is kept of them, and whether the node made it, as in Saved.
        again: representative node -> the part of its copies that run twice.
        block: node -> name of the module of them that it is in.
    """

    def __init__(self, problem: PlacementProblem, rules: Iterable[RecomputeRule]) -> None:
        tape, quotient = problem.tape, problem.quotient
        chosen = recomputed_blocks(tape, rules)
        block_of: dict[str, str | None] = {}
        self.policy: dict[int, bool] = {}
        self.block: dict[int, str] = {}
        met: Counter[str] = Counter()
        for index, node in enumerate(tape.nodes):
            if node.module not in block_of:
                parts = node.module.split(".")
                names = (".".join(parts[:n]) for n in range(1, len(parts) + 1))
                block_of[node.module] = next((name for name in names if name in chosen), None)
            block = block_of[node.module]
            if block is not None:
                policy = chosen[block].policy
                kept = policy != "full" and problem.legality.flops(index) > 0
                if kept and policy == "alternate" and node.name != "sdpa":
                    met[block] += 1
                    kept = met[block] % 2 == 1
                self.policy[index] = kept
                self.block[index] = block
        self._tape = tape
        ends = last_again(tape, self.block)
        twice = Counter(
            quotient.node(index)
            for index, kept in self.policy.items()
            if not kept and index <= ends[self.block[index]]
        )
        self.again = {k: twice[k] / quotient.node_count[k] for k in quotient.nodes}

    @cached_property
    def kept(self) -> list[tuple[int, int, int, bool]]:
        """What is kept of them, as said above."""
        return [*self._inputs(self._tape), *self._results(self._tape)]

    @cached_property
    def _root(self) -> dict[int | None, int | None]:
        return {item.value: item.root for item in self._tape.saved if item.value is not None}

    def _inputs(self, tape: Tape) -> Iterator[tuple[int, int, int, bool]]:
        """What goes into the blocks: it is kept."""
        made, seen = dict[int, str](), set[tuple[str, int]]()
        for index, node in enumerate(tape.nodes):
            block = self.block.get(index)
            if block is not None:
                for ref in node.ins:
                    named = (tape.values[ref.i].name or "").partition(":")[0] in ("param", "buffer")
                    if made.get(ref.i) != block and not named and (block, ref.i) not in seen:
                        seen.add((block, ref.i))
                        yield index, self._storage(ref.i), ref.i, False
            made.update((ref.i, block or "") for ref in node.outs)

    def _results(self, tape: Tape) -> Iterator[tuple[int, int, int, bool]]:
        """What is computed in the blocks and kept."""
        for index, kept in self.policy.items():
            if kept:
                for ref in tape.nodes[index].outs:
                    yield index, self._storage(ref.i), ref.i, True

    def _storage(self, value: int) -> int:
        root = self._root.get(value)
        return value if root is None else root


def recomputed_blocks(tape: Tape, rules: Iterable[RecomputeRule]) -> dict[str, RecomputeRule]:
    """Name -> rule of the modules that run twice: of nested ones the outermost, and never the model itself."""
    chosen: dict[str, RecomputeRule] = {}
    ordered = list(rules)
    for name in tape.modules:
        parts = name.split(".")
        if any(".".join(parts[:n]) in chosen for n in range(1, len(parts))):
            continue
        rule = next((r for r in ordered if name and r.matches(name)), None)
        if rule is not None:
            chosen[name] = rule
    return chosen
