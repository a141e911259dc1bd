"""Run a model once on fake tensors and record the tape.

Parameters and floating-point inputs are fake.  Integers and booleans are real and small: models read them (is anything
masked? is this sequence packed?), and take other paths on fake tensors.  If the model reads floating-point data too, the run
is repeated on real tensors, and the tape says so.
"""

from __future__ import annotations

import contextlib
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from meshwright_dtensor.deferred.materialize import has_values
from meshwright_dtensor.devices import HOST
from meshwright_dtensor.errors import MeshwrightError, UnsupportedError, UsageError
from meshwright_dtensor.hints import observe_marks
from meshwright_dtensor.model.blocks import has_forward
from meshwright_dtensor.model.precision import cast_buffers
from meshwright_dtensor.model.tied_parameters import tied_names
from meshwright_dtensor.sharding.states import State
from meshwright_dtensor.trace.graph import Recorder, leaves
from meshwright_dtensor.trace.one_device import on_one_device
from meshwright_planner import _torch
from meshwright_planner.trace.batch import Batch, check_signature
from meshwright_planner.trace.recorder.borrow_model import borrowed
from meshwright_planner.trace.recorder.replay_blocks import BlockReplayer, BlocksDifferError
from meshwright_planner.trace.recorder.saved_tensors import note_saved
from meshwright_planner.trace.recorder.storage_recorder import REAL_ELEMENTS, StorageRecorder
from meshwright_planner.trace.tape import ModuleInfo, Tape, finish

REAL_RUN_LIMIT_BYTES = 4 * 2**30

Composites = Mapping[Callable[..., Any], Any]
"""Torch function -> Composite, as in RuleBook.composites."""

_HOOKS = "saved tensor hooks"
"""Part of the message of torch.func where autograd is watched."""

Dtype = torch.dtype | None


class NoRunError(UsageError):
    """A model raises when it is called with its batch or a part of it; `what`: the model and its error."""

    def __init__(self, what: str) -> None:
        self.what = what
        super().__init__(
            f"{what} when called with this batch on tensors without values; check that model(**batch) runs on one device"
        )

    def __reduce__(self) -> tuple[type[NoRunError], tuple[str]]:
        return type(self), (self.what,)


@dataclass
class RecordingCache:
    """Shared by the recordings of one model in one dtype.

    Args:
        mode: fake tensor mode of its parameters.
        parameters: id of a parameter -> (parameter, fake parameter).
        trusted: families of repeated blocks, by their first block, whose members were verified to do the same.
    """

    mode: Any = field(default_factory=_torch.fake_mode)
    parameters: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)
    trusted: set[str] = field(default_factory=set)


def record(
    model: nn.Module,
    batch: Batch,
    composites: Composites,
    dtype: torch.dtype | None = None,
    cache: RecordingCache | None = None,
) -> Tape:
    """Run `model` once on tensors of `batch`'s shapes and return the tape; the model is restored.

    Args:
        model: any module; parameters may be on the meta device.
        batch: the arguments, real, fake or meta tensors; their values are not used unless the model reads data.
        dtype: compute dtype of floating-point parameters, persistent buffers and batch tensors; None: their own.
        cache: shared with earlier recordings of the same model in the same dtype; updated.

    Raises:
        UsageError: the model does not take the batch.
        UnsupportedError: the model reads data and is too large for a real run.
    """
    check_signature(model, batch)
    start = time.perf_counter()
    cache = RecordingCache() if cache is None else cache
    try:
        try:
            tape = _run_mixed(model, batch, composites, dtype, cache, replay=True)
        except (UsageError, BlocksDifferError):
            # blocks that depend on each other's side effects: run them all
            tape = _run_mixed(model, batch, composites, dtype, cache, replay=False)
    except _torch.DATA_DEPENDENT as error:
        tape = _run_real(model, batch, composites, error, dtype)
    tape.seconds = time.perf_counter() - start
    return tape


def _dtypes(model: nn.Module, dtype: Dtype) -> Callable[[torch.Tensor], torch.dtype]:
    """Tensor of the model or the batch -> its compute dtype."""
    kept = {id(buffer) for buffer in model.buffers()} - cast_buffers(model)
    return lambda t: t.dtype if dtype is None or id(t) in kept or not t.is_floating_point() else dtype


def _run_mixed(
    model: nn.Module, batch: Batch, composites: Composites, dtype: Dtype, cache: RecordingCache, replay: bool
) -> Tape:
    mode, computed = cache.mode, _dtypes(model, dtype)
    devices = (parameter.device for parameter in model.parameters())
    device = next((d for d in devices if d.type != "meta"), HOST)

    def fake(tensor: torch.Tensor) -> torch.Tensor:
        if _is_readable(tensor):
            return tensor.detach().clone()
        return _torch.fake_like(mode, tensor, device, computed(tensor))

    def fake_once(tensor: torch.Tensor) -> torch.Tensor:
        """As `fake`, but the fake parameter of a parameter is made once."""
        if not isinstance(tensor, nn.Parameter):
            return fake(tensor)
        cached = cache.parameters.get(id(tensor))
        if cached is None or cached[0] is not tensor:
            new = fake(tensor)
            parameter = _torch.as_parameter if _torch.is_fake(new) else nn.Parameter
            cached = cache.parameters[id(tensor)] = tensor, parameter(new, tensor.requires_grad)
        return cached[1]

    def given(name: str, tensor: torch.Tensor) -> torch.Tensor:
        if _is_readable(tensor):
            return tensor.detach().to(device)
        if not tensor.is_floating_point() and not tensor.is_complex() and tensor.numel() <= REAL_ELEMENTS:
            # valid as token ids, and a mask that masks nothing
            return torch.ones(tensor.shape, dtype=tensor.dtype, device=device)
        return fake(tensor).requires_grad_(tensor.requires_grad)

    with borrowed(model, fake_once):
        recorder = StorageRecorder(composites, mode)
        blocks = BlockReplayer(model, recorder, cache.trusted) if replay else None
        tape = _watch(model, batch.map(given), recorder)
    if not recorder.checkpoints.alike():
        raise BlocksDifferError("a checkpoint")
    if blocks is not None:
        cache.trusted |= blocks.verified()
    return tape


def _is_readable(tensor: torch.Tensor) -> bool:
    """Whether a tensor holds integers or booleans that a model may read."""
    unreal = tensor.is_meta or _torch.is_fake(tensor)
    return not (unreal or tensor.is_floating_point() or tensor.is_complex() or tensor.numel() > REAL_ELEMENTS)


def _is_unreal(tensor: torch.Tensor) -> bool:
    """Whether a tensor has no values."""
    return _torch.is_fake(tensor) or not has_values(tensor)


def _run_real(model: nn.Module, batch: Batch, composites: Composites, why: Exception, dtype: Dtype) -> Tape:
    tensors = [*model.parameters(), *model.buffers(), *(t for _, t in batch.tensors())]
    unreal = [t for t in tensors if _is_unreal(t)]
    size = sum(t.numel() * t.element_size() for t in unreal)
    if size > REAL_RUN_LIMIT_BYTES:
        raise UnsupportedError(
            f"{type(model).__name__} reads the data it computes ({_line(why)}), so it must run on real tensors, and "
            f"{size / 2**30:.1f} GiB of it has no values yet; plan with a smaller configuration of the same model"
        ) from None
    generator, computed = torch.Generator().manual_seed(0), _dtypes(model, dtype)

    def real(tensor: torch.Tensor) -> torch.Tensor:
        if not _is_unreal(tensor):
            new = tensor.detach() if isinstance(tensor, nn.Parameter) else tensor.detach().clone()
        else:
            new = torch.empty(tensor.shape, dtype=tensor.dtype, device=HOST)
            new = new.normal_(std=0.02, generator=generator) if tensor.is_floating_point() else new.zero_()
        return new.to(computed(tensor))

    with borrowed(model, real):
        given = batch.map(lambda name, t: real(t).requires_grad_(t.requires_grad))
        tape = _watch(model, given, StorageRecorder(composites))
    tape.real = True
    return tape


def _watch(model: nn.Module, batch: Batch, recorder: StorageRecorder) -> Tape:
    named = model.named_parameters()
    parameters = {name: recorder.mark(parameter, f"param:{name}").i for name, parameter in named}
    for name, buffer in model.named_buffers():
        recorder.mark(buffer, f"buffer:{name}")
    for name, tensor in batch.tensors():
        recorder.mark(tensor, f"input:{name}")

    calls: set[tuple[str, str]] = set()
    marks: list[tuple[str, dict[str, State]]] = []
    noted = observe_marks(lambda mark: marks.append((recorder.frames[-1].module, mark)))
    saves = recorder.checkpoints.watched(recorder.pack)
    with torch.enable_grad(), _module_frames(model, recorder, calls), noted, saves, recorder:
        try:
            out = on_one_device(model, *batch.args, **batch.kwargs)
        except Exception as error:
            if isinstance(error, (MeshwrightError, BlocksDifferError, *_torch.DATA_DEPENDENT)):
                raise
            if _HOOKS in str(error):
                raise UsageError(
                    f"the forward of {type(model).__name__} uses torch.func (grad, vjp, jacrev or hessian), which planning cannot "
                    "follow: it watches what autograd saves. Use torch.autograd.grad(..., create_graph=True) there"
                ) from error
            raise NoRunError(f"{type(model).__name__} raised {_line(error)}") from error
    results, scalar = _results(out)
    if not results:
        kind = type(model).__name__
        raise UsageError(f"{kind} returned no floating-point tensor; there is nothing to train")
    tape = Tape(
        values=recorder.values,
        nodes=recorder.nodes,
        results=[recorder.ref(t).i for t in results],
        grad=[],
        saved=[],
        modules=_module_infos(model),
        recorded=len(recorder.nodes),
        scalar=scalar,
        parameters=parameters,
        rows=batch.size,
        copied=recorder.copied,
        tied=tied_names(model),
        marks=tuple(marks),
        returned=tuple(dict.fromkeys(recorder.ref(t).i for t in (*leaves(out, torch.Tensor), *results))),
        calls=_with_copies(calls, recorder.copied),
    )
    recorder.find_functions()
    asking = [recorder.ref(t).i for t in results if t.requires_grad]
    kept = finish(tape, recorder.notes, recorder.roots, asking)
    note_saved(recorder, kept, tape)
    return tape


@contextlib.contextmanager
def _module_frames(model: nn.Module, recorder: Recorder, calls: set[tuple[str, str]]) -> Iterator[None]:
    """Inside, the recorder knows the module whose forward runs; `calls` collects (calling module, called module)."""
    names = {id(module): name for name, module in model.named_modules()}

    def enters(module: nn.Module, args: Any) -> None:
        caller = recorder.frames[-1].module
        # modules made during the forward count as their caller
        name = names.get(id(module))
        if name is not None and name != caller:
            calls.add((caller, name))
        recorder.enter_module(name)

    enter = register_module_forward_pre_hook(enters)
    leave = register_module_forward_hook(lambda module, args, out: recorder.exit_module(), always_call=True)
    try:
        yield
    finally:
        enter.remove()
        leave.remove()


def _with_copies(calls: Iterable[tuple[str, str]], copied: Mapping[str, str]) -> frozenset[tuple[str, str]]:
    """The calls, with those inside of copied modules."""
    all_calls = set[tuple[str, str]]()
    # module -> calls by it and inside it
    inside: dict[str, list[tuple[str, str]]] = defaultdict(list)

    def add(caller: str, called: str) -> None:
        if (caller, called) not in all_calls:
            all_calls.add((caller, called))
            for name in accumulate(caller.split("."), "{}.{}".format):
                inside[name].append((caller, called))

    for call in calls:
        add(*call)
    # in order of recording: the original may contain copies
    for name, original in copied.items():
        for caller, called in list(inside[original]):
            if called.startswith(f"{original}."):
                add(name + caller[len(original) :], name + called[len(original) :])
    return frozenset(all_calls)


def _module_infos(model: nn.Module) -> dict[str, ModuleInfo]:
    infos: dict[str, ModuleInfo] = {}
    for name, module in model.named_modules():
        is_leaf, parameters = next(module.children(), None) is None, sum(1 for _ in module.parameters())
        infos[name] = ModuleInfo(type(module).__name__, parameters, is_leaf, has_forward(module))
    return infos


def _results(out: Any) -> tuple[list[torch.Tensor], bool]:
    """The tensors to differentiate: the scalar loss if there is one, else every floating-point output."""
    loss = out.get("loss") if isinstance(out, Mapping) else getattr(out, "loss", None)
    if isinstance(out, torch.Tensor):
        loss = out
    elif loss is None and isinstance(out, (tuple, list)) and out and isinstance(out[0], torch.Tensor):
        loss = out[0] if out[0].dim() == 0 else None
    if isinstance(loss, torch.Tensor) and loss.is_floating_point():
        return [loss], loss.dim() == 0
    tensors: dict[int, torch.Tensor] = {}
    _collect(out, tensors)
    return list(tensors.values()), False


def _collect(tree: Any, tensors: dict[int, torch.Tensor]) -> None:
    if isinstance(tree, torch.Tensor):
        if tree.is_floating_point():
            tensors[id(tree)] = tree
    elif isinstance(tree, (Mapping, tuple, list)):
        for value in tree.values() if isinstance(tree, Mapping) else tree:
            _collect(value, tensors)
    elif hasattr(tree, "__dict__") and not isinstance(tree, nn.Module):
        for value in vars(tree).values():
            if isinstance(value, (torch.Tensor, tuple, list, dict)):
                _collect(value, tensors)


def _line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:200]}"
