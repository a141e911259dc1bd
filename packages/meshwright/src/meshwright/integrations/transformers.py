"""transformers' `Trainer` for parallel models, and a mixin for trainers that are built on it, such as TRL's.

from meshwright.integrations.transformers import Trainer           # instead of transformers'
trainer = Trainer(model, args, ..., parallel={"tp": 2})            # keywords of mw.plan, or a plan; left out: the best plan

class SFTTrainer(ParallelTrainer, trl.SFTTrainer): ...
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from meshwright.integrations.accelerate import STATE, save_to, show_one_device
from meshwright.integrations.first_batch import Called, tell_call
from meshwright.integrations.first_use import subclass_on_first_use
from meshwright_checkpoint import full_state_dict, load
from meshwright_checkpoint.state import rng
from meshwright_dtensor.errors import UsageError
from meshwright_dtensor.model.wrapped import is_parallel
from meshwright_dtensor.plan import ParallelPlan
from meshwright_parallel import auto_parallelize, parallelize

if TYPE_CHECKING:
    from transformers import Trainer as Base
else:
    Base = object

SCHEDULER = "scheduler.pt"
_DIVIDE = "fsdp deepspeed parallelism_config torch_compile".split()
"""Training arguments that divide or compile the model."""
_QUANTIZED: Mapping[str, str] = MappingProxyType(
    {"adamw_8bit": "adamw8bit", "adamw_bnb_8bit": "adamw8bit"}
    | {"adamw_torch_8bit": "adamw8bit", "adamw_torch_4bit": "adamw4bit"}
)
"""`optim` of the training arguments -> the same as `optimizer` of a plan, which keeps the blocks of their states whole."""


class ParallelTrainer(Base):
    """transformers' Trainer over a parallel model: same arguments, methods and loop; losses are those of one device.

    The trainer sees one device: `per_device_train_batch_size` is the size of the global batch, of which each rank computes its
    rows. Files and logs are written by rank 0. A checkpoint goes on under any plan and on any number of ranks.

    Args:
        parallel: keywords of `mw.auto_parallelize`, such as {"tp": 2}, or a plan. The model becomes parallel when the first
            training or evaluation begins, for a batch of its data loader. Left out: the planner decides everything (on one
            rank, the model stays as it is). Nothing happens to a model that is parallel already.
        the others: as for the trainer.

    Raises:
        UsageError: training arguments make transformers divide or compile the model.
    """

    def __init__(
        self, *args: Any, parallel: Mapping[str, Any] | ParallelPlan | None = None, **kwargs: Any
    ) -> None:
        self._parallel = parallel
        super().__init__(*args, **kwargs)

    def create_accelerator_and_postprocess(self) -> None:
        """See transformers."""
        from meshwright.integrations.accelerate import Accelerator

        for name in _DIVIDE:
            if getattr(self.args, name, None):
                raise UsageError(
                    f"the training argument {name} divides or compiles the model, which a plan does here; leave it out, and give "
                    'the trainer a plan instead (parallel={"dp": 2, "zero": 3}, for example)'
                )
        show_one_device(self.args.use_cpu)
        # a rank has one, however many the machine has
        self.args._n_gpu = min(1, self.args.n_gpu)
        super().create_accelerator_and_postprocess()
        self.accelerator.__class__ = Accelerator
        self.accelerator.adapt()
        gathered = self.accelerator.gather_for_metrics
        self.gather_function = functools.partial(gathered, use_gather_object=self.args.eval_use_gather_object)

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        # each rank would have the whole model on its device
        if not self._becomes_parallel(model):
            super()._move_model_to_device(model, device)

    def _inner_training_loop(self, *args: Any, **kwargs: Any) -> Any:
        self.model.train()
        self._make_parallel(self.get_train_dataloader)
        return super()._inner_training_loop(*args, **kwargs)

    def evaluation_loop(self, dataloader: Any, *args: Any, **kwargs: Any) -> Any:
        """See transformers."""
        self._make_parallel(lambda: dataloader)
        return super().evaluation_loop(dataloader, *args, **kwargs)

    def _becomes_parallel(self, model: nn.Module) -> bool:
        return not is_parallel(model) and (self._parallel is not None or dist.get_world_size() > 1)

    def _make_parallel(self, loader: Callable[[], Iterable[Any]]) -> None:
        if not self._becomes_parallel(self.model):
            return
        # the loop reads this batch again, with the same numbers
        streams = rng.state()
        batch = self._call_of(next(iter(loader())))
        rng.restore(streams)
        if isinstance(self._parallel, ParallelPlan):
            parallelize(self.model, self._parallel, batch=batch)
        else:
            keywords: dict[str, Any] = dict(self._parallel or {})
            # an enum, which hashes by its name
            optimizer = _QUANTIZED.get(str(getattr(self.args.optim, "value", self.args.optim)))
            if optimizer is not None:
                keywords.setdefault("optimizer", optimizer)
            auto_parallelize(self.model, batch, **keywords)

    def _call_of(self, batch: Any) -> Any:
        """What the trainer calls the model with for a batch of its data loader."""
        inputs = self._prepare_inputs(batch)
        count = self._get_num_items_in_batch([inputs], self.args.device)
        hook = self.model.register_forward_pre_hook(tell_call, prepend=True, with_kwargs=True)
        try:
            # which may take something out
            self.compute_loss(self.model, dict(inputs), num_items_in_batch=count)
        except Called as call:
            return call.batch
        finally:
            hook.remove()
        return inputs

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """See transformers."""
        given = self.optimizer is not None
        super().create_optimizer(model)
        if not given and is_parallel(self.model):
            decayed = set(self.get_decay_parameter_names(self.model))
            _join_groups(self.optimizer, self.model, decayed, self.args.weight_decay)
        return self.optimizer

    def _has_mixed_mesh_grads(self, model: nn.Module) -> bool:
        # the accelerator's norm is that of all meshes
        return False

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """See transformers (a collective call): a directory that `from_pretrained` reads."""
        super().save_model(output_dir, _internal_call)
        # rank 0 has written it; all look for it
        dist.barrier()

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        if state_dict is None and is_parallel(self.model):
            state_dict = full_state_dict(self.model)
        super()._save(output_dir, state_dict)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if not is_parallel(self.model):
            super()._save_optimizer_and_scheduler(output_dir)
            return
        save_to(Path(output_dir) / STATE.format(0), self.model, _inner(self.optimizer))
        if self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), os.path.join(output_dir, SCHEDULER))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        states = None if checkpoint is None else Path(checkpoint) / STATE.format(0)
        if states is None or not states.exists():
            super()._load_optimizer_and_scheduler(checkpoint)
            return
        load(states, model=self.model, optimizer=_inner(self.optimizer), random=False)
        self.lr_scheduler.load_state_dict(torch.load(states.parent / SCHEDULER, weights_only=True))

    def _save_rng_state(self, output_dir: str) -> None:
        # one device's numbers are the same on every rank
        if self.args.should_save:
            super()._save_rng_state(output_dir)


__getattr__ = subclass_on_first_use("Trainer", ParallelTrainer, "transformers")


def _join_groups(optimizer: torch.optim.Optimizer, model: nn.Module, decayed: set[str], decay: float) -> None:
    """Undo that transformers divides its two groups of parameters by mesh: a schedule has a number for each group."""
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    # as transformers tells; a parameter of another stage is no DTensor
    meshes = {p.device_mesh if isinstance(p, DTensor) else None for _, p in named}
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    first, *others = ({**group, "params": [], "weight_decay": decay} for group in optimizer.param_groups)
    if len(meshes) < 2 or held != {id(p) for _, p in named} or any(group != first for group in others):
        return
    second: dict[str, Any] = {**first, "params": [], "weight_decay": 0.0}
    for name, parameter in named:
        (first if name in decayed else second)["params"].append(parameter)
    optimizer.param_groups[:] = [first, second]


def _inner(optimizer: Any) -> torch.optim.Optimizer:
    """The optimizer in accelerate's."""
    return optimizer.optimizer if hasattr(optimizer, "optimizer") else optimizer
