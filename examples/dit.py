"""A diffusion transformer learns to predict the noise in latents, with an average of its weights.

torchrun --nproc-per-node 2 examples/dit.py
"""

import copy

import torch
import torch.nn.functional as F
from torch import nn

import meshwright as mw

WIDTH, HEADS, PATCHES, STEPS = 32, 4, 16, 6


class Block(nn.Module):
    """Attention and MLP, scaled and shifted by the time and the class."""

    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = (nn.LayerNorm(WIDTH, elementwise_affine=False) for _ in range(2))
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
        self.modulate = nn.Sequential(nn.SiLU(), nn.Linear(WIDTH, 4 * WIDTH))

    def forward(self, x, condition):
        shift1, scale1, shift2, scale2 = self.modulate(condition)[:, None].chunk(4, dim=-1)
        rows, tokens, _ = x.shape
        q, k, v = (
            t.view(rows, tokens, HEADS, -1).transpose(1, 2)
            for t in self.qkv(self.norm1(x) * (1 + scale1) + shift1).chunk(3, -1)
        )
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(rows, tokens, WIDTH))
        return x + self.mlp(self.norm2(x) * (1 + scale2) + shift2)


class DiT(nn.Module):
    def __init__(self):
        super().__init__()
        self.into, self.out = nn.Linear(8, WIDTH), nn.Linear(WIDTH, 8)
        self.places, self.classes = nn.Parameter(torch.randn(PATCHES, WIDTH) * 0.02), nn.Embedding(10, WIDTH)
        self.time = nn.Sequential(nn.Linear(1, WIDTH), nn.SiLU(), nn.Linear(WIDTH, WIDTH))
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, noised, time, label):
        condition = self.time(time[:, None]) + self.classes(label)
        x = self.into(noised) + self.places
        for block in self.blocks:
            x = block(x, condition)
        return self.out(x)


mw.init()
torch.manual_seed(0)
latents, labels = torch.randn(8, PATCHES, 8), torch.randint(10, (8,))
model = mw.auto_parallelize(DiT(), (latents, torch.rand(8), labels))
average = copy.deepcopy(model)  # parallel too
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(STEPS):
    noise, time = torch.randn_like(latents), torch.rand(8)
    noised = torch.lerp(latents, noise, time[:, None, None])
    loss = F.mse_loss(model(noised, time, labels), noise - latents)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    with torch.no_grad():
        for old, new in zip(average.parameters(), model.parameters(), strict=True):
            old.lerp_(new, 0.1)
    value = loss.item()
    if torch.distributed.get_rank() == 0:
        print(f"step {step:3d}  loss {value:.4f}")
with torch.no_grad():
    value = F.mse_loss(average(noised, time, labels), noise - latents).item()
if torch.distributed.get_rank() == 0:
    print(f"step {STEPS:3d}  loss {value:.4f}")
torch.distributed.destroy_process_group()
