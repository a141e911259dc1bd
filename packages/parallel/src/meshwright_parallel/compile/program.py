"""The compiled program of a region: the local operations of one module call, recorded by AOTAutograd, compiled and run.

The module runs on global tensors whose local parts are being recorded, so the graph has plain local operations and functional
collectives only. Its inputs are the local parts of the arguments, of the parameters (their compute copies under ZeRO and mixed
precision), the buffers, and the random numbers, which are drawn before it runs, in the order of the code.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import fx, nn

from meshwright_dtensor._torch.core import dtensor_local, module_tensors, quiet_fakes
from meshwright_dtensor._torch.functional import is_recorded
from meshwright_dtensor._torch.modes import kept_dispatch_keys, without_modes
from meshwright_dtensor.comm.group_calls import RECORDED
from meshwright_dtensor.parameter import MeshParameter
from meshwright_dtensor.random import DRAWS
from meshwright_dtensor.tensor.compute_copy import ComputeCopy
from meshwright_dtensor.trace.module_stack import FRAMES
from meshwright_parallel._torch.compiler import AotFunction, Backend, collective_of, is_random_or_constant
from meshwright_parallel._torch.core import BUFFERS, PARAMETERS, module_parts
from meshwright_parallel.compile.cache_arguments import CannotAppend, RecordedCaches
from meshwright_parallel.compile.call_values import (
    CannotKey,
    Outputs,
    labels_of,
    local_parts,
    relabelled,
    with_values,
)
from meshwright_parallel.compile.compiled_graphs import CompiledGraphs
from meshwright_parallel.compile.main_result import MainResults, main_results, once_differentiable
from meshwright_parallel.compile.plain_draws import PlainDraws

Tensor = torch.Tensor
Draw = Callable[[], Tensor]
FEWEST = 3
"""Operations of a graph that is worth its call."""
Slot = tuple[int, str]
"""Number of a module of the region, and the name of its parameter or buffer."""


class CannotCompile(Exception):
    """A call that has no compiled program; the text says why."""


@dataclass(eq=False)
class GraphChecks:
    """What graphs are checked for, and what they have shown.

    Attributes:
        inputs: how many they have.
        passes: how many were read.
        collectives: of the passes, in their order.
        main: of several differentiable results, those of which the loss has to use one.
    """

    inputs: int
    passes: int = 0
    collectives: list[Any] = field(default_factory=list)
    main: frozenset[int] = frozenset()

    def check(self, graph: fx.GraphModule) -> None:
        """Look at the graph of one pass. Raises CannotCompile."""
        nodes = graph.graph.nodes
        for node in nodes:
            reason = is_random_or_constant(node)
            if reason is not None:
                raise CannotCompile(reason)
        if not self.passes and sum(node.op == "call_function" for node in nodes) < FEWEST:
            raise CannotCompile("it is a single operation, which a graph does not make faster")
        self.passes += 1
        self.collectives += filter(None, map(collective_of, nodes))

    def check_order(self, recorded: Sequence[Any]) -> None:
        """Compare the collectives with those that the code makes, which a rank that runs as it is makes too."""
        if self.collectives != list(recorded):
            raise CannotCompile("the compiler leaves out a collective, or changes their order")

    def check_joint(self, graph: fx.GraphModule) -> None:
        """Look at the graph of both passes. Raises CannotCompile."""
        several = sum(n.op == "placeholder" and n.name.startswith("tangents") for n in graph.graph.nodes) > 1
        if several:
            self.main = main_results(graph, self.inputs)
            if not self.main:
                raise CannotCompile(
                    "its results depend on different parameters, and a loss may use only some of them"
                )


@dataclass(eq=False)
class RegionProgram:
    """A compiled module call.

    Attributes:
        parameters, buffers: where they are; each tensor once.
        draws: make the random numbers of a run, in the order of the code.
        outputs: the form of the result.
        run: the compiled function of all inputs.
        checks: what its graphs have shown.
        name: of the module's class.
    """

    parameters: list[Slot]
    buffers: list[Slot]
    draws: list[Draw]
    outputs: Outputs
    run: AotFunction
    checks: GraphChecks
    name: str

    def __call__(self, modules: Sequence[nn.Module], tensors: list[Any], caches: list[Any]) -> Any:
        """The result of the call of these tensors and caches."""
        values = local_parts(tensors)
        for number, name in self.parameters:
            values.append(_local_value(module_tensors(modules[number])[0][name]))
        values += [module_tensors(modules[number])[1][name] for number, name in self.buffers]
        values += [draw() for draw in self.draws]
        results = list(self.run(values))
        if self.checks.main:
            results = self._guarded(results, self.checks.main)
        return self.outputs.build(results, tensors, caches)

    def _guarded(self, results: list[Tensor], main: frozenset[int]) -> list[Tensor]:
        """The results, of which the loss has to use a main one."""
        places = [place for place, result in enumerate(results) if result.requires_grad]
        if len(places) > 1:
            guarded = MainResults.apply(self.name, main, *(results[place] for place in places))
            for place, result in zip(places, guarded, strict=True):
                results[place] = result
        return results


def _local_value(parameter: Any) -> Tensor:
    """What computations take of a parameter."""
    if not isinstance(parameter, MeshParameter):
        return parameter  # type: ignore[no-any-return]
    return dtensor_local(parameter) if parameter._copy is None else parameter._copy.take()


def slots_of(modules: Sequence[nn.Module], kind: str) -> list[Slot]:
    """The parameters or buffers of the modules, each once."""
    slots: dict[int, Slot] = {}
    for number, module in enumerate(modules):
        for name, value in module_parts(module)[kind].items():
            if value is not None:
                slots.setdefault(id(value), (number, name))
    return list(slots.values())


def compile_call(
    modules: Sequence[nn.Module],
    forward: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    tensors: list[Any],
    caches: list[Any],
    draws: list[tuple[Draw, Tensor]],
    backend: Backend,
    graphs: CompiledGraphs,
) -> RegionProgram:
    """Compile the call `forward(*args, **kwargs)` of a region.

    Args:
        modules: the region's module and all inside of it.
        tensors, caches: those of the arguments, in the order of `call_values.key_of`.
        draws: those of an earlier run, each with a tensor of the form that it makes.
        graphs: of other calls of the region's kind, of which equal ones are taken.

    Raises CannotCompile: with the reason.
    """
    parameters, buffers = slots_of(modules, PARAMETERS), slots_of(modules, BUFFERS)
    weights = [module_parts(modules[n])[PARAMETERS][name] for n, name in parameters]
    fixed = [module_parts(modules[n])[BUFFERS][name] for n, name in buffers]
    labels = labels_of(tensors)
    # a program keeps the recorded function, which must not keep the values of this call
    given: list[Any] = [args, kwargs, caches, weights, fixed]
    counts = [len(tensors), len(weights), len(fixed), len(draws)]
    outputs: list[Outputs] = []

    frame = FRAMES.current()
    calls, begun = None if frame is None else frame.counts.copy(), copy(FRAMES.begun)

    def local(*values: Tensor) -> list[Tensor]:
        if frame is not None and calls is not None:
            # it runs more than once, and a plan numbers the calls of each run
            frame.counts = calls.copy()
        FRAMES.begun = copy(begun)
        RECORDED.calls = []
        following = iter(values)
        parts = [list(itertools.islice(following, count)) for count in counts]
        arguments = relabelled(parts[0], labels)
        pending = iter(parts[3])
        with (
            _in_place_of(modules, given[3], parts[1], given[4], parts[2]),
            _drawn(lambda draw: _next(pending)),
        ):
            recorded = RecordedCaches(given[2])
            call_args, call_kwargs = with_values(given[:2], iter(arguments), iter(recorded.stand_ins))
            result = forward(*call_args, **call_kwargs)
        if next(pending, None) is not None:
            raise CannotCompile("it draws other random numbers than in the run before")
        form, results = Outputs.of(result, arguments, recorded)
        if any(not is_recorded(value) for value in results):
            raise CannotCompile("it returns a tensor that does not depend on its arguments")
        outputs[:] = [form]
        return results

    examples = [*local_parts(tensors), *map(_local_value, weights), *fixed, *(value for _, value in draws)]
    checks, name = GraphChecks(len(examples)), type(modules[0]).__name__
    once = partial(once_differentiable, name)
    function = AotFunction(local, backend, checks.check, checks.check_joint, graphs.take, once)
    try:
        # a pipeline's mode replays random numbers, and none is drawn here
        with _state_kept(), quiet_fakes(), without_modes(), kept_dispatch_keys():
            function.compile(examples)
            checks.check_order(RECORDED.calls or ())
    except (CannotCompile, CannotKey, CannotAppend) as error:
        raise CannotCompile(str(error)) from None
    except Exception as error:
        # torch raises errors of any kind for code that cannot be recorded
        text = str(error).strip().splitlines()
        raise CannotCompile(f"{type(error).__name__}: {text[0] if text else ''}") from error
    finally:
        RECORDED.calls = None
        given.clear()
    kept = [draw for draw, _ in draws]
    return RegionProgram(parameters, buffers, kept, outputs[0], function, checks, name)


def _next(pending: Iterator[Tensor]) -> Tensor:
    value = next(pending, None)
    if value is None:
        raise CannotCompile("it draws more random numbers than in the run before")
    return value


class _Recorded(ComputeCopy):
    """Stands for the compute copy of a parameter while a call is recorded."""

    __slots__ = ("value",)

    def __init__(self, parameter: MeshParameter, value: Tensor) -> None:
        super().__init__(parameter.compute_layout)
        self.value = value

    @property
    def computing(self) -> bool:
        return True

    def take(self) -> Tensor:
        return self.value

    def leaf(self) -> Tensor:
        return self.value

    def stored_gradient(self, gradient: Tensor) -> Tensor:
        raise CannotCompile("it reads the gradient of a parameter")

    def follow(self, requires_grad: bool) -> None:
        raise CannotCompile("it switches the gradient of a parameter on or off")


@contextmanager
def _in_place_of(
    modules: Sequence[nn.Module],
    weights: Sequence[Any],
    recorded: Sequence[Tensor],
    buffers: Sequence[Tensor],
    recorded_buffers: Sequence[Tensor],
) -> Iterator[None]:
    """Inside, parameters and buffers of the modules have the values that are being recorded."""
    by_id = {
        id(old): new for old, new in zip([*weights, *buffers], [*recorded, *recorded_buffers], strict=True)
    }
    copies = [(p, p._copy) for p in weights if isinstance(p, MeshParameter)]
    replaced: list[tuple[dict[str, Any], str, Any]] = []
    try:
        for parameter, _ in copies:
            parameter.compute_with(_Recorded(parameter, by_id[id(parameter)]))
        for module in modules:
            for part in module_tensors(module):
                for name, value in part.items():
                    if value is not None and not isinstance(value, MeshParameter):
                        replaced.append((part, name, value))
                        part[name] = by_id[id(value)]
        yield
        for part, name, value in replaced:
            if part.get(name) is not by_id[id(value)]:
                raise CannotCompile(f"it assigns {name!r} anew")
    finally:
        for part, name, value in replaced:
            part[name] = value
        for parameter, copy in copies:
            parameter.compute_with(copy)


@contextmanager
def _drawn(take: Callable[[Draw], Tensor]) -> Iterator[None]:
    """Inside, `take` is called for each draw."""
    before, DRAWS.taken = DRAWS.taken, take
    try:
        with PlainDraws():
            yield
    finally:
        DRAWS.taken = before


@contextmanager
def recorded_draws() -> Iterator[list[tuple[Draw, Tensor]]]:
    """Collect the draws made inside, each with an empty tensor of the form of its result."""
    draws: list[tuple[Draw, Tensor]] = []

    def take(draw: Draw) -> Tensor:
        value = draw()
        draws.append(
            (draw, torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device))
        )
        return value

    with _drawn(take):
        yield draws


@contextmanager
def _state_kept() -> Iterator[None]:
    """The random state that compiling may change, restored at exit."""
    import random

    before = random.getstate()
    try:
        with torch.random.fork_rng(devices=()):
            yield
    finally:
        random.setstate(before)
