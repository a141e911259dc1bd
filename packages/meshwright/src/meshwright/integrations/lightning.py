"""A strategy for Lightning's `Trainer`, over parallel models.

from meshwright.integrations.lightning import MeshwrightStrategy
trainer = Trainer(strategy=MeshwrightStrategy({"tp": 2}), ...)      # keywords of mw.plan, or a plan; left out: the best plan
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DistributedSampler

from meshwright.integrations.accelerate import STATE, save_to, whole
from meshwright.integrations.first_batch import Called, first_batch, tell_call
from meshwright.integrations.first_use import subclass_on_first_use
from meshwright.integrations.torchmetrics import without_sync
from meshwright_checkpoint import full_state_dict, load
from meshwright_checkpoint.state import rng
from meshwright_dtensor.errors import UsageError
from meshwright_dtensor.mesh.mesh import init
from meshwright_dtensor.model.wrapped import is_parallel
from meshwright_dtensor.plan import ParallelPlan
from meshwright_parallel import GradScaler, auto_parallelize, parallelize
from meshwright_parallel.data.loader import ShardedLoader

if TYPE_CHECKING:
    from lightning.pytorch import Trainer
    from lightning.pytorch.strategies import SingleDeviceStrategy as Base
else:
    Base = object

META = "meta.pt"
"""The file of a checkpoint's directory with everything but the states of model and optimizers."""
_BY_HAND = (
    "; make the model parallel yourself, in configure_model or before the trainer is made: "
    "self.net = mw.auto_parallelize(self.net, batch)"
)
_STEPS = {
    "fit": ("training_step", "fit_loop"),
    "validate": ("validation_step", "validate_loop"),
    "test": ("test_step", "test_loop"),
    "predict": ("predict_step", "predict_loop"),
}
"""By what the trainer does: the method of the LightningModule that it calls for a batch, and its loop."""


class StrategyMethods(Base):
    """Strategy of Lightning's Trainer for a parallel model: same module, loop and callbacks; losses are those of one device.

    The trainer sees one device: `world_size` is 1, and a batch of the data loader is the global batch, of which each rank
    computes its rows. `global_rank` and `is_global_zero` are the rank's, so files and logs are written by rank 0.

    A checkpoint is a directory, written in shards, from which a run goes on under any plan and on any number of ranks. With
    weights alone (`save_weights_only=True`) it is Lightning's file, which rank 0 gathers in host memory.

    Args:
        parallel: keywords of `mw.auto_parallelize`, such as {"tp": 2}, or a plan. The module that `training_step` calls
            becomes parallel when `fit` begins, for a batch of the data loader. Left out: the planner decides everything (on
            one rank, the model stays as it is). Nothing happens to a model that is parallel already.
        the others: as for Lightning's SingleDeviceStrategy.
    """

    def __init__(
        self,
        parallel: Mapping[str, Any] | ParallelPlan | None = None,
        *,
        accelerator: Any = None,
        checkpoint_io: Any = None,
        precision_plugin: Any = None,
    ) -> None:
        super().__init__(init(), accelerator, checkpoint_io, precision_plugin)
        self.global_rank = dist.get_rank()
        self._parallel = parallel
        # the values that a checkpoint was begun with
        self._saved: dict[str, Any] = {}
        self._resumed: Path | None = None

    @property
    def is_global_zero(self) -> bool:
        """See Lightning."""
        return dist.get_rank() == 0

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        """See Lightning."""
        dist.barrier()

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """See Lightning."""
        objects = [obj]
        dist.broadcast_object_list(objects, src)
        return objects[0]

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """See Lightning."""
        told: list[bool] = [decision] * dist.get_world_size()
        dist.all_gather_object(told, bool(decision))
        return min(told) if all else max(told)

    def setup_environment(self) -> None:
        """See Lightning."""
        from lightning.fabric.utilities.rank_zero import rank_zero_only

        rank_zero_only.rank = dist.get_rank()
        super().setup_environment()

    def process_dataloader(self, dataloader: object) -> object:
        """See Lightning. Raises UsageError: the data loader gives each rank other rows."""
        if isinstance(getattr(dataloader, "sampler", None), DistributedSampler) and dist.get_world_size() > 1:
            raise UsageError(
                "the data loader has a DistributedSampler, which gives each rank other rows, but a batch is the global batch on "
                "every rank; leave the sampler out (mw.shard_loader(loader) reads only this rank's rows)"
            )
        return super().process_dataloader(dataloader)

    def setup(self, trainer: Trainer) -> None:
        """See Lightning (a collective call)."""
        super().setup(trainer)
        without_sync(self.lightning_module)

    def model_to_device(self) -> None:
        """See Lightning; the model becomes parallel here. Raises UsageError: it is not clear which module shall."""
        if self._becomes_parallel():
            self._make_parallel()
        elif not is_parallel(self.lightning_module):
            super().model_to_device()

    def _becomes_parallel(self) -> bool:
        divides = self._parallel is not None or dist.get_world_size() > 1
        return divides and not is_parallel(self.lightning_module)

    def _make_parallel(self) -> None:
        # the loop reads this batch again, with the same numbers
        streams = rng.state()
        net, batch = self._first_call()
        rng.restore(streams)
        if isinstance(self._parallel, ParallelPlan):
            parallelize(net, self._parallel, batch=batch)
        else:
            auto_parallelize(net, batch, **(self._parallel or {}))

    def _first_call(self) -> tuple[nn.Module, Any]:
        """The module with all trained parameters that the step calls first, and its arguments as a batch."""
        from lightning.pytorch.utilities import CombinedLoader

        module = self.lightning_module
        step, loop = _STEPS[module.trainer.state.fn]
        loaders = getattr(module.trainer, loop)._data_source.dataloader()
        if not isinstance(loaders, CombinedLoader):
            loaders = CombinedLoader(loaders, "max_size_cycle" if step == "training_step" else "sequential")
        given = loaders.flattened
        # global tensors are made for a model that is parallel
        loaders.flattened = [
            loader.loader if isinstance(loader, ShardedLoader) else loader for loader in given
        ]
        try:
            batch = self.batch_to_device(first_batch(loaders, loaders.flattened)[0])
        finally:
            loaders.flattened = given
        trained = {id(p) for p in module.parameters() if p.requires_grad}
        nets = [net for net in module.modules() if trained <= {id(p) for p in net.parameters()}]
        hooks = [net.register_forward_pre_hook(tell_call, prepend=True, with_kwargs=True) for net in nets]
        try:
            getattr(module, step)(batch, *([0] if step != "training_step" or _takes_index(module) else []))
        except Called as call:
            return call.module, call.batch
        except Exception as error:
            reason = (str(error) or type(error).__name__).partition("\n")[0]
            raise UsageError(f"{step} failed before it called the model ({reason}){_BY_HAND}") from error
        finally:
            for hook in hooks:
                hook.remove()
        raise UsageError(f"{step} calls no module that has all trained parameters{_BY_HAND}")

    def setup_precision_plugin(self) -> None:
        """See Lightning."""
        plugin = self.precision_plugin
        if getattr(plugin, "scaler", None) is not None:
            options = plugin.scaler.state_dict()
            # as the norm, its check for infinities is that of all ranks
            plugin.scaler = GradScaler(self.root_device.type)
            plugin.scaler.load_state_dict(options)
        super().setup_precision_plugin()

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """See Lightning."""
        return True

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """See Lightning."""
        state = super().lightning_module_state_dict()
        self._saved = dict(state)
        return state

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """See Lightning; a checkpoint has it in shards."""
        return {} if is_parallel(self.lightning_module) else super().optimizer_state(optimizer)

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """See Lightning (a collective call)."""
        from lightning.fabric.utilities.apply_func import apply_to_collection

        model = self.lightning_module
        if not is_parallel(model):
            super().save_checkpoint(checkpoint, filepath, storage_options)
            return
        state, saved, path = checkpoint["state_dict"], self._saved, Path(filepath)
        # what callbacks and hooks have put in place of the model's own
        changed = {name: value for name, value in state.items() if saved.get(name) is not value}
        whole_file = "optimizer_states" not in checkpoint
        values = full_state_dict(model) if whole_file else {}
        rest = apply_to_collection({**checkpoint, "state_dict": changed}, Tensor, whole)
        rest["state_dict"] |= {name: values[name] for name in state if name in values and name not in changed}
        if self.is_global_zero and path.exists():
            self.checkpoint_io.remove_checkpoint(path)
        dist.barrier()
        if not whole_file:
            for number, optimizer in enumerate(self.optimizers or [None]):
                save_to(path / STATE.format(number), model, optimizer)
            path /= META
        super().save_checkpoint(rest, path, storage_options)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """See Lightning; ours, and one that Lightning wrote on one device."""
        path = Path(checkpoint_path)
        self._resumed = path if path.is_dir() else None
        checkpoint: dict[str, Any] = super().load_checkpoint(
            path if self._resumed is None else path / META, weights_only
        )
        return checkpoint

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """See Lightning (a collective call)."""
        if self._resumed is None:
            super().load_model_state_dict(checkpoint, strict)
            return
        load(self._resumed / STATE.format(0), model=self.lightning_module, strict=strict, random=False)
        self._load_changed(checkpoint)

    def _load_changed(self, checkpoint: Mapping[str, Any]) -> None:
        """Load the values that callbacks and hooks had put in place of the model's own."""
        if checkpoint["state_dict"]:
            super().load_model_state_dict(checkpoint, strict=False)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """See Lightning (a collective call)."""
        if self._resumed is None:
            super().load_optimizer_state_dict(checkpoint)
            return
        for number, optimizer in enumerate(self.optimizers):
            states = self._resumed / STATE.format(number)
            load(states, model=self.lightning_module, optimizer=optimizer, random=False)
        self._load_changed(checkpoint)

    def teardown(self) -> None:
        """See Lightning; a parallel model stays on its devices."""
        if not is_parallel(self.lightning_module):
            super().teardown()
            return
        self.precision_plugin.teardown()
        self.accelerator.teardown()
        self.checkpoint_io.teardown()


__getattr__ = subclass_on_first_use(
    "MeshwrightStrategy", StrategyMethods, "lightning", "lightning.pytorch.strategies:SingleDeviceStrategy"
)


def _takes_index(module: Any) -> bool:
    from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature

    return bool(is_param_in_hook_signature(module.training_step, "batch_idx", min_args=2))
