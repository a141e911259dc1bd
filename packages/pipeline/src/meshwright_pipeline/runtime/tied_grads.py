"""Parameters that several ranks of a pipeline hold: tied weights on two stages, and what every stage has.

Their gradients are summed, so that every copy gets the same update, bit for bit: two ranks that hold some exchange what they
have, all of it at once (a sum of two has one order); of more, the first adds up and sends back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from meshwright_dtensor.comm.log import record
from meshwright_dtensor.model.tied_parameters import all_names
from meshwright_pipeline._torch import local_gradient
from meshwright_pipeline.runtime.broadcast import Lost

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


@dataclass(frozen=True)
class _Packed:
    """Gradients of one dtype that the same ranks hold, in one message: all elements, then whether there is each.

    Attributes:
        tag: of its messages.
        ties: what they are of.
        names: the same as this rank has them.
        content: elements.
    """

    tag: int
    ties: tuple[Tie, ...]
    names: tuple[str, ...]
    content: torch.Tensor

    @property
    def ranks(self) -> tuple[int, ...]:
        """Who holds them."""
        return self.ties[0].ranks

    def unpacked(self, like: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor | None]]:
        """Each gradient by its name here; None where no rank has one."""
        parts = self.content.split([*(like[name].numel() for name in self.names), len(self.names)])
        for name, part, has in zip(self.names, parts[:-1], parts[-1].tolist(), strict=True):
            yield name, part.view(like[name].shape) if has else None


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

    def local_name(self, tie: Tie, names: Mapping[str, object]) -> str | None:
        """Under which of its names this rank has it; None where it is not among them (it is not trained)."""
        return next((name for name in tie.names if name in names), None)

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
        every = self._packed(gradients, like, dtypes)
        for packed in every:
            if len(packed.ranks) == 2:
                self._exchange(packed, gone)
            else:
                self._add(packed, gone)
        for lost in gone.values():
            raise lost
        for packed in every:
            gradients.update(packed.unpacked(like))
        return gradients

    def _packed(
        self,
        gradients: Mapping[str, torch.Tensor | None],
        like: Mapping[str, torch.Tensor],
        dtypes: Mapping[str, torch.dtype],
    ) -> list[_Packed]:
        """By the ranks that hold them and their dtype, in an order that is the same on all."""
        groups: dict[tuple[tuple[int, ...], torch.dtype], list[tuple[int, Tie, str]]] = {}
        for place, tie in self.ties:
            name = self.local_name(tie, like)
            if name is not None:
                groups.setdefault((tie.ranks, dtypes[name]), []).append((place, tie, name))
        found = []
        for (_, dtype), own in sorted(groups.items(), key=lambda item: (item[0][0], item[1][0][0])):
            names = tuple(name for *_, name in own)
            sizes = [*(like[name].numel() for name in names), len(names)]
            content = torch.zeros(sum(sizes), dtype=dtype, device=like[names[0]].device)
            *parts, has = content.split(sizes)
            for index, (name, part) in enumerate(zip(names, parts, strict=True)):
                mine = gradients[name]
                if mine is not None:
                    part.copy_(mine.reshape(-1))
                    has[index] = 1
            nbytes = content.numel() * content.element_size()
            record("send_recv", "pp", nbytes, "backward", function=self.what)
            found.append(_Packed(_TAG + own[0][0], tuple(tie for _, tie, _ in own), names, content))
        return found

    def _exchange(self, packed: _Packed, gone: dict[int, Lost]) -> None:
        """Two ranks add what the other has."""
        other = sum(packed.ranks) - self.rank
        if other in gone:
            return
        theirs = torch.zeros_like(packed.content)
        both = ((dist.isend, packed.content), (dist.irecv, theirs))
        try:
            for work in dist.batch_isend_irecv(
                [dist.P2POp(move, t, group=self.group, group_peer=other, tag=packed.tag) for move, t in both]
            ):
                work.wait()
        except RuntimeError as error:
            gone[other] = _lost(other, packed.ties[0], error)
            return
        packed.content.add_(theirs)

    def _add(self, packed: _Packed, gone: dict[int, Lost]) -> None:
        """The first of several ranks adds up, and tells the others."""
        first, content, tag, tie = packed.ranks[0], packed.content, packed.tag, packed.ties[0]
        if self.rank != first:
            self._message(dist.send, content, first, tag, tie, gone)
            self._message(dist.recv, content, first, tag, tie, gone)
            return
        for rank in packed.ranks[1:]:
            part = torch.zeros_like(content)
            self._message(dist.recv, part, rank, tag, tie, gone)
            content += part
        for rank in packed.ranks[1:]:
            self._message(dist.send, content, rank, tag, tie, gone)

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
            gone[rank] = _lost(rank, tie, error)

    @torch.no_grad()
    def settle(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Give every copy the gradient of the first: sums over other axes may have been rounded in another order.

        Raises:
            Lost: a rank that holds one is gone.
        """
        gone: dict[int, Lost] = {}
        for place, tie in self.ties:
            name = self.local_name(tie, parameters)
            gradient = None if name is None else local_gradient(parameters[name])
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


def _lost(rank: int, tie: Tie, error: RuntimeError) -> Lost:
    what = f"it has died or hangs: the gradient of {tie.names[0]!r}, which it holds too, could not be summed"
    return Lost(rank, f"{what} ({str(error).splitlines()[0]})")
