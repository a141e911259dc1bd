"""Timings of operations of each kind on one rank, forward and backward, by size.

A timing is the minimum of several repeats, since other processes only ever make them longer.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from meshwright_dtensor.cluster import MeasuredWork
from meshwright_dtensor.devices import default_device
from meshwright_planner.cost.operations import even_bytes
from meshwright_planner.cost.prices import dtype_name

LEAST_S = 2e-4
"""Shorter operations are timed in batches of this length."""

COLD_BYTES, MOST_COPIES = 2**23, 64
"""Operations alternate between copies of their inputs of so many bytes in all, so that inputs are outside of small caches."""

KEPT_BYTES, MOST_KEPT = 2**26, 1024
"""So many bytes of results are kept alive, as autograd does, so that results are written outside of any cache."""


def sync() -> None:
    """Wait for the accelerator, if there is one."""
    default_device().synchronize()


def device() -> torch.device:
    """The device of ranks on this machine."""
    return default_device().current()


def least(action: Callable[[], object], budget: float, repeats: int = 50) -> float:
    """The minimum time of `action` in seconds: after a warm-up, of at least three runs, until `budget` seconds are spent.

    On a CPU with one thread, only time of this thread counts.
    """
    alone = default_device().on_host and torch.get_num_threads() == 1
    clock = time.thread_time if alone else time.perf_counter
    action()
    sync()
    begin, best = time.perf_counter(), float("inf")
    for number in range(repeats):
        start = clock()
        action()
        sync()
        best = min(best, clock() - start)
        if number >= 2 and time.perf_counter() - begin > budget:
            break
    return best


@dataclass(frozen=True)
class Case:
    """One operation at one size: its inputs (floating-point ones get gradients), and the size on its timing curve."""

    size: float
    inputs: tuple[Tensor, ...]
    run: Callable[..., Tensor]


def products(dtype: torch.dtype, top: float) -> Iterator[Case]:
    """Matrix products with shapes of layers, by FLOPs up to `top`."""
    for rows, inner, outer in (
        (16, 16, 16), (64, 32, 32), (128, 64, 64), (256, 64, 192), (256, 128, 256), (512, 192, 384),
        (512, 384, 768), (1024, 512, 1536), (2048, 1024, 2048), (8192, 4096, 4096), (8192, 8192, 16384),
    ):  # fmt: skip
        if 2.0 * rows * inner * outer <= top:
            x, w = _random((rows, inner), dtype), _random((outer, inner), dtype)
            yield Case(2.0 * rows * inner * outer, (x, w), F.linear)


THIN = (64, 128, 16384)
"""Rows, and sides of the weight, of a product that moves many more bytes than one of equal sides."""


def thin(budget: float, entry: float, even: MeasuredWork, shape: tuple[int, int, int] = THIN) -> MeasuredWork:
    """What a product of few rows with a large weight takes beyond one of equal sides (`even`), by the bytes that it moves more."""
    rows, inner, outer = shape
    flops = 2.0 * rows * inner * outer
    x, w = _random((rows, inner), torch.float32), _random((outer, inner), torch.float32)
    forward, back = _times(Case(flops, (x, w), F.linear), budget)
    more = 4.0 * (rows * inner + inner * outer + rows * outer) - even_bytes(flops)
    forward -= even.seconds(flops, (True, False))
    back -= entry + even.seconds(flops, (False, True))
    return MeasuredWork("thin", "float32", ((more, max(0.0, forward)),), ((more, max(0.0, back)),))


def attentions(width: int, dtype: torch.dtype, top: float) -> Iterator[Case]:
    """Causal attention over heads of a width, by floating-point operations of both products."""
    for batch, heads, length in (
        (1, 2, 32), (4, 4, 64), (4, 4, 128), (8, 8, 128), (4, 8, 256), (4, 8, 512), (2, 8, 1024), (2, 32, 4096),
    ):  # fmt: skip
        # a causal query sees half of the keys
        flops = 2.0 * batch * heads * length * length * width
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
    nbytes = float(x.numel() * x.element_size())
    index = torch.arange(rows, device=x.device)
    if kind == "pointwise":
        return Case(3 * nbytes, (x, torch.randn_like(x)), torch.mul)
    if kind == "reduce":
        return Case(nbytes, (x,), lambda t: t.mean(-1))
    if kind == "norm":
        scale = torch.randn(2, width, device=x.device).to(x.dtype)
        return Case(2 * nbytes, (x, scale[0], scale[1]), lambda t, w, b: F.layer_norm(t, (width,), w, b))
    if kind == "softmax":
        # as many classes as a small vocabulary has
        wide = x.view(-1, min(x.numel(), 32 * width))
        classes = torch.zeros(len(wide), dtype=torch.long, device=x.device)
        return Case(nbytes, (wide,), lambda t: F.cross_entropy(t, classes))
    if kind == "embedding":
        return Case(2 * nbytes, (_random((TABLE, width), x.dtype),), lambda t: F.embedding(index % TABLE, t))
    mapped: dict[str, Callable[[Tensor], Tensor]] = {
        "function": F.silu,
        "copy": lambda t: t.t().contiguous(),
        "dropout": lambda t: F.dropout(t, 0.1),
    }
    return Case(2 * nbytes, (x,), mapped[kind])


TABLE = 64
"""Rows of the measured embedding: few, since the gradient of the whole table is counted separately."""

KINDS = ("pointwise", "function", "copy", "reduce", "norm", "softmax", "dropout", "embedding")


def settle() -> None:
    """Warm up the allocator as in a training process: a C library keeps more freed memory after a large allocation."""
    for _ in range(3):
        torch.empty(31 * 2**20, dtype=torch.uint8, device=device()).zero_()


def entry(budget: float) -> float:
    """Seconds of one call of autograd without its operations: a backward pass has one call for all."""
    x = _random((1,), torch.float32).requires_grad_()
    ones, seconds = torch.ones_like(x), []
    for out in (x * 2.0, (x * 2.0) * 2.0):
        call = partial(torch.autograd.grad, out, [x], ones, retain_graph=True)
        seconds.append(least(_turns([call], 20), budget) / 20)
    return max(0.0, 2 * seconds[0] - seconds[1])


def measured(
    kind: str, dtype: torch.dtype, cases: Iterator[Case], budget: float, entry: float = 0.0
) -> MeasuredWork:
    """The curve of one kind of operation; `budget`: seconds for each point; `entry`: see the function of that name."""
    forward, backward = [], []
    for case in cases:
        seconds, back = _times(case, budget)
        forward.append((case.size, seconds))
        backward.append((case.size, max(back - entry, back / 10)))
    return MeasuredWork(kind, dtype_name(dtype), _rising(forward), _rising(backward))


def launches(budget: float) -> tuple[float, float]:
    """Host seconds of one operation, forward and backward: the mean of many on tensors of one element."""
    x, y = _random((1,), torch.float32).requires_grad_(), _random((1,), torch.float32)

    def chain() -> Tensor:
        out = x
        for _ in range(50):
            out = out * y
        return out

    forward = least(chain, budget) / 50
    return forward, max(least(lambda: torch.autograd.grad(chain(), [x]), budget) / 50 - forward, forward / 4)


def fresh(budget: float, top: float) -> MeasuredWork | None:
    """Additional seconds to write newly allocated memory; None if there are none."""
    points = []
    for nbytes in (2.0**22, 2.0**24, 2.0**25, 2.0**26, 2.0**27):
        if nbytes > top:
            break
        # above a power of two, where allocators change their strategy
        count = int(nbytes) // 4 + 1024
        used = torch.empty(count, device=device())
        again = least(used.zero_, budget)
        new = least(partial(_zeroed, count), budget)
        if new > 1.5 * again:
            points.append((nbytes, new - again))
    return MeasuredWork("fresh", "float32", _rising(points), ()) if points else None


def _zeroed(count: int) -> Tensor:
    return torch.empty(count, device=device()).zero_()


def views(budget: float) -> MeasuredWork:
    """Operations that move no data: a chain of views."""
    x = _random((4, 4, 4), torch.float32).requires_grad_()

    def chain() -> Tensor:
        out = x
        for _ in range(20):
            out = out.transpose(1, 2).view(4, 4, 4) if out.is_contiguous() else out.transpose(1, 2)
        return out

    forward = least(chain, budget) / 30
    back = max(least(lambda: torch.autograd.grad(chain().sum(), [x]), budget) / 30 - forward, forward / 4)
    return MeasuredWork("view", "float32", ((1.0, forward),), ((1.0, back),))


def updates(budget: float, top: float) -> MeasuredWork:
    """A step of AdamW per parameter, by the bytes of the parameter."""
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
    given = [(x.detach(), x.is_floating_point()) for x in case.inputs]
    sets = [[x.clone().requires_grad_(floating) for x, floating in given] for _ in range(copies)]
    once = least(lambda: case.run(*sets[0]), budget / 4, 5)
    count = max(1, int(LEAST_S / max(once, 1e-7)))
    outs = [case.run(*inputs) for inputs in sets]
    back = torch.ones_like(outs[0])
    # autograd may save as many bytes as its inputs have
    made = max(back.numel() * back.element_size(), size, 1)
    # with fewer repeats than this caches matter little
    most = int(budget / max(once, 1e-7))
    runs = [partial(case.run, *inputs) for inputs in sets]
    forward = least(_turns(runs, count, made, most), budget) / count
    grad = partial(torch.autograd.grad, grad_outputs=back, retain_graph=True)
    again = [partial(grad, out, inputs) for out, inputs in zip(outs, sets, strict=True)]
    return forward, least(_turns(again, count, max(size, 1), most // 2), budget) / count


def _turns(
    actions: Sequence[Callable[[], object]], count: int, made: int = KEPT_BYTES, most: int = MOST_KEPT
) -> Callable[[], None]:
    """Run `count` of the actions, in a cycle that continues with the next call.

    `made`: bytes of the result of each; the last results are kept alive, at most `most` of them.
    """
    endless, room = itertools.cycle(actions), max(1, min(MOST_KEPT, KEPT_BYTES // made, most))
    kept = deque((action() for action in itertools.islice(endless, room)), maxlen=room)

    def turn() -> None:
        for action in itertools.islice(endless, count):
            kept.append(action())

    return turn


def _rising(points: list[tuple[float, float]]) -> tuple[tuple[float, float], ...]:
    """Points by ascending size with non-decreasing times, which removes noise."""
    fastest: dict[float, float] = {}
    for size, seconds in sorted(points):
        fastest.setdefault(size, seconds)
    return tuple(zip(fastest, itertools.accumulate(fastest.values(), max)))
