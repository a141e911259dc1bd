"""What a fusing compiler saves: each chain of memory-bound operations becomes one kernel, which reads and writes once.

Products, convolutions and attention keep kernels of their own, and end a chain; so does a collective.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from meshwright_dtensor.sharding.states import States
from meshwright_planner.cost.prices import AxisCosts, Work
from meshwright_planner.trace.tape import Tape

FUSED = frozenset({"pointwise", "function", "norm", "reduce", "copy", "view", "dropout", "softmax"})
"""Kinds of operations (op_kinds.kind_of) that fuse with their producers and consumers."""


@dataclass(frozen=True)
class Saving:
    """Seconds that fusing saves on one rank, in the forward and in the backward pass."""

    forward: float = 0.0
    backward: float = 0.0

    @property
    def seconds(self) -> float:
        """Of both passes."""
        return self.forward + self.backward


class Fusion:
    """The operations of a tape on one rank, and what fusing some of them saves.

    Args:
        tape: of what one rank computes.
        costs: of the axes that shard it, and of its device.
        work: of a node, by index.
        states: of the inputs and of the outputs of a node, by index.
    """

    def __init__(
        self,
        tape: Tape,
        costs: AxisCosts,
        work: Callable[[int], Work],
        states: Callable[[int], tuple[States, States]],
    ) -> None:
        self._tape, self._costs, self._work, self._states = tape, costs, work, states
        self._readers: dict[int, list[int]] = defaultdict(list)
        for index, node in enumerate(tape.nodes):
            for ref in node.ins:
                self._readers[ref.i].append(index)
        self._results = frozenset(tape.results)

    def saving(self, nodes: Iterable[int] | None = None) -> Saving:
        """Seconds that one graph of these nodes saves, in one step; None: of all."""
        inside = range(len(self._tape.nodes)) if nodes is None else sorted(nodes)
        forward = backward = 0.0
        for kernel in self._kernels(inside):
            separate = [self._passes(index, self._work(index)) for index in kernel]
            # arithmetic that takes longer than the memory traffic remains in the kernel
            streamed = [self._passes(index, replace(self._work(index), kind="pointwise")) for index in kernel]
            gains = [[min(pair) for pair in zip(*passes)] for passes in zip(separate, streamed)]
            first, later = self._fused(kernel)
            # what does not gain by it is not fused
            forward += max(0.0, sum(gain for gain, _ in gains) - first)
            backward += max(0.0, sum(gain for _, gain in gains) - later)
        return Saving(forward, backward)

    def _passes(self, index: int, work: Work) -> tuple[float, float]:
        """Seconds of a node that runs by itself, forward (as often as it runs) and backward."""
        ins, outs = self._states(index)
        node, times = self._tape.nodes[index], 1 + work.again
        seconds, share = self._costs.timed(work, node, self._tape.values, ins, outs)
        # the share is that of one forward pass
        forward = seconds * share * times if work.grad else seconds
        return forward, max(0.0, seconds - forward)

    def _fused(self, nodes: Sequence[int]) -> tuple[float, float]:
        """Seconds of the kernels of these nodes, forward and backward; views alone are none."""
        if all(self._work(i).kind == "view" for i in nodes):
            return 0.0, 0.0
        forward, backward = self._traffic(nodes)
        forward_times = 1 + max(self._work(i).again for i in nodes)
        cluster = self._costs.cluster
        curve = None if self._costs.model is not None else cluster.measured("pointwise", "float32")
        if curve is None:
            return forward_times * forward / cluster.streams, backward / cluster.streams
        # both by the curve of a kernel: the bytes of the backward pass are counted, not those of a forward
        seconds = [curve.seconds(size, (True, False)) if size else 0.0 for size in (forward, backward)]
        return forward_times * seconds[0], seconds[1]

    def _traffic(self, nodes: Sequence[int]) -> tuple[float, float]:
        """Bytes that one kernel of these nodes reads and writes, and its backward kernel if gradients flow.

        The backward kernel reads the gradients of the outputs and the inputs, and writes the gradients of the inputs.
        """
        tape, inside = self._tape, set(nodes)
        made: dict[int, float] = {}
        read: dict[int, float] = {}
        for index in nodes:
            ins, outs = self._states(index)
            for ref, state in zip(tape.nodes[index].ins, ins):
                read[ref.i] = tape.values[ref.i].nbytes * self._costs.share(state)
            for ref, state in zip(tape.nodes[index].outs, outs):
                made[ref.i] = tape.values[ref.i].nbytes * self._costs.share(state)
        given = {value: size for value, size in read.items() if value not in made}
        written = [
            size
            for value, size in made.items()
            if value in self._results or any(k not in inside for k in self._readers[value])
        ]
        into, out = sum(given.values()), sum(written)
        grad = any(tape.grad[value] for value in made)
        back = out + into + sum(size for value, size in given.items() if tape.grad[value]) if grad else 0.0
        return into + out, back

    def _kernels(self, inside: Sequence[int]) -> list[list[int]]:
        """The nodes that fuse, in groups: producers and consumers of one value, without a product or a collective between."""
        tape = self._tape
        parent = {i: i for i in inside if (work := self._work(i)).kind in FUSED and not work.flops}

        def find(i: int) -> int:
            while parent[i] != i:
                parent[i] = parent[parent[i]]
                i = parent[i]
            return i

        # value -> the node that made it, and its state there
        maker: dict[int, tuple[int, object]] = {}
        # of a value: the number of nodes before it that do not fuse, one after the other
        depth: dict[int, int] = {}
        level: dict[int, int] = {}
        for index in inside:
            node, (ins, outs) = tape.nodes[index], self._states(index)
            level[index] = max((depth.get(ref.i, 0) for ref in node.ins), default=0)
            depth.update((ref.i, level[index] + (index not in parent)) for ref in node.outs)
            if index in parent:
                for ref, state in zip(node.ins, ins):
                    before, kept = maker.get(ref.i, (None, None))
                    if before is not None and level[before] == level[index] and kept == state:
                        parent[find(index)] = find(before)
            for ref, state in zip(node.outs, outs):
                if index in parent:
                    maker[ref.i] = index, state
                else:
                    maker.pop(ref.i, None)
        kernels: dict[int, list[int]] = defaultdict(list)
        for index in parent:
            kernels[find(index)].append(index)
        return list(kernels.values())
