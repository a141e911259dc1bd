"""The compiled graphs of a kind of region: equal ones are compiled once, however many modules record them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import fx

Compiled = Callable[..., Any]


@dataclass(eq=False)
class CompiledGraphs:
    """Compiled graphs by their text and the forms of their inputs.

    Attributes:
        most: forward passes that are compiled.
        count: forward passes that were.
        full: made into the error where one more is asked for.
    """

    most: int
    full: Callable[[], Exception]
    count: int = 0
    graphs: dict[Any, Compiled] = field(default_factory=dict)

    def take(
        self, graph: fx.GraphModule, examples: Sequence[Any], backward: bool, compiler: Callable[[], Compiled]
    ) -> Compiled:
        """The compiled form of a graph without constants of its own; `compiler` makes it if there is none.

        `examples`: tensors as its inputs are. What a forward pass saves may have other strides than it was recorded with.
        """
        key = (backward, graph.code, _forms(examples))
        if key not in self.graphs:
            if not backward and self.count >= self.most:
                raise self.full()
            self.graphs[key] = compiler()
            self.count += not backward
        return self.graphs[key]


def _forms(values: Sequence[Any]) -> Sequence[Any]:
    """Shape, strides, dtype and device of each input."""
    return tuple([(tuple(v.shape), v.stride(), v.dtype, v.device, v.requires_grad) for v in values])
