"""A GPT from scratch, in plain PyTorch, on a text file.

    torchrun --nproc-per-node 2 examples/nanogpt.py README.md

Tied embeddings, dropout, weight decay for matrices only, a schedule of the learning rate, and text at the end. Nothing in
the model knows of ranks. The sizes below are for a laptop: GPT-2 has WIDTH 768, LAYERS 12, HEADS 12, TOKENS 1024.
"""

import math
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

import meshwright as mw

WIDTH, LAYERS, HEADS, TOKENS, ROWS, STEPS = 64, 2, 4, 64, 8, 12


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
        self.drop = nn.Dropout(0.1)

    def forward(self, x):
        rows, tokens, _ = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(rows, tokens, 3, HEADS, -1).permute(2, 0, 3, 1, 4).unbind(0)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.drop(self.out(attended.transpose(1, 2).reshape(rows, tokens, WIDTH)))
        return x + self.drop(self.mlp(self.norm2(x)))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.bytes, self.places = nn.Embedding(256, WIDTH), nn.Embedding(TOKENS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256, bias=False)
        self.head.weight = self.bytes.weight
        nn.init.normal_(self.bytes.weight, std=0.02)

    def forward(self, ids, labels=None):
        x = self.bytes(ids) + self.places.weight[: ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return logits if labels is None else F.cross_entropy(logits.flatten(0, 1), labels.flatten())


mw.init()
torch.manual_seed(0)
text = torch.tensor(list(Path(sys.argv[1]).read_bytes()))
starts = torch.randint(len(text) - TOKENS - 1, (STEPS, ROWS))
batches = [torch.stack([text[i : i + TOKENS + 1] for i in row]) for row in starts.tolist()]

model = mw.auto_parallelize(GPT(), {"ids": batches[0][:, :-1], "labels": batches[0][:, 1:]})
matrices = [p for p in model.parameters() if p.ndim > 1]
others = [p for p in model.parameters() if p.ndim <= 1]
groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
optimizer = torch.optim.AdamW(groups, lr=3e-3, betas=(0.9, 0.95))
schedule = torch.optim.lr_scheduler.LambdaLR(
    optimizer, lambda n: 0.1 + 0.9 * math.cos(math.pi * n / 2 / STEPS)
)
for step, batch in enumerate(batches):
    loss = model(batch[:, :-1], batch[:, 1:])
    loss.backward()
    mw.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    schedule.step()
    value = loss.item()  # on every rank: it may communicate
    if torch.distributed.get_rank() == 0:
        print(f"step {step:3d}  loss {value:.4f}")

model.eval()
ids = text[None, :16]
with torch.no_grad():
    for _ in range(16):
        ids = torch.cat([ids, model(ids[:, -TOKENS:])[:, -1].argmax(-1, keepdim=True)], dim=1)
written = bytes(ids[0].tolist()).decode(errors="replace")
if torch.distributed.get_rank() == 0:
    print(repr(written))
torch.distributed.destroy_process_group()
