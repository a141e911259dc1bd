"""Every public method of `torch.nn.Module`, on the parallel model and on a layer of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from .cases import Case
from .subjects import Subject

AREA = "torch.nn.Module"
Use = Callable[[Any, Subject], Any]


def _hooked(register: str) -> Use:
    """The numbers that a hook of a module sees in a step."""

    def use(module: Any, made: Subject) -> Any:
        seen: list[Any] = []

        def hook(_: Any, *values: Any) -> None:
            seen.extend(
                x
                for value in values
                for x in (value if isinstance(value, tuple) else (value,))
                if isinstance(x, Tensor)
            )

        handle = getattr(module, register)(hook)
        made.loss().backward()
        handle.remove()
        # in a pipeline they run in a step, on microbatches and where the stage is: docs/pipeline.md
        whole = module is made.model and made.plan != "pp2"
        return [x.detach() for x in seen] if whole else None

    return use


def _state_hook(register: str) -> Use:
    def use(module: Any, made: Subject) -> Any:
        calls: list[int] = []
        handle = getattr(module, register)(lambda *_: calls.append(1))
        module.load_state_dict(module.state_dict())
        handle.remove()
        return len(calls)

    return use


def _halved(module: Any, made: Subject) -> Any:
    with torch.no_grad():
        module.load_state_dict({key: value * 0.5 for key, value in module.state_dict().items()})


def _initialised(module: Any, made: Subject) -> Any:
    def initialise(layer: nn.Module) -> None:
        if isinstance(layer, nn.Linear):
            nn.init.xavier_uniform_(layer.weight)
            nn.init.zeros_(layer.bias)

    module.apply(initialise)
    return torch.rand(2)


USES: dict[str, list[Use]] = {
    "T_destination": [lambda m, s: m.T_destination],
    "add_module": [lambda m, s: m.add_module("extra", nn.ReLU())],
    "apply": [_initialised],
    "bfloat16": [lambda m, s: m.bfloat16()],
    "buffers": [lambda m, s: list(m.buffers())],
    "call_super_init": [lambda m, s: m.call_super_init],
    "children": [lambda m, s: [type(x).__name__ for x in m.children()]],
    "compile": [lambda m, s: m.compile(backend="eager")],
    "cpu": [lambda m, s: m.cpu()],
    "double": [lambda m, s: m.double()],
    "dump_patches": [lambda m, s: m.dump_patches],
    "eval": [lambda m, s: m.eval()],
    "extra_repr": [lambda m, s: m.extra_repr()],
    "float": [lambda m, s: m.float()],
    "forward": [lambda m, s: m.forward(s.ids) if m is s.model else None],
    "get_buffer": [lambda m, s: s.model.get_buffer("c.scale"), lambda m, s: m.get_buffer("nothing")],
    "get_extra_state": [lambda m, s: m.get_extra_state()],
    "get_parameter": [
        lambda m, s: s.model.get_parameter("b.weight"),
        lambda m, s: m.get_parameter("nothing"),
    ],
    "get_submodule": [lambda m, s: s.model.get_submodule("b"), lambda m, s: m.get_submodule("nothing")],
    "half": [lambda m, s: m.half()],
    "load_state_dict": [
        _halved,
        lambda m, s: m.load_state_dict({}),
        lambda m, s: m.load_state_dict({}, strict=False),
        lambda m, s: m.load_state_dict(
            {k: torch.full(tuple(v.shape), 0.01) for k, v in m.state_dict().items()}
        ),
        lambda m, s: m.load_state_dict({k: torch.ones(3) for k in m.state_dict()}),
        lambda m, s: m.load_state_dict(
            {k: torch.full(tuple(v.shape), 0.01) for k, v in m.state_dict().items()}, assign=True
        ),
    ],
    "modules": [lambda m, s: [type(x).__name__ for x in m.modules()]],
    "named_buffers": [lambda m, s: dict(m.named_buffers())],
    "named_children": [lambda m, s: [name for name, _ in m.named_children()]],
    "named_modules": [lambda m, s: [name for name, _ in m.named_modules()]],
    "named_parameters": [
        lambda m, s: dict(m.named_parameters()),
        lambda m, s: dict(m.named_parameters("a", recurse=False)),
    ],
    "parameters": [lambda m, s: list(m.parameters())],
    "register_backward_hook": [_hooked("register_backward_hook")],
    "register_buffer": [
        lambda m, s: m.register_buffer("more", torch.ones(3)),
        lambda m, s: s.model.c.register_buffer("scale", torch.ones(8)),
    ],
    "register_forward_hook": [_hooked("register_forward_hook")],
    "register_forward_pre_hook": [_hooked("register_forward_pre_hook")],
    "register_full_backward_hook": [_hooked("register_full_backward_hook")],
    "register_full_backward_pre_hook": [_hooked("register_full_backward_pre_hook")],
    "register_load_state_dict_post_hook": [_state_hook("register_load_state_dict_post_hook")],
    "register_load_state_dict_pre_hook": [_state_hook("register_load_state_dict_pre_hook")],
    "register_module": [lambda m, s: m.register_module("extra", nn.ReLU())],
    "register_parameter": [
        lambda m, s: m.register_parameter("more", nn.Parameter(torch.ones(3))),
        lambda m, s: m.register_parameter("nothing", None),
    ],
    "register_state_dict_post_hook": [_state_hook("register_state_dict_post_hook")],
    "register_state_dict_pre_hook": [_state_hook("register_state_dict_pre_hook")],
    "requires_grad_": [lambda m, s: m.requires_grad_(False), lambda m, s: m.requires_grad_()],
    "set_extra_state": [lambda m, s: m.set_extra_state({})],
    "set_submodule": [
        lambda m, s: s.model.set_submodule("b", nn.Linear(12, 8)),
        lambda m, s: s.model.set_submodule("b", s.model.b),
    ],
    "share_memory": [lambda m, s: m.share_memory()],
    "state_dict": [
        lambda m, s: m.state_dict(),
        lambda m, s: m.state_dict(prefix="x.", keep_vars=True),
        lambda m, s: {k: v.cpu() for k, v in m.state_dict().items()},
    ],
    "to": [
        lambda m, s: m.to(torch.float64),
        lambda m, s: m.to("cpu"),
        lambda m, s: m.to(torch.bfloat16),
        lambda m, s: m.to(torch.ones(1, dtype=torch.float64)),
        lambda m, s: m.to("meta"),
    ],
    # its tensors are not initialised
    "to_empty": [
        lambda m, s: [
            m.to_empty(device="cpu"),
            m.load_state_dict({k: torch.ones(v.shape) for k, v in m.state_dict().items()}),
        ]
    ],
    "train": [lambda m, s: m.train(), lambda m, s: m.train(False)],
    "type": [lambda m, s: m.type(torch.float64)],
    "zero_grad": [lambda m, s: m.zero_grad(), lambda m, s: m.zero_grad(set_to_none=False)],
    "__call__": [lambda m, s: s.model(s.ids), lambda m, s: s.model(s.ids[:2]), lambda m, s: s.model()],
    "__dir__": [
        lambda m, s: sorted({name for name in dir(s.model.b) if name in ("weight", "bias", "forward")})
    ],
    "__getattr__": [lambda m, s: s.model.b.weight, lambda m, s: s.model.b.nothing],
    "__setattr__": [
        lambda m, s: setattr(s.model.c, "scale", torch.ones(8)),
        lambda m, s: setattr(s.model.c, "scale", s.model.c.scale * 0.5),
        lambda m, s: setattr(s.model.c, "scale", None),
        lambda m, s: setattr(s.model.b, "bias", None),
        lambda m, s: setattr(s.model.b, "bias", nn.Parameter(torch.ones(8))),
        lambda m, s: setattr(s.model.b, "bias", nn.Parameter(s.model.b.bias * 0.5)),
        lambda m, s: setattr(s.model.b, "bias", torch.ones(8)),
        lambda m, s: setattr(s.model.b, "weight", s.model.b.weight),
        lambda m, s: setattr(s.model.b, "note", 3),
        lambda m, s: setattr(s.model, "b", nn.Linear(12, 8)),
        lambda m, s: setattr(s.model.b, "weight", nn.Parameter(s.model.a.weight.detach().T.clone())),
        lambda m, s: setattr(s.model.b, "forward", s.model.b.forward),
    ],
    "__delattr__": [lambda m, s: delattr(s.model.b, "bias"), lambda m, s: delattr(s.model.c, "scale")],
    "__repr__": [lambda m, s: len(repr(m)) > 0],
    "__deepcopy__": [lambda m, s: list(__import__("copy").deepcopy(m).parameters())],
    "__reduce_ex__": [lambda m, s: type(m.__reduce_ex__(2)).__name__],
}


def names() -> list[str]:
    """The public attributes of a module."""
    return [name for name in dir(nn.Module) if not name.startswith("_")]


def module_cases() -> Iterator[Case]:
    """On the model and on one layer; with a step of training after it."""
    for name, uses in USES.items():
        for on in ("model", "b"):
            for i, use in enumerate(uses):
                yield Case(AREA, f"Module.{name}", f"{on} {i + 1}", _on(on, use), "backward", trains=True)


def _on(on: str, use: Use) -> Callable[[Subject], Any]:
    def run(made: Subject) -> Any:
        result = use(made.model if on == "model" else made.model.b, made)
        return None if isinstance(result, nn.Module) else result

    return run
