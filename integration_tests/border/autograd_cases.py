"""`torch.autograd`, `torch.amp` and `torch.func` on losses, activations and parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import amp, autograd, func
from torch.autograd import forward_ad, functional, graph

from .cases import Case
from .subjects import Subject

Use = Callable[[Subject], Any]


class Twice(autograd.Function):
    """A function of a user."""

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        return gradient * 2 + x * 0


class InHalf(autograd.Function):
    """A function of a user, for autocast."""

    @staticmethod
    @amp.custom_fwd(device_type="cpu", cast_inputs=torch.float32)  # type: ignore[untyped-decorator]
    def forward(ctx: Any, x: Any) -> Any:
        return x * 0.5

    @staticmethod
    @amp.custom_bwd(device_type="cpu")  # type: ignore[untyped-decorator]
    def backward(ctx: Any, gradient: Any) -> Any:  # type: ignore[override]
        return gradient * 0.5


def _weights(made: Subject) -> list[Any]:
    return list(made.model.parameters())


def _penalty(made: Subject) -> Any:
    gradients = autograd.grad(made.loss(), _weights(made), create_graph=True)
    total: Any = sum(g.square().sum() for g in gradients)
    total.backward()
    return total


def _in(context: Callable[[], Any], use: Use) -> Use:
    def run(made: Subject) -> Any:
        with context():
            return use(made)

    return run


def _trained(made: Subject) -> Any:
    loss = made.loss()
    loss.backward()
    return loss


def _multi_hook(made: Subject) -> Any:
    seen: list[Any] = []
    weights = [made.model.a.weight, made.model.b.weight]
    handle = graph.register_multi_grad_hook(weights, lambda gradients: seen.append(len(gradients)))
    made.loss().backward()
    handle.remove()
    return seen


def _hooked(names: tuple[str, ...]) -> Use:
    """Hooks of gradients that read, or double, one; of parameters of these layers."""

    def use(made: Subject) -> Any:
        seen: list[Any] = []

        def doubled(g: Any) -> Any:
            seen.append(g.norm())
            return g * 2

        for name in names:
            p = getattr(made.model, name).weight
            p.register_hook(doubled)
        made.loss().backward()
        return [float(x) for x in seen] if len(names) > 4 else None

    return use


def _other_stage(made: Subject) -> Any:
    first, last = made.model.a.weight, made.model.b.weight
    first.register_hook(lambda g: g * last.detach().norm())
    made.loss().backward()


def _scaled(made: Subject) -> Any:
    scaler = amp.GradScaler("cpu", init_scale=8.0)
    optimizer = torch.optim.SGD(made.model.parameters(), lr=0.1)
    optimizer.zero_grad()
    scaler.scale(made.loss()).backward()
    scaler.unscale_(optimizer)
    norm = torch.nn.utils.clip_grad_norm_(made.model.parameters(), 0.1)
    scaler.step(optimizer)
    scaler.update()
    return norm, scaler.get_scale()


def _autocast(made: Subject) -> Any:
    with amp.autocast("cpu", dtype=torch.bfloat16):
        out = made.activation()
        extra = made.model.b.weight @ made.model.a.weight
    out.float().square().mean().backward()
    return out.dtype, extra.dtype


def _dual(made: Subject) -> Any:
    with forward_ad.dual_level():
        x = made.model.b.weight.detach()
        dual = forward_ad.make_dual(x, torch.ones(8, 12))
        return forward_ad.unpack_dual(dual.sin()).tangent


def _anomaly(made: Subject) -> Any:
    with autograd.detect_anomaly(check_nan=True):
        return _trained(made)


def _saved(made: Subject) -> Any:
    count: list[int] = []

    def pack(x: Any) -> Any:
        count.append(1)
        return x

    with graph.saved_tensors_hooks(pack, lambda x: x):
        y = (made.model.b.weight * 2).sin()
    y.sum().backward()
    return len(count) > 0


def _disabled(made: Subject) -> Any:
    with graph.disable_saved_tensors_hooks("not here"):
        return _trained(made)


def _profiled(made: Subject) -> Any:
    with autograd.profiler.profile() as recorded:
        with autograd.profiler.record_function("mine"):
            loss = _trained(made)
    return loss, any(event.name == "mine" for event in recorded.function_events)


def _functional(name: str, *more: Any) -> Use:
    def use(made: Subject) -> Any:
        w = made.model.b.weight.detach()[0, :3]
        f = (lambda x: x.sin()) if name in ("vjp", "jvp", "jacobian") else (lambda x: x.sin().sum())
        return getattr(functional, name)(f, w, *more)

    return use


def _func(name: str, *more: Any) -> Use:
    def use(made: Subject) -> Any:
        w = made.model.b.weight.detach()
        transformed = getattr(func, name)(lambda x: x.sin().sum())
        return transformed(w, *more)

    return use


def _checked(made: Subject) -> Any:
    x = made.model.b.weight.detach()[:2, :2].double().requires_grad_()
    return autograd.gradcheck(lambda y: y.sin(), (x,))


def _weights_by_name(made: Subject) -> dict[str, Any]:
    return {name: p.detach() * 0.5 for name, p in made.model.named_parameters()}


def _called_with_gradient(made: Subject) -> Any:
    weights = {name: p * 0.5 for name, p in made.model.named_parameters()}
    out = func.functional_call(made.model, weights, (made.ids,))
    out.square().mean().backward()
    return out


AUTOGRAD: dict[str, list[Use]] = {
    "Function": [
        lambda s: Twice.apply(s.activation()).sum().backward(),
        lambda s: Twice.apply(s.model.b.weight).sum().backward(),
    ],
    "backward": [
        lambda s: autograd.backward(s.loss()),
        lambda s: autograd.backward([s.loss()], [torch.tensor(2.0)]),
        lambda s: autograd.backward(s.model.b.weight.square().sum()),
        lambda s: autograd.backward(s.loss(), inputs=[s.model.b.weight]),
    ],
    "detect_anomaly": [_anomaly],
    "enable_grad": [_in(torch.no_grad, _in(autograd.enable_grad, _trained))],
    "enforce_grad_layout_policy": [],
    "grad": [
        lambda s: autograd.grad(s.loss(), _weights(s)),
        lambda s: autograd.grad(s.loss(), s.model.b.weight)[0].norm(),
        lambda s: autograd.grad(
            s.model.b.weight.sin().sum(), [s.model.a.weight, s.model.b.weight], allow_unused=True
        ),
        lambda s: autograd.grad(s.model.b.weight.sin(), s.model.b.weight, torch.ones(8, 12)),
        lambda s: autograd.grad(s.model.b.weight.sin().sum(), s.model.a.weight),
        _penalty,
    ],
    "gradcheck": [_checked],
    "gradgradcheck": [],
    "inference_mode": [
        _in(autograd.inference_mode, lambda s: s.activation() * 2),
        _in(autograd.inference_mode, lambda s: s.model.b.weight * 2),
    ],
    "no_grad": [_in(autograd.no_grad, lambda s: s.activation() * 2)],
    "set_detect_anomaly": [_in(lambda: autograd.set_detect_anomaly(True), _trained)],
    "set_grad_enabled": [_in(lambda: autograd.set_grad_enabled(False), lambda s: s.activation() * 2)],
    "set_multithreading_enabled": [_in(lambda: autograd.set_multithreading_enabled(False), _trained)],
    "Variable": [lambda s: autograd.Variable(s.model.b.weight), lambda s: autograd.Variable(s.activation())],
    "functional.vjp": [_functional("vjp", torch.ones(3))],
    "functional.jvp": [_functional("jvp", torch.ones(3))],
    "functional.jacobian": [_functional("jacobian")],
    "functional.hessian": [_functional("hessian")],
    "functional.hvp": [_functional("hvp", torch.ones(3))],
    "functional.vhp": [_functional("vhp", torch.ones(3))],
    "forward_ad.dual_level": [_dual],
    "forward_ad.make_dual": [_dual],
    "forward_ad.unpack_dual": [_dual],
    "graph.saved_tensors_hooks": [
        _saved,
        _in(lambda: graph.saved_tensors_hooks(lambda x: x.clone(), lambda x: x), _trained),
    ],
    "graph.save_on_cpu": [_in(graph.save_on_cpu, _trained)],
    "graph.disable_saved_tensors_hooks": [_disabled],
    "graph.register_multi_grad_hook": [_multi_hook],
    "graph.allow_mutation_on_saved_tensors": [_in(graph.allow_mutation_on_saved_tensors, _trained)],
    "graph.Node": [lambda s: type(s.loss().grad_fn).__name__ != ""],
    "graph.get_gradient_edge": [
        lambda s: autograd.grad(s.model.b.weight.sin().sum(), graph.get_gradient_edge(s.model.b.weight))
    ],
    "graph.increment_version": [lambda s: graph.increment_version(s.model.b.weight)],
    "hooks": [_hooked(("b",)), _hooked(("emb", "a", "b", "c")), _other_stage],
    "profiler.profile": [_profiled],
    "profiler.record_function": [_profiled],
}

AMP: dict[str, list[Use]] = {
    "GradScaler": [_scaled],
    "autocast": [_autocast],
    "custom_bwd": [lambda s: InHalf.apply(s.activation()).sum().backward()],
    "custom_fwd": [lambda s: InHalf.apply(s.activation()).sum().backward()],
    "is_autocast_available": [lambda s: amp.is_autocast_available("cpu")],
}

FUNC: dict[str, list[Use]] = {
    "functional_call": [
        lambda s: func.functional_call(s.model, _weights_by_name(s), (s.ids,)),
        lambda s: func.functional_call(s.model, {"b.bias": torch.ones(8)}, (s.ids,)),
        lambda s: func.functional_call(s.model.b, {"bias": torch.ones(8)}, (torch.ones(2, 12),)),
        _called_with_gradient,
    ],
    "grad": [_func("grad")],
    "grad_and_value": [_func("grad_and_value")],
    "hessian": [_func("hessian")],
    "jacfwd": [_func("jacfwd")],
    "jacrev": [_func("jacrev")],
    "functionalize": [_func("functionalize")],
    "vmap": [_func("vmap")],
    "vjp": [lambda s: func.vjp(torch.sin, s.model.b.weight.detach())[0]],
    "jvp": [lambda s: func.jvp(torch.sin, (s.model.b.weight.detach(),), (torch.ones(8, 12),))],
    "linearize": [lambda s: func.linearize(torch.sin, s.model.b.weight.detach())[0]],
    "replace_all_batch_norm_modules_": [lambda s: func.replace_all_batch_norm_modules_(s.model) and None],
    "stack_module_state": [lambda s: func.stack_module_state([s.model.b, s.model.b])],
}


def names() -> list[str]:
    """The public names of these modules that do something with a tensor."""
    functions = [
        name for name in dir(autograd) if not name.startswith("_") and callable(getattr(autograd, name))
    ]
    helpers = frozenset(
        "DeviceType Mapping NestedIOFunction ProfilerActivity ProfilerConfig ProfilerEvent ProfilerState SavedTensor Sequence cast "
        "handle_torch_function has_torch_function is_multithreading_enabled is_tensor_like is_view_replay_enabled "
        "kineto_available overload".split()
    )
    public = [name for name in functions if name not in helpers]
    for prefix, module in (("functional", functional), ("forward_ad", forward_ad), ("graph", graph)):
        public += [f"{prefix}.{name}" for name in module.__all__]
    told = [f"autograd.{name}" for name in public]
    told += [f"amp.{name}" for name in dir(amp) if not name.startswith("_") and callable(getattr(amp, name))]
    return told + [f"func.{name}" for name in func.__all__]


def autograd_cases() -> Iterator[Case]:
    """With a step of training after those of a whole pass."""
    for area, uses in (("autograd", AUTOGRAD), ("amp", AMP), ("func", FUNC)):
        for name, several in uses.items():
            for i, use in enumerate(several):
                yield Case(f"torch.{area}", f"{area}.{name}", str(i + 1), use, "bare", trains=area != "func")
