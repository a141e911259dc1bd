"""A run that goes on with the ranks that are left. Start it again, with any number of ranks, and it continues.

    torchrun --nnodes 1:4 --nproc-per-node 8 --max-restarts 100 examples/elastic.py

torchrun starts all ranks again when a machine is lost or comes back. The script then plans for the new number of ranks,
and `mw.elastic` loads the last whole checkpoint into that plan. Losses are those of a run that was never interrupted. The
batch is the global batch, so it stays the same.
"""

import sys

import torch
import torch.nn.functional as F
from torch import nn

import meshwright as mw

STEPS = 8
lost = int(sys.argv[1]) if len(sys.argv) > 1 else STEPS  # for our tests: a machine is lost here


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


mw.init()
torch.manual_seed(0)
data = torch.randn(24, 16)
loader = torch.utils.data.DataLoader(data, batch_size=8, shuffle=True)
model = mw.auto_parallelize(Model(), data[:8])  # a plan for the ranks that there are now
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
run = mw.elastic("elastic-run", model=model, optimizer=optimizer, interval=2)
for step, batch in run.batches(loader, STEPS):
    if step == lost:
        break
    loss = F.mse_loss(model(batch), batch.sin())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    value = loss.item()
    if torch.distributed.get_rank() == 0:
        print(f"step {step:3d}  loss {value:.4f}")
torch.distributed.destroy_process_group()
