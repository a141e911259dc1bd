"""Units of a pipeline: the modules that a stage holds as a whole.

Units are the members of the outermost repeated lists, every other module with parameters that contains no such list, and
dropouts. A module that is never called itself (a layer that is a ModuleDict), or that only calls its children in order
(Sequential), is opened: its children are units instead. So is a module of which a plan names submodules. The code between
units (masks, positions, residual sums) belongs to no stage and runs on all of them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from torch import nn

from meshwright_dtensor.errors import PlanError
from meshwright_dtensor.model.blocks import has_forward
from meshwright_dtensor.plan import PipelineRule
from meshwright_dtensor.utils.names import did_you_mean, listing
from meshwright_pipeline._torch import normalises_by_batch
from meshwright_pipeline.module_state import holders

DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)


@dataclass(frozen=True)
class Units:
    """The units of a model by name, in the order of registration, and the `free` parameters, which code between units reads."""

    names: tuple[str, ...]
    free: tuple[str, ...]


def find_units(model: nn.Module, opened: Collection[str] = ()) -> Units:
    """The units of `model`, and the parameters outside of them. `opened`: modules whose children are units instead."""
    containers = set(_containers(model))
    names: list[str] = []
    free: list[str] = []
    # a module under two names is one unit
    seen: set[nn.Module] = set()

    def walk(name: str, module: nn.Module, member: bool = False) -> None:
        """`member`: of a repeated list; it is a unit whatever lists it contains."""
        if module in seen:
            return
        seen.add(module)
        listed = not member and (name in containers or (not name and _repeats(module)))
        holds = not member and (not name or any(c.startswith(f"{name}.") for c in containers))
        in_order = "forward" not in module.__dict__ and type(module).forward is nn.Sequential.forward
        loose = not has_forward(module) or (not member and in_order)
        if listed or holds or loose or name in opened:
            free.extend(_join(name, key) for key, _ in module.named_parameters(recurse=False))
            for key, child in module.named_children():
                walk(_join(name, key), child, member or listed)
        elif isinstance(module, DROPOUTS) or next(module.parameters(), None) is not None:
            names.append(name)

    walk("", model)
    return Units(_apart(model, names), tuple(free))


def _apart(model: nn.Module, names: Iterable[str]) -> tuple[str, ...]:
    """Those that are no part of another one under another name; such a part runs with that one."""
    units = {model.get_submodule(name): name for name in names}
    inner = {part for unit in units for part in unit.modules() if part is not unit}
    return tuple(name for unit, name in units.items() if unit not in inner)


Calls = Iterable[tuple[str, str]]
"""(calling module, called module), by first names."""


def called_in_parts(model: nn.Module, units: Iterable[str], calls: Calls) -> frozenset[str]:
    """The units whose submodules are called from outside of the unit. What several units hold is called inside of each."""
    names, result = frozenset(units), set[str]()
    for caller, called in _between(model, names, calls):
        parts = called.split(".")
        for end in range(1, len(parts)):
            unit = ".".join(parts[:end])
            if unit in names and not f"{caller}.".startswith(f"{unit}."):
                result.add(unit)
    return frozenset(result)


def called_by_units(model: nn.Module, units: Iterable[str], calls: Calls) -> frozenset[str]:
    """The units that other units call: whatever stage runs the other one has to hold them."""
    names = frozenset(units)
    return frozenset(
        called
        for caller, called in _between(model, names, calls)
        if called in names and any(f"{caller}.".startswith(f"{unit}.") for unit in names - {called})
    )


def _between(model: nn.Module, names: frozenset[str], calls: Calls) -> Iterator[tuple[str, str]]:
    """The calls but those that stay in a unit, by any name of the called module."""
    names_of: dict[nn.Module, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        names_of.setdefault(module, []).append(name)
    others = {aliases[0]: aliases for aliases in names_of.values() if len(aliases) > 1}
    for caller, called in calls:
        aliases = others.get(called)
        if aliases is not None:
            around = [unit for unit in names if f"{caller}.".startswith(f"{unit}.")]
            if any(alias.startswith(f"{unit}.") for alias in aliases for unit in around):
                continue
        yield caller, called


def _containers(module: nn.Module, prefix: str = "") -> Iterator[str]:
    for key, child in module.named_children():
        name = _join(prefix, key)
        if _repeats(child):
            yield name
        else:
            yield from _containers(child, name)


def _repeats(module: nn.Module) -> bool:
    """Whether it is a list or dict of at least two modules with parameters, of one class or with a common base class."""
    children = list(module.children())
    if not isinstance(module, (nn.ModuleList, nn.ModuleDict, nn.Sequential)) or len(children) < 2:
        return False
    bases = set.intersection(*(set(type(child).__mro__) for child in children)) - set(nn.Module.__mro__)
    one_class = len({type(child) for child in children}) == 1
    return (one_class or (not isinstance(module, nn.Sequential) and bool(bases))) and all(
        next(child.parameters(), None) is not None for child in children
    )


def _join(prefix: str, key: str) -> str:
    return f"{prefix}.{key}" if prefix else key


def whole_batch_module(model: nn.Module) -> str | None:
    """The first module that needs the whole batch at once, and why; None if there is none."""
    for name, module in model.named_modules():
        if normalises_by_batch(module):
            return f"module {name!r} normalises by the whole batch, which microbatches would change"
        if getattr(module, "scale_grad_by_freq", False) and module.weight.requires_grad:
            return f"module {name!r} (scale_grad_by_freq) divides gradients by counts of the whole batch, which microbatches change"
    return None


@dataclass(frozen=True)
class Ownership:
    """The units of each stage.

    Attributes:
        stages: for each stage the units that it may run, in the order of registration.
        everywhere: units that every stage holds and runs: named in `shared`, or without parameters and named in no stage.
        free: parameters outside of units, which every stage holds too.
        holders: see module_state.holders.
    """

    stages: tuple[tuple[str, ...], ...]
    everywhere: tuple[str, ...]
    free: tuple[str, ...]
    holders: Mapping[str, frozenset[str]] = field(default_factory=dict)

    @property
    def units(self) -> tuple[str, ...]:
        """The units that belong to stages."""
        return tuple(dict.fromkeys(unit for stage in self.stages for unit in stage))

    def allowed(self, unit: str) -> list[int]:
        """The stages that hold a unit, ascending."""
        return [index for index, stage in enumerate(self.stages) if unit in stage]


def ownership(model: nn.Module, rule: PipelineRule) -> Ownership:
    """The ownership that a plan's pipeline rule describes.

    Raises PlanError: a pattern matches nothing, a unit with parameters is named in no stage, or a stage has none.
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
        named = [u for u in units.names if u not in shared and any(_matches(p, u) for p in patterns)]
        if not any(next(model.get_submodule(unit).parameters(), None) is not None for unit in named):
            text = f"a stage needs a module with parameters; the modules are {listing(units.names)}"
            raise PlanError(f"pipeline.stages[{index}]", list(patterns), text)
        stages.append(tuple(named))
    placed = {unit for stage in stages for unit in stage} | set(shared)
    for unit in units.names:
        if unit not in placed and next(model.get_submodule(unit).parameters(), None) is not None:
            text = f"module {unit!r} has parameters and is in no stage; name it in a stage, or in shared"
            raise PlanError("pipeline.stages", [list(stage) for stage in rule.stages], text)
    left = [unit for unit in units.names if unit not in placed]
    return Ownership(tuple(stages), (*shared, *left), units.free, holders(model, units.names))


def _named_in_parts(model: nn.Module, rule: PipelineRule) -> frozenset[str]:
    """Modules that would be units, but whose submodules `rule` names instead."""
    patterns = [pattern for field in (*rule.stages, rule.shared) for pattern in field]
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
        text = f"it matches none of the modules that can be placed on a stage: {listing(names, 6)}"
        raise PlanError(field, pattern, text, did_you_mean(pattern, names))
