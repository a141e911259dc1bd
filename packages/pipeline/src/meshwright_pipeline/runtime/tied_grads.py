"""Sums the gradients of parameters that several ranks of a pipeline hold: tied weights, and parameters outside of units. A tied
weight that is frozen on one of its ranks is frozen on all.

Every copy then gets the same update, bit for bit. Two ranks exchange all their shared gradients at once: a sum of two
numbers does not depend on their order. Of more ranks, the first one sums and sends the result back.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from meshwright_dtensor.comm.log import record
from meshwright_dtensor.devices import HOST
from meshwright_dtensor.devices.waits import wait_for, waiting
from meshwright_dtensor.mesh.mesh import message_device
from meshwright_dtensor.model.tied_parameters import all_names
from meshwright_pipeline._torch import local_gradient
from meshwright_pipeline.runtime.agreement import RankLost

Tensor = torch.Tensor
Gradients = dict[str, Tensor | None]
_TAG = (1 << 30) + (1 << 20)
_FLAGS = (1 << 30) + (5 << 20)


@dataclass(frozen=True)
class Tie:
    """One parameter that several ranks hold: its names in the whole model, and these ranks of the axis, ascending."""

    names: tuple[str, ...]
    ranks: tuple[int, ...]


def ties(model: nn.Module, holders: Mapping[str, Sequence[int]]) -> list[Tie]:
    """The parameters of a whole model that more than one rank holds. `holders`: name of a parameter -> ranks that hold it."""
    shared = []
    for names, _ in all_names(model):
        ranks = sorted({rank for name in names for rank in holders[name]})
        if len(ranks) > 1:
            shared.append(Tie(names, tuple(ranks)))
    return shared


@dataclass(frozen=True)
class _Packed:
    """Gradients of one dtype that the same ranks hold, as one message (`content`): all elements, then a flag each for its presence.

    `ties`: the parameters; `names`: their names on this rank.
    """

    tag: int
    ties: tuple[Tie, ...]
    names: tuple[str, ...]
    content: Tensor

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that hold them."""
        return self.ties[0].ranks


class TiedSum:
    """Sums gradients over the ranks that hold a parameter.

    `ties`: all ties, the same on every rank. `what`: name of the tensors in the communication log.
    `any`: whether any ranks share a parameter.
    """

    def __init__(self, ties: Sequence[Tie], group: dist.ProcessGroup, what: str = "tied parameters") -> None:
        self.group, self.rank, self.what = group, dist.get_rank(group), what
        self.any = bool(ties)
        self._lost: dict[int, RankLost] = {}
        self.ties = [(place, tie) for place, tie in enumerate(ties) if self.rank in tie.ranks]

    def _local_name(self, tie: Tie, names: Mapping[str, object]) -> str | None:
        """The name of the parameter on this rank; None where it is not among `names` (it is not trained)."""
        return next((name for name in tie.names if name in names), None)

    def sum(
        self, gradients: Gradients, like: Mapping[str, Tensor], dtypes: Mapping[str, torch.dtype]
    ) -> Gradients:
        """`gradients`, in place, with those of tied parameters summed; None where no rank has one.

        Args:
            like: name -> the parameter's leaf, for the shape of a missing gradient.
            dtypes: name -> the dtype to sum in.

        Raises RankLost: a rank that holds one is gone; all others have come to the end.
        """
        messages = self._packed(gradients, like, dtypes)
        for packed in messages:
            if len(packed.ranks) == 2:
                self._exchange(packed)
            else:
                self._reduce(packed)
        self._raise_lost()
        for packed in messages:
            sizes = [*(like[name].numel() for name in packed.names), len(packed.names)]
            *parts, present = packed.content.split(sizes)
            for name, part, has in zip(packed.names, parts, present.tolist(), strict=True):
                gradients[name] = part.view(like[name].shape) if has else None
        return gradients

    def _packed(
        self, gradients: Gradients, like: Mapping[str, Tensor], dtypes: Mapping[str, torch.dtype]
    ) -> list[_Packed]:
        """The messages: one for each set of ranks and dtype, in the same order on all ranks."""
        groups: dict[tuple[tuple[int, ...], torch.dtype], list[tuple[int, Tie, str]]] = {}
        for place, tie in self.ties:
            name = self._local_name(tie, like)
            if name is not None:
                groups.setdefault((tie.ranks, dtypes[name]), []).append((place, tie, name))
        messages = []
        for (_, dtype), members in sorted(groups.items(), key=lambda item: (item[0][0], item[1][0][0])):
            names = tuple(name for *_, name in members)
            sizes = [*(like[name].numel() for name in names), len(names)]
            content = torch.zeros(sum(sizes), dtype=dtype, device=like[names[0]].device)
            *parts, present = content.split(sizes)
            for index, (name, part) in enumerate(zip(names, parts, strict=True)):
                gradient = gradients[name]
                if gradient is not None:
                    part.copy_(gradient.reshape(-1))
                    present[index] = 1
            record("send_recv", "pp", content.nbytes, "backward", function=self.what)
            ties = tuple(tie for _, tie, _ in members)
            messages.append(_Packed(_TAG + members[0][0], ties, names, content))
        return messages

    def _exchange(self, packed: _Packed) -> None:
        """Each of two ranks adds the gradients of the other."""
        other = sum(packed.ranks) - self.rank
        if other in self._lost:
            return
        theirs = torch.zeros_like(packed.content)
        try:
            _swap(packed.content, theirs, self.group, other, packed.tag)
        except RuntimeError as error:
            self._note_lost(other, packed.ties[0], error)
            return
        packed.content.add_(theirs)

    def _reduce(self, packed: _Packed) -> None:
        """The first of several ranks sums, and sends the sums to the others."""
        first, content, tag, tie = packed.ranks[0], packed.content, packed.tag, packed.ties[0]
        if self.rank != first:
            self._message(dist.send, content, first, tag, tie)
            self._message(dist.recv, content, first, tag, tie)
            return
        for rank in packed.ranks[1:]:
            part = torch.zeros_like(content)
            self._message(dist.recv, part, rank, tag, tie)
            content += part
        for rank in packed.ranks[1:]:
            self._message(dist.send, content, rank, tag, tie)

    def _message(self, move: Any, tensor: Tensor, rank: int, tag: int, tie: Tie) -> None:
        """Send or receive. A lost rank gets no more messages; the others do."""
        if rank in self._lost:
            return
        peer = "group_dst" if move is dist.send else "group_src"
        try:
            with waiting():
                move(tensor, group=self.group, tag=tag, **{peer: rank})
        except RuntimeError as error:
            self._note_lost(rank, tie, error)

    def _note_lost(self, rank: int, tie: Tie, error: RuntimeError) -> None:
        what = (
            f"it has died or hangs: the gradient of {tie.names[0]!r}, which it holds too, could not be summed"
        )
        self._lost[rank] = RankLost(rank, f"{what} ({str(error).splitlines()[0]})")

    def _raise_lost(self) -> None:
        lost, self._lost = self._lost, {}
        for error in lost.values():
            raise error

    @torch.no_grad()
    def equalize(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Copy the gradient of the first rank to the others: other reductions may have rounded differently. Raises RankLost."""
        for place, tie in self.ties:
            name = self._local_name(tie, parameters)
            gradient = None if name is None else local_gradient(parameters[name])
            if gradient is None:
                continue
            first, dense = tie.ranks[0], gradient.contiguous()
            if self.rank == first:
                for rank in tie.ranks[1:]:
                    self._message(dist.send, dense, rank, _TAG + place, tie)
                continue
            self._message(dist.recv, dense, first, _TAG + place, tie)
            if dense is not gradient:
                gradient.copy_(dense)
        self._raise_lost()


def _swap(ours: Tensor, theirs: Tensor, group: dist.ProcessGroup, peer: int, tag: int) -> None:
    """Send `ours` to a peer while `theirs` is received from it."""
    both = ((dist.isend, ours), (dist.irecv, theirs))
    operations = [dist.P2POp(move, t, group=group, group_peer=peer, tag=tag) for move, t in both]
    for work in dist.batch_isend_irecv(operations):
        wait_for(work)


class TiedFlags:
    """Freezes a tied weight, or unfreezes it, on all ranks that hold it.

    Each rank has it under the name of its own stage, and a user may change `requires_grad` by the other name, which reaches only
    the rank of that stage. So a change since the last call of the model, on any rank, counts for all of them.

    `shared`: all ties, the same on every rank.
    """

    def __init__(self, model: nn.Module, shared: Sequence[Tie], group: dist.ProcessGroup) -> None:
        self.group, rank = group, dist.get_rank(group)
        named = [tie for tie in shared if len(tie.names) > 1]
        self.count = len(named)
        self.peers = sorted({r for tie in named if rank in tie.ranks for r in tie.ranks} - {rank})
        parameters = dict(model.named_parameters())
        # place of the tie -> name of its parameter on this rank
        self.names = {
            place: next(name for name in tie.names if name in parameters)
            for place, tie in enumerate(named)
            if rank in tie.ranks
        }
        self.flags = {place: parameters[name].requires_grad for place, name in self.names.items()}

    def agree(self, model: nn.Module) -> None:
        """Exchange the changes since the last call, and make them here (collective among the ranks that share weights).

        Raises RankLost: a rank that holds one is gone.
        """
        if not self.names:
            return
        parameters = {place: model.get_parameter(name) for place, name in self.names.items()}
        changed = torch.zeros(self.count, dtype=torch.uint8, device=HOST)
        for place, parameter in parameters.items():
            changed[place] = parameter.requires_grad != self.flags[place]
        ours = changed.to(message_device(self.group))
        theirs = [torch.zeros_like(ours) for _ in self.peers]
        for peer, buffer in zip(self.peers, theirs, strict=True):
            try:
                _swap(ours, buffer, self.group, peer, _FLAGS)
            except RuntimeError as error:
                raise RankLost(peer, f"it has died or hangs ({str(error).splitlines()[0]})") from error
        changes = torch.stack([ours, *theirs]).amax(0).tolist()
        for place, parameter in parameters.items():
            if changes[place]:
                self.flags[place] = not self.flags[place]
                parameter.requires_grad_(self.flags[place])
