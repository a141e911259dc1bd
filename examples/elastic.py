"""A run that goes on with the ranks that are left. Start it again, with any number of ranks, and it continues.

    torchrun --nnodes 1:4 --nproc-per-node 8 --max-restarts 100 examples/elastic.py

torchrun starts all ranks again when a machine is lost or comes back. The script then plans for the new number of ranks,
and loads the last whole checkpoint into that plan. Losses are those of a run that was never interrupted. The batch is
the global batch, so it stays the same.
"""

import sys

import torch
import torch.nn.functional as F
from torch import nn

import meshwright as mw

FOLDER, STEPS, EVERY = "elastic-run", 8, 2
stop = int(sys.argv[1]) if len(sys.argv) > 1 else STEPS  # for our tests: a machine is lost here


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)) for _ in range(2)
        )

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x)
        return x


def batch_of(step):
    """The global batch of a step: it depends on nothing else, so a new run has the same data."""
    return torch.randn(8, 16, generator=torch.Generator().manual_seed(step))


mw.init()
torch.manual_seed(0)
model = mw.auto_parallelize(Model(), batch_of(0))  # a plan for the ranks that there are now
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
first = 0
if path := mw.latest(FOLDER):
    first = mw.load(path, model=model, optimizer=optimizer)["step"] + 1
for step in range(first, stop):
    loss = F.mse_loss(model(batch_of(step)), batch_of(step).sin())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    value = loss.item()
    if torch.distributed.get_rank() == 0:
        print(f"step {step:3d}  loss {value:.4f}")
    if step % EVERY == EVERY - 1:
        mw.save(f"{FOLDER}/step-{step}", model=model, optimizer=optimizer, extra={"step": step}).wait()
torch.distributed.destroy_process_group()
