"""Parameters that several ranks of a pipeline hold: tied weights on two stages, and what every stage has.

Their gradients are summed on the first rank that holds one and sent back, so that every copy gets the same update, bit for
bit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from meshwright_dtensor.commlog import record
from meshwright_dtensor.tied import all_names
from meshwright_pipeline._torch import local_gradient
from meshwright_pipeline.spreading import Lost

_TAG = (1 << 30) + (1 << 20)


@dataclass(frozen=True)
class Tie:
    """One parameter that several ranks hold.

    Attributes:
        names: its names in the model as the user built it, the first one first.
        ranks: ranks of the axis that hold it, ascending.
    """

    names: tuple[str, ...]
    ranks: tuple[int, ...]


def ties(model: nn.Module, holders: Mapping[str, Sequence[int]]) -> list[Tie]:
    """The parameters of a whole model that more than one rank holds.

    Args:
        holders: parameter name -> ranks that hold it under that name.
    """
    found = []
    for own, _ in all_names(model):
        ranks = sorted({rank for name in own for rank in holders[name]})
        if len(ranks) > 1:
            found.append(Tie(own, tuple(ranks)))
    return found


class TiedSum:
    """Adds gradients up over the ranks that hold a parameter.

    Args:
        found: all ties, alike on every rank.
        group: the ranks of the axis.
        what: they are, in the communication log.

    Attributes:
        any: whether any ranks share a parameter.
    """

    def __init__(self, found: Sequence[Tie], group: dist.ProcessGroup, what: str = "tied parameters") -> None:
        self.group, self.rank, self.what = group, dist.get_rank(group), what
        self.any = bool(found)
        self.ties = [(place, tie) for place, tie in enumerate(found) if self.rank in tie.ranks]

    def local_name(self, tie: Tie, names: Mapping[str, object]) -> str:
        """Under which of its names this rank has it."""
        return next(name for name in tie.names if name in names)

    def sum(
        self,
        gradients: dict[str, torch.Tensor | None],
        like: Mapping[str, torch.Tensor],
        dtypes: Mapping[str, torch.dtype],
    ) -> dict[str, torch.Tensor | None]:
        """The gradients by name, those of tied parameters summed; None where no rank has one.

        Args:
            like: name -> the parameter's leaf, for the shape of what is missing.
            dtypes: name -> in which gradients are added up.

        Raises:
            Lost: a rank that holds one is gone; all others have come to the end.
        """
        gone: dict[int, Lost] = {}
        for place, tie in self.ties:
            name = self.local_name(tie, like)
            leaf, mine = like[name], gradients[name]
            # one element more says whether there is a gradient
            packed = torch.zeros(leaf.numel() + 1, dtype=dtypes[name], device=leaf.device)
            if mine is not None:
                packed[:-1].copy_(mine.reshape(-1))
                packed[-1] = 1
            self._add(packed, tie, _TAG + place, gone)
            has = bool(packed[-1].item())
            gradients[name] = packed[:-1].view(leaf.shape) if has else None
        for lost in gone.values():
            raise lost
        return gradients

    def _add(self, packed: torch.Tensor, tie: Tie, tag: int, gone: dict[int, Lost]) -> None:
        first, nbytes = tie.ranks[0], packed.numel() * packed.element_size()
        record("send_recv", "pp", nbytes, "backward", function=self.what)
        if self.rank != first:
            self._message(dist.send, packed, first, tag, tie, gone)
            self._message(dist.recv, packed, first, tag, tie, gone)
            return
        for rank in tie.ranks[1:]:
            part = torch.zeros_like(packed)
            self._message(dist.recv, part, rank, tag, tie, gone)
            packed += part
        for rank in tie.ranks[1:]:
            self._message(dist.send, packed, rank, tag, tie, gone)

    def _message(
        self,
        move: Callable[..., Any],
        tensor: torch.Tensor,
        rank: int,
        tag: int,
        tie: Tie,
        gone: dict[int, Lost],
    ) -> None:
        """Send or receive; once a rank is gone, nothing is said to it, and the others get theirs."""
        if rank in gone:
            return
        peer = "group_dst" if move is dist.send else "group_src"
        try:
            move(tensor, group=self.group, tag=tag, **{peer: rank})
        except RuntimeError as error:
            what = f"it has died or hangs: the gradient of {tie.names[0]!r}, which it holds too, could not be summed"
            gone[rank] = Lost(rank, f"{what} ({str(error).splitlines()[0]})")

    @torch.no_grad()
    def settle(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Give every copy the gradient of the first: sums over other axes may have been rounded in another order.

        Raises:
            Lost: a rank that holds one is gone.
        """
        gone: dict[int, Lost] = {}
        for place, tie in self.ties:
            parameter = parameters[self.local_name(tie, parameters)]
            gradient = local_gradient(parameter)
            if gradient is None:
                continue
            first, dense = tie.ranks[0], gradient.contiguous()
            if self.rank == first:
                for rank in tie.ranks[1:]:
                    self._message(dist.send, dense, rank, _TAG + place, tie, gone)
                continue
            self._message(dist.recv, dense, first, _TAG + place, tie, gone)
            if dense is not gradient:
                gradient.copy_(dense)
        for lost in gone.values():
            raise lost
