"""Train a small GPT-2 on a text file, on as many ranks as torchrun starts.

    torchrun --nproc-per-node 4 examples/train_gpt2.py README.md

The same file runs on one device: `python examples/train_gpt2.py README.md`.
"""

import sys
from pathlib import Path

import torch
from transformers import GPT2Config, GPT2LMHeadModel

import meshwright as mw

ROWS, TOKENS, STEPS = 8, 64, 20

mw.init()
torch.manual_seed(0)
text = torch.tensor(list(Path(sys.argv[1]).read_bytes()))
starts = torch.randint(len(text) - TOKENS, (STEPS * ROWS,)).tolist()
samples = [{"input_ids": text[i : i + TOKENS], "labels": text[i : i + TOKENS]} for i in starts]
loader = torch.utils.data.DataLoader(samples, batch_size=ROWS)

with mw.deferred_init():
    config = GPT2Config(n_embd=128, n_layer=4, n_head=4, vocab_size=256, bos_token_id=None, eos_token_id=None)
    model = GPT2LMHeadModel(config)
model = mw.auto_parallelize(model, next(iter(loader)))
if torch.distributed.get_rank() == 0:
    print(model.parallel_plan.explain())

optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step, batch in enumerate(mw.shard_loader(loader)):
    loss = model(**batch).loss
    loss.backward()
    mw.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    value = loss.item()  # on every rank: it may communicate
    if torch.distributed.get_rank() == 0:
        print(f"step {step:3d}  loss {value:.4f}")
torch.distributed.destroy_process_group()
