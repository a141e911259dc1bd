"""A mixture of experts: each rank has its share of the experts of every layer, and tokens are sent to theirs.

torchrun --nproc-per-node 2 examples/mixtral_experts.py
"""

import torch
from transformers import MixtralConfig, MixtralForCausalLM

import meshwright as mw

STEPS = 6

mw.init()
torch.manual_seed(0)
sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
config = MixtralConfig(
    vocab_size=64, num_key_value_heads=2, num_local_experts=4, output_router_logits=True, **sizes
)
ids = torch.randint(64, (8, 16))
batch = {"input_ids": ids, "labels": ids}
with mw.deferred_init():
    model = MixtralForCausalLM(config)
model = mw.auto_parallelize(model, batch, ep=torch.distributed.get_world_size())

optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
for step in range(STEPS):
    loss = model(**batch).loss  # with the auxiliary loss that balances the experts
    loss.backward()
    mw.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    value = loss.item()
    if torch.distributed.get_rank() == 0:
        print(f"step {step:3d}  loss {value:.4f}")
torch.distributed.destroy_process_group()
