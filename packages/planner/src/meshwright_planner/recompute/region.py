"""The nodes of a tape that recompute runs twice, and the tensors that are kept instead of what they saved."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from functools import cached_property
from itertools import accumulate

from meshwright_dtensor.plan import RecomputeRule
from meshwright_planner.trace.quotient import Quotient
from meshwright_planner.trace.tape import Saved, Tape


class Region:
    """The nodes in recomputed blocks.

    Attributes:
        policy: node -> whether its results are kept.
        kept: (node, storage, value, whether the node produced it) of the kept tensors, as in Saved.
        again: representative node -> the part of its copies that run twice.
        block: node -> name of its recomputed block.
    """

    def __init__(
        self, tape: Tape, quotient: Quotient, flops: Callable[[int], float], rules: Iterable[RecomputeRule]
    ) -> None:
        """`flops`: FLOPs of the forward pass of a node."""
        chosen = recomputed_blocks(tape, rules)
        block_of: dict[str, str | None] = {}
        self.policy: dict[int, bool] = {}
        self.block: dict[int, str] = {}
        products: Counter[str] = Counter()
        for index, node in enumerate(tape.nodes):
            if node.module not in block_of:
                names = accumulate(node.module.split("."), "{}.{}".format)
                block_of[node.module] = next((name for name in names if name in chosen), None)
            block = block_of[node.module]
            if block is not None:
                policy = chosen[block].policy
                kept = policy != "full" and flops(index) > 0
                if kept and policy == "alternate" and node.name != "sdpa":
                    products[block] += 1
                    kept = products[block] % 2 == 1
                self.policy[index], self.block[index] = kept, block
        self._tape = tape
        twice = Counter(map(quotient.node, self.repeated))
        self.again = {k: twice[k] / quotient.node_count[k] for k in quotient.nodes}

    @cached_property
    def kept(self) -> list[tuple[int, int, int, bool]]:
        """The kept tensors (see the class): the inputs of the blocks, and the results in them that the policy keeps."""
        tape = self._tape
        roots = {item.value: item.root for item in tape.saved if item.value is not None}
        tensors: list[tuple[int, int, bool]] = []
        made, seen = dict[int, str](), set[tuple[str | None, int]]()
        for index, node in enumerate(tape.nodes):
            block = self.block.get(index)
            for ref in node.ins if block is not None else ():
                if made.get(ref.i) != block and not tape.lasts(ref.i) and (block, ref.i) not in seen:
                    seen.add((block, ref.i))
                    tensors.append((index, ref.i, False))
            made.update((ref.i, block or "") for ref in node.outs)
        results = [index for index, kept in self.policy.items() if kept]
        tensors += [(index, ref.i, True) for index in results for ref in tape.nodes[index].outs]
        storages = ((entry, roots.get(entry[1])) for entry in tensors)
        return [(node, v if root is None else root, v, is_made) for (node, v, is_made), root in storages]

    def saved(self, tape: Tape) -> list[Saved]:
        """The saved tensors of this tape, or of one that differs in sizes only, with recompute."""
        outside = [
            # the output of a block that a node outside saves belongs to that node
            item._replace(node=item.by, output=False) if item.node in self.policy else item
            for item in tape.saved
            if item.by not in self.policy
        ]
        return outside + [Saved(*item, tape.values[item[2]].nbytes, item[0]) for item in self.kept]

    @cached_property
    def repeated(self) -> frozenset[int]:
        """The nodes that run twice. torch stops recomputing a block as soon as all its saved tensors are there again."""
        # block -> its last node that saves a tensor, and whether the node produced that tensor
        last: dict[str, tuple[int, bool]] = {}
        for item in self._tape.saved:
            block = self.block.get(item.by)
            if block is not None:
                made = item.root is None or item.value in [ref.i for ref in self._tape.nodes[item.by].outs]
                last[block] = max(last.get(block, (-1, False)), (item.by, made))
        again = (index for index, kept in self.policy.items() if not kept)
        return frozenset(k for k in again if (k, False) < last.get(self.block[k], (-1, False)))


def recomputed_blocks(tape: Tape, rules: Iterable[RecomputeRule]) -> dict[str, RecomputeRule]:
    """Name -> rule of the recomputed modules: of nested ones the outermost, and never the model itself.

    A module that is never called is not recomputed, although code outside may call modules inside it.
    """
    chosen: dict[str, RecomputeRule] = {}
    ordered = list(rules)
    called = {name for _, name in tape.calls}
    for name in (name for name, info in tape.modules.items() if name and info.runs):
        inside = not chosen.keys().isdisjoint(accumulate(name.split("."), "{}.{}".format))
        rule = None if inside else next((r for r in ordered if r.matches(name)), None)
        if rule is not None:
            chosen[name] = rule
    return {name: rule for name, rule in chosen.items() if name in called}
