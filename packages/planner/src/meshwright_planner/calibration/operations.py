"""How long operations of each kind take on one rank, forward and backward, by size."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from meshwright_dtensor.cluster import MeasuredWork
from meshwright_planner.calibration.timing import device, least
from meshwright_planner.cost.operations import even_bytes
from meshwright_planner.cost.prices import dtype_name

LEAST_S = 2e-4
"""What is shorter is timed many at once, to as long."""

COLD_BYTES, MOST_COPIES = 2**23, 64
"""Operations take turns on copies of their inputs of so many bytes in all, as a model finds them: outside of small caches."""

KEPT_BYTES, MOST_KEPT = 2**26, 1024
"""So many bytes of results are kept, as autograd keeps them: each is written where nothing was for long, outside of any cache."""


@dataclass(frozen=True)
class Case:
    """One operation at one size: its inputs (those that float get gradients), and the size that its time is kept by."""

    size: float
    inputs: tuple[Tensor, ...]
    run: Callable[..., Tensor]


def products(dtype: torch.dtype, top: float) -> Iterator[Case]:
    """Matrix products of shapes as layers have them, by floating-point operations up to `top`."""
    for rows, inner, outer in (
        (16, 16, 16), (64, 32, 32), (128, 64, 64), (256, 64, 192), (256, 128, 256), (512, 192, 384),
        (512, 384, 768), (1024, 512, 1536), (2048, 1024, 2048), (8192, 4096, 4096), (8192, 8192, 16384),
    ):  # fmt: skip
        if 2.0 * rows * inner * outer <= top:
            x, w = _random((rows, inner), dtype), _random((outer, inner), dtype)
            yield Case(2.0 * rows * inner * outer, (x, w), F.linear)


THIN = (64, 128, 16384)
"""Rows, and sides of the weight, of a product that moves much more than its operations need."""


def thin(budget: float, entry: float, even: MeasuredWork, shape: tuple[int, int, int] = THIN) -> MeasuredWork:
    """What a product of few rows with a large weight takes beyond one of equal sides (`even`), by the bytes that it moves more."""
    rows, inner, outer = shape
    flops = 2.0 * rows * inner * outer
    x, w = _random((rows, inner), torch.float32), _random((outer, inner), torch.float32)
    ahead, back = _times(Case(flops, (x, w), F.linear), budget)
    more = 4.0 * (rows * inner + inner * outer + rows * outer) - even_bytes(flops)
    ahead -= even.seconds(flops, (True, False))
    back -= entry + even.seconds(flops, (False, True))
    return MeasuredWork("thin", "float32", ((more, max(0.0, ahead)),), ((more, max(0.0, back)),))


def attentions(width: int, dtype: torch.dtype, top: float) -> Iterator[Case]:
    """Causal attention over heads of a width, by floating-point operations of both products."""
    for batch, heads, length in (
        (1, 2, 32), (4, 4, 64), (4, 4, 128), (8, 8, 128), (4, 8, 256), (4, 8, 512), (2, 8, 1024), (2, 32, 4096),
    ):  # fmt: skip
        flops = 2.0 * batch * heads * length * length * width  # a causal query sees half of the keys
        if flops <= top:
            q, k, v = (_random((batch, heads, length, width), dtype) for _ in range(3))
            yield Case(flops, (q, k, v), partial(F.scaled_dot_product_attention, is_causal=True))


def streams(kind: str, dtype: torch.dtype, top: float) -> Iterator[Case]:
    """Operations that mostly move memory, by the bytes of their inputs and outputs up to `top`."""
    for rows, width in (
        (1, 64), (16, 64), (128, 64), (512, 64), (1024, 128), (2048, 256), (4096, 512), (16384, 512),
    ):  # fmt: skip
        if 12.0 * rows * width > top:
            return
        yield stream(kind, _random((rows, width), dtype))


def stream(kind: str, x: Tensor) -> Case:
    """The operation that stands for a kind, on rows of a width."""
    rows, width = x.shape
    one = float(x.numel() * x.element_size())
    index = torch.arange(rows, device=x.device)
    if kind == "pointwise":
        return Case(3 * one, (x, torch.randn_like(x)), torch.mul)
    if kind == "function":
        return Case(2 * one, (x,), F.silu)
    if kind == "copy":
        return Case(2 * one, (x,), lambda t: t.t().contiguous())
    if kind == "reduce":
        return Case(one, (x,), lambda t: t.mean(-1))
    if kind == "norm":
        scale = torch.randn(2, width, device=x.device).to(x.dtype)
        return Case(2 * one, (x, scale[0], scale[1]), lambda t, w, b: F.layer_norm(t, (width,), w, b))
    if kind == "softmax":
        wide = x.view(-1, min(x.numel(), 32 * width))  # as many classes as a small vocabulary has
        classes = torch.zeros(len(wide), dtype=torch.long, device=x.device)
        return Case(one, (wide,), lambda t: F.cross_entropy(t, classes))
    if kind == "dropout":
        return Case(2 * one, (x,), lambda t: F.dropout(t, 0.1))
    return Case(2 * one, (_random((TABLE, width), x.dtype),), lambda t: F.embedding(index % TABLE, t))


TABLE = 64
"""Rows of the embedding that is measured: few, since the gradient of the whole table is counted by itself."""

KINDS = ("pointwise", "function", "copy", "reduce", "norm", "softmax", "dropout", "embedding")


def settle() -> None:
    """Bring the allocator to where a training process has it: a C library keeps more of what is freed once it was large."""
    for _ in range(3):
        torch.empty(31 * 2**20, dtype=torch.uint8, device=device()).zero_()


def entry(budget: float) -> float:
    """Seconds that one call of autograd takes beside the operations that it runs: a backward pass has one for all."""
    x = _random((1,), torch.float32).requires_grad_()
    outs = [x * 2.0, (x * 2.0) * 2.0]
    ones = torch.ones_like(outs[0])
    one, two = (
        least(_turns([partial(torch.autograd.grad, out, [x], ones, retain_graph=True)], 20), budget) / 20
        for out in outs
    )
    return max(0.0, 2 * one - two)


def measured(
    kind: str, dtype: torch.dtype, cases: Iterator[Case], budget: float, entry: float = 0.0
) -> MeasuredWork:
    """The curve of one kind of work; `budget`: seconds for each point; `entry`: as the function of that name says."""
    forward, backward = [], []
    for case in cases:
        ahead, back = _times(case, budget)
        forward.append((case.size, ahead))
        backward.append((case.size, max(back - entry, back / 10)))
    return MeasuredWork(kind, dtype_name(dtype), _rising(forward), _rising(backward))


def launches(budget: float) -> tuple[float, float]:
    """Seconds that the host needs for one operation, forward and backward: of many on tensors of one element."""
    x, y = _random((1,), torch.float32).requires_grad_(), _random((1,), torch.float32)

    def chain() -> Tensor:
        out = x
        for _ in range(50):
            out = out * y
        return out

    ahead = least(chain, budget) / 50
    return ahead, max(least(lambda: torch.autograd.grad(chain(), [x]), budget) / 50 - ahead, ahead / 4)


def fresh(budget: float, top: float) -> MeasuredWork | None:
    """Memory that was not in use before: seconds beyond those of writing it; None where that is nothing."""
    points = []
    for nbytes in (2.0**22, 2.0**24, 2.0**25, 2.0**26, 2.0**27):
        if nbytes > top:
            break
        count = int(nbytes) // 4 + 1024  # beyond a power of two, where allocators change their ways
        used = torch.empty(count, device=device())
        again = least(used.zero_, budget)
        new = least(partial(_zeroed, count), budget)
        if new > 1.5 * again:
            points.append((nbytes, new - again))
    return MeasuredWork("fresh", "float32", _rising(points), ()) if points else None


def _zeroed(count: int) -> Tensor:
    return torch.empty(count, device=device()).zero_()


def views(budget: float) -> MeasuredWork:
    """What moves no data: a chain of views."""
    x = _random((4, 4, 4), torch.float32).requires_grad_()

    def chain() -> Tensor:
        out = x
        for _ in range(20):
            out = out.transpose(1, 2).view(4, 4, 4) if out.is_contiguous() else out.transpose(1, 2)
        return out

    ahead = least(chain, budget) / 30
    back = max(least(lambda: torch.autograd.grad(chain().sum(), [x]), budget) / 30 - ahead, ahead / 4)
    return MeasuredWork("view", "float32", ((1.0, ahead),), ((1.0, back),))


def updates(budget: float, top: float) -> MeasuredWork:
    """A step of AdamW, by the bytes of one parameter, for one of many parameters."""
    forward = []
    for elements in (64, 4096, 65536, 2**20, 2**24):
        count = max(1, min(32, 2**22 // elements))
        if 16.0 * elements > top:
            break
        parameters = [torch.nn.Parameter(_random((elements,), torch.float32)) for _ in range(count)]
        for p in parameters:
            p.grad = torch.zeros_like(p)
        optimizer = torch.optim.AdamW(parameters, lr=1e-4)
        forward.append((4.0 * elements, least(optimizer.step, budget) / count))
    return MeasuredWork("update", "float32", _rising(forward), ())


def bandwidth(top: float) -> float:
    """Bytes per second that a streaming kernel moves (reads one tensor and writes another, both large)."""
    x = torch.zeros(int(top) // 8, device=device())
    y = torch.empty_like(x)
    return 2.0 * x.numel() * 4 / least(lambda: y.copy_(x), 0.2)


def _random(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    return torch.randn(*shape, device=device()).to(dtype)


def _times(case: Case, budget: float) -> tuple[float, float]:
    size = sum(x.numel() * x.element_size() for x in case.inputs)
    copies = max(1, min(MOST_COPIES, COLD_BYTES // max(size, 1)))
    sets = [
        [x.detach().clone().requires_grad_(x.is_floating_point()) for x in case.inputs] for _ in range(copies)
    ]
    once = least(lambda: case.run(*sets[0]), budget / 4, 5)
    count = max(1, int(LEAST_S / max(once, 1e-7)))
    outs = [case.run(*own) for own in sets]
    back = torch.ones_like(outs[0])
    # what autograd keeps of it may be as large as its inputs
    made = max(back.numel() * back.element_size(), size, 1)
    most = int(budget / max(once, 1e-7))  # in whose time no more are made, caches matter little
    ahead = least(_turns([partial(case.run, *own) for own in sets], count, made, most), budget) / count
    again = [
        partial(torch.autograd.grad, out, own, back, retain_graph=True)
        for out, own in zip(outs, sets, strict=True)
    ]
    return ahead, least(_turns(again, count, max(size, 1), most // 2), budget) / count


def _turns(
    actions: Sequence[Callable[[], object]], count: int, made: int = KEPT_BYTES, most: int = MOST_KEPT
) -> Callable[[], None]:
    """`count` of the actions, one after the other, going on where it stopped.

    `made`: bytes of what each returns and holds, which are kept of the last ones, at most of so many (`most`).
    """
    endless, room = itertools.cycle(actions), max(1, min(MOST_KEPT, KEPT_BYTES // made, most))
    kept = deque((action() for action in itertools.islice(endless, room)), maxlen=room)

    def turn() -> None:
        for action in itertools.islice(endless, count):
            kept.append(action())

    return turn


def _rising(points: list[tuple[float, float]]) -> tuple[tuple[float, float], ...]:
    """Points by ascending size, none shorter than a smaller one: that would be noise."""
    found: list[tuple[float, float]] = []
    for size, seconds in sorted(points):
        if found and size == found[-1][0]:
            continue
        found.append((size, max(seconds, found[-1][1] if found else 0.0)))
    return tuple(found)
