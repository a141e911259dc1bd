"""Finds which operation saves which tensor for the backward pass, and computes the bytes for a placement and batch size."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from meshwright_planner.placement.problem import Placement, PlacementProblem


@dataclass(frozen=True)
class SavedByRun:
    """The saved tensors of a tape by module run, without parameters and buffers.

    Args:
        inner: (place in `tape.saved`, run, representative node) of tensors that the recorder never saw.
        shared: storage -> run -> (place, representative node, slot, output); slot: see `PlacementProblem.slot`.
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
                slot = problem.slot(item.node, item.value, item.output)
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
            alone[run] += problem.kept_bytes(saved[place]) * parts[k]
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
