"""Refuses that another tool makes a parallel model parallel: it would take this rank's parts for whole parameters."""

from __future__ import annotations

from typing import Any, NoReturn

from torch import nn

from meshwright_dtensor._torch.core import FSDP_ATTRIBUTE, wrapped_attributes
from meshwright_dtensor.errors import UnsupportedError

PREPARED = "_is_accelerate_prepared"
"""The attribute of a model that accelerate's Accelerator reads before it prepares the model."""


def refuse_wrapping(model: nn.Module) -> None:
    """Make DistributedDataParallel, FSDP, fully_shard, replicate, parallelize_module and accelerate's Accelerator raise
    UnsupportedError for the model and its modules."""
    states, *others = wrapped_attributes()
    for module in model.modules():
        # those of activation checkpointing
        module.__dict__[states] = _Refusal(module.__dict__.get(states, {}))
        module.__dict__.update((name, _Refusal()) for name in (*others, PREPARED))
    for parameter in model.parameters():
        setattr(parameter, FSDP_ATTRIBUTE, _Refusal())


def allow_preparing(model: nn.Module) -> None:
    """Let an Accelerator that does not divide the model prepare it."""
    if isinstance(model.__dict__.get(PREPARED), _Refusal):
        model.__dict__[PREPARED] = False


def is_parallel(model: nn.Module) -> bool:
    """Whether any part of the model is parallel."""
    states = wrapped_attributes()[0]
    return any(isinstance(module.__dict__.get(states), _Refusal) for module in model.modules())


def _refuse(*_: Any) -> NoReturn:
    raise UnsupportedError(
        "DistributedDataParallel, FSDP, fully_shard, parallelize_module or a framework that calls one of them was given a "
        "parallel model, which its plan has distributed already: leave that call out, and write the loop as for one device "
        "(mw.plan(model, batch, dp=2, zero=3), for example, chooses data parallel with ZeRO); with accelerate, import "
        "Accelerator from meshwright.integrations.accelerate; with transformers, Trainer from meshwright.integrations.transformers"
        "; with Lightning, MeshwrightStrategy from meshwright.integrations.lightning"
    )


class _Refusal(dict[Any, Any]):
    """What raises where these tools read it; some of them want a dict."""

    def __contains__(self, tool: object) -> bool:
        # composable activation checkpointing works
        if getattr(tool, "__name__", "") != "checkpoint":
            _refuse()
        return super().__contains__(tool)

    __iter__ = __bool__ = _refuse  # type: ignore[assignment]
