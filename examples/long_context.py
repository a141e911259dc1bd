"""Long rows: the tokens of a row are divided over the ranks (context parallelism), and blocks are recomputed.

    torchrun --nproc-per-node 2 examples/long_context.py

The sequence is 256 tokens here. On 8 GPUs with 80 GB, 131,072 tokens are the same lines.
"""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import meshwright as mw

TOKENS, STEPS = 256, 4

mw.init()
torch.manual_seed(0)
sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
config = LlamaConfig(vocab_size=64, num_key_value_heads=2, max_position_embeddings=TOKENS, **sizes)
ids = torch.randint(64, (2, TOKENS))
batch = {"input_ids": ids, "labels": ids}
with mw.deferred_init():
    model = LlamaForCausalLM(config)
cp = torch.distributed.get_world_size()
model = mw.auto_parallelize(model, batch, cp=cp, recompute="full")  # context_attention="ring" pins the kind

optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
for step in range(STEPS):
    loss = model(**batch, use_cache=False).loss
    loss.backward()
    mw.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    value = loss.item()
    if torch.distributed.get_rank() == 0:
        print(f"step {step:3d}  loss {value:.4f}")
torch.distributed.destroy_process_group()
