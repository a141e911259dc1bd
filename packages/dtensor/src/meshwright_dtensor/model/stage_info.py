"""What a rank knows of a model that is divided by modules: which parameters others hold, and who speaks for shared ones."""

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
    """How the parameters of a model are divided over the ranks of one mesh axis.

    Attributes:
        group: the ranks along that axis, alike in their places on the others.
        rank, ranks: this rank's place in it, and how many there are.
        holders: name of every parameter of the whole model, each alias of tied ones included -> ranks that hold it so.
        aliases: later name of a tied parameter -> its first name in the whole model.
        repeated: names of parameters that this rank holds too, but an earlier rank speaks for (norms, checkpoints).
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
    """Note how `model` is divided."""
    model.__dict__[_MODEL] = info


def stages_of(model: nn.Module) -> StageInfo | None:
    """How `model` is divided by modules, None where every rank holds all of it."""
    found = model.__dict__.get(_MODEL)
    return found if isinstance(found, StageInfo) else None


def link_stage(mesh: DeviceMesh, info: StageInfo) -> None:
    """Note that parameters over `mesh` are those of one stage, and others lie on the ranks of `info.group`."""
    setattr(mesh, _MESH, info)


def stage_link(mesh: DeviceMesh) -> StageInfo | None:
    """The division that parameters over `mesh` belong to, None where there is none."""
    return getattr(mesh, _MESH, None)


def mark_repeated(parameter: Any) -> None:
    """Note that another rank speaks for this parameter."""
    parameter.__dict__[_REPEATED] = True


def is_repeated(parameter: Any) -> bool:
    """Whether another rank speaks for this parameter, or for the one that this gradient is of."""
    return bool(parameter.__dict__.get(_REPEATED, False))
