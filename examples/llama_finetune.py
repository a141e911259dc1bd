"""Fine-tune a Llama from a directory of `from_pretrained`, and write such a directory.

    torchrun --nproc-per-node 2 examples/llama_finetune.py my-llama finetuned

No rank ever holds the whole model: it is made without memory, and each rank reads its part of the weights. If the first
folder is missing, a tiny model with random weights is written there.
"""

import sys
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import meshwright as mw

source, target = sys.argv[1:3]
ROWS, TOKENS, STEPS = 4, 32, 8

mw.init()
torch.manual_seed(0)
rank = torch.distributed.get_rank()
if rank == 0 and not Path(source).exists():
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    LlamaForCausalLM(LlamaConfig(vocab_size=128, num_key_value_heads=2, **sizes)).save_pretrained(source)
torch.distributed.barrier()
torch.manual_seed(0)

config = AutoConfig.from_pretrained(source)
with mw.deferred_init():
    model = AutoModelForCausalLM.from_config(config)
lines = torch.randint(config.vocab_size, (1, TOKENS)).repeat(ROWS, 1)  # your text
batch = {"input_ids": lines, "labels": lines}
model = mw.auto_parallelize(model, batch)
mw.load(source, model=model)

optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(STEPS):
    loss = model(**batch).loss
    loss.backward()
    mw.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    value = loss.item()
    if rank == 0:
        print(f"step {step:3d}  loss {value:.4f}")
mw.export(target, model=model)  # AutoModelForCausalLM.from_pretrained(target) reads it
torch.distributed.destroy_process_group()
