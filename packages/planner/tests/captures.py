"""Every way in which torch captures a graph, found by looking through its modules, and made to raise."""

from __future__ import annotations

import importlib
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

PACKAGES = (
    "torch.fx", "torch._dynamo", "torch.export", "torch._export", "torch.jit", "torch._functorch", "torch._inductor",
    "torch.compiler", "torch.onnx",
)  # fmt: skip
"""Where capture lives; its functions are replaced wherever in torch they are bound."""

LOADED = (
    "torch._dynamo.convert_frame", "torch._dynamo.eval_frame", "torch._export", "torch._functorch.aot_autograd",
    "torch._functorch.compilers", "torch._inductor.compile_fx", "torch.export._trace", "torch.fx.experimental.proxy_tensor",
    "torch.jit", "torch.onnx",
)  # fmt: skip

NAMED = re.compile(
    r"_?(symbolic_trace|make_fx|dispatch_trace|get_isolated_graphmodule|trace|trace_module|script|script_method"
    r"|compile|compile_fx\w*|optimize|optimize_assert|export|export_for_\w+|draft_export|explain|convert_frame\w*"
    r"|aot_(function|module|module_simplified|compile\w*|export\w*)|aoti_compile_and_package|memory_efficient_fusion|ts_compile)"
)
"""Names of what captures, public or not."""

MARKS = {("torch._jit_internal", "export")}
"""Decorators of such a name that only mark a method."""

FIRST = (
    "torch.compile", "torch.compiler.compile", "torch.fx.symbolic_trace", "torch.fx.experimental.proxy_tensor.make_fx",
    "torch._dynamo.optimize", "torch._dynamo.optimize_assert", "torch._dynamo.export", "torch._dynamo.explain",
    "torch._dynamo.convert_frame.convert_frame", "torch._dynamo.convert_frame.convert_frame_assert", "torch.export.export",
    "torch.export.draft_export", "torch.jit.trace", "torch.jit.trace_module", "torch.jit.script", "torch.onnx.export",
    "torch._functorch.aot_autograd.aot_function", "torch._functorch.aot_autograd.aot_module",
    "torch._functorch.aot_autograd.aot_module_simplified", "torch._functorch.aot_autograd.aot_export_module",
    "torch._inductor.compile", "torch._inductor.compile_fx.compile_fx",
)  # fmt: skip
"""Those that must be found, lest the search through the modules go blind."""


class Captured(AssertionError):
    """A graph was captured."""


def _refuse(*args: Any, **kwargs: Any) -> Any:
    raise Captured("a graph was captured")


def entry_points() -> dict[str, Callable[..., Any]]:
    """Full name -> function, of all that captures; one function under each name that it is bound to in torch."""
    with warnings.catch_warnings():  # torch deprecates parts of itself as it imports them
        warnings.simplefilter("ignore")
        for name in LOADED:
            importlib.import_module(name)
    modules = {n: m for n, m in list(sys.modules.items()) if m is not None and n.partition(".")[0] == "torch"}
    allowed = {
        id(value)
        for module in modules.values()
        for name, value in list(vars(module).items())
        if NAMED.fullmatch(name) and callable(value) and not isinstance(value, type) and _captures(value)
    }
    return {
        f"{where}.{name}": value
        for where, module in modules.items()
        for name, value in list(vars(module).items())
        if id(value) in allowed
    }


def _captures(value: Any) -> bool:
    home = getattr(value, "__module__", None) or ""
    inside = home == "torch" or any(home == p or home.startswith(f"{p}.") for p in PACKAGES)
    return inside and (home, getattr(value, "__name__", "")) not in MARKS and value is not torch.trace


def tracers(kind: type = torch.fx.Tracer) -> Iterator[type]:
    """torch.fx.Tracer and every class that follows it."""
    yield kind
    for below in kind.__subclasses__():
        yield from tracers(below)


@contextmanager
def refused() -> Iterator[dict[str, Callable[..., Any]]]:
    """Inside, whatever captures raises; so does making an FX graph or a TorchScript one in any other way. Yields what was found."""
    with pytest.MonkeyPatch.context() as patch:
        entries = entry_points()
        for name in entries:
            where, _, attribute = name.rpartition(".")
            patch.setattr(sys.modules[where], attribute, _refuse)
        for tracer in tracers():
            if "trace" in vars(tracer):
                patch.setattr(tracer, "trace", _refuse)
        for owner, attribute in (
            (torch.fx.Graph, "__init__"),
            (torch.fx.GraphModule, "__init__"),
            (torch._C, "_create_graph_by_tracing"),
            (torch._C, "_jit_script_compile"),
            (torch._C._dynamo.eval_frame, "set_eval_frame"),
        ):
            patch.setattr(owner, attribute, _refuse)
        yield entries
