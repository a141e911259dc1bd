"""Where rows of a batch meet: the tapes of data ranks of models that do not go row by row."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from meshwright_dtensor.following import Followed, Grid, follow
from meshwright_dtensor.rules import RuleBook
from meshwright_dtensor.states import States
from meshwright_planner.costs.products import by_name
from meshwright_planner.profile.dividing import apart, divided, plain
from meshwright_planner.profile.quotient import Quotient
from meshwright_planner.profile.scaling import alike
from meshwright_planner.profile.tape import Division, Tape

UNLIKE = (
    "what data ranks do where rows meet is not predicted: with fewer rows the model does other operations, as "
    "where it looks at its data"
)


def follows(
    own: Tape,
    whole: Tape,
    merged: Quotient,
    grid: Grid,
    book: RuleBook,
    states: Mapping[str, States],
    modules: Sequence[str],
) -> Followed:
    """What the core does with the rows of `whole`, of which a rank of `grid` has those of `own`.

    Args:
        merged: the quotient of `whole`.
        states: name of a batch tensor -> its states on the grid.
        modules: those that strategies run on each rank's rows.
    """
    lying: States = ("X",) * grid.ndim  # parameters: gradients are summed later
    start, weights = {}, set()
    for i, value in enumerate(whole.values):
        kind, _, name = (value.name or "").partition(":")
        if kind == "param":
            start[i] = lying
            weights.add(i)
        elif kind == "input":
            start[i] = states[name]
    prefixes = tuple(f"{module}." for module in modules)

    def known(index: int) -> tuple[tuple[States, ...], tuple[States, ...]] | None:
        inside = bool(prefixes) and f"{whole.nodes[index].module}.".startswith(prefixes)
        return apart(own, whole, index, grid.ndim) if inside else None

    return follow(
        grid, book, whole.nodes, whole.values, whole.grad, start, weights, known, merged.node, whole.results
    )


class Rows:
    """The tapes of one model's data ranks. A variant of a search shares them."""

    def __init__(self, merged: Callable[[Tape], Quotient]) -> None:
        """`merged`: tape -> its quotient."""
        self._merged = merged
        self._clean: dict[object, bool] = {}
        self._divided: dict[object, Tape] = {}

    def goes_by_rows(
        self, key: object, few: Tape, more: Tape, counted: Mapping[str, bool], book: RuleBook
    ) -> bool:
        """Whether all of a model goes row by row, as two tapes of it tell: one has twice the rows of the other.

        Looked at once for two ranks: what more ranks would have to move, two have to. `counted`: whether a batch tensor has
        the rows of the batch; `key`: what it depends on.
        """
        if key not in self._clean:
            grid = Grid(("rows",), (2,))
            states: dict[str, States] = {name: (0 if rows else "I",) for name, rows in counted.items()}
            found = follows(few, more, self._merged(more), grid, book, states, ())
            self._clean[key] = plain(found, few, more, grid)
        return self._clean[key]

    def of(
        self,
        key: object,
        own: Tape,
        whole: Callable[[], Tape],
        grid: Grid,
        book: RuleBook,
        states: Mapping[str, States],
        modules: Sequence[str],
    ) -> Tape:
        """The tape of one rank; arguments as in `follows`, `whole` where it is not known yet."""
        if key not in self._divided:
            every = whole()
            if not alike(own, every):
                self._divided[key] = replace(own, origin=None, division=Division(notes=(UNLIKE,)))
            else:
                found = follows(own, every, self._merged(every), grid, book, states, modules)
                same = plain(found, own, every, grid)
                composites = by_name(book.composites)
                self._divided[key] = own if same else divided(own, every, found, grid, composites)
        return self._divided[key]
