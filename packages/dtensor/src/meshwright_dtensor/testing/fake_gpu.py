"""A training step on GPUs that are not there: fake tensors of cuda, and a note of all that would wait for a GPU or copy from it.

    with fake_gpus(rank=0, world_size=2) as gpus:
        mw.init("cuda")
        ...                                   # build, plan, parallelize, a first step
        with gpus.watched() as waits:
            step()
        assert not waits

Tensors of the CPU are real, those of cuda have shapes only. What is read from a fake GPU is 0. Torch raises where tensors of two
devices meet in an operation.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from meshwright_dtensor._torch import fake_gpu
from meshwright_dtensor._torch.core import TorchDispatchMode, fake_mode_active, is_fake, op_name, pytree
from meshwright_dtensor._torch.groups import fake_store
from meshwright_dtensor._torch.modes import fake_mode
from meshwright_dtensor.devices import HOST, replaced
from meshwright_dtensor.devices.cuda import Cuda
from meshwright_dtensor.drawing.held import Held
from meshwright_dtensor.drawing.whole import Way, Whole
from meshwright_dtensor.errors import UnsupportedError

_GPU = "cuda"
_MASKS = (torch.bool, torch.uint8)


@dataclass(frozen=True)
class Wait:
    """Something that makes the CPU wait for the GPU, or copies between their memories.

    Attributes:
        what: "read" of one number, "shape" that depends on values, "to host" or "to device".
        operation: the torch operation.
        where: the line of code that called it, and those that led there, the innermost first.
    """

    what: str
    operation: str
    where: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.what}: {self.operation} at {' < '.join(self.where)}"


class FakeGpu(TorchDispatchMode):
    """Operations on tensors of cuda give fake tensors; all others run."""

    def __init__(self) -> None:
        super().__init__()
        self.fake: Any = fake_mode()
        self.waits: list[Wait] | None = None

    @contextmanager
    def watched(self) -> Iterator[list[Wait]]:
        """Yields a list that gets all that waits for the GPU from now on until the end of the block."""
        before, self.waits = self.waits, []
        try:
            yield self.waits
        finally:
            self.waits = before

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        leaves = pytree.tree_leaves((args, kwargs))
        tensors: list[Any] = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        # fake tensors of someone else, such as a derivation of programs
        if fake_mode_active() or any(is_fake(t) and t.fake_mode is not self.fake for t in tensors):
            return func(*args, **kwargs)
        target = next((leaf for leaf in leaves if isinstance(leaf, torch.device)), None)
        here = any(is_fake(t) for t in tensors)
        there = target is not None and target.type == _GPU
        if not here and not there:
            return func(*args, **kwargs)
        if target is not None and target.type == "meta":
            like = self._fake_call(func, args, kwargs)
            return torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=target)
        to_host = here and target is not None and target.type == HOST.type
        return self._on_gpu(func, args, kwargs, tensors, to_host)

    def _on_gpu(self, func: Any, args: Any, kwargs: Any, tensors: list[Any], to_host: bool) -> Any:
        """An operation that a GPU takes part in, as it would wait for it."""
        name = op_name(func).partition("::")[2]
        if name == "_local_scalar_dense":
            self._note("read", name)
            return torch.zeros((), dtype=tensors[0].dtype).item()
        if _has_data_dependent_shape(func, name, tensors, kwargs):
            self._note("shape", name)
        if to_host:
            self._note("to host", name)
            return self._zeros(func, args, kwargs)
        if name == "copy_" and is_fake(tensors[1]) and not is_fake(tensors[0]):
            self._note("to host", name)
            return tensors[0].zero_()
        if any(not is_fake(t) and t.numel() for t in tensors) and name in ("copy_", "_to_copy"):
            self._note("to device", name)
        return self._fake_call(func, args, kwargs)

    def _fake_call(self, func: Any, args: Any, kwargs: Any) -> Any:
        # fake tensors of the CPU, or torch would compute with constants
        args, kwargs = pytree.tree_map_only(torch.Tensor, self._faked, (args, kwargs))
        with self.fake:
            return func(*args, **kwargs)

    def _faked(self, tensor: torch.Tensor) -> torch.Tensor:
        if is_fake(tensor):
            return tensor
        faked: torch.Tensor = self.fake.from_tensor(tensor)
        return faked

    def _zeros(self, func: Any, args: Any, kwargs: Any) -> Any:
        like = self._fake_call(func, args, kwargs)
        return torch.empty_strided(like.shape, like.stride(), dtype=like.dtype).zero_()

    def _note(self, what: str, name: str) -> None:
        if self.waits is None:
            return
        frames = [
            f for f in traceback.extract_stack() if "/torch/" not in f.filename and f.filename != __file__
        ]
        where = [f"{f.filename.rpartition('/src/')[2]}:{f.lineno} {f.name}" for f in reversed(frames[-6:])]
        self.waits.append(Wait(what, name, tuple(where)))


def _has_data_dependent_shape(func: Any, name: str, tensors: list[Any], kwargs: Any) -> bool:
    if torch.Tag.dynamic_output_shape not in func.tags or kwargs.get("output_size") is not None:
        return False
    # only masks are counted
    if name in ("index", "index_put", "index_put_"):
        return any(t.dtype in _MASKS for t in tensors[1:])
    return True


class _FakeCuda(Cuda):
    """GPUs that have no random numbers."""

    def generator(self, device: torch.device) -> torch.Generator:
        """Of the CPU: nothing is drawn from it."""
        return torch.default_generator

    def way(self, whole: Whole, held: Held) -> Way | None:
        """None: ways are tried on values."""
        return None


@contextmanager
def fake_gpus(rank: int = 0, world_size: int = 1) -> Iterator[FakeGpu]:
    """This process is one rank of a world of fake GPUs, over a fake process group if there is none yet.

    Raises UnsupportedError: torch without CUDA needs a C++ compiler, and there is none.
    """
    if not torch.cuda.is_available() and fake_gpu.compiler() is None:
        raise UnsupportedError(
            "fake GPUs need a C++ compiler once (c++ or g++), and this machine has none; install one"
        )
    made = not dist.is_initialized()
    if made:
        dist.init_process_group("fake", store=fake_store(), rank=rank, world_size=world_size)
    mode = FakeGpu()
    try:
        with fake_gpu.guarded(), fake_gpu.pretended_module(), replaced(_FakeCuda()), mode:
            yield mode
    finally:
        if made:
            dist.destroy_process_group()
