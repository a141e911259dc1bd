"""Which modules of a model are compiled regions, by its plan."""

from __future__ import annotations

import logging
from typing import Any

from torch import nn

from meshwright_dtensor._torch.inductor import inductor_lacks
from meshwright_dtensor.devices import HOST
from meshwright_dtensor.errors import PlanError
from meshwright_dtensor.model.blocks import has_forward
from meshwright_dtensor.plan import ParallelPlan
from meshwright_parallel._torch.compiler import Backend
from meshwright_parallel.compile.region import Kind, Region, kind_key

_ATTRIBUTE = "_meshwright_region"
_log = logging.getLogger("meshwright")


def compiled_modules(model: nn.Module, plan: ParallelPlan) -> dict[str, Backend]:
    """Name -> backend of the modules that are compiled: of nested ones the outermost.

    Raises PlanError: a rule matches no module.
    """
    chosen: dict[str, Backend] = {}
    used = set()
    for name, module in model.named_modules():
        rule = next((r for r in plan.compile if r.matches(name)), None)
        if rule is None or (not name and rule.pattern != ""):
            continue
        used.add(rule)
        if has_forward(module) and not any(name.startswith(f"{outer}.") for outer in chosen):
            chosen[name] = rule.backend
    for index, rule in enumerate(plan.compile):
        if rule not in used:
            text = f"no module of this {type(model).__name__} matches"
            raise PlanError(f"compile[{index}].pattern", rule.pattern, text)
    return chosen


def install_regions(model: nn.Module, plan: ParallelPlan) -> None:
    """Make regions of the modules that the plan names. Those inside of one take over where it cannot be compiled.

    Where the machine of this rank lacks what inductor needs, their calls run as they are, and the collectives are the same.
    """
    kinds: dict[Any, Kind] = {}
    chosen = compiled_modules(model, plan)
    lacks = None
    if "inductor" in chosen.values():
        lacks = inductor_lacks(next((p.device.type for p in model.parameters()), HOST.type))
    if lacks is not None:
        _log.warning("compile= has no effect on this rank: %s", lacks)
    for name, backend in chosen.items():
        region = _region(model.get_submodule(name), backend, lacks if backend == "inductor" else None, kinds)
        if region is not None:
            region.active = True


def _region(
    module: nn.Module,
    backend: Backend,
    lacks: str | None,
    kinds: dict[Any, Kind],
) -> Region | None:
    parts = [_region(child, backend, lacks, kinds) for child in module.children()]
    inner = [part for part in parts if part is not None]
    if not has_forward(module) or _is_one_call(module):
        return None
    key = (kind_key(module), backend)
    kind = kinds.setdefault(key, Kind(type(module).__name__, backend, lacks))
    region = Region(module, module.forward, kind, inner)
    module.__dict__[_ATTRIBUTE] = region
    module.forward = region
    return region


def _is_one_call(module: nn.Module) -> bool:
    """Whether a module is one of torch's layers, of one operation: a graph of it alone saves nothing."""
    return type(module).__module__.startswith("torch.nn.modules") and not any(True for _ in module.children())


def regions_of(model: nn.Module) -> dict[str, Region]:
    """Name -> region of the modules of a model."""
    return {
        name: module.__dict__[_ATTRIBUTE]
        for name, module in model.named_modules()
        if _ATTRIBUTE in module.__dict__
    }
