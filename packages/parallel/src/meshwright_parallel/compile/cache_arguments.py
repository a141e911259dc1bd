"""Caches of `transformers` as arguments of a region, of calls that append their keys and values to an empty layer of one.

Models of `transformers` make a cache in training too, unless they are built with `use_cache=False`. A graph has the keys and
values as results, and they are appended to the cache of a call after its run. The attention of an empty layer is that of the
keys and values alone. Every other use of a cache is one of a call that runs as it is.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

_MODULE, _CACHE, _PAIR = "transformers.cache_utils", "DynamicCache", "EncoderDecoderCache"
_GROWING = ("DynamicLayer", "DynamicSlidingWindowLayer")
"""Kinds of layers whose first update returns its arguments."""
EARLIER = "its cache has earlier tokens"


class CannotAppend(Exception):
    """A call uses its cache in another way than a graph can; the text says how."""


@dataclass(frozen=True)
class Append:
    """Keys and values that a call appends: to which of its caches, and to which layer of it."""

    cache: int
    layer: int


@dataclass(frozen=True)
class CacheUse:
    """What calls of a graph do with their caches.

    Attributes:
        appends: where to keys and values are appended.
        updated: per number of a cache of an encoder and a decoder, its `is_updated` after the call.
    """

    appends: tuple[Append, ...]
    updated: Mapping[int, Mapping[int, bool]]

    def repeat(self, caches: Sequence[Any], tensors: Sequence[Sequence[Tensor]]) -> None:
        """Do the same with the caches of another call: append its keys and values."""
        for append, (keys, values) in zip(self.appends, tensors, strict=True):
            caches[append.cache].update(keys, values, append.layer)
        for number, now in self.updated.items():
            caches[number].is_updated.update(now)


@dataclass
class RecordedCaches:
    """What a recorded call does with its caches.

    Attributes:
        caches: those of the call, as `caches_of` gives them; the call gets `stand_ins`, which note its use of them.
        appends, tensors: where to, and the keys and values of each.
        updated: per cache of an encoder and a decoder, its `is_updated` for this call.
    """

    caches: list[Any]
    stand_ins: list[Any] = field(default_factory=list)
    appends: list[Append] = field(default_factory=list)
    tensors: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    updated: dict[int, dict[int, bool]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for number, cache in enumerate(self.caches):
            first = next(n for n, other in enumerate(self.caches) if other is cache)
            if first < number:
                self.stand_ins.append(self.stand_ins[first])
            elif is_pair(cache):
                self.updated[number] = dict(cache.is_updated)
                self.stand_ins.append(_Pair(self, number))
            else:
                self.stand_ins.append(_Single(self, number))

    def number(self, value: Any) -> int | None:
        """Which of the stand-ins a value is; None if it is none of them."""
        return next((n for n, stand_in in enumerate(self.stand_ins) if value is stand_in), None)

    def use(self) -> CacheUse:
        """What the call has done. Raises CannotAppend: it has changed `is_updated` alone."""
        updated = {
            number: now for number, now in self.updated.items() if now != self.caches[number].is_updated
        }
        if updated and not self.appends:
            raise CannotAppend("it assigns 'is_updated' of its cache")
        return CacheUse(tuple(self.appends), updated)

    def append(self, number: int, keys: Tensor, values: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        """Note an append. Raises CannotAppend: the layer is not an empty one."""
        cache = self.caches[number]
        kind = type(cache.layers[layer]) if layer < len(cache.layers) else cache.layer_class_to_replicate
        if self.length(number, layer):
            raise CannotAppend(EARLIER)
        if cache.offloading or not _is_of_transformers(kind, *_GROWING):
            raise CannotAppend(f"its cache has a layer of another kind, {getattr(kind, '__name__', kind)}")
        self.appends.append(Append(number, layer))
        self.tensors.append((keys, values))
        return keys, values

    def length(self, number: int, layer: int) -> int:
        """Tokens in a layer. Raises CannotAppend: it has some from before the call."""
        layers = self.caches[number].layers
        if layer < len(layers) and layers[layer].is_initialized is not False:
            raise CannotAppend(EARLIER)
        appended = [
            keys
            for a, (keys, _) in zip(self.appends, self.tensors, strict=True)
            if a == Append(number, layer)
        ]
        return sum(keys.shape[-2] for keys in appended)


def is_pair(value: Any) -> bool:
    """Whether a value is a cache of an encoder and a decoder, of two that calls may append to."""
    if not _is_of_transformers(type(value), _PAIR):
        return False
    return _is_single(value.self_attention_cache) and _is_single(value.cross_attention_cache)


def _is_single(value: Any) -> bool:
    return _is_of_transformers(type(value), _CACHE) and hasattr(value, "layer_class_to_replicate")


def caches_of(value: Any) -> list[Any]:
    """The caches in an argument: itself first, and those of a pair; none of an argument of another kind."""
    if is_pair(value):
        return [value, value.self_attention_cache, value.cross_attention_cache]
    return [value] if _is_single(value) else []


def cache_key(cache: Any) -> Any:
    """Equal for caches to which the same call appends in the same way."""
    if is_pair(cache):
        return (type(cache), *cache.is_updated.items(), *map(cache_key, caches_of(cache)[1:]))
    layers = [(type(layer), getattr(layer, "is_initialized", None)) for layer in cache.layers]
    return (type(cache), cache.offloading, cache.layer_class_to_replicate, *layers)


def contents(caches: Sequence[Any]) -> list[list[Any]]:
    """The keys of each layer of each cache."""
    return [
        [] if is_pair(cache) else [getattr(layer, "keys", None) for layer in cache.layers] for cache in caches
    ]


def filled(before: Sequence[Sequence[Any]], after: Sequence[Sequence[Any]]) -> set[int]:
    """The numbers of the layers that a call has filled, by the contents of its caches before and after it."""
    return {
        number
        for old, new in zip(before, after, strict=True)
        for number, keys in enumerate(new)
        if number >= len(old) or keys is not old[number]
    }


def go_on(caches: Sequence[Any], layers: Collection[int]) -> bool:
    """Whether one of these layers has tokens already."""
    of_all = [cache.layers for cache in caches if not is_pair(cache)]
    return any(
        getattr(of_cache[n], "keys", None) is not None
        for of_cache in of_all
        for n in layers
        if n < len(of_cache)
    )


def _is_of_transformers(kind: Any, *names: str) -> bool:
    return getattr(kind, "__module__", None) == _MODULE and kind.__qualname__ in names


class _StandIn:
    """What the code of a model gets for a cache: an instance of its class, as far as isinstance sees."""

    def __init__(self, recorded: RecordedCaches, number: int) -> None:
        self.__dict__.update(_recorded=recorded, _number=number)

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return type(self._recorded.caches[self._number])

    def __getattr__(self, name: str) -> Any:
        raise CannotAppend(f"it reads {name!r} of its cache")

    def __setattr__(self, name: str, value: Any) -> None:
        raise CannotAppend(f"it assigns {name!r} of its cache")

    def __len__(self) -> int:
        raise CannotAppend("it reads the length of its cache")


class _Single(_StandIn):
    """For one cache."""

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> Any:
        return self._recorded.append(self._number, key_states, value_states, layer_idx)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self._recorded.length(self._number, layer_idx)  # type: ignore[no-any-return]


class _Pair(_StandIn):
    """For the caches of an encoder and a decoder."""

    @property
    def is_updated(self) -> dict[int, bool]:
        return self._recorded.updated[self._number]  # type: ignore[no-any-return]

    @property
    def self_attention_cache(self) -> Any:
        return self._recorded.stand_ins[self._number + 1]

    @property
    def cross_attention_cache(self) -> Any:
        return self._recorded.stand_ins[self._number + 2]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.self_attention_cache.get_seq_length(layer_idx)  # type: ignore[no-any-return]
