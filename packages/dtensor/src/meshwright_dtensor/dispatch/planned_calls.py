"""The runtime executes the plan: which states a planned call takes its inputs in.

A plan addresses calls as (module name, function, occurrence); module hooks keep track of whose forward is running, and
the dispatcher asks for the target of each call.
"""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from meshwright_dtensor._torch.core import on_checkpointing
from meshwright_dtensor.comm.collectives import NOWHERE, Site
from meshwright_dtensor.comm.log import CommLog
from meshwright_dtensor.errors import PlanError
from meshwright_dtensor.sharding.boxes import local_shape_of
from meshwright_dtensor.sharding.intervals import IntervalShard, repeat_to_fit
from meshwright_dtensor.sharding.states import State, States, parse_state
from meshwright_dtensor.trace.graph import function_name
from meshwright_dtensor.utils.names import did_you_mean

if TYPE_CHECKING:
    from meshwright_dtensor.mesh.context import MeshContext
    from meshwright_dtensor.mesh.layout import Layout
    from meshwright_dtensor.plan.plan import ActivationRule, ParallelPlan

AxisStates = tuple[tuple[str, State], ...]


@dataclass(frozen=True)
class Target:
    """What the plan wants of one call: per tensor input, and for the output, states on some axes."""

    inputs: tuple[AxisStates | None, ...]
    output: AxisStates | None = None

    def states(
        self, context: MeshContext, layouts: Sequence[Layout]
    ) -> tuple[list[States | None], tuple[State | None, ...]]:
        """(states for every input or None, wanted state of the output per mesh axis).

        Runs that the plan names are those of the rows that it was made for; they are fitted to those that are there.
        """
        forced: list[States | None] = []
        for position, layout in enumerate(layouts):
            want = dict(self.inputs[position] or ()) if position < len(self.inputs) else {}
            changed: States = ()
            for axis, own, n in zip(context.axes, layout.states, context.sizes, strict=True):
                wanted = want.get(axis, own)
                if isinstance(wanted, IntervalShard) and wanted != own:
                    outer = len(changed)
                    left = local_shape_of(tuple(layout.shape), context.sizes[:outer], (0,) * outer, changed)
                    fit = repeat_to_fit(wanted, left, n)
                    wanted = own if fit is None else fit
                changed = (*changed, wanted)
            forced.append(changed if changed != layout.states else None)
        goal = dict(self.output or ())
        return forced, tuple(goal.get(a) for a in context.axes)


class Frame:
    """A module whose forward is running."""

    __slots__ = ("module", "rules", "counts", "where")

    def __init__(self, module: str, rules: Mapping[str, Mapping[int, Target]], where: str = "") -> None:
        """`where`: what reports call the module, where it has no name of its own (the model itself)."""
        self.module, self.rules, self.where = module, rules, where or module
        self.counts: Counter[str] = Counter()

    def target(self, func: Callable[..., Any]) -> Target | None:
        """The target of the call that is about to be made; counts it."""
        if not self.rules:
            return None
        name = function_name(func)
        planned = self.rules.get(name)
        if planned is None:
            return None
        occurrence = self.counts[name]
        self.counts[name] = occurrence + 1
        return planned.get(occurrence)

    def copy(self) -> Frame:
        """The same, counting on by itself."""
        again = Frame(self.module, self.rules, self.where)
        again.counts.update(self.counts)
        return again


class Frames(threading.local):
    """The running modules of this thread, innermost last."""

    def __init__(self) -> None:
        self.stack: list[Frame] = []

    def current(self) -> Frame | None:
        """The innermost running module that the plan knows."""
        return self.stack[-1] if self.stack else None


FRAMES = Frames()
"""Torch functions carry no context, so whose forward is running has to be known per thread."""

_NAME = "_meshwright_name"


def resumed(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` as if it were called from here, whenever it runs: inside of the modules whose forward runs now.

    A model's own checkpointing of a part of a forward runs that part again without the hooks of the module around it.
    """
    began = [frame.copy() for frame in FRAMES.stack]
    if not began:
        return function

    def run(*args: Any, **kwargs: Any) -> Any:
        before, FRAMES.stack = FRAMES.stack, [frame.copy() for frame in began]
        try:
            return function(*args, **kwargs)
        finally:
            FRAMES.stack = before

    return run


def here(function: str) -> Site:
    """Where in the model the running code is, for reports."""
    if not CommLog.listening():
        return NOWHERE
    frame = FRAMES.current()
    return Site("" if frame is None else frame.where, function)


@contextlib.contextmanager
def named_modules_watched() -> Iterator[None]:
    """Inside, every module of a parallel model tells when its forward runs: reports say where, at a price per call."""

    def enter(module: nn.Module, _args: Any) -> None:
        name = module.__dict__.get(_NAME)
        if name is not None:
            FRAMES.stack.append(Frame(name, {}, _shown(module, name)))

    def leave(module: nn.Module, _args: Any, _output: Any) -> None:
        if _NAME in module.__dict__ and FRAMES.stack:
            FRAMES.stack.pop()

    handles = [
        register_module_forward_pre_hook(enter),
        register_module_forward_hook(leave, always_call=True),
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _shown(module: nn.Module, name: str) -> str:
    return name or f"({type(module).__name__})"


def install_targets(
    model: nn.Module, mesh: DeviceMesh, plan: ParallelPlan, everywhere: bool = False
) -> list[Any]:
    """Make the calls of ``model`` take their inputs in the states that ``plan.activations`` names.

    Args:
        everywhere: know whose forward is running for every module, not only where the plan has targets.

    Returns:
        Handles; ``handle.remove()`` undoes it.

    Raises:
        PlanError: a rule names no module of the model.
    """
    interned: dict[Target, Target] = {}
    rules: dict[str, dict[str, dict[int, Target]]] = {}
    names = [name for name, _ in model.named_modules(remove_duplicate=False)]
    for rule in plan.activations:
        target = _target(rule, plan)
        target = interned.setdefault(target, target)
        matched = [name for name in names if fnmatchcase(name, rule.module)]
        if not matched:
            raise PlanError(
                "activations.module",
                rule.module,
                f"the pattern matches no module of {type(model).__name__}; use one over model.named_modules() names",
                did_you_mean(rule.module, names),
            )
        for name in matched:
            rules.setdefault(name, {}).setdefault(rule.function, {}).setdefault(rule.occurrence, target)
    if everywhere:
        rules.setdefault("", {})
    return hook_frames(model, rules)


def hook_frames(model: nn.Module, rules: Mapping[str, Mapping[str, Mapping[int, Target]]]) -> list[Any]:
    """Hooks that push and pop a frame for every module in ``rules`` and for all modules inside of those.

    A call counts for the innermost module whose forward is running, so what is inside needs frames to be told apart.  The
    other modules are given their names, for reports.
    """
    handles: list[Any] = []
    inside: set[str] = set()
    for name, module in model.named_modules():
        if name in rules or (name and ("" in rules or name.rpartition(".")[0] in inside)):
            inside.add(name)
            handles += _hook(module, name, rules.get(name, {}))
        else:
            module.__dict__[_NAME] = name
    if handles:
        on_checkpointing(resumed)
    return handles


def _hook(module: nn.Module, name: str, rules: Mapping[str, Mapping[int, Target]]) -> list[Any]:
    stack_of, shown = FRAMES, _shown(module, name)

    def enter(_module: nn.Module, _args: Any) -> None:
        stack_of.stack.append(Frame(name, rules, shown))

    def leave(_module: nn.Module, _args: Any, _output: Any) -> None:
        if stack_of.stack:
            stack_of.stack.pop()

    return [module.register_forward_pre_hook(enter), module.register_forward_hook(leave, always_call=True)]


def _target(rule: ActivationRule, plan: ParallelPlan) -> Target:
    def states(entry: Mapping[str, str] | None) -> AxisStates | None:
        if entry is None:
            return None
        try:
            return tuple((axis, parse_state(s, plan.degree(axis))) for axis, s in sorted(entry.items()))
        except ValueError as error:
            raise PlanError(
                "activations", dict(entry), f"{rule.function} of {rule.module!r}: {error}"
            ) from None

    outputs = rule.outputs
    return Target(tuple(states(e) for e in rule.inputs), states(outputs[0]) if outputs else None)
