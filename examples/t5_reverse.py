"""An encoder and a decoder: T5 learns to write its input backwards, under tensor parallelism, and then writes.

torchrun --nproc-per-node 2 examples/t5_reverse.py
"""

import torch
from transformers import T5Config, T5ForConditionalGeneration

import meshwright as mw

STEPS = 8

mw.init()
torch.manual_seed(0)
sizes = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}
config = T5Config(vocab_size=32, decoder_start_token_id=0, pad_token_id=0, **sizes)
ids = torch.randint(3, 32, (STEPS, 8, 10))
with mw.deferred_init():
    model = T5ForConditionalGeneration(config)
tp = torch.distributed.get_world_size()
model = mw.auto_parallelize(model, {"input_ids": ids[0], "labels": ids[0].flip(1)}, tp=tp)

optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
for step, rows in enumerate(ids):
    loss = model(input_ids=rows, labels=rows.flip(1)).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    value = loss.item()
    if torch.distributed.get_rank() == 0:
        print(f"step {step:3d}  loss {value:.4f}")

model.eval()
written = model.generate(input_ids=ids[0, :2], max_new_tokens=6, do_sample=False).tolist()
if torch.distributed.get_rank() == 0:
    print(written)
torch.distributed.destroy_process_group()
