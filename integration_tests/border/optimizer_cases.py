"""Every optimizer, scheduler and average of weights of `torch.optim`."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import optim
from torch.optim import lr_scheduler, swa_utils

from .cases import Case
from .subjects import Subject

AREA = "torch.optim"
Use = Callable[[Subject], Any]

OPTIONS: dict[str, list[dict[str, Any]]] = {
    "Adafactor": [{}, {"foreach": False}],
    "Adadelta": [{}, {"foreach": True, "weight_decay": 0.1}],
    "Adagrad": [{}, {"lr_decay": 0.1, "foreach": True}, {"fused": True}],
    "Adam": [{}, {"amsgrad": True, "foreach": True}, {"fused": True}, {"maximize": True}],
    "AdamW": [{}, {"foreach": False}, {"fused": True}],
    "Adamax": [{}, {"foreach": True}],
    "ASGD": [{}, {"foreach": True}],
    "LBFGS": [{"max_iter": 3}, {"max_iter": 3, "line_search_fn": "strong_wolfe"}],
    "Muon": [{"matrices": True}],
    "NAdam": [{}, {"decoupled_weight_decay": True, "foreach": True}],
    "RAdam": [{}, {"foreach": True}],
    "RMSprop": [{}, {"centered": True, "momentum": 0.5, "foreach": True}],
    "Rprop": [{}, {"foreach": True}],
    "SGD": [
        {"lr": 0.1},
        {"lr": 0.1, "momentum": 0.9, "nesterov": True},
        {"lr": 0.1, "fused": True},
        {"lr": 0.1, "foreach": True},
    ],
    "SparseAdam": [{}],
}


def _trained(name: str, options: dict[str, Any]) -> Use:
    """Two steps; then the state goes through a state dict, and one more step."""

    def use(made: Subject) -> Any:
        given = dict(options)
        parameters = list(made.model.parameters())
        if given.pop("matrices", False):
            parameters = [p for p in parameters if p.dim() == 2]
        kind: Any = getattr(optim, name)
        optimizer = kind(parameters, **given)

        def closure() -> Any:
            optimizer.zero_grad()
            loss = made.loss()
            loss.backward()
            return loss

        losses = [optimizer.step(closure).detach() for _ in range(2)]
        fresh = kind(parameters, **given)
        fresh.load_state_dict(optimizer.state_dict())
        optimizer = fresh
        return [*losses, optimizer.step(closure).detach()]

    return use


def _sgd(made: Subject, **options: Any) -> Any:
    return optim.SGD(made.model.parameters(), **{"lr": 0.1, "momentum": 0.9, **options})


def _scheduled(make: Callable[[Any], Any], metric: bool = False) -> Use:
    """Rates and parameters over four steps."""

    def use(made: Subject) -> Any:
        optimizer = _sgd(made)
        scheduler = make(optimizer)
        rates = []
        for _ in range(4):
            optimizer.zero_grad()
            loss = made.loss()
            loss.backward()
            optimizer.step()
            scheduler.step(*([loss] if metric else []))
            rates.append(float(optimizer.param_groups[0]["lr"]))
        saved = scheduler.state_dict()
        scheduler.load_state_dict(saved)
        return rates, {k: v for k, v in saved.items() if isinstance(v, (int, float))}

    return use


def _chain(kind: Any, **options: Any) -> Callable[[Any], Any]:
    def make(optimizer: Any) -> Any:
        parts = [lr_scheduler.ConstantLR(optimizer, 0.5, 2), lr_scheduler.ExponentialLR(optimizer, 0.9)]
        return kind(optimizer, parts, **options) if options else kind(parts, optimizer)

    return make


SCHEDULERS: dict[str, list[Use]] = {
    "LambdaLR": [_scheduled(lambda o: lr_scheduler.LambdaLR(o, lambda step: 0.9**step))],
    "MultiplicativeLR": [_scheduled(lambda o: lr_scheduler.MultiplicativeLR(o, lambda step: 0.9))],
    "StepLR": [_scheduled(lambda o: lr_scheduler.StepLR(o, 2))],
    "MultiStepLR": [_scheduled(lambda o: lr_scheduler.MultiStepLR(o, [1, 3]))],
    "ConstantLR": [_scheduled(lambda o: lr_scheduler.ConstantLR(o))],
    "LinearLR": [_scheduled(lambda o: lr_scheduler.LinearLR(o))],
    "ExponentialLR": [_scheduled(lambda o: lr_scheduler.ExponentialLR(o, 0.9))],
    "SequentialLR": [_scheduled(_chain(lr_scheduler.SequentialLR, milestones=[2]))],
    "CosineAnnealingLR": [_scheduled(lambda o: lr_scheduler.CosineAnnealingLR(o, 4))],
    "ChainedScheduler": [_scheduled(_chain(lr_scheduler.ChainedScheduler))],
    "ReduceLROnPlateau": [_scheduled(lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0), metric=True)],
    "CyclicLR": [_scheduled(lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1))],
    "CosineAnnealingWarmRestarts": [_scheduled(lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 2))],
    "OneCycleLR": [_scheduled(lambda o: lr_scheduler.OneCycleLR(o, 0.1, 10))],
    "PolynomialLR": [_scheduled(lambda o: lr_scheduler.PolynomialLR(o, 4))],
    "LRScheduler": [lambda s: lr_scheduler.LRScheduler.__name__],
}


def _averaged(*, buffers: bool = False, **options: Any) -> Use:
    """An average of weights over three steps, and its output."""

    def use(made: Subject) -> Any:
        averaged = swa_utils.AveragedModel(made.model, use_buffers=buffers, **options)
        for _ in range(3):
            made.step()
            averaged.update_parameters(made.model)
        return list(averaged.module.parameters()), averaged(made.ids), averaged.n_averaged

    return use


def _by_function(function: Callable[..., Any], multi: bool) -> Use:
    def use(made: Subject) -> Any:
        now = [p.detach() for p in made.model.parameters()]
        averages = [p.clone() for p in now]
        made.step()
        if multi:
            function(averages, now, torch.tensor(2))
            return averages
        return [function(a, p, torch.tensor(2)) for a, p in zip(averages, now, strict=True)]

    return use


AVERAGES: dict[str, list[Use]] = {
    "AveragedModel": [
        _averaged(),
        _averaged(buffers=True),
        _averaged(multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.9)),
        _averaged(avg_fn=swa_utils.get_ema_avg_fn(0.9)),
    ],
    "update_bn": [lambda s: swa_utils.update_bn([s.ids], s.model)],
    "SWALR": [_scheduled(lambda o: swa_utils.SWALR(o, 0.01, 2))],
    "get_ema_multi_avg_fn": [_by_function(swa_utils.get_ema_multi_avg_fn(0.9), True)],
    "get_swa_multi_avg_fn": [_by_function(swa_utils.get_swa_multi_avg_fn(), True)],
    "get_ema_avg_fn": [_by_function(swa_utils.get_ema_avg_fn(0.9), False)],
    "get_swa_avg_fn": [_by_function(swa_utils.get_swa_avg_fn(), False)],
}


def _hook(register: str, call: Callable[[Any, Subject], Any]) -> Use:
    def use(made: Subject) -> Any:
        calls: list[int] = []
        getattr(made.optimizer, register)(lambda *_: calls.append(1))
        call(made.optimizer, made)
        return len(calls)

    return use


def _reload(optimizer: Any, made: Subject) -> None:
    optimizer.load_state_dict(optimizer.state_dict())


def _two_groups(made: Subject) -> Any:
    optimizer = optim.SGD(made.model.a.parameters(), lr=0.1)
    optimizer.add_param_group({"params": list(made.model.b.parameters()), "lr": 0.01})
    made.loss().backward()
    optimizer.step()
    return len(optimizer.param_groups)


def _doubled_states(made: Subject) -> None:
    for p in made.model.parameters():
        made.optimizer.state[p]["exp_avg"].mul_(2)
    made.optimizer.step()


def _swapped(made: Subject) -> Any:
    other = copy.deepcopy(made.optimizer)
    return optim.swap_in_optimizer_params_and_state(made.optimizer, other.param_groups, other.state)  # type: ignore[attr-defined]


METHODS: dict[str, list[Use]] = {
    "add_param_group": [_two_groups],
    "load_state_dict": [
        lambda s: s.optimizer.load_state_dict(s.optimizer.state_dict()),
        lambda s: s.optimizer.load_state_dict(copy.deepcopy(s.optimizer.state_dict())),
        lambda s: s.optimizer.load_state_dict({}),
    ],
    "profile_hook_step": [lambda s: s.optimizer.profile_hook_step(lambda o: 3)(s.optimizer)],
    "register_load_state_dict_post_hook": [_hook("register_load_state_dict_post_hook", _reload)],
    "register_load_state_dict_pre_hook": [_hook("register_load_state_dict_pre_hook", _reload)],
    "register_state_dict_post_hook": [_hook("register_state_dict_post_hook", lambda o, s: o.state_dict())],
    "register_state_dict_pre_hook": [_hook("register_state_dict_pre_hook", lambda o, s: o.state_dict())],
    "register_step_post_hook": [_hook("register_step_post_hook", lambda o, s: o.step())],
    "register_step_pre_hook": [_hook("register_step_pre_hook", lambda o, s: o.step())],
    "state": [lambda s: [s.optimizer.state[p]["exp_avg"] for p in s.model.parameters()], _doubled_states],
    "state_dict": [lambda s: s.optimizer.state_dict()],
    "step": [lambda s: s.optimizer.step(), lambda s: [s.optimizer.zero_grad(), s.optimizer.step(s.loss)]],
    "zero_grad": [lambda s: s.optimizer.zero_grad(), lambda s: s.optimizer.zero_grad(set_to_none=False)],
    "OptimizerPostHook": [lambda s: True],
    "OptimizerPreHook": [lambda s: True],
}


def names() -> list[str]:
    """The public classes and functions, and the methods of an optimizer."""
    public = [name for name in optim.__all__ if name not in ("lr_scheduler", "swa_utils", "Optimizer")]
    public += [f"lr_scheduler.{name}" for name in lr_scheduler.__all__]
    public += [f"swa_utils.{name}" for name in swa_utils.__all__]
    return [*public, *(f"Optimizer.{name}" for name in dir(optim.Optimizer) if not name.startswith("_"))]


def optimizer_cases() -> Iterator[Case]:
    """With gradients there, and AdamW's states for the methods of an optimizer."""
    for name, options in OPTIONS.items():
        for i, given in enumerate(options):
            yield Case(AREA, f"optim.{name}", str(i + 1), _trained(name, given), "backward")
    yield Case(AREA, "optim.swap_in_optimizer_params_and_state", "1", _swapped, "optimizer")
    for prefix, uses in (("lr_scheduler", SCHEDULERS), ("swa_utils", AVERAGES), ("Optimizer", METHODS)):
        for name, several in uses.items():
            for i, use in enumerate(several):
                setup = "optimizer" if prefix == "Optimizer" else "backward"
                yield Case(AREA, f"optim.{prefix}.{name}", str(i + 1), use, setup, trains=True)
