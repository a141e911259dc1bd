"""The parameters and buffers of all pipeline stages on every rank, outside of a step.

Inside of a step, a module of another stage has placeholders as attributes, and no parameters. Outside, ``parameters()``,
``named_parameters()`` and ``state_dict()`` have those of all stages, with the names, the order and the shapes of one device.
"""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from meshwright_dtensor._torch.core import mark_as_parameter, module_tensors, pytree, stock_call
from meshwright_dtensor.errors import UnsupportedError, UsageError
from meshwright_dtensor.mesh.mesh import extremes
from meshwright_dtensor.model.stage_info import StageInfo
from meshwright_dtensor.parameter import MeshParameter
from meshwright_dtensor.sharding.states import I, X
from meshwright_dtensor.stages import stage_tensor
from meshwright_dtensor.stages.exchange import exchange, exchanged_by_id
from meshwright_dtensor.stages.functions import install
from meshwright_dtensor.tensor.global_tensor import GlobalTensor

Tensor = torch.Tensor
_ATTRIBUTE = "_meshwright_whole_model"


@dataclass(frozen=True)
class ModuleNames:
    """The names of a module's parameters and buffers in the whole model, in the order of registration.

    parameters: name in the module -> first name in the model, which tied parameters share; and requires_grad.
    """

    module: nn.Module
    prefix: str
    parameters: Mapping[str, tuple[str, bool]]
    buffers: tuple[str, ...]


def names_of(model: nn.Module) -> list[ModuleNames]:
    """The names in every module of a model that is whole."""
    first: dict[int, str] = {}
    names = []
    for path, module in model.named_modules():
        dot = f"{path}." if path else ""
        parameters, buffers = module_tensors(module)
        keys = {
            name: (first.setdefault(id(p), dot + name), p.requires_grad)
            for name, p in parameters.items()
            if p is not None
        }
        names.append(ModuleNames(module, dot, keys, tuple(buffers)))
    return names


@dataclass(frozen=True)
class _Absent:
    """Parameters or buffers that a module has outside of a step only.

    Attributes:
        part: the dict in which the module holds them. `order`: all its names in the whole model.
        tensors: by name.
    """

    module: nn.Module
    part: dict[str, Any]
    order: Iterable[str]
    tensors: dict[str, Any]
    placeholders: dict[str, Any]

    def show(self) -> None:
        mine = dict(self.part)
        self.part.clear()
        for name in self.order:
            if name in self.tensors:
                self.placeholders[name] = self.module.__dict__.pop(name)
                self.part[name] = self.tensors[name]
            elif name in mine:
                self.part[name] = mine.pop(name)
        # added by the user
        self.part.update(mine)

    def hide(self) -> None:
        for name in list(self.tensors):
            shown = self.part.get(name)
            if shown is None:
                # the user has deleted it, or set it to None
                del self.tensors[name]
            else:
                # also another tensor that the user calls the model with
                self.tensors[name] = self.part.pop(name)
                self.module.__dict__[name] = self.placeholders.pop(name)


class WholeModel:
    """The tensors of all stages of a model, as one rank has them.

    Args:
        model: with placeholders for other stages.
        names: of the whole model.
        info: the stages. `mesh`: that of this rank's stage.
        buffers: name of a buffer of a unit -> ranks of the axis that hold it.
        device: of this rank.
    """

    def __init__(
        self,
        model: nn.Module,
        names: Sequence[ModuleNames],
        info: StageInfo,
        mesh: DeviceMesh,
        buffers: Mapping[str, frozenset[int]],
        device: torch.device,
    ) -> None:
        install()
        self.mesh, self.group, self.rank, self.device = mesh, info.group, info.rank, device
        self._everywhere = frozenset(range(info.ranks))
        # how many steps (or callers that are to see this rank's stages only) run
        self._depth = 1
        self._changed = self._stepping = False
        # gradient hooks were registered; their first error in this backward pass
        self._hooked, self._hook_error = False, cast(Exception | None, None)
        # what calls without autograd give on meta tensors, and whether they draw random numbers
        self.results_on_meta: dict[Any, tuple[Any, bool]] = {}
        self._held: list[Any] = []
        # where this rank's modules hold buffers that other stages do not have
        self._buffers: list[tuple[dict[str, Any], str, Any]] = []
        self._absent: list[_Absent] = []
        self.parameters: dict[str, Any] = {}
        self._shown: list[tuple[dict[str, Any], str, Any]] = []
        holders: dict[str, frozenset[int]] = {}
        here: dict[str, Any] = {}
        for entry in names:
            parameters, _ = module_tensors(entry.module)
            for name, (key, _) in entry.parameters.items():
                holders[key] = holders.get(key, frozenset()) | frozenset(info.holders[entry.prefix + name])
                if name in parameters:
                    here[key] = parameters[name]
        # a module that blocks of several stages share has one entry, and a name in each of them
        for name, ranks in info.holders.items():
            key = info.aliases.get(name, name)
            if key in holders:
                holders[key] |= frozenset(ranks)
        for entry in names:
            parameters, own_buffers = module_tensors(entry.module)
            shown: dict[str, Any] = {}
            for name, (key, trained) in entry.parameters.items():
                if key not in self.parameters:
                    self.parameters[key] = (
                        self._claimed(here[key], holders[key])
                        if key in here
                        else self._foreign(entry.module.__dict__[name], holders[key], trained)
                    )
                if name not in parameters:
                    shown[name] = self.parameters[key]
                self._shown.append((parameters, name, self.parameters[key]))
            self._absent.append(_Absent(entry.module, parameters, entry.parameters, shown, {}))
            shown = {}
            for name in entry.buffers:
                at = buffers.get(entry.prefix + name)
                if at is not None and name not in own_buffers:
                    shown[name] = self._foreign(entry.module.__dict__[name], at, None)
                elif at is not None and own_buffers[name] is not None:
                    if hasattr(self._claimed(own_buffers[name], at), "whole_model"):
                        self._buffers.append((own_buffers, name, own_buffers[name]))
            self._absent.append(_Absent(entry.module, own_buffers, entry.buffers, shown, {}))
        self._absent = [absent for absent in self._absent if absent.tensors]
        model.__dict__[_ATTRIBUTE] = self

    def __deepcopy__(self, memo: dict[int, Any]) -> WholeModel:
        return self

    def _claimed(self, tensor: Any, holders: frozenset[int]) -> Any:
        """A tensor of this rank. One that all stages hold needs no exchange."""
        if holders != self._everywhere and not hasattr(tensor, "whole_model"):
            tensor.whole_model, tensor.holders = self, holders
            self._held.append(tensor)
        return tensor

    def _foreign(
        self, placeholder: Tensor, holders: frozenset[int], trained: bool | None
    ) -> stage_tensor.StageTensor:
        """A parameter of other ranks, or a buffer (`trained` is None)."""
        with stock_call():
            meta = stage_tensor.meta_like(placeholder)
            value: Tensor = meta if trained is None else nn.Parameter(meta, trained)
        tensor: stage_tensor.StageTensor = stage_tensor.staged(value, self, holders, self.device)
        if trained is not None:
            mark_as_parameter(tensor)
        return tensor

    # ---- inside and outside of a step
    @property
    def inside(self) -> bool:
        """Whether a step of the model or of an optimizer runs, which sees this rank's stages only."""
        return self._depth > 0

    def enter(self) -> None:
        """Show the tensors of this rank's stages only."""
        self._depth += 1
        if self._depth > 1:
            return
        for tensor in self._held:
            # not one of a call in which the step runs
            if isinstance(tensor, stage_tensor.StageValue):
                tensor.__class__ = tensor.held_class  # type: ignore[assignment]
        for absent in self._absent:
            absent.hide()

    def refuse_replaced(self) -> None:
        """Raise UnsupportedError if the user calls the model with other values of stages for its parameters."""
        for part, name, tensor in self._shown:
            given = part.get(name)
            if given is not tensor and given is not None:
                raise UnsupportedError(
                    f"the model is called with another value of parameter {name!r}, which one pipeline stage holds "
                    "(torch.func.functional_call): write it to the parameters, with p.copy_(value), or plan without pp"
                )

    def leave(self) -> None:
        """Show the tensors of all stages again, once every caller of enter() has left."""
        self._depth -= 1
        if self._depth:
            return
        self._claim_assigned()
        for tensor in self._held:
            tensor.__class__ = (
                stage_tensor.StageParameter if isinstance(tensor, MeshParameter) else stage_tensor.StageBuffer
            )
        for absent in self._absent:
            absent.show()

    def _claim_assigned(self) -> None:
        """Take over the buffers that a step has assigned (``self.mean = 0.9 * self.mean + x``) for those of before."""
        for place, (part, name, old) in enumerate(self._buffers):
            new = part.get(name)
            if not isinstance(new, Tensor) or new is old or (new.shape, new.dtype) != (old.shape, old.dtype):
                continue
            if isinstance(new, GlobalTensor):
                if any(state not in (I, X) for state in new.global_layout.states):
                    continue
                new = new.to_local()
            part[name] = self._claimed(new.detach(), old.holders)
            self._held = [tensor for tensor in self._held if tensor is not old]
            self._buffers[place] = part, name, part[name]

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Inside, only the tensors of this rank's stages are shown."""
        self.enter()
        try:
            yield
        finally:
            self.leave()

    def begin_step(self) -> None:
        """An optimizer that steps each parameter by itself sees this rank's stages only, until `end_step`."""
        if not self._stepping:
            self._stepping = True
            self.enter()

    def end_step(self) -> None:
        """The step has ended, or an earlier one has raised."""
        if self._stepping:
            self._stepping = False
            self.leave()

    # ---- agreement with other stages
    def exchange(self, values: Sequence[stage_tensor.StageValue]) -> list[Any]:
        """The values on every rank (a collective call): replicated global tensors."""
        return exchange(self, values)

    def on_every_rank(self, tree: Any) -> Any:
        """A pytree with the values of single stages exchanged (a collective call, if there are any)."""
        values = [x for x in pytree.tree_leaves(tree) if isinstance(x, stage_tensor.StageValue)]
        if not values:
            return tree
        by_id = exchanged_by_id(values)
        return pytree.tree_map(lambda x: by_id.get(id(x), x), tree)

    def check_same_call(self, call: str) -> None:
        """Raise UsageError on every rank of the axis unless all of them make this call (a collective call)."""
        ((least, largest),) = extremes([zlib.crc32(call.encode())], self.group)
        if least == largest:
            return
        calls = self._of_ranks(call)
        listed = "; ".join(f"stage rank {rank} {text}" for rank, text in enumerate(calls))
        raise UsageError(
            f"ranks of a pipeline do not make the same calls on its parameters: {listed}. Read parameters and gradients on every "
            "rank and in the same order (not in that of a set); isinstance(x, DTensor) is true for this rank's stages only: use "
            'hasattr(x, "full_tensor")'
        )

    def _of_ranks(self, mine: Any) -> list[Any]:
        of_ranks: list[Any] = [None] * len(self._everywhere)
        dist.all_gather_object(of_ranks, mine, group=self.group)
        return of_ranks

    def gathered(self, call: str, mine: Any) -> list[Any]:
        """What each rank of the axis has, in the same call (a collective call)."""
        self.check_same_call(call)
        return self._of_ranks(mine)

    def gradients_changed(self) -> None:
        """A backward pass has run: which parameters have a gradient is agreed on before it is read."""
        self._changed = True
        if self._hooked:
            torch.autograd.Variable._execution_engine.queue_callback(self._agree_on_hooks)  # type: ignore[attr-defined]

    def agreed_hook(self, hook: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """`hook` of a gradient, as in a step. An error of it is raised on every rank, at the end of the backward pass."""
        self._hooked = True

        def run(x: Any) -> Any:
            # other ranks run no hook, so that nothing may be exchanged in it
            with self.entered():
                try:
                    return hook(x)
                except Exception as error:
                    self._hook_error = self._hook_error or error
                    return None

        return run

    def _agree_on_hooks(self) -> None:
        error, self._hook_error = self._hook_error, None
        self.raise_on_all(error, "a gradient hook failed on another rank of the pipeline")

    def raise_on_all(self, error: Exception | None, told: str) -> None:
        """Raise the `error` of this rank, or UsageError with that of another one, if any has one (a collective call)."""
        if any(self.agreed([error is not None])):
            first = next(filter(None, self._of_ranks(error and repr(error))))
            raise error or UsageError(f"{told}: {first}")

    def agreed(self, flags: Sequence[bool]) -> list[bool]:
        """Which flags are set on any rank (a collective call)."""
        self.check_same_call(f"asks which of {len(flags)} gradients there are")
        return [bool(most) for _, most in extremes([int(flag) for flag in flags], self.group)]

    def agree_on_gradients(self) -> None:
        """After a backward pass: a parameter of another stage has a gradient where its holders have one (collective)."""
        if not self._changed:
            return
        self._changed = False
        parameters = [x for x in self.parameters.values() if isinstance(x, stage_tensor.StageValue)]
        present = self.agreed([x.here and stage_tensor.held_gradient(x) is not None for x in parameters])
        for x, has in zip(parameters, present, strict=True):
            if not x.here:
                value = stage_tensor.value_of(x)
                value.grad = value.detach() if has else None


def whole_model_of(model: nn.Module) -> WholeModel | None:
    """The tensors of all stages of a pipelined model; None of any other."""
    return model.__dict__.get(_ATTRIBUTE)


def whole_models_in(model: nn.Module) -> list[WholeModel]:
    """Those of a model whose parts were divided into stages, one by one or the model itself."""
    if (whole := whole_model_of(model)) is not None:
        return [whole]
    return [whole for module in model.modules() if (whole := whole_model_of(module)) is not None]


def whole_model_among(tensors: Iterable[Any]) -> WholeModel | None:
    """The model of the first of these tensors that only some stages hold, in a step or outside; None if there is none."""
    return next((x.whole_model for x in tensors if hasattr(x, "whole_model")), None)


@contextlib.contextmanager
def own_tensors(tensors: Iterable[Any]) -> Iterator[list[Any]]:
    """Those of `tensors` that this rank has, inside as they are in a step of their model."""
    given = list(tensors)
    mine = [x for x in given if not isinstance(x, stage_tensor.StageValue) or x.here]
    with stage_tensor.held([x for x in mine if isinstance(x, stage_tensor.StageValue)]):
        yield [stage_tensor.value_of(x) for x in mine]


@contextlib.contextmanager
def own_stages(model: nn.Module) -> Iterator[None]:
    """Inside, `model` has the parameters and buffers of this rank's stages only."""
    with contextlib.ExitStack() as entered:
        for whole in whole_models_in(model):
            whole.refuse_replaced()
            entered.enter_context(whole.entered())
        yield


def show_all_stages(model: nn.Module, shown: bool = True) -> None:
    """From now on `model` has the parameters and buffers of all stages outside of its calls, or only of this rank's stages."""
    whole = whole_model_of(model)
    if whole is not None:
        (whole.leave if shown else whole.enter)()
