"""Two models and two optimizers: a generator learns to fool a discriminator. Each model has a plan of its own.

torchrun --nproc-per-node 2 examples/gan.py
"""

import torch
import torch.nn.functional as F
from torch import nn

import meshwright as mw

NOISE, STEPS = 8, 6

mw.init()
torch.manual_seed(0)
world = torch.distributed.get_world_size()
real = torch.randn(16, 2) * 0.1 + torch.tensor([1.0, -1.0])
generator = nn.Sequential(nn.Linear(NOISE, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 2))
critic = nn.Sequential(nn.Linear(2, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1))
generator = mw.auto_parallelize(generator, torch.randn(16, NOISE), dp=world)
critic = mw.auto_parallelize(critic, real, dp=world)
generates = torch.optim.Adam(generator.parameters(), lr=2e-3, betas=(0.5, 0.9))
judges = torch.optim.Adam(critic.parameters(), lr=2e-3, betas=(0.5, 0.9))
for step in range(STEPS):
    made = generator(torch.randn(16, NOISE))
    judged = F.softplus(-critic(real)).mean() + F.softplus(critic(made.detach())).mean()
    judged.backward()
    judges.step()
    judges.zero_grad()

    fooled = F.softplus(-critic(made)).mean()
    fooled.backward()
    generates.step()
    generates.zero_grad()
    judges.zero_grad()  # the generator's loss left gradients in the critic

    values = judged.item(), fooled.item()
    if torch.distributed.get_rank() == 0:
        print(f"step {step:3d}  loss {values[0]:.4f}  generator {values[1]:.4f}")
torch.distributed.destroy_process_group()
