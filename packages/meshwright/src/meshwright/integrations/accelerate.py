"""accelerate's `Accelerator` for parallel models.

from meshwright.integrations.accelerate import Accelerator      # instead of accelerate's
model = mw.auto_parallelize(model, batch)                       # before the optimizer is made
accelerator = Accelerator()                                     # the rest of the script stays
"""

from __future__ import annotations

import functools
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from meshwright.integrations.first_use import subclass_on_first_use
from meshwright_checkpoint import full_state_dict, load, save
from meshwright_dtensor.errors import UnsupportedError, UsageError
from meshwright_dtensor.mesh.mesh import init
from meshwright_dtensor.model.wrapped import allow_preparing, is_parallel
from meshwright_parallel import GradScaler, clip_grad_norm_

if TYPE_CHECKING:
    from accelerate import Accelerator as Base
else:
    Base = object

Function = Callable[..., Any]

STATE = "meshwright_{}"
"""Folder of a model and its optimizer in a directory of save_state."""


class AcceleratorMethods(Base):
    """accelerate's Accelerator over a parallel model: same arguments, methods and loop; losses are those of one device.

    The script sees one device: `num_processes` is 1, a batch of the data loader is the global batch, and `gather` and
    `gather_for_metrics` give whole plain tensors. `process_index`, `is_main_process` and what follows from them are the rank's.

    Raises:
        UsageError: an argument, or the configuration of `accelerate launch`, makes accelerate divide the model.
    """

    scaler: Any
    flag_tensor: torch.Tensor | None
    _models: list[nn.Module]
    _optimizers: list[Any]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        _refuse_plugins(kwargs)
        show_one_device(bool(kwargs.get("cpu")))
        super().__init__(*args, **kwargs)
        self.adapt()

    def adapt(self) -> None:
        """Change settings that an Accelerator has for one device and one rank."""
        # rank 0 would read for the others
        self.dataloader_config.dispatch_batches = False
        if self.scaler is not None:
            keywords = self.scaler_handler.to_kwargs() if self.scaler_handler is not None else {}
            self.scaler = GradScaler(self.device.type, **keywords)

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """See accelerate. Raises UsageError: the model is to be trained on several ranks, and is not parallel."""
        allow_preparing(model)
        if is_parallel(model):
            device_placement = False
        elif (
            dist.get_world_size() > 1
            and not evaluation_mode
            and any(p.requires_grad for p in model.parameters())
        ):
            raise UsageError(
                f"this {type(model).__name__} is not parallel, so each of the {dist.get_world_size()} ranks would train all of "
                "it; call model = mw.auto_parallelize(model, batch) before its optimizer is made"
            )
        return super().prepare_model(model, device_placement, evaluation_mode)

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2) -> torch.Tensor:
        """See accelerate; the norm is that of one device."""
        self.unscale_gradients()
        return clip_grad_norm_(parameters, max_norm, norm_type)

    def gather(self, tensor: Any) -> Any:
        """The values of all ranks: a global tensor's whole value as a plain one; plain ones stay (a collective call)."""
        from accelerate.utils import recursively_apply

        return recursively_apply(whole, tensor)

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """See accelerate; as `gather`, also for tensors among other values (a collective call)."""
        # which accelerate takes as objects, without gather()
        return self.gather(super().gather_for_metrics(input_data, use_gather_object))

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """The state dict of one device, on rank 0; empty on the others (a collective call)."""
        return full_state_dict(model)

    def wait_for_everyone(self) -> None:
        """See accelerate."""
        dist.barrier()

    @contextmanager
    def main_process_first(self) -> Iterator[None]:
        """See accelerate."""
        with _first(self.is_main_process):
            yield

    @contextmanager
    def local_main_process_first(self) -> Iterator[None]:
        """See accelerate."""
        with _first(self.is_local_main_process):
            yield

    def on_main_process(self, function: Function | None = None) -> Function:
        """See accelerate."""
        return _only(lambda: self.is_main_process, function)

    def on_local_main_process(self, function: Function | None = None) -> Function:
        """See accelerate."""
        return _only(lambda: self.is_local_main_process, function)

    def on_last_process(self, function: Function) -> Function:
        """See accelerate."""
        return _only(lambda: self.is_last_process, function)

    def on_process(self, function: Function | None = None, process_index: int | None = None) -> Function:
        """See accelerate."""
        return _only(lambda: self.process_index == process_index, function)

    def on_local_process(
        self, function: Function | None = None, local_process_index: int | None = None
    ) -> Function:
        """See accelerate."""
        return _only(lambda: self.local_process_index == local_process_index, function)

    def init_trackers(self, *args: Any, **kwargs: Any) -> None:
        """See accelerate; on rank 0 only."""
        if self.is_main_process:
            super().init_trackers(*args, **kwargs)

    def check_trigger(self) -> bool:
        """See accelerate (a collective call)."""
        if self.flag_tensor is None:
            self.flag_tensor = torch.tensor(0, device=self.device)
        dist.all_reduce(self.flag_tensor, op=dist.ReduceOp.MAX)
        return bool(super().check_trigger())

    def save_state(
        self, output_dir: str | None = None, safe_serialization: bool = True, **keywords: Any
    ) -> Any:
        """See accelerate (a collective call); loads at any plan and number of ranks.

        Models and optimizers are saved with `mw.save`, in folders of the directory. So hooks of `register_save_state_pre_hook`
        get no models and no weights.
        """
        with self._without_models() as parts:
            # accelerate makes it, and refuses one that is there already
            where = super().save_state(output_dir, safe_serialization, **keywords)
            self.wait_for_everyone()
            for number, (model, optimizer) in enumerate(parts):
                save_to(Path(where) / STATE.format(number), model, optimizer, extra={"step": self.step})
        return where

    def load_state(self, input_dir: str | None = None, load_kwargs: Any = None, **keywords: Any) -> None:
        """See accelerate (a collective call). Raises CheckpointError: it was saved without meshwright's Accelerator."""
        with self._without_models() as parts:
            super().load_state(input_dir, load_kwargs, **keywords)
            where = Path(os.path.expanduser(input_dir)) if input_dir is not None else self._latest()
            # last, since it sets random streams
            for number, (model, optimizer) in enumerate(parts):
                self.step = load(where / STATE.format(number), model=model, optimizer=optimizer)["step"]

    @contextmanager
    def _without_models(self) -> Iterator[list[tuple[nn.Module, torch.optim.Optimizer | None]]]:
        """Hide models and optimizers from accelerate. Gives each optimizer with its model, and models without any."""
        models, optimizers = self._models, self._optimizers
        parts = [(_model_of(optimizer, models), optimizer.optimizer) for optimizer in optimizers]
        alone = [model for model in models if not any(model is other for other, _ in parts)]
        self._models, self._optimizers = [], []
        try:
            yield [*parts, *((model, None) for model in alone)]
        finally:
            self._models, self._optimizers = models, optimizers

    def _latest(self) -> Path:
        folders = (Path(self.project_dir) / "checkpoints").iterdir()
        return max(folders, key=lambda folder: int(folder.name.rpartition("_")[2]))


__getattr__ = subclass_on_first_use("Accelerator", AcceleratorMethods, "accelerate")


def show_one_device(cpu: bool = False) -> None:
    """Let accelerate, and what is built on it, see one device with this rank's index (a collective call at first).

    A parallel model takes and returns global values. So nothing is left to divide, to gather, to wrap or to scale. The index
    stays that of the rank, since files and logs are written by rank 0.
    """
    from accelerate import DistributedType, PartialState

    init()
    state = PartialState(cpu)
    state.distributed_type = DistributedType.NO
    state.num_processes = 1
    state.process_index = dist.get_rank()
    state.local_process_index = int(os.environ.get("LOCAL_RANK", dist.get_rank()))


def save_to(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer | None, extra: Any = None) -> None:
    """`mw.save` in place of what is at the path (a collective call)."""
    if dist.get_rank() == 0:
        shutil.rmtree(path, ignore_errors=True)
    dist.barrier()
    save(path, model=model, optimizer=optimizer, extra=extra, asynchronous=False)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """The whole value of a global tensor as a plain tensor (a collective call); a plain one as it is."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def _model_of(optimizer: torch.optim.Optimizer, models: list[nn.Module]) -> nn.Module:
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    for model in models:
        if any(id(p) in held for p in model.parameters()):
            return model
    raise UsageError(
        f"save_state and load_state need the model whose parameters {type(optimizer).__name__} updates; give it to prepare() too"
    )


@contextmanager
def _first(goes_first: bool) -> Iterator[None]:
    if not goes_first:
        dist.barrier()
    yield
    if goes_first:
        dist.barrier()


def _only(here: Callable[[], bool], function: Function | None) -> Function:
    if function is None:
        return functools.partial(_only, here)

    @functools.wraps(function)
    def inner(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs) if here() else None

    return inner


_DIVIDES = (
    "{} makes accelerate divide the model, which its plan has divided already; leave it out, and choose a plan instead "
    "(mw.auto_parallelize(model, batch, dp=2, zero=3), for example)"
)
_PLUGINS = "deepspeed_plugin deepspeed_plugins fsdp_plugin megatron_lm_plugin torch_tp_plugin parallelism_config".split()
_VARIABLES = "ACCELERATE_USE_DEEPSPEED ACCELERATE_USE_FSDP ACCELERATE_USE_MEGATRON_LM ACCELERATE_USE_PARALLELISM_CONFIG".split()


def _refuse_plugins(keywords: dict[str, Any]) -> None:
    for name in _PLUGINS:
        if keywords.get(name) is not None:
            raise UsageError(_DIVIDES.format(f"{name}="))
    for name in _VARIABLES:
        if os.environ.get(name, "false").lower() == "true":
            raise UsageError(_DIVIDES.format(f"the environment variable {name}, set by accelerate launch,"))
    if keywords.get("mixed_precision") == "fp8":
        raise UnsupportedError(
            'mixed_precision="fp8" replaces layers of the model; use "bf16" with a parallel model'
        )
