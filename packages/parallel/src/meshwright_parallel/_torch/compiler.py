"""Private names of torch's compiler: AOTAutograd, which records a function with its backward pass, and inductor."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, Literal

import torch
from torch import fx
from torch.nn.modules import module as _module

Tensor = torch.Tensor
Backend = Literal["inductor", "aot_eager"]
Compiled = Callable[..., Any]


_COLLECTIVES = ("all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single")
"""Those of torch in functional form that a graph may have."""


_CACHE_TAG = " meshwright 1"
"""Of inductor's caches on disk: another one whenever code is generated otherwise than by torch."""


_ONE_AT_A_TIME = threading.RLock()


class _NotRun(Exception):
    """A compiled graph is called for the first time, while it is being compiled."""


class AotFunction:
    """A function of tensors that returns tensors, recorded by AOTAutograd with its backward pass and compiled.

    Args:
        function: takes and returns tensors of fixed shapes, strides, dtypes and requires_grad.
        check: called with the graph of each pass, the forward first.
        check_joint: called with the graph of both passes together, if there is a backward pass.
        take: gets a graph, tensors as its inputs are, whether it is that of a backward pass, and a function that compiles it; gives
            the compiled graph.
        differentiable: called with the gradients of a backward pass that autograd records (create_graph=True).
    """

    def __init__(
        self,
        function: Callable[..., Any],
        backend: Backend,
        check: Callable[[fx.GraphModule], None],
        check_joint: Callable[[fx.GraphModule], None],
        take: Callable[[fx.GraphModule, Sequence[Any], bool, Callable[[], Compiled]], Compiled],
        differentiable: Callable[[Sequence[Any]], Sequence[Any]],
    ) -> None:
        from torch._functorch import aot_autograd
        from torch._functorch.partitioners import min_cut_rematerialization_partition

        self._compiling, self._differentiable = True, differentiable
        compiler = _inductor if backend == "inductor" else _as_recorded

        def forward(graph: fx.GraphModule, examples: Sequence[Any]) -> Compiled:
            check(graph)
            run = take(graph, examples, False, lambda: compiler(graph, examples, False))
            _tell_strides(run, examples)
            return self._boxed(run)

        def backward(graph: fx.GraphModule, examples: Sequence[Any]) -> Compiled:
            check(graph)
            return take(graph, examples, True, lambda: compiler(graph, examples, True))

        def partition(graph: fx.GraphModule, inputs: Any, **options: Any) -> Any:
            check_joint(graph)
            if backend == "inductor":
                from torch._inductor.fx_passes.joint_graph import joint_graph_passes

                joint_graph_passes(graph)
                options["compiler"] = "inductor"
            return min_cut_rematerialization_partition(graph, inputs, **options)

        with _backward_at_once():
            self._function = aot_autograd.aot_function(
                function,
                fw_compiler=forward,  # type: ignore[arg-type]
                bw_compiler=backward,  # type: ignore[arg-type]
                inference_compiler=forward,  # type: ignore[arg-type]
                partition_fn=partition,
                decompositions=_decompositions() if backend == "inductor" else None,
            )

    def _boxed(self, run: Compiled) -> Compiled:
        def boxed(values: list[Any]) -> Any:
            if self._compiling:
                raise _NotRun
            return run(values)

        boxed._boxed_call = True  # type: ignore[attr-defined]
        return boxed

    def compile(self, examples: Sequence[Tensor]) -> None:
        """Record and compile, and do not run."""
        from torch._inductor import config as inductor
        from torch.compiler import config as caches

        with (
            # operations round to their dtype as they do uncompiled, also where they are fused
            inductor.patch(fallback_random=True, emulate_precision_casts=True),
            caches.patch(cache_key_tag=caches.cache_key_tag + _CACHE_TAG),  # type: ignore[attr-defined]
            _in_this_process(),
            _reductions_in_one_dim(),
            _strides_told(),
            _nothing_donated(),
            _collectives_apart(),
            _recorded_gradients(self._differentiable),
            _without_saved_hooks(),
        ):
            with suppress(_NotRun):
                self._function(*examples)
        self._compiling = False

    def __call__(self, values: Sequence[Tensor]) -> Any:
        """The results; autograd records one node."""
        return self._function(*values)


def _decompositions() -> dict[Any, Any]:
    from torch._inductor.decomposition import select_decomp_table

    return select_decomp_table()


def _inductor(graph: fx.GraphModule, examples: Sequence[Any], backward: bool) -> Compiled:
    from torch._inductor.compile_fx import compile_fx_inner, record_original_output_strides

    _write_out_scattered(graph)
    record_original_output_strides(graph)
    output = next(node for node in graph.graph.nodes if node.op == "output")
    # results and gradients keep the strides that they were recorded with; what is saved for the backward pass may have others
    kept = range(len(output.args[0])) if backward else _places_of_results()  # type: ignore[arg-type]
    output.meta["user_visible_output_idxs"] = [n for n in kept if isinstance(output.args[0][n], fx.Node)]  # type: ignore[index]
    return compile_fx_inner(graph, examples, is_backward=backward)  # type: ignore[arg-type, return-value]


def _places_of_results() -> range:
    """Where a forward graph being compiled has the results of its function, among the tensors that are saved."""
    metadata: Any = torch._guards.TracingContext.get().fw_metadata
    first = metadata.num_mutated_inp_runtime_indices
    return range(first, first + metadata.num_outputs)


@contextmanager
def _strides_told() -> Iterator[None]:
    """Inside, the backward pass is compiled for the strides that the compiled forward pass gives to saved tensors."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with torch._guards.tracing(torch._guards.TracingContext(FakeTensorMode())):
        yield


def _tell_strides(run: Any, examples: Sequence[Any]) -> None:
    """Tell the strides of a compiled graph's results, which inductor does when it compiles one, for one that was there."""
    from torch._inductor.utils import set_tracing_context_output_strides

    told = torch._guards.TracingContext.get().output_strides
    if told is not None and not told and hasattr(run, "output_strides"):
        set_tracing_context_output_strides(examples, run)


def _write_out_scattered(graph: fx.GraphModule) -> None:
    """Let tensors that a part was written to be memory before they are reshaped.

    Else inductor computes where each element comes from, through all reshapes before it. A relative attention that is scaled in
    place (slice, reshape, slice, and back) has an expression for it that sympy does not simplify in an hour.
    """
    from torch._inductor import inductor_prims

    aten = torch.ops.aten
    scatters = (aten.slice_scatter.default, aten.select_scatter.default)
    reshapes = (aten.view.default, aten.reshape.default, aten._unsafe_view.default)
    for node in graph.graph.nodes:
        readers = [user for user in node.users if user.target in reshapes]
        if node.target not in scatters or not readers:
            continue
        value: Any = node.meta["val"]
        with graph.graph.inserting_after(node):
            written = graph.graph.call_function(
                inductor_prims.force_stride_order, (node, list(value.stride()))
            )
        written.meta["val"] = value
        for reader in readers:
            reader.replace_input_with(node, written)
    graph.recompile()


def _as_recorded(graph: fx.GraphModule, examples: Sequence[Any], backward: bool) -> Compiled:
    def run(values: list[Any]) -> Any:
        mine = list(values)
        values.clear()
        return graph(*mine)

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


@contextmanager
def _backward_at_once() -> Iterator[None]:
    """Inside, functions are made whose backward pass is compiled together with the forward; torch does it at its first run."""
    from torch._functorch import aot_autograd

    config: Any = aot_autograd.AOTConfig  # type: ignore[attr-defined]
    with _replaced(aot_autograd, "AOTConfig", partial(config, force_non_lazy_backward_lowering=True)):
        yield


@contextmanager
def _in_this_process() -> Iterator[None]:
    """Inside, one thread compiles at a time, and no other process does: what is replaced in torch is replaced for all threads."""
    from torch._inductor import compile_fx

    normal = compile_fx.FxCompileMode.NORMAL
    with (
        _ONE_AT_A_TIME,
        _replaced(compile_fx, "fx_compile_mode", normal),
        _replaced(compile_fx, "fx_compile_async", False),
        _replaced(compile_fx, "fx_compile_progressive", False),
    ):
        yield


@contextmanager
def _reductions_in_one_dim() -> Iterator[None]:
    """Inside, loops over CPU memory that reduce are vectorized in one dim.

    In two, torch 2.13 writes beyond the result where the dims are smaller than a vector, and sums what does not belong together:
    `where(mask, x, 0).sum(-1)` of a mask whose last dim is not the contiguous one ends the process, or is wrong.
    """
    from torch._inductor.codegen import cpp

    select = cpp.TilingSelect.select_tiling

    def select_tiling(self: Any, functions: Any, sizes: Any) -> Any:
        factors, dims, stats = select(self, functions, sizes)
        if len(dims) > 1 and any(reduced for _, reduced in sizes):
            factors, dims = factors[-1:], dims[-1:]
        return factors, dims, stats

    with _replaced(cpp.TilingSelect, "select_tiling", select_tiling):
        yield


@contextmanager
def _nothing_donated() -> Iterator[None]:
    """Inside, backward passes are compiled that keep what was saved: a user may run one again (retain_graph=True).

    torch's own switch, donated_buffer, is read once more when the pass runs, where it is that of the user.
    """
    from torch._functorch._aot_autograd import graph_compile

    with _replaced(graph_compile, "collect_bw_donated_buffer_idxs", lambda *args, **kwargs: []):
        yield


@contextmanager
def _collectives_apart() -> Iterator[None]:
    """Inside, equal collectives of one value stay several, as random operations do: a rank that runs uncompiled makes each."""
    from torch._functorch import compile_utils

    collectives = [getattr(torch.ops._c10d_functional, name) for name in _COLLECTIVES]
    with _replaced(compile_utils, "rand_ops", [*compile_utils.rand_ops, *collectives]):
        yield


@contextmanager
def _recorded_gradients(function: Callable[[Sequence[Any]], Sequence[Any]]) -> Iterator[None]:
    """Inside, functions are compiled that apply `function` to the gradients of a backward pass which autograd records."""
    from torch._functorch._aot_autograd import runtime_wrappers

    factory = runtime_wrappers._AOTDispatchAutogradFunctionFactory
    make = factory.build

    def build(self: Any) -> Any:
        made: Any = make(self)
        recorded = made._double_backward
        made._double_backward = staticmethod(lambda *args: function(recorded(*args)))
        return made

    with _replaced(factory, "build", build):
        yield


@contextmanager
def _replaced(module: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, before)


@contextmanager
def _without_saved_hooks() -> Iterator[None]:
    """Inside, no hooks see the tensors that autograd saves."""
    autograd: Any = torch._C._autograd
    taken = []
    while (pair := autograd._top_saved_tensors_default_hooks(True)) is not None:
        taken.append(pair)
        autograd._pop_saved_tensors_default_hooks()
    try:
        yield
    finally:
        for pack, unpack in reversed(taken):
            autograd._push_saved_tensors_default_hooks(pack, unpack)


def modes_are_on() -> bool:
    """Whether a mode of the caller has to see torch functions or operations."""
    core: Any = torch._C
    modes = [core._get_dispatch_stack_at(i) for i in range(core._len_torch_dispatch_stack())]
    return function_mode_is_on() or _has_to_see(modes)


def function_mode_is_on() -> bool:
    """Whether a mode of the caller has to see torch functions, such as that of a default device."""
    core: Any = torch._C
    return _has_to_see([core._get_function_stack_at(i) for i in range(core._len_torch_function_stack())])


def _has_to_see(modes: Sequence[Any]) -> bool:
    """Whether one of these modes has to see what a compiled region computes."""
    return not all(getattr(mode, "over_compiled_regions", False) for mode in modes)


def global_hooks() -> bool:
    """Whether hooks for all modules are registered."""
    return bool(
        _module._global_forward_hooks
        or _module._global_forward_pre_hooks
        or _module._global_backward_hooks
        or _module._global_backward_pre_hooks
    )


def is_random_or_constant(node: fx.Node) -> str | None:
    """What a node of a graph may not be: a random operation or a tensor that is no input; None of other nodes."""
    if node.op == "get_attr":
        return (
            f"it computes with a tensor, {node.target}, that is neither an argument, a parameter nor a buffer"
        )
    tags = getattr(node.target, "tags", ())
    if torch.Tag.nondeterministic_seeded in tags and _probability(node) != 0.0:
        return (
            f"it draws random numbers by {node.target}, which depend on values or are not drawn on the mesh"
        )
    return None


def _probability(node: fx.Node) -> Any:
    """With which probability an operation drops elements: an attention with 0.0 draws no random numbers."""
    names = [argument.name for argument in node.target._schema.arguments]  # type: ignore[union-attr]
    given = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
    return given.get("dropout_p", 0.0) if "dropout_p" in names else None


def collective_of(node: fx.Node) -> tuple[str, str, int] | None:
    """(operation, group, elements of the local input) of a collective in a graph; None of other nodes."""
    if node.op != "call_function" or getattr(node.target, "namespace", "") != "_c10d_functional":
        return None
    name = node.target._schema.name.partition("::")[2]  # type: ignore[union-attr]
    if name == "wait_tensor":
        return None
    value: Any = node.args[0]
    return name, str(node.args[-1]), value.meta["val"].numel()
