"""Deferred initialisation: build a model larger than memory with its own constructor, then keep only a rank's boxes.

    with deferred_init():
        model = Model(config)                      # any code; values of one device, bit for bit
    shard = local_values(model.weight, box)        # only this box, in memory

Inside the context every large CPU tensor is a memory-mapped file on a disk. The code that fills it runs unchanged, in the
same order, with the same numbers; the kernel keeps as many of the pages as fit into memory. Nothing is recorded or
replayed. The ranks of a host build together (`shared_build`): it costs disk space for the model, and about 1.6 times the time of
one device, once per host.

    with deferred_init(values=False):
        model = Model(config)                      # to plan for: neither memory, nor disk, nor time for values
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from meshwright_dtensor._torch import core
from meshwright_dtensor._torch.modes import dispatch_modes
from meshwright_dtensor.deferred import mapped_files
from meshwright_dtensor.deferred.call_text import Holds, call_text, tensor_text
from meshwright_dtensor.deferred.host_ranks import JOIN_SECONDS, HostRanks, calling_line, join_host, this_job
from meshwright_dtensor.deferred.page_release import Resident, release
from meshwright_dtensor.deferred.shared_build import SharedBuild
from meshwright_dtensor.devices import on_host, unnamed_device
from meshwright_dtensor.errors import UsageError
from meshwright_dtensor.sharding.boxes import Place, copy_region

MIN_BYTES = 1 << 16
_LOG = logging.getLogger("meshwright")


def _aten(names: str) -> frozenset[str]:
    return frozenset(f"aten::{name}" for name in names.split())


# Factories of uninitialised or zero tensors: a new file is all zeros.
_EMPTY = _aten(
    "empty empty_strided empty_permuted empty_like new_empty new_empty_strided zeros zeros_like new_zeros"
)
# Factories that equal an in-place op on an empty tensor: it fills the file directly, with the same numbers.
_FILLED: Mapping[str, Callable[[torch.Tensor, Mapping[str, Any]], torch.Tensor]] = {
    **dict.fromkeys(_aten("ones ones_like new_ones"), lambda new, given: new.fill_(1)),
    **dict.fromkeys(_aten("full full_like new_full"), lambda new, given: new.fill_(given["fill_value"])),
    **dict.fromkeys(
        _aten("rand rand_like"), lambda new, given: new.uniform_(0, 1, generator=given.get("generator"))
    ),
    **dict.fromkeys(
        _aten("randn randn_like"), lambda new, given: new.normal_(0, 1, generator=given.get("generator"))
    ),
    **dict.fromkeys(_aten("clone _to_copy"), lambda new, given: new.copy_(given["self"])),
}
# Factories without tensor arguments that have an out= overload.
_WITH_OUT = _aten("arange linspace eye randint randperm normal tril_indices")
# In-place ops that only change values, in addition to pointwise and random ones.
_WRITERS = _aten("copy_ fill_ zero_ masked_fill_")


@contextmanager
def deferred_init(
    *,
    directory: str | os.PathLike[str] | None = None,
    min_bytes: int = MIN_BYTES,
    values: bool = True,
    shared: bool = True,
) -> Iterator[None]:
    """Inside, CPU tensors of at least `min_bytes` are made in files of `directory`, with the values of one device.

    `directory` is by default MESHWRIGHT_INIT_DIR, else the temporary directory, /var/tmp or the current one,
    whichever has the most room; it is never a file system in memory. A file is unlinked at once and freed with its tensor.
    Parameters made here are ordinary, but they stay in their files, which a forked process shares, and their storage cannot
    grow (`resize_` raises). On Linux the process keeps about 256 MiB of these files mapped at most, and none afterwards.
    Raises UsageError if there is no disk, MeshwrightError when the disk is full.

    shared: the ranks of this host (of torchrun, or of the default process group; Linux) build one model: the first one to come
    computes each large tensor, in a file that all map, and the others wait for it. Every rank enters at the same line and runs the
    same code; a rank may not wait for others inside. After the context a rank's writes are its own, in ordinary memory. The first
    rank waits up to half a minute for the others; those that come later, and all where ranks cannot connect, build alone, which is
    logged. A context inside of another one builds as that does. Raises UsageError on all ranks of the host if they build different
    models, MeshwrightError if another rank has failed, ended, or made no call for five minutes. False: this rank builds alone.

    values=False: floating-point tensors of that size, and results computed from them, are never filled and take no room on
    the disk; other integers and booleans are. Such a model can be planned for, whatever its size; `parallelize` refuses it.
    """
    if min_bytes < 1:
        raise UsageError(f"min_bytes={min_bytes} is not positive; the default is {MIN_BYTES}")
    if not on_host(default := unnamed_device()) and default.type != "meta":
        _LOG.warning(
            "deferred_init has no effect on tensors without a device: torch's default device is %s, and they take its memory at "
            "once; build the model inside of torch.device('cpu')",
            default,
        )
    # a context inside of another one builds as that does
    around = [mode for mode in dispatch_modes() if isinstance(mode, _MappedInit)]
    ranks = _ranks_of_host(min_bytes) if values and shared and not around else None
    with ExitStack() as stack:
        resident = Resident()
        build = around[-1].build if around else None
        if ranks is not None:
            build = SharedBuild(ranks, resident)
            stack.enter_context(build.building())
        place = mapped_files.choose_directory(directory)
        hollow = None if values else mapped_files.MappedFiles(place, hollow=True)
        files = mapped_files.MappedFiles(place, made=build.made if build is not None and values else None)
        # other ranks than the builder fill nothing
        if build is None or build.builds:
            stack.enter_context(resident.watching())
        stack.enter_context(_MappedInit(files, min_bytes, resident, hollow, build if values else None))
        yield


def _ranks_of_host(min_bytes: int) -> HostRanks | None:
    """The other ranks of this host that build here; None if there are none, or none can be reached (then said in the log)."""
    job = this_job() if sys.platform.startswith("linux") else None
    if job is None:
        return None
    where = calling_line(frozenset({__file__, contextlib.__file__}))
    try:
        ranks = join_host(job, f"{where} min_bytes={min_bytes}")
    except OSError as error:
        _LOG.warning(
            "deferred_init: ranks of this host cannot connect (%s), and each builds on its own", error
        )
        return None
    if ranks is None:
        _LOG.warning(
            "deferred_init at %s: rank %d came too late to build with the others, and builds alone",
            where,
            job.rank,
        )
    elif ranks.missing:
        _LOG.warning(
            "deferred_init at %s: %s of this host did not come in %g s and will build alone; where only some ranks build, use "
            "deferred_init(shared=False)",
            where,
            ranks.missing,
            JOIN_SECONDS,
        )
    if ranks is not None and not ranks.channels:
        ranks.close()
        return None
    return ranks


def is_deferred(value: torch.Tensor | nn.Module) -> bool:
    """Whether a tensor, or any parameter or buffer of a module, is in a file of `deferred_init`."""
    if isinstance(value, nn.Module):
        return any(mapped_files.is_mapped(tensor) for tensor in (*value.parameters(), *value.buffers()))
    return mapped_files.is_mapped(value)


def has_values(tensor: torch.Tensor) -> bool:
    """Whether a tensor has values: it is not on the meta device, nor of `deferred_init(values=False)`."""
    return not (tensor.is_meta or mapped_files.is_hollow(tensor))


def local_values(tensor: torch.Tensor, box: Place) -> torch.Tensor:
    """A detached, dense copy of the `box` (or region) of `tensor` in ordinary memory, with the same memory order of dims.

    Works for any tensor. The rest of a deferred tensor is never read into ordinary memory.
    """
    values = copy_region(tensor.detach(), box)
    if mapped_files.is_mapped(tensor):
        release(tensor.untyped_storage())
    return values


class _MappedInit(core.TorchDispatchMode):
    """Sees every op below autograd and puts large results into files: computed there where possible, else copied.

    hollow: the files of floating-point values that are never read; None if all values are needed.
    build: the build of all ranks of this host, by which one of them makes large results; None if this rank builds alone.
    """

    def __init__(
        self,
        files: mapped_files.MappedFiles,
        min_bytes: int,
        resident: Resident,
        hollow: mapped_files.MappedFiles | None,
        build: SharedBuild | None,
    ) -> None:
        super().__init__()
        self._files, self._hollow, self._min_bytes, self._resident = files, hollow, min_bytes, resident
        self.build = build

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        # fake tensors take no memory
        if core.fake_mode_active():
            return func(*args, **kwargs)
        inputs = [leaf for leaf in core.pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        if self.build is not None:
            return self._built_by_one(self.build, func, args, kwargs, inputs)
        return self._computed(func, args, kwargs, inputs)

    def _computed(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], inputs: list[torch.Tensor]
    ) -> Any:
        """The result of a call on this rank."""
        if self._hollow is not None and core.op_mutates(func) and _only_writes(func, args):
            return args[0]
        if core.op_mutates(func) or not all(mapped_files.is_plain(tensor) for tensor in inputs):
            return func(*args, **kwargs)
        result = self._made_in_file(func, args, kwargs, inputs)
        if result is not None:
            return result
        return self._with_large_moved(func, inputs, func(*args, **kwargs), self._moved)

    def _with_large_moved(
        self,
        func: Any,
        inputs: list[torch.Tensor],
        result: Any,
        moved: Callable[[torch.Tensor], torch.Tensor],
    ) -> Any:
        """The result of a call, with large new tensors in files."""
        fresh = core.op_name(func) == "aten::lift_fresh"
        old = set() if fresh else set(map(_storage, inputs))
        return core.pytree.tree_map_only(
            torch.Tensor, lambda tensor: moved(tensor) if self._is_moved(tensor, old) else tensor, result
        )

    def _built_by_one(
        self,
        build: SharedBuild,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        inputs: list[torch.Tensor],
    ) -> Any:
        """The result of a call that all ranks of this host make: one of them computes it if it is large."""
        # of a context inside of this one, which puts the result into a file itself
        if build.busy:
            return func(*args, **kwargs)
        written = _written(func, args, kwargs, inputs) if core.op_mutates(func) else []
        plain = all(mapped_files.is_plain(tensor) for tensor in inputs)
        if self._is_for_one(build.holds, func, args, kwargs, inputs, written, plain):
            return build.call(
                call_text(func, args, kwargs, build.holds),
                lambda: self._computed(func, args, kwargs, inputs),
                lambda: func(*args, **kwargs),
                inputs,
                written,
                (args, kwargs),
            )
        result = func(*args, **kwargs)
        if core.op_mutates(func) or not plain:
            return result

        def moved(tensor: torch.Tensor) -> torch.Tensor:
            text = f"the result {tensor_text(tensor, build.holds)} of {core.op_name(func)}"
            new: torch.Tensor = build.call(
                text, lambda: self._moved(tensor), lambda: tensor, [], [], ((), {})
            )
            return new

        return self._with_large_moved(func, inputs, result, moved)

    def _is_for_one(
        self,
        holds: Holds,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        inputs: list[torch.Tensor],
        written: Sequence[int],
        plain: bool,
    ) -> bool:
        """Whether one rank makes this call for all: it writes into a shared file, makes a large tensor, or reads one.

        All ranks decide alike, from shapes and from which arguments are in files.
        """
        if core.op_mutates(func):
            # each rank changes the shape of its own tensors
            shapes = torch.Tag.inplace_view in func.tags
            return not shapes and any(holds(inputs[index]) for index in written)
        if not plain or core.op_only_views(func):
            return False
        if any(self._is_large(tensor) and holds(tensor) for tensor in inputs):
            return True
        sketch = _sketch(func, args, kwargs) if self._may_compute_in_file(func, kwargs, inputs) else None
        return sketch is not None and self._is_large(sketch)

    def _made_in_file(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], inputs: list[torch.Tensor]
    ) -> torch.Tensor | None:
        """The result of `func`, computed directly in a file; None if it is small or `func` cannot do so."""
        name = core.op_name(func)
        may = self._may_compute_in_file(func, kwargs, inputs)
        sketch = _sketch(func, args, kwargs) if may else None
        if sketch is None or not self._is_large(sketch):
            return None
        if name in _EMPTY:
            return self._new(sketch)
        if self._is_unwanted(sketch) or any(mapped_files.is_hollow(tensor) for tensor in inputs):
            return self._new(sketch, hollow=True)
        if name in _FILLED:
            given = {**dict(zip(core.op_arguments(func), args, strict=False)), **kwargs}
            return _FILLED[name](self._new(sketch), given)
        out = core.out_overload(func)
        if out is None:
            return None
        accepted = core.op_arguments(out)
        named = {key: value for key, value in kwargs.items() if key in accepted}
        return out(*args, **named, **{next(reversed(accepted)): self._new(sketch)})

    def _may_compute_in_file(self, func: Any, kwargs: dict[str, Any], inputs: list[torch.Tensor]) -> bool:
        name, device = core.op_name(func), kwargs.get("device")
        pointwise = torch.Tag.pointwise in func.tags
        if not (pointwise or name in _EMPTY or name in _FILLED or name in _WITH_OUT):
            return False
        if not core.op_returns_fresh_tensor(func) or kwargs.get("pin_memory"):
            return False
        if device is not None and not on_host(torch.device(device)):
            return False
        if not all(on_host(tensor.device) for tensor in inputs):
            return False
        return not pointwise or any(map(self._is_large, inputs))

    def _is_moved(self, tensor: torch.Tensor, old: set[int]) -> bool:
        """Whether a result is put into a file: it is large, new and in ordinary memory."""
        if not mapped_files.is_plain(tensor) or not on_host(tensor.device) or not self._is_large(tensor):
            return False
        if _storage(tensor) in old or mapped_files.is_mapped(tensor):
            return False
        if tensor.is_conj() or tensor.is_neg():
            return False
        # not a small one, expanded
        return tensor.untyped_storage().nbytes() >= tensor.nbytes

    def _moved(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy of `tensor` in a file."""
        new = self._new(tensor)
        return new if self._is_unwanted(tensor) else new.copy_(tensor)

    def _new(self, like: torch.Tensor, hollow: bool = False) -> torch.Tensor:
        files = self._hollow if hollow or self._is_unwanted(like) else None
        new = (files or self._files).zeros(like.shape, like.stride(), like.dtype)
        self._resident.add(new.untyped_storage())
        return new

    def _is_unwanted(self, tensor: torch.Tensor) -> bool:
        return self._hollow is not None and tensor.is_floating_point()

    def _is_large(self, tensor: torch.Tensor) -> bool:
        return tensor.nbytes >= self._min_bytes


def _only_writes(func: Any, args: tuple[Any, ...]) -> bool:
    """Whether a call only changes values that are never read."""
    tags = {torch.Tag.pointwise, torch.Tag.nondeterministic_seeded}
    writes = core.op_name(func) in _WRITERS or not tags.isdisjoint(func.tags)
    in_place = core.op_name(func).endswith("_") and bool(args) and isinstance(args[0], torch.Tensor)
    return writes and in_place and mapped_files.is_hollow(args[0])


def _written(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], inputs: list[torch.Tensor]
) -> list[int]:
    """Indices of the tensors among the arguments that a call writes into."""
    places = core.declared_writes(func)
    values = [value for place, value in (*enumerate(args), *kwargs.items()) if place in places]
    targets = set(map(id, core.pytree.tree_leaves(values)))
    return [index for index, tensor in enumerate(inputs) if id(tensor) in targets]


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _sketch(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor | None:
    """The result on the meta device: its shape, strides and dtype; None if torch cannot tell."""

    def as_meta(tensor: torch.Tensor) -> torch.Tensor:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")

    meta_args, meta_kwargs = core.pytree.tree_map_only(torch.Tensor, as_meta, (args, kwargs))
    if "device" in core.op_arguments(func):
        meta_kwargs = {**meta_kwargs, "device": torch.device("meta")}
    if "generator" in meta_kwargs:
        meta_kwargs = {**meta_kwargs, "generator": None}
    try:
        result: torch.Tensor = func(*meta_args, **meta_kwargs)
        return result
    # no meta kernel, or a user's error, which the real call will raise
    except (NotImplementedError, RuntimeError):
        return None
