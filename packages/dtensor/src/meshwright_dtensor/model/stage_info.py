"""Pipeline stages of a model as one rank sees them: which ranks hold which parameters, and which rank counts a shared one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh

_MODEL = "_meshwright_stages"
_MESH = "_meshwright_stage_group"
_REPEATED = "_meshwright_repeated"


@dataclass(frozen=True, eq=False)
class StageInfo:
    """The stages of a model along one mesh axis.

    Attributes:
        group: this rank's process group along that axis.
        rank, ranks: this rank's position in it, and its size.
        holders: name of each parameter of the whole model, tied names included -> ranks that hold it under this name.
        aliases: later name of a tied parameter -> its first name in the whole model.
        repeated: names of parameters on this rank that an earlier rank counts (in norms and checkpoints).
    """

    group: dist.ProcessGroup
    rank: int
    ranks: int
    holders: Mapping[str, tuple[int, ...]]
    aliases: Mapping[str, str]
    repeated: frozenset[str]

    def __deepcopy__(self, memo: dict[int, Any]) -> StageInfo:
        return self


def describe_stages(model: nn.Module, info: StageInfo) -> None:
    """Record the stages of `model`."""
    model.__dict__[_MODEL] = info


def stages_of(model: nn.Module) -> StageInfo | None:
    """The stages of `model`, None if each rank holds all of it."""
    info = model.__dict__.get(_MODEL)
    return info if isinstance(info, StageInfo) else None


def aliases_in(model: nn.Module) -> dict[str, str]:
    """`StageInfo.aliases` of a model and of its modules, under the names of the model."""
    return {
        f"{prefix}.{later}".removeprefix("."): f"{prefix}.{first}".removeprefix(".")
        for prefix, module in model.named_modules()
        if (info := stages_of(module)) is not None
        for later, first in info.aliases.items()
    }


def link_stage(mesh: DeviceMesh, info: StageInfo) -> None:
    """Record that parameters on `mesh` belong to one stage; `info.group` holds the others."""
    setattr(mesh, _MESH, info)


def stage_link(mesh: DeviceMesh) -> StageInfo | None:
    """The stages that parameters on `mesh` belong to, or None."""
    return getattr(mesh, _MESH, None)


def mark_repeated(parameter: Any) -> None:
    """Record that another rank counts this parameter."""
    parameter.__dict__[_REPEATED] = True


def is_repeated(parameter: Any) -> bool:
    """Whether another rank counts this parameter (or the parameter of this gradient)."""
    return bool(parameter.__dict__.get(_REPEATED, False))
