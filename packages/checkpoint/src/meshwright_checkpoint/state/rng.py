"""The random streams of this process as tensors."""

from __future__ import annotations

import hashlib
import random
import sys
from collections.abc import Mapping

import torch

from meshwright_checkpoint.errors import CorruptError
from meshwright_checkpoint.rank_messages import Ranks
from meshwright_dtensor.devices import HOST, default_device, device_of


def state() -> dict[str, torch.Tensor]:
    """Stream -> state: torch on the CPU and on this rank's accelerator, Python, and numpy if it is imported."""
    streams = {"torch-cpu": torch.get_rng_state()}
    if default_device().in_use() and (name := _accelerator()) is not None:
        streams[f"torch-{name}"] = _generator(name).get_state()
    _, words, gauss = random.getstate()
    streams["python"] = torch.tensor(words, dtype=torch.int64, device=HOST)
    if gauss is not None:
        streams["python-gauss"] = torch.tensor([gauss], dtype=torch.float64, device=HOST)
    if "numpy.random" in sys.modules:
        import numpy as np

        kind, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
        if kind == "MT19937":
            words = [*np.asarray(keys).tolist(), position, has_gauss]
            streams["numpy"] = torch.tensor(words, dtype=torch.int64, device=HOST)
            streams["numpy-gauss"] = torch.tensor([cached], dtype=torch.float64, device=HOST)
    return streams


def _accelerator() -> str | None:
    """The type of the accelerator of this rank, if its random numbers have a stream of their own."""
    record = default_device()
    if record.on_host or _generator(record.name) is torch.default_generator:
        return None
    return record.name


def _generator(name: str) -> torch.Generator:
    record = device_of(name)
    return record.generator(record.current())


def digests() -> dict[str, str]:
    """Stream -> digest of its state."""
    return {name: hashlib.sha256(value.numpy().tobytes()).hexdigest() for name, value in state().items()}


def shared(digests: Mapping[str, str], ranks: Ranks) -> set[str]:
    """The streams that are equal on all ranks (a collective call)."""
    first: dict[str, str] = ranks.first(digests)
    different = ranks.most([digests.get(name) != value for name, value in first.items()])
    return {name for name, differs in zip(first, different, strict=True) if not differs}


def restore(streams: Mapping[str, torch.Tensor]) -> None:
    """Restore the given streams that exist here. Raises CorruptError for invalid states."""
    try:
        if "torch-cpu" in streams:
            torch.set_rng_state(streams["torch-cpu"])
        if (name := _accelerator()) is not None and f"torch-{name}" in streams:
            _generator(name).set_state(streams[f"torch-{name}"])
        if "python" in streams:
            gauss = streams.get("python-gauss")
            random.setstate((3, tuple(streams["python"].tolist()), None if gauss is None else gauss.item()))
        if "numpy" in streams:
            import numpy as np

            *keys, position, has_gauss = streams["numpy"].tolist()
            cached = streams["numpy-gauss"].item()
            np.random.set_state(("MT19937", np.array(keys, dtype=np.uint32), position, has_gauss, cached))
    except (RuntimeError, TypeError, ValueError, OverflowError, KeyError) as error:
        raise CorruptError(f"the random state in the checkpoint is invalid: {error}") from error
