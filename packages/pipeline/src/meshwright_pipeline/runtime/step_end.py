"""The end of a step on one rank: all ranks agree on its loss or its failure, and share gradients and results."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from meshwright_dtensor.errors import StageError, UnsupportedError
from meshwright_dtensor.schedule.schedule import NAMES, Action
from meshwright_dtensor.schedule.timetable import Timetable
from meshwright_dtensor.stages.whole_model import own_stages
from meshwright_pipeline._torch import at_end_of_backward
from meshwright_pipeline.runtime.agreement import Agreement, Broadcast, RankContext, RankLost, Report, Vote
from meshwright_pipeline.runtime.grad_handover import Sink
from meshwright_pipeline.runtime.input_grads import InputGradients
from meshwright_pipeline.runtime.p2p.messages import TensorSpec
from meshwright_pipeline.runtime.p2p.step import Failure
from meshwright_pipeline.runtime.tied_grads import TiedSum
from meshwright_pipeline.trace.loss import plain_or_none

Tensor = torch.Tensor
_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


class StepEnd:
    """The end of a step on one rank.

    `tied`: parameters that several ranks hold. `forget`: all are called after a failure: nothing of the step is kept.
    """

    def __init__(
        self, context: RankContext, table: Timetable, tied: TiedSum, forget: Sequence[Callable[[], None]]
    ) -> None:
        self.context, self.table, self.tied, self.forget = context, table, tied, forget
        self.rank = dist.get_rank(context.group)
        self.agreement = Agreement(context.world, self._last_action)
        self.results = Broadcast(context.group)

    @property
    def last_stage_rank(self) -> int:
        """The rank of the axis that holds the last stage."""
        return self.table.owner(self.table.shape.stages - 1)

    def agree(self, failure: Failure | None, loss: Tensor | None = None, batch: str = "") -> Tensor:
        """The loss, the same on every rank, and whether it requires a gradient.

        `failure`: of this rank. `loss`: what this rank of the last stage adds to it. `batch`: what this rank was given.

        Raises StageError: a rank failed; on every rank.
        """
        report, value = None, (0.0, 0.0)
        if failure is not None:
            stage = failure.action.stage
            rank = self.table.owner(stage) if failure.lost else self.rank
            rank = dist.get_global_rank(self.context.group, rank)
            reason = f"{type(failure.error).__name__}: {failure.error}"
            when = self.table.ends[failure.action]
            report = Report(failure.action, rank, reason, int(failure.lost), when)
        elif loss is not None:
            kind = _DTYPES.index(loss.dtype) + len(_DTYPES) * loss.requires_grad
            value = float(loss.detach().double()), float(kind) * self.context.reports_loss
        verdict = self.agreement.settle(Vote(value, report, batch))
        if isinstance(verdict, Report):
            for forget in self.forget:
                forget()
            action, cause = verdict.action, None if failure is None else failure.error
            place = (action.stage, action.microbatch, NAMES[action.kind])
            raise StageError(*place, verdict.rank, verdict.reason) from cause
        differentiable, kind = divmod(int(verdict[1]), len(_DTYPES))
        # filled there, not copied from the host
        agreed = torch.full((), verdict[0], dtype=_DTYPES[kind], device=self.context.device)
        return agreed.requires_grad_(bool(differentiable))

    def share(
        self,
        sinks: dict[str, Sink] | None,
        inputs: InputGradients | None,
        expected: Sequence[Any] = (),
        values: Sequence[Any] = (),
        failure: Failure | None = None,
        agree: bool = False,
    ) -> tuple[list[Tensor | None], list[Any], list[bool]]:
        """Sum the gradients that several ranks hold and broadcast values of the last stage, with one agreement at the end.

        Each part runs even where an earlier one failed, since other ranks wait for this one.

        Args:
            sinks, inputs: whose gradients to sum; None for none.
            expected, values: see `broadcast`.
            failure: of this rank in the actions before; then `agree` on it even where nothing is shared.

        Returns: the gradients, of parameters and then of inputs; the broadcast values; which of them have a gradient.

        Raises:
            StageError: a rank failed; on every rank.
            UnsupportedError: the last stage has other values than expected; on every rank.
        """
        gradients = {name: sink.take() for name, sink in (sinks or {}).items()}
        of_inputs: list[Tensor | None] = []
        received: tuple[list[Any], list[bool]] | None = ([], [])

        @contextlib.contextmanager
        def part() -> Iterator[None]:
            nonlocal failure, agree
            agree = True
            try:
                yield
            except RankLost as lost:
                failure = failure or self.failure_of(lost)

        if sinks is not None and self.tied.any:
            with part():
                dtypes = {name: sink.dtype for name, sink in sinks.items()}
                self.tied.sum(gradients, {name: sink.leaf for name, sink in sinks.items()}, dtypes)
        if inputs is not None:
            with part():
                of_inputs = inputs.gradients()
        if expected:
            with part():
                received = self.broadcast(expected, values)
        if agree:
            self.agree(failure)
        if received is None:
            raise UnsupportedError(
                "the model returned something else than when it was profiled; return tensors only (use_cache=False, say)"
            )
        return [*gradients.values(), *of_inputs], *received

    def equalize_later(self, model: nn.Module) -> None:
        """After this backward pass and its gradient reductions, make the gradients of tied parameters equal.

        Not needed for reductions over at most two ranks, which have only one order.
        """
        if self.context.mesh is None or self.context.mesh.size() <= 2 or not self.tied.any:
            return

        def equalize() -> None:
            failure = None
            try:
                with own_stages(model):
                    self.tied.equalize(dict(model.named_parameters()))
            except RankLost as lost:
                failure = self.failure_of(lost)
            self.agree(failure)

        # queued from inside a callback, so that it runs after the callbacks that gradients have queued meanwhile
        at_end_of_backward(lambda: at_end_of_backward(equalize))

    def failure_of(self, lost: RankLost) -> Failure:
        """The failure for a rank of the axis that was lost after the last action."""
        return Failure(self.table.ranks[lost.rank][-1], ConnectionError(lost.reason), lost=True)

    def broadcast(
        self, expected: Sequence[Any], values: Sequence[Any] | None
    ) -> tuple[list[Any], list[bool]] | None:
        """The values of the last stage on all ranks of the axis, and which of them have a gradient.

        `expected`: values of the same structure, from the profile. `values`: on the rank of the last stage, ordinary tensors, which
        require a gradient where they have one. Returns None where the last stage has other values than expected.

        Raises RankLost: a rank of the axis is gone.
        """
        if self.rank == self.last_stage_rank:
            given, header = list(values or ()), None
            if len(given) == len(expected):
                expected = given
                header = [TensorSpec.of(value) if isinstance(value, Tensor) else None for value in given]
            tensors = [TensorSpec.of(x).contiguous(x) for x in given if isinstance(x, Tensor)]
            self.results.send(header, tensors if header is not None else ())
        else:
            header, tensors = self.results.receive(self.last_stage_rank, self._buffers)
        if header is None:
            return None
        received = iter(tensors)
        shared = [
            plain_or_none(value) if spec is None else spec.unpacked(next(received))
            for value, spec in zip(expected, header, strict=True)
        ]
        return shared, [spec is not None and spec.differentiable for spec in header]

    def _buffers(self, header: list[TensorSpec | None] | None) -> list[Tensor]:
        specs = [spec for spec in header or () if spec is not None]
        return [spec.contiguous(spec.empty(self.context.device)) for spec in specs]

    def _last_action(self, rank: int) -> Action:
        """The action that ends a step on a rank of the run: the pipeline axis is the outermost."""
        return self.table.ranks[rank * self.table.shape.ranks // dist.get_world_size()][-1]
