"""Units of a model: its repeated blocks, and the rest.

The parameters of a unit are unsharded together, and their gradients reduced together.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn


def has_forward(module: nn.Module) -> bool:
    """Whether a module can be called; containers such as ModuleDict and ModuleList have no forward."""
    return "forward" in module.__dict__ or type(module).forward is not nn.Module.forward


def parameter_units(model: nn.Module) -> Iterator[tuple[str, nn.Module, list[tuple[str, nn.Parameter]]]]:
    """(name, module, named parameters) of each block with parameters, then of the rest; each parameter once.

    The rest has the name "" and the model as its module. A shared parameter belongs to the first block that holds it.
    """
    names = {id(p): name for name, p in model.named_parameters()}
    left = dict(names)
    for name, module in blocks(model):
        parameters = [(left.pop(id(p)), p) for p in module.parameters() if id(p) in left]
        if parameters:
            yield name, module, parameters
    yield "", model, [(names[id(p)], p) for p in model.parameters() if id(p) in left]


def blocks(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """(name, module) of the outermost modules in a list of at least two with parameters."""
    if isinstance(model, nn.Sequential):
        yield from model.named_children()
    else:
        yield from _walk("", model)


def _walk(prefix: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for name, child in module.named_children():
        path = f"{prefix}{name}"
        members = [(f"{path}.{key}", member) for key, member in child.named_children()]
        listed = isinstance(child, (nn.ModuleList, nn.Sequential))
        if listed and sum(next(member.parameters(), None) is not None for _, member in members) > 1:
            yield from members
        else:
            yield from _walk(f"{path}.", child)
