"""Units of a model: its repeated blocks, and the rest.

The parameters of a unit are unsharded together, and their gradients reduced together.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from torch import nn

Calls = Collection[tuple[str, str]]
"""(calling module, called module)."""


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


def repeated_blocks(model: nn.Module, calls: Calls | None = None) -> tuple[str, ...]:
    """Patterns of the repeated blocks: children of outermost module lists or dicts in which a class occurs more than once.

    Some blocks (a ModuleDict) are never called themselves; then their children are the blocks. A Sequential is such a list
    where no module inside of it is one.

    Args:
        calls: which modules call which; without it, every module with a forward counts as called.
    """
    called = None if calls is None else {name for _, name in calls}
    # name of the list -> pattern
    patterns: dict[str, str] = {}
    for name, module in model.named_modules():
        inside = not name or any(name.startswith(f"{outer}.") for outer in patterns)
        if inside or not _repeats(module):
            continue
        if called is None:
            whole = any(map(has_forward, module.children()))
        else:
            whole = any(f"{name}.{key}" in called for key, _ in module.named_children())
        patterns[name] = f"{name}.*" if whole else f"{name}.*.*"
    if not patterns and _repeats(model):
        return ("*",)
    return tuple(patterns.values())


def _repeats(module: nn.Module) -> bool:
    """Whether a module is a list or dict of modules, in which a class with parts of its own occurs more than once."""
    if not isinstance(module, (nn.ModuleList, nn.ModuleDict, nn.Sequential)):
        return False
    kinds = [type(child) for child in module.children() if any(True for _ in child.children())]
    return len(kinds) > len(set(kinds))
