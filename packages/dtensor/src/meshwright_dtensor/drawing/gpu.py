"""Numbers of one device on GPUs: those of the rank's part, and no more of the others than share a wave with them.

A wave is what all threads of the device draw at one call of the generator, side by side in memory. Torch's own kernel draws any
wave alone, from its place in the stream, so that numbers of any distribution are right and whole waves of other ranks are left out.
Where the rank's elements are few in every wave (columns of a matrix), single numbers are counted up to (`philox`) instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import torch

from meshwright_dtensor.drawing import philox
from meshwright_dtensor.drawing.held import Held, Target
from meshwright_dtensor.drawing.philox import BLOCK, CALL, Launch
from meshwright_dtensor.drawing.whole import Kind, Way, Whole, agrees, restored
from meshwright_dtensor.utils.host import HOST

_COUNTED_COST = 100
"""Operations of torch for a number that is counted up to, against one of a kernel that draws."""
_COUNTED_AT_ONCE = 1 << 18
_MOST_OFFSET = 2**31 - 1


def most_threads(device: torch.device) -> int:
    """Threads that torch starts at most for a kernel that draws."""
    properties = torch.cuda.get_device_properties(device)
    return properties.multi_processor_count * (properties.max_threads_per_multi_processor // BLOCK) * BLOCK


@dataclass(frozen=True)
class Stretch:
    """Elements in memory that one kernel draws: the first, how many, and the offset of the stream before them."""

    start: int
    numel: int
    offset: int


def stretches(launch: Launch, numel: int, stride: int) -> tuple[list[Stretch], int]:
    """The kernels that draw `numel` elements, `stride` bytes apart; and by how much they advance the stream in all.

    Torch halves a tensor until 32 bits count its bytes; it advances the stream for the whole first, and draws nothing with it.
    """
    kernels: list[Stretch] = []
    offset = 0

    def halve(start: int, count: int) -> None:
        nonlocal offset
        if not launch.halved or fits(count, stride):
            kernels.append(Stretch(start, count, offset))
            offset += launch.advance(count)
        else:
            halve(start, count // 2)
            halve(start + count // 2, count - count // 2)

    if launch.halved and not fits(numel, stride):
        offset += launch.advance(numel)
    halve(0, numel)
    return kernels, offset


def fits(numel: int, stride: int) -> bool:
    """Whether one kernel draws them."""
    return numel <= _MOST_OFFSET and 1 + (numel - 1) * stride <= _MOST_OFFSET


def _pieces(launch: Launch, whole: Whole, held: Held, stride: int) -> Iterator[tuple[int, int, int, int]]:
    """What has to be drawn: (first element, elements to draw, those of them that count, offset)."""
    for stretch in stretches(launch, held.total, stride)[0]:
        threads = launch.threads(stretch.numel)
        wave, end = threads * launch.unroll, stretch.start + stretch.numel
        # with fewer threads than the device has, the count of elements decides how many there are
        alone = threads < launch.most_threads
        step = stretch.numel if alone else max(whole.piece // wave, 1) * wave
        at = held.first_from(stretch.start)
        while at is not None and at < end:
            waves = 0 if alone else (at - stretch.start) // wave
            first = stretch.start + waves * wave
            count = min(step, end - first)
            drawn = count if alone else -(-count // wave) * wave
            yield first, drawn, count, stretch.offset + waves * CALL
            at = held.first_from(first + count)


def by_waves(launch: Launch, generator: Any) -> Way:
    """Draw the waves in which the rank has elements, by torch's kernel."""

    def way(whole: Whole, held: Held, target: Target) -> None:
        stride = whole.dtype.itemsize * (2 if whole.gaps else 1)
        before = generator.get_offset()
        for first, drawn, count, offset in _pieces(launch, whole, held, stride):
            generator.set_offset(before + offset)
            piece = whole.buffer(drawn)
            whole.draw(piece)
            held.put(target, piece[:count], first)
        generator.set_offset(before + stretches(launch, held.total, stride)[1])

    return way


def by_counting(launch: Launch, law: philox.Law, generator: Any) -> Way:
    """Compute the numbers at the rank's places."""

    def way(whole: Whole, held: Held, target: Target) -> None:
        stride = whole.dtype.itemsize * (2 if whole.gaps else 1)
        before, seed = generator.get_offset(), generator.initial_seed()
        kernels, advance = stretches(launch, held.total, stride)
        for box, places in held.places(_COUNTED_AT_ONCE, whole.device):
            values = torch.empty(places.shape, dtype=whole.dtype, device=whole.device)
            for kernel in kernels:
                inside = places - kernel.start
                words = launch.words(inside, kernel.numel, seed, before + kernel.offset)
                drawn = law(words)
                here = (inside >= 0) & (inside < kernel.numel)
                values = drawn if len(kernels) == 1 else torch.where(here, drawn, values)
            held.put_box(target, values, box)
        generator.set_offset(before + advance)

    return way


def counted(
    kind: Kind | None, dtype: torch.dtype, numel: int, gaps: bool, threads: int
) -> tuple[Launch, philox.Law] | None:
    """How a draw of this kind can be counted up to, as torch's headers have it; None where it cannot."""
    if kind is None:
        return None
    double = dtype == torch.float64
    launch, scalars = Launch(threads, 2 if double else 4), kind.scalars
    if kind.name == "uniform_":
        low, high = scalars or (0.0, 1.0)
        law = philox.uniform(low, high, dtype)
        return None if law is None else (launch, law)
    if kind.name == "bernoulli_":
        return launch, philox.bernoulli(scalars[0] if scalars else 0.5, dtype)
    if kind.name == "random_" and len(scalars) == 2:
        whole_numbers = philox.integers(*scalars, dtype)
        return None if whole_numbers is None else (Launch(threads), whole_numbers)
    if kind.name == "noise_":
        kept = 1.0 - scalars[0]
        return launch, philox.bernoulli(kept, dtype, torch.ones((), dtype=dtype, device=HOST).div_(kept))
    if kind.name == "dropout_noise_":
        # float32 numbers for each dtype, and as many at a time as 16 bytes hold and the count of elements allows
        vector = 1 if gaps else 16 // dtype.itemsize
        while numel % vector:
            vector //= 2
        kept32 = torch.tensor(1.0 - scalars[0], dtype=torch.float64 if double else torch.float32, device=HOST)
        scale = torch.tensor(1.0 / float(kept32), dtype=kept32.dtype, device=HOST).to(dtype)
        return Launch(threads, 4, vector, halved=False), philox.bernoulli(
            float(kept32), dtype, scale, wide=double
        )
    return None


def unroll_of(whole: Whole, threads: int) -> int | None:
    """Elements that a thread draws at a call of the generator; None if the draw is of another form."""
    generator: Any = whole.generator
    with restored(whole.generator):
        before = generator.get_offset()
        whole.draw(whole.buffer(3 * threads))
        return {CALL: 4, 2 * CALL: 2}.get(generator.get_offset() - before)


@dataclass(frozen=True)
class Candidate:
    """A way, with its cost in elements that torch's kernel draws."""

    cost: int
    name: str
    launch: Launch
    way: Way


def candidates(whole: Whole, held: Held, threads: int, unroll: int | None) -> list[Candidate]:
    """The ways that may give the numbers of one device, the cheapest first. `unroll`: see `unroll_of`."""
    stride = whole.dtype.itemsize * (2 if whole.gaps else 1)
    ways: list[Candidate] = []
    law = counted(whole.kind, whole.dtype, held.total, whole.gaps, threads)
    if law is not None:
        cost = _COUNTED_COST * held.numel
        ways.append(Candidate(cost, "count", law[0], by_counting(*law, whole.generator)))
    if unroll is not None:
        launch = Launch(threads, unroll)
        cost = sum(drawn for _, drawn, _, _ in _pieces(launch, whole, held, stride))
        ways.append(Candidate(cost, "waves", launch, by_waves(launch, whole.generator)))
    return sorted(ways, key=lambda candidate: candidate.cost)


def chosen(whole: Whole, held: Held, threads: int | None = None) -> Way | None:
    """The cheapest way that gives the numbers of one device, tried on a few waves; None if there is none.

    Of a tensor that several kernels fill, above 2 GiB, three places are tried too, in one of just over 2 or 4 GiB, whose whole
    would have been drawn else.
    """
    threads = most_threads(whole.device) if threads is None else threads
    stride = whole.dtype.itemsize * (2 if whole.gaps else 1)
    unroll = _remembered(whole, "unroll", 0, lambda: unroll_of(whole, threads))
    for candidate in candidates(whole, held, threads, unroll):
        launch, name, way = candidate.launch, candidate.name, candidate.way
        # as many elements more than whole waves as decide how many a thread draws together
        rows = 3 * held.total % 8 + 8 * (-(-2 * launch.unroll * threads // 24) + threads // 24 + 5)
        if not _remembered(whole, name, held.total % 8, partial(_tried, way, whole, rows)):
            continue
        if launch.halved and not fits(held.total, stride):
            most = (_MOST_OFFSET - 1) // stride + 1
            # halves of halves are tried if the tensor is cut into them
            size = most * (1 if fits(-(-held.total // 2), stride) else 2) + 3
            if not _remembered(whole, name, size, partial(_tried_halves, way, whole, size)):
                continue
        return way
    return None


def _tried(way: Way, whole: Whole, rows: int) -> bool:
    return agrees(way, replace(whole, piece=1), rows, 3)


def _tried_halves(way: Way, whole: Whole, size: int) -> bool:
    """Whether the beginning, the middle and the end of a tensor that several kernels fill are those of one device."""
    spots = tuple((at, 1024) for at in (0, size // 2 - 512, size - 1024))
    held = Held((size,), tuple((((at, n),), ((index * n, n),)) for index, (at, n) in enumerate(spots)))
    got = torch.empty(len(spots) * 1024, dtype=whole.dtype, device=whole.device)
    step = 2 if whole.gaps else 1
    with restored(whole.generator) as state:
        try:
            full = torch.empty(size * step, dtype=whole.dtype, device=whole.device)[::step]
        except torch.OutOfMemoryError:
            return False
        whole.draw(full)
        end = whole.generator.get_state()
        expected = torch.cat([full[at : at + n] for at, n in spots])
        del full
        whole.generator.set_state(state)
        way(whole, held, Target((got,)))
        return torch.equal(expected, got) and torch.equal(end, whole.generator.get_state())


@cache
def _verdicts() -> dict[Any, Any]:
    """(what was tried) -> the outcome: devices and kernels stay the same while a process lives."""
    return {}


def _remembered(whole: Whole, name: str, rest: int, tried: Callable[[], Any]) -> Any:
    """The outcome of a trial, which is made once for each kind of draw; every time where the kind is not known."""
    if whole.kind is None:
        return tried()
    key = (name, rest, whole.kind, whole.dtype, whole.device, whole.contiguous, whole.gaps)
    verdicts = _verdicts()
    if key not in verdicts:
        verdicts[key] = tried()
    return verdicts[key]
