"""Units of a pipeline: the modules that are given to stages whole.

Members of the outermost repeated lists, every other module with parameters that holds no such list, and dropouts. A module
that is never called itself (a layer that is a ModuleDict), or only calls its parts one after the other (Sequential), is opened:
its parts are units in its place. So is one that a plan names parts of. The code between units (masks, positions, residual sums)
belongs to no stage and runs on all of them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase

from torch import nn

from meshwright_dtensor.errors import PlanError
from meshwright_dtensor.model.blocks import has_forward
from meshwright_dtensor.plan import PipelineRule
from meshwright_dtensor.utils.names import did_you_mean, listing
from meshwright_pipeline._torch import by_the_batch

DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)


@dataclass(frozen=True)
class Units:
    """The units of a model.

    Attributes:
        names: in the order of registration.
        free: names of parameters that lie in no unit; code between units reads them.
    """

    names: tuple[str, ...]
    free: tuple[str, ...]


def find_units(model: nn.Module, opened: Collection[str] = ()) -> Units:
    """The units of `model`, and the parameters outside of them; `opened`: modules that are none, their parts may be."""
    containers = set(_containers(model))
    names: list[str] = []
    free: list[str] = []

    def walk(name: str, module: nn.Module, member: bool = False) -> None:
        """`member`: of a list, and as it is, whatever lists it holds itself."""
        listed = not member and (name in containers or (not name and _repeats(module)))
        holds = not member and (not name or any(c.startswith(f"{name}.") for c in containers))
        loose = not has_forward(module) or (not member and _only_calls(module))
        if listed or holds or loose or name in opened:
            free.extend(_join(name, key) for key, _ in module.named_parameters(recurse=False))
            for key, child in module.named_children():
                walk(_join(name, key), child, member or listed)
        elif isinstance(module, DROPOUTS) or next(module.parameters(), None) is not None:
            names.append(name)

    walk("", model)
    return Units(tuple(names), tuple(free))


def _only_calls(module: nn.Module) -> bool:
    """Whether all that its forward does is to call its parts, so that they may be called by others as well."""
    return "forward" not in module.__dict__ and type(module).forward is nn.Sequential.forward


def called_in_parts(units: Iterable[str], calls: Iterable[tuple[str, str]]) -> frozenset[str]:
    """Those of `units` of which others call parts, beside them or in their place.

    Args:
        calls: (module that calls, module that is called).
    """
    known, found = frozenset(units), set[str]()
    for caller, called in calls:
        parts = called.split(".")
        for end in range(1, len(parts)):
            unit = ".".join(parts[:end])
            if unit in known and not f"{caller}.".startswith(f"{unit}."):
                found.add(unit)
    return frozenset(found)


def _containers(module: nn.Module, prefix: str = "") -> Iterator[str]:
    for key, child in module.named_children():
        name = _join(prefix, key)
        if _repeats(child):
            yield name
        else:
            yield from _containers(child, name)


def _repeats(module: nn.Module) -> bool:
    """A list, or dict, of at least two modules of one class, or of kin (layers of several kinds), all with parameters."""
    children = list(module.children())
    if not isinstance(module, (nn.ModuleList, nn.ModuleDict, nn.Sequential)) or len(children) < 2:
        return False
    kin = set.intersection(*(set(type(child).__mro__) for child in children)) - set(nn.Module.__mro__)
    alike = len({type(child) for child in children}) == 1
    return (alike or (not isinstance(module, nn.Sequential) and bool(kin))) and all(
        next(child.parameters(), None) is not None for child in children
    )


def _join(prefix: str, key: str) -> str:
    return f"{prefix}.{key}" if prefix else key


def batch_norm_module(model: nn.Module) -> str | None:
    """The first module that normalises by the statistics of the rows that it is given; None where there is none."""
    found = (name for name, m in model.named_modules() if by_the_batch(m))
    return next(found, None)


@dataclass(frozen=True)
class Ownership:
    """Which units each stage holds.

    Attributes:
        stages: per stage the units that it may run, in the order of registration.
        everywhere: units that every stage holds and runs: named by `shared`, or without parameters and named by no stage.
        free: parameters outside of units, which every stage holds too.
    """

    stages: tuple[tuple[str, ...], ...]
    everywhere: tuple[str, ...]
    free: tuple[str, ...]

    @property
    def units(self) -> tuple[str, ...]:
        """The units that belong to stages."""
        return tuple(dict.fromkeys(unit for stage in self.stages for unit in stage))

    def allowed(self, unit: str) -> list[int]:
        """The stages that hold a unit, ascending."""
        return [index for index, stage in enumerate(self.stages) if unit in stage]


def ownership(model: nn.Module, rule: PipelineRule) -> Ownership:
    """What `rule` says of the units of `model`.

    Raises:
        PlanError: a pattern matches nothing, a unit with parameters is named by no stage, or a stage has none.
    """
    units = find_units(model, _named_in_parts(model, rule))
    names = [*units.names, *units.free]
    shared = [unit for unit in units.names if any(_matches(p, unit) for p in rule.shared)]
    for place, pattern in enumerate(rule.shared):
        _check_pattern(f"pipeline.shared[{place}]", pattern, names)
    stages: list[tuple[str, ...]] = []
    for index, patterns in enumerate(rule.stages):
        for place, pattern in enumerate(patterns):
            _check_pattern(f"pipeline.stages[{index}][{place}]", pattern, units.names)
        own = [u for u in units.names if u not in shared and any(_matches(p, u) for p in patterns)]
        if not any(next(model.get_submodule(unit).parameters(), None) is not None for unit in own):
            text = f"a stage needs a module with parameters; the modules are {listing(units.names)}"
            raise PlanError(f"pipeline.stages[{index}]", list(patterns), text)
        stages.append(tuple(own))
    placed = {unit for stage in stages for unit in stage} | set(shared)
    for unit in units.names:
        if unit not in placed and next(model.get_submodule(unit).parameters(), None) is not None:
            text = f"module {unit!r} has parameters and is in no stage; name it in one of them, or in shared"
            raise PlanError("pipeline.stages", [list(stage) for stage in rule.stages], text)
    left = [unit for unit in units.names if unit not in placed]
    return Ownership(tuple(stages), (*shared, *left), units.free)


def _named_in_parts(model: nn.Module, rule: PipelineRule) -> frozenset[str]:
    """Modules that would be units, and of which `rule` names parts instead."""
    patterns = [pattern for own in (*rule.stages, rule.shared) for pattern in own]
    opened: set[str] = set()
    while True:
        units = find_units(model, opened)
        names = (*units.names, *units.free)
        finer = [p for p in patterns if not any(_matches(p, name) for name in names)]
        if not finer:
            return frozenset(opened)
        inside = [name for name, _ in (*model.named_modules(), *model.named_parameters())]
        named = [name for name in inside if any(fnmatchcase(name, pattern) for pattern in finer)]
        more = {unit for unit in units.names if any(name.startswith(f"{unit}.") for name in named)}
        if not more:
            return frozenset(opened)
        opened |= more


def _matches(pattern: str, name: str) -> bool:
    return fnmatchcase(name, pattern) or fnmatchcase(name, f"{pattern}.*")


def _check_pattern(field: str, pattern: str, names: tuple[str, ...] | list[str]) -> None:
    if not any(_matches(pattern, name) for name in names):
        raise PlanError(
            field,
            pattern,
            f"it matches none of the modules that can be given to a stage: {listing(names, 6)}",
            did_you_mean(pattern, names),
        )
