"""Units of a model: its repeated blocks, and what is left outside of them.

Parameters of a unit are gathered and their gradients shared together, at run time and in the planner's costs alike.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn


def has_forward(module: nn.Module) -> bool:
    """Whether a module can be called: torch's containers (ModuleDict, ModuleList), and others that only hold, have no forward."""
    return "forward" in module.__dict__ or type(module).forward is not nn.Module.forward


def parameter_units(model: nn.Module) -> Iterator[tuple[str, nn.Module, list[tuple[str, nn.Parameter]]]]:
    """(name, module, its named parameters) of every block that has any, then of the rest; each parameter once.

    The rest comes under the name "" with the model itself. A parameter that several modules share belongs to the first
    block that holds it.
    """
    names = {id(p): name for name, p in model.named_parameters()}
    left = dict(names)
    for name, module in blocks(model):
        found = [(left.pop(id(p)), p) for p in module.parameters() if id(p) in left]
        if found:
            yield name, module, found
    yield "", model, [(names[id(p)], p) for p in model.parameters() if id(p) in left]


def blocks(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The outermost modules that stand in a list of at least two with parameters: (name, module)."""
    if isinstance(model, nn.Sequential):
        yield from model.named_children()
    else:
        yield from _walk("", model)


def _walk(prefix: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for name, child in module.named_children():
        path = f"{prefix}{name}"
        members = [(f"{path}.{key}", one) for key, one in child.named_children()]
        listed = isinstance(child, (nn.ModuleList, nn.Sequential))
        if listed and sum(next(one.parameters(), None) is not None for _, one in members) > 1:
            yield from members
        else:
            yield from _walk(f"{path}.", child)
