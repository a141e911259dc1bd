"""A training step on GPUs that are not there: fake tensors of cuda, and a note of all that would wait for a GPU or copy from it.

    with fake_gpus(rank=0, world_size=2) as gpus:
        mw.init("cuda")
        ...                                   # build, plan, parallelize, a first step
        with gpus.watched() as waits:
            step()
        assert not waits

Tensors of the CPU are real, those of cuda have shapes only. What is read from a fake GPU is 0. Torch raises where tensors of two
devices meet in an operation. Random numbers are drawn in the ways that a GPU draws them, without the trials, which need values.
"""

from __future__ import annotations

import struct
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.distributed as dist

from meshwright_dtensor._torch import fake_gpu
from meshwright_dtensor._torch.core import TorchDispatchMode, fake_mode_active, is_fake, op_name, pytree
from meshwright_dtensor._torch.groups import fake_store
from meshwright_dtensor._torch.modes import fake_mode
from meshwright_dtensor.devices import HOST, replaced
from meshwright_dtensor.devices.cuda import Cuda
from meshwright_dtensor.drawing import gpu
from meshwright_dtensor.drawing.held import Held
from meshwright_dtensor.drawing.philox import CALL
from meshwright_dtensor.drawing.whole import Way, Whole
from meshwright_dtensor.errors import UnsupportedError

_GPU = "cuda"
_MASKS = (torch.bool, torch.uint8)
_INDEXED = ("index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index")
_WAITING_KERNELS = ("_linalg_check_errors", "embedding_renorm_", "multinomial")
"""Operations whose kernels for GPUs read a result before they return."""
_THREADS = 132 * 2048
"""That an H100 runs at a time."""
_STATE = struct.Struct("=QQ")


@dataclass(frozen=True)
class Wait:
    """Something that makes the CPU wait for the GPU, or copies between their memories.

    Attributes:
        what: "read" of one number, "shape" that depends on values, "to host", "to device" (also of the CPU's indices), "inside" of
            a kernel, or "synchronise".
        operation: the torch operation.
        where: the line of code that called it, and those that led there, the innermost first.
    """

    what: str
    operation: str
    where: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.what}: {self.operation} at {' < '.join(self.where)}"


class FakeGpu(TorchDispatchMode):
    """Operations on tensors of cuda give fake tensors; all others run.

    Attributes:
        asynchronous: copies between the memories, in watched blocks, that wait for nothing: non_blocking, of pinned memory.
    """

    def __init__(self) -> None:
        super().__init__()
        self.fake: Any = fake_mode()
        self.waits: list[Wait] | None = None
        self.asynchronous: list[Wait] = []

    @contextmanager
    def watched(self) -> Iterator[list[Wait]]:
        """Yields a list that gets all that waits for the GPU from now on until the end of the block."""
        before, self.waits = self.waits, []
        try:
            yield self.waits
        finally:
            self.waits = before

    def synchronized(self, device: Any = None) -> None:
        """What `torch.cuda.synchronize` does here."""
        self._note("synchronise", "synchronize")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        # autograd runs backward passes of GPUs in threads of its own
        fake_gpu.lift_on_cpu()
        leaves = pytree.tree_leaves((args, kwargs))
        tensors: list[Any] = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        # fake tensors of someone else, such as a derivation of programs
        if fake_mode_active() or any(is_fake(t) and t.fake_mode is not self.fake for t in tensors):
            return func(*args, **kwargs)
        target = next((leaf for leaf in leaves if isinstance(leaf, torch.device)), None)
        here = any(is_fake(t) for t in tensors)
        there = target is not None and target.type == _GPU
        if not here and not there:
            return self._on_host(func, args, kwargs)
        if target is not None and target.type == "meta":
            like = self._fake_call(func, args, kwargs)
            return torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=target)
        to_host = here and target is not None and target.type == HOST.type
        return self._on_gpu(func, args, kwargs, tensors, to_host)

    def _on_host(self, func: Any, args: Any, kwargs: Any) -> Any:
        """An operation of the CPU. Memory that it pins is not, since there is no driver, and is known to be."""
        name = op_name(func).partition("::")[2]
        if name == "is_pinned":
            return self._is_pinned(args[0])
        if name == "_pin_memory":
            return self._pin(args[0].clone())
        if kwargs.get("pin_memory"):
            return self._pin(func(*args, **{**kwargs, "pin_memory": False}))
        return func(*args, **kwargs)

    def _pin(self, tensor: torch.Tensor) -> torch.Tensor:
        _pinned()[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    def _is_pinned(self, tensor: torch.Tensor) -> bool:
        return not is_fake(tensor) and tensor.untyped_storage().data_ptr() in _pinned()

    def _on_gpu(self, func: Any, args: Any, kwargs: Any, tensors: list[Any], to_host: bool) -> Any:
        """An operation that a GPU takes part in, as it would wait for it."""
        name = op_name(func).partition("::")[2]
        if torch.Tag.data_dependent_output in func.tags and name not in _WAITING_KERNELS:
            self._note("read", name)
            return (
                torch.zeros((), dtype=tensors[0].dtype, device=HOST).item()
                if name == "_local_scalar_dense"
                else False
            )
        if _has_data_dependent_shape(func, name, tensors, kwargs):
            self._note("shape", name)
        if name in _WAITING_KERNELS:
            self._note("inside", name)
        if to_host:
            self._note("to host", name)
            return self._zeros(func, args, kwargs)
        if name == "copy_" and is_fake(tensors[1]) and not is_fake(tensors[0]):
            self._copied("to host", name, func, args, kwargs, tensors[0])
            return tensors[0].zero_()
        # numbers without dims are arguments of a kernel
        of_host = [t for t in tensors if not is_fake(t) and t.numel()]
        if of_host and name in ("copy_", "_to_copy"):
            self._copied("to device", name, func, args, kwargs, of_host[0])
        elif name in _INDEXED and any(t.dim() for t in of_host):
            self._note("to device", name)
        return self._fake_call(func, args, kwargs)

    def _copied(self, what: str, name: str, func: Any, args: Any, kwargs: Any, of_host: torch.Tensor) -> None:
        """A copy between the memories: it waits unless it is asked not to and the host's memory is pinned."""
        lets_go = bool(args[2] if len(args) > 2 else kwargs.get("non_blocking"))
        self._note(what, name, lets_go and self._is_pinned(of_host))

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
        return torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=HOST).zero_()

    def _note(self, what: str, name: str, asynchronous: bool = False) -> None:
        if self.waits is None:
            return
        frames = [
            f for f in traceback.extract_stack() if "/torch/" not in f.filename and f.filename != __file__
        ]
        where = [f"{f.filename.rpartition('/src/')[2]}:{f.lineno} {f.name}" for f in reversed(frames[-6:])]
        (self.asynchronous if asynchronous else self.waits).append(Wait(what, name, tuple(where)))


@cache
def _pinned() -> dict[int, torch.Tensor]:
    """Address -> pinned memory of this process. It is kept, so that no other memory gets its address."""
    return {}


def _has_data_dependent_shape(func: Any, name: str, tensors: list[Any], kwargs: Any) -> bool:
    if torch.Tag.dynamic_output_shape not in func.tags or kwargs.get("output_size") is not None:
        return False
    # only masks are counted
    if name in _INDEXED:
        return any(t.dtype in _MASKS for t in tensors[1:])
    return True


class _Stream(torch.Generator):
    """The stream of a GPU, as far as the host knows it: a seed and an offset."""

    offset = 0

    def get_offset(self) -> int:
        """Numbers that were drawn."""
        return self.offset

    def set_offset(self, offset: int) -> torch.Generator:
        """Go on from there."""
        if offset % CALL:
            raise RuntimeError(f"offset must be a multiple of {CALL}, and is {offset}")
        self.offset = offset
        return self

    def manual_seed(self, seed: int) -> torch.Generator:
        """Begin another stream."""
        self.offset = 0
        return super().manual_seed(seed)

    def get_state(self) -> torch.Tensor:
        """Both, 8 bytes each, as a GPU has them."""
        return torch.frombuffer(bytearray(_STATE.pack(self.initial_seed(), self.offset)), dtype=torch.uint8)

    def set_state(self, state: torch.Tensor) -> torch.Generator:
        """What `get_state` gave."""
        seed, offset = _STATE.unpack(bytes(state.tolist()))
        self.manual_seed(seed)
        return self.set_offset(offset)


class _FakeCuda(Cuda):
    """GPUs whose numbers nobody knows."""

    def __init__(self, stream: _Stream) -> None:
        super().__init__()
        self.stream = stream

    def generator(self, device: torch.device) -> torch.Generator:
        """One whose offset counts."""
        return self.stream

    def way(self, whole: Whole, held: Held) -> Way | None:
        """The cheapest, which a GPU would try first."""
        candidates = gpu.candidates(whole, held, _THREADS, CALL)
        return candidates[0].way if candidates else None


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
    mode, stream = FakeGpu(), _Stream()
    pretended = fake_gpu.pretended_module(mode.synchronized, stream)
    try:
        with fake_gpu.guarded(), pretended, replaced(_FakeCuda(stream)), mode:
            yield mode
    finally:
        if made:
            dist.destroy_process_group()
