"""Checks of sharding rules for ops, by the examples that their record names."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.utils import _pytree as pytree

from meshwright_dtensor.api import distribute
from meshwright_dtensor.plugins import Registered
from meshwright_dtensor.plugins.records import OpRuleSpec
from meshwright_dtensor.rules import Composite, NodeView, Rule, Strategy, check, finish
from meshwright_dtensor.rules.book import parts_of
from meshwright_dtensor.rules.node import base_name
from meshwright_dtensor.testing.conformance.report import Check, Tools, require, told
from meshwright_dtensor.trace.graph import Node, Recorder, Value
from meshwright_dtensor.utils.host import HOST
from meshwright_dtensor.utils.names import did_you_mean

Example = tuple[Callable[..., Any], Sequence[Any]]
EXAMPLES_FIX = (
    "give the record examples='package.module:function', a function without arguments that yields (function, arguments) with small "
    "float64 tensors"
)


def parts(plugin: Registered[Any]) -> tuple[dict[str, Rule], list[Composite]]:
    """The rules by op, and the composites."""
    target = told(plugin, "loading its target", "correct the target", plugin.load)
    rules: dict[str, Rule] = {}
    composites: list[Composite] = []
    for part in told(
        plugin, "reading its target", "see meshwright_dtensor.rules", lambda: list(parts_of(target))
    ):
        if isinstance(part, Composite):
            composites.append(part)
            continue
        require(
            isinstance(part, Mapping),
            plugin,
            f"its target has a {type(part).__name__}",
            "make it a mapping of op names to rules, a Composite, or a list of them",
        )
        rules.update(part)
    return rules, composites


def examples(plugin: Registered[Any]) -> list[Example]:
    """Calls of the ops, from the record."""
    require(
        plugin.record.examples,
        plugin,
        "its record names no examples, so its rows cannot be tried",
        EXAMPLES_FIX,
    )
    function = told(
        plugin, "loading its examples", EXAMPLES_FIX, lambda: plugin.record.load_examples(plugin.distribution)
    )
    made = told(plugin, f"{plugin.record.examples}()", EXAMPLES_FIX, lambda: list(function()))
    shaped = all(
        isinstance(example, tuple) and len(example) == 2 and callable(example[0]) for example in made
    )
    require(made and shaped, plugin, f"its examples are {made!r:.200}", EXAMPLES_FIX)
    return [(call, tuple(arguments)) for call, arguments in made]


def check_target(plugin: Registered[Any], tools: Tools) -> None:
    """Ops exist under the names of the mapping, rules can be called, composites name torch functions."""
    rules, composites = parts(plugin)
    require(rules or composites, plugin, "its target is empty", "give it rules, or leave the record out")
    for op, rule in rules.items():
        namespace, _, rest = op.partition(".")
        operators = getattr(torch.ops, namespace)
        name = rest.partition(".")[0]
        close = did_you_mean(name, dir(operators))
        require(
            bool(rest) and hasattr(operators, name),
            plugin,
            f"there is no op {op!r}{f' (did you mean {namespace}.{close}?)' if close else ''}",
            "write 'namespace.op', and define a custom op before its rule (import its module)",
        )
        require(
            callable(rule),
            plugin,
            f"the rule of {op} is {rule!r}",
            "give a function of a NodeView that yields rows",
        )
    for composite in composites:
        named = getattr(composite, "name", None), getattr(composite, "functions", ())
        require(
            isinstance(named[0], str) and named[1] and all(map(callable, named[1])),
            plugin,
            f"{type(composite).__name__} has name {named[0]!r} and functions {named[1]!r}",
            "set both: the name of its nodes, and the torch functions that it stands for",
        )


def recorded(plugin: Registered[Any], example: Example) -> tuple[list[Node], list[Value]]:
    """The nodes that a call runs."""
    call, arguments = example
    tensors = [x for x in pytree.tree_leaves(arguments) if isinstance(x, torch.Tensor)]
    composites = {function: part for part in parts(plugin)[1] for function in part.functions}
    recorder = Recorder(composites, tensors)

    def record() -> None:
        with recorder, torch.no_grad():
            call(*arguments)

    told(plugin, f"its example {_shown(example)}", "let each example be a call that works", record)
    return recorder.nodes, recorder.values


def views(plugin: Registered[Any], rules: Mapping[str, Any]) -> Iterator[tuple[str, NodeView]]:
    """The calls in the examples of the ops in `rules`, on mesh axes of 2 and 3 ranks."""
    for example in examples(plugin):
        nodes, values = recorded(plugin, example)
        for node, n in itertools.product(nodes, (2, 3)):
            name = next((name for name in (node.name, base_name(node.name)) if name in rules), None)
            if name is not None:
                yield name, NodeView.of(node, values, n)


def check_rows(plugin: Registered[Any], tools: Tools) -> None:
    """Every row of every rule is the whole op: values and gradients, on 2 and 3 ranks."""
    rules, _ = parts(plugin)
    useful: dict[str, bool] = {}
    for op, view in views(plugin, rules):
        useful.setdefault(op, False)
        where = f"op {op} with inputs {view.in_shapes} on {view.n} ranks"
        fix = "yield (states of the tensor inputs), (states of the outputs): 'R', 'P' or the number of a dim"
        for row in told(
            plugin, f"the rule of {where}", fix, lambda rule, view: list(rule(view)), rules[op], view
        ):
            _check_row(plugin, where, view, row, fix)
            fitting = finish(view, [row], "plugin")[1:]
            useful[op] |= bool(fitting)
            for strategy in fitting:
                require(
                    check(view, strategy),
                    plugin,
                    f"the row {row[0]} -> {row[1]} of {where} does not give the values or gradients of the whole op",
                    "leave that row out for these shapes: meshwright would drop it, and gather the inputs",
                )
    for op in rules:
        require(
            op in useful,
            plugin,
            f"no example calls {op}",
            f"yield a call of {op} in {plugin.record.examples}",
        )
        require(
            useful[op],
            plugin,
            f"no example has a row for {op} that shards anything",
            "yield rows with a dim that 2 or 3 ranks divide, or leave the rule out: without rows inputs are gathered",
        )


def _check_row(plugin: Registered[Any], where: str, view: NodeView, row: Any, fix: str) -> None:
    counts = len(view.node.ins), len(view.node.outs)
    shaped = isinstance(row, tuple) and len(row) == 2 and all(isinstance(states, tuple) for states in row)
    require(
        shaped and (len(row[0]), len(row[1])) == counts,
        plugin,
        f"the rule of {where} yields {row!r}, and the op has {counts[0]} tensor inputs and {counts[1]} outputs",
        fix,
    )
    for state, shape in zip(row[0] + row[1], view.in_shapes + view.out_shapes, strict=True):
        legal = (
            state in ("R", "P")
            if isinstance(state, str)
            else isinstance(state, int) and 0 <= state < len(shape)
        )
        require(
            legal, plugin, f"the rule of {where} yields state {state!r} for a tensor of shape {shape}", fix
        )


def check_composites(plugin: Registered[Any], tools: Tools) -> None:
    """The first row of a composite is the replicated one, and an example calls it."""
    composites = {composite.name: composite for composite in parts(plugin)[1]}
    seen = set()
    for name, view in views(plugin, composites) if composites else ():
        seen.add(name)
        fix = "return what meshwright_dtensor.rules.finish(view, rows, source) returns"
        rows = told(
            plugin,
            f"{name}.strategies(view)",
            fix,
            lambda composite, view: list(composite.strategies(view)),
            composites[name],
            view,
        )
        first = rows[0] if rows and isinstance(rows[0], Strategy) else None
        require(
            first is not None and set(first.ins + first.outs) <= {"R"},
            plugin,
            f"the first row of {name} is {first}, not the replicated one",
            fix,
        )
    missing = sorted(composites.keys() - seen)
    require(not missing, plugin, f"no example calls {', '.join(missing)}", EXAMPLES_FIX)


def check_on_ranks(plugin: Registered[Any], tools: Tools) -> None:
    """Each example on two real ranks, each tensor sharded on each dim: values and gradients of one device."""
    examples(plugin)
    fix = "look at the rows for these shapes, and at local() of a composite"
    answers = told(
        plugin, "its examples on two ranks", fix, lambda: tools.pool().run(2, differences, plugin.record)
    )
    for text in answers:
        require(not text, plugin, text, fix)


def differences(rank: int, world_size: int, record: OpRuleSpec) -> str:
    """The first call that differs from one device; "" if none does."""
    mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("tp",))
    record.load()
    for call, arguments in record.load_examples()():
        whole = _results(call, arguments, lambda index, value: value)
        tensors = [x for x in pytree.tree_leaves(arguments) if isinstance(x, torch.Tensor)]
        for place, tensor in enumerate(tensors):
            for dim in (dim for dim, size in enumerate(tensor.shape) if size >= world_size):

                def spread(index: int, value: Any, place: int = place, dim: int = dim) -> Any:
                    return distribute(value, mesh, [Shard(dim) if index == place else Replicate()])

                sharded = _results(call, arguments, spread)
                if len(sharded) != len(whole) or not all(map(_close, sharded, whole)):
                    return (
                        f"its example {_shown((call, arguments))} with tensor {place} sharded on dim {dim} does not give on "
                        f"{world_size} ranks what one device gives"
                    )
    return ""


def _results(
    call: Callable[..., Any], arguments: Sequence[Any], spread: Callable[[int, Any], Any]
) -> list[Any]:
    """Outputs, and gradients of the floating-point inputs, whole."""
    leaves, spec = pytree.tree_flatten(tuple(arguments))
    count, inputs = itertools.count(), []
    for index, leaf in enumerate(leaves):
        if isinstance(leaf, torch.Tensor):
            wanted = leaf.is_floating_point()
            inputs.append(leaf.detach().clone().requires_grad_(wanted))
            leaves[index] = spread(next(count), inputs[-1])
    outputs = [
        x
        for x in pytree.tree_leaves(call(*pytree.tree_unflatten(leaves, spec)))
        if isinstance(x, torch.Tensor)
    ]
    differentiable = [x for x in outputs if x.requires_grad]
    if differentiable:
        # different weights for all elements, so that a transposed gradient is seen
        sum((_weighted(x) for x in differentiable[1:]), _weighted(differentiable[0])).backward()
    values = [_whole(x.detach()) for x in outputs]
    return values + [None if x.grad is None else _whole(x.grad) for x in inputs if x.requires_grad]


def _weighted(x: torch.Tensor) -> torch.Tensor:
    weights = torch.linspace(0.5, 1.5, x.numel(), dtype=torch.float64, device=HOST).view(x.shape).to(x.dtype)
    return (x * weights).sum()


def _whole(x: Any) -> torch.Tensor:
    value: torch.Tensor = x.full_tensor() if hasattr(x, "full_tensor") else x
    return value.detach()


def _close(actual: torch.Tensor | None, expected: torch.Tensor | None) -> bool:
    if actual is None or expected is None:
        return actual is expected
    return actual.shape == expected.shape and torch.allclose(actual, expected, rtol=1e-6, atol=1e-8)


def _shown(example: tuple[Any, Any]) -> str:
    call, arguments = example
    shapes = [tuple(x.shape) if isinstance(x, torch.Tensor) else x for x in pytree.tree_leaves(arguments)]
    return f"{getattr(call, '__name__', call)}({', '.join(map(str, shapes))})"


CHECKS: tuple[Check, ...] = (check_target, check_rows, check_composites, check_on_ranks)
