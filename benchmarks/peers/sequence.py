"""Tensor and sequence parallelism: torch's parallelize_module, after torchtitan's Llama."""

import torch.distributed as dist
from peers.model import Batch, Llama, Step, optimizer_of
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)


def shard(model: Llama, mesh: DeviceMesh) -> None:
    whole, tokens = Replicate(), Shard(1)
    parallelize_module(
        model,
        mesh,
        {
            "embed": RowwiseParallel(input_layouts=whole, output_layouts=tokens),
            "norm": SequenceParallel(),
            "lm_head": ColwiseParallel(
                input_layouts=tokens, output_layouts=Shard(-1), use_local_output=False
            ),
        },
    )
    styles = {
        "norm_1": SequenceParallel(),
        "norm_2": SequenceParallel(),
        "attention": PrepareModuleInput(
            input_layouts=(tokens, None, None), desired_input_layouts=(whole, None, None)
        ),
        "mlp": PrepareModuleInput(input_layouts=(tokens,), desired_input_layouts=(whole,)),
        **{f"attention.{name}": ColwiseParallel() for name in ("q_proj", "k_proj", "v_proj")},
        **{f"mlp.{name}": ColwiseParallel() for name in ("gate_proj", "up_proj")},
        "attention.o_proj": RowwiseParallel(output_layouts=tokens),
        "mlp.down_proj": RowwiseParallel(output_layouts=tokens),
    }
    for layer in model.layers:
        parallelize_module(layer, mesh, styles)


def setup(model: Llama, batch: Batch) -> Step:
    shard(model, init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = optimizer_of(model.parameters())

    def step():
        with loss_parallel():
            loss = model(**batch)
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.full_tensor().detach()

    return step
