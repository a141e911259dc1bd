"""Recomputed modules that write to objects among their arguments, as layers write to a key-value cache."""

from __future__ import annotations

import gc
import time
import weakref
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright_dtensor.errors import UnsupportedError
from meshwright_dtensor.plan import ParallelPlan, ParameterRule, RecomputeRule
from meshwright_dtensor.testing.on_device import seeded
from meshwright_dtensor.testing.rank_pool import RankPool
from meshwright_parallel import parallelize
from meshwright_parallel.recompute import argument_copies
from meshwright_parallel.verification.compare import compare

LAYOUTS = {"tp2": {"tp": 2}, "dp2": {"dp": 2}, "zero2": {"zero": 2}}
POLICIES = ["full", "selective", "alternate"]
HEADS, HEAD, LAYERS, VOCABULARY = 2, 6, 3, 21
WIDTH = HEADS * HEAD


class Entry:
    """The cache of one layer."""

    __slots__ = ("__weakref__", "keys", "values")

    def __init__(self) -> None:
        self.keys: Tensor | None = None
        self.values: Tensor | None = None


@dataclass
class Cache:
    """Keys and values of all layers, with an entry per layer, and counts of calls."""

    entries: list[Entry] = field(default_factory=list)
    calls: dict[int, int] = field(default_factory=dict)

    @property
    def length(self) -> int:
        """How many tokens it has."""
        return self.entries[0].keys.shape[2] if self.entries else 0  # type: ignore[union-attr]

    def update(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """All keys and values of a layer, with new ones."""
        if len(self.entries) <= layer:
            self.entries.append(Entry())
        entry = self.entries[layer]
        old = (keys[:, :, :0], values[:, :, :0]) if entry.keys is None else (entry.keys, entry.values)
        entry.keys, entry.values = (torch.cat(pair, dim=2) for pair in zip(old, (keys, values), strict=True))
        self.calls[layer] = self.calls.get(layer, 0) + 1
        return entry.keys, entry.values


class Layer(nn.Module):
    """Attention over the whole cache; the result also depends on the number of calls."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.index = index
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def forward(self, x: Tensor, *, cache: Cache, states: list[Tensor]) -> Tensor:
        q, k, v = (f(x).unflatten(-1, (-1, HEAD)).transpose(1, 2) for f in (self.q, self.k, self.v))
        k, v = cache.update(self.index, k, v)
        states.append(x)
        new, all_values = q.shape[2], k.shape[2]
        mask = torch.ones(new, all_values, dtype=torch.bool).tril(all_values - new)
        h = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return x + self.o(h.transpose(1, 2).flatten(2)) * cache.calls[self.index] / len(states)


class Cached(nn.Module):
    """Returns the loss with the cache and the layers' values, and continues a given cache."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Layer(n) for n in range(LAYERS))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, ids: Tensor, cache: Cache | None = None) -> tuple[Tensor, Cache, list[Tensor]]:
        cache = Cache() if cache is None else cache
        states: list[Tensor] = []
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x, cache=cache, states=states)
        loss = F.cross_entropy(self.head(x[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        return loss, cache, states


def plan(degrees: dict[str, int], policy: str | None) -> ParallelPlan:
    """Heads on `tp`; all layers are recomputed."""
    rules = (
        *(ParameterRule(pattern=f"*.{name}.weight", placement={"tp": "S(0)"}) for name in "qkv"),
        ParameterRule(pattern="*.o.weight", placement={"tp": "S(1)"}),
    )
    again = () if policy is None else (RecomputeRule(pattern="layers.*", policy=policy),)  # type: ignore[arg-type]
    sharded = rules if "tp" in degrees else ()
    zero = {"zero": {"stage": 3}} if "zero" in degrees else {}
    return ParallelPlan(world_size=2, degrees=degrees, parameters=sharded, recompute=again, **zero)  # type: ignore[arg-type]


def batches() -> list[Tensor]:
    return [torch.randint(0, VOCABULARY, (4, length), generator=seeded(length)) for length in (5, 7)]


def made(model: Any, chunks: int) -> dict[str, Tensor | None]:
    """Loss, gradients and cache of a text read in `chunks` pieces; each piece sends gradients to all earlier ones."""
    model.zero_grad()
    cache, losses, actual = None, [], {}
    for ids in batches()[:chunks]:
        loss, cache, states = model(ids, cache)
        losses.append(loss)
        actual |= {f"state {len(losses)} {n}": state for n, state in enumerate(states)}
    torch.stack(losses).sum().backward()
    assert cache.calls == dict.fromkeys(range(LAYERS), chunks) and len(cache.entries) == LAYERS
    for n, entry in enumerate(cache.entries):
        actual |= {f"keys {n}": entry.keys, f"values {n}": entry.values}
    actual |= {f"loss {n}": loss for n, loss in enumerate(losses)}
    return actual | {name: p.grad for name, p in model.named_parameters()}


def _pair(degrees: dict[str, int], policy: str | None) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    single = Cached()
    torch.manual_seed(0)
    return single, parallelize(Cached(), plan(degrees, policy))


def _wrong(rank: int, world_size: int, degrees: dict[str, int], policy: str | None, chunks: int) -> list[str]:
    single, many = _pair(degrees, policy)
    actual = compare(0, "gradient", made(single, chunks), made(many, chunks), None)
    assert len(actual) > 20
    return [f"{c.name} {c.relative:.1e} {c.note}" for c in actual if not c.ok]


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_cache_equals_one_device(rank_pool: RankPool, layout: str, policy: str) -> None:
    """In one piece and in two; the second piece reads the cache of the first, and sends gradients through it."""
    for chunks in (1, 2):
        for wrong in rank_pool.run(2, _wrong, LAYOUTS[layout], policy, chunks):
            assert not wrong


class _NoCopies(argument_copies.ArgumentCopies):
    """The control: a second run gets the same objects as the first."""

    def __init__(self, args: Any, kwargs: Any) -> None:
        super().__init__((), {})
        self._arguments = (args, kwargs)

    def once_more(self, module: str) -> Any:
        """The same objects."""
        from contextlib import nullcontext

        return nullcontext(self._arguments)


def _without_copies(rank: int, world_size: int, degrees: dict[str, int]) -> str:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("meshwright_parallel.recompute.checkpoint.ArgumentCopies", _NoCopies)
        try:
            return " ".join(_wrong(rank, world_size, degrees, "full", 1))
        except (RuntimeError, AssertionError) as error:
            return f"{type(error).__name__} {error}"


def test_cache_differs_without_copies(rank_pool: RankPool) -> None:
    for wrong in rank_pool.run(2, _without_copies, LAYOUTS["tp2"]):
        assert wrong


def _twice(rank: int, world_size: int) -> list[str]:
    """Three backward passes through one graph: each recomputes the layers on new copies."""
    ends = []
    for model in _pair(LAYOUTS["tp2"], "full"):
        loss, cache, _ = model(batches()[0])
        for last in (False, False, True):
            loss.backward(retain_graph=not last)
        assert cache.length == 5
        ends.append({name: p.grad for name, p in model.named_parameters()})
    return [f"{c.name} {c.relative:.1e}" for c in compare(0, "gradient", *ends, None) if not c.ok]


def test_each_backward_pass_has_its_own_copies(rank_pool: RankPool) -> None:
    for wrong in rank_pool.run(2, _twice):
        assert not wrong


def _are_gone(refs: list[weakref.ref[Any]]) -> bool:
    """Whether the objects are freed; a thread of autograd or of a collective may hold one a moment longer."""
    for _ in range(50):
        if all(ref() is None for ref in refs):
            return True
        time.sleep(0.1)
    return False


def _freed(rank: int, world_size: int) -> None:
    _, model = _pair(LAYOUTS["tp2"], "full")
    for backward in (True, False):
        gc.collect()
        gc.disable()
        try:
            loss, cache, states = model(batches()[0])
            gone = [weakref.ref(entry) for entry in cache.entries]
            keys = [weakref.ref(entry.keys) for entry in cache.entries]
            del cache, states
            assert all(ref() is None for ref in gone), "the copies hold no object that was given"
            assert any(ref() is not None for ref in keys), (
                "the control: they hold what the second run may read"
            )
            if backward:
                loss.backward()
                assert _are_gone(keys), "a backward pass frees them"
            del loss
            assert _are_gone(keys), "so does the end of the graph"
        finally:
            gc.enable()


@pytest.mark.slow
def test_copies_are_freed_with_the_graph(rank_pool: RankPool) -> None:
    rank_pool.run(2, _freed)


def _without_gradients(rank: int, world_size: int) -> None:
    _, model = _pair(LAYOUTS["tp2"], "full")
    copies: list[Any] = []

    class Counted(argument_copies.ArgumentCopies):
        def __init__(self, args: Any, kwargs: Any) -> None:
            copies.append(self)
            super().__init__(args, kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("meshwright_parallel.recompute.checkpoint.ArgumentCopies", Counted)
        with torch.no_grad():
            model(batches()[0])
        assert not copies
        model(batches()[0])[0].backward()
        assert len(copies) == LAYERS


def test_nothing_is_copied_without_gradients(rank_pool: RankPool) -> None:
    rank_pool.run(2, _without_gradients)


class Static(nn.Module):
    """Writes to a tensor of an object in place: with `itself` in the recomputed module, else after it."""

    def __init__(self, itself: bool) -> None:
        super().__init__()
        self.itself = itself
        self.inner = Inner(itself)

    def forward(self, x: Tensor) -> Tensor:
        cache = Cache([Entry()])
        cache.entries[0].keys = x * 0.0
        y = self.inner(x, cache)
        if not self.itself:
            cache.entries[0].keys.add_(1.0)
        return y.sum()


class Inner(nn.Module):
    """Reads, and may write to, a tensor of the object that it is given."""

    def __init__(self, writes: bool) -> None:
        super().__init__()
        self.writes = writes
        self.up = nn.Sequential(nn.Linear(6, 8), nn.Tanh())

    def forward(self, x: Tensor, cache: Cache) -> Tensor:
        keys = cache.entries[0].keys
        assert keys is not None
        if self.writes:
            keys.add_(x.detach())
        return self.up(x + keys.clone())


def _refused(rank: int, world_size: int) -> None:
    rule = RecomputeRule(pattern="inner")
    for itself, who in ((True, "by the module itself"), (False, "after the module had run")):
        plan = ParallelPlan(world_size=2, degrees={"dp": 2}, recompute=(rule,))
        loss = parallelize(Static(itself), plan)(torch.ones(2, 6))
        with pytest.raises(
            UnsupportedError, match=f"a tensor in the Entry .* Inner was modified in place {who}"
        ):
            loss.backward()


@pytest.mark.slow
def test_writes_to_tensors_of_an_object_are_refused(rank_pool: RankPool) -> None:
    rank_pool.run(2, _refused)
