"""A vision transformer on synthetic pictures: where is the bright square? Each rank reads its own rows.

torchrun --nproc-per-node 2 examples/vit.py
"""

import torch
from torch.utils.data import DataLoader, Dataset
from transformers import ViTConfig, ViTForImageClassification

import meshwright as mw


class Squares(Dataset):
    """Pictures of noise with a bright square in one of four corners."""

    def __len__(self):
        return 64

    def __getitem__(self, index):
        draw = torch.Generator().manual_seed(index)
        picture, corner = torch.randn(3, 16, 16, generator=draw), index % 4
        down, right = divmod(corner, 2)
        picture[:, 8 * down : 8 * down + 8, 8 * right : 8 * right + 8] += 2
        return {"pixel_values": picture, "labels": torch.tensor(corner)}


mw.init()
torch.manual_seed(0)
sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
config = ViTConfig(image_size=16, patch_size=4, num_labels=4, **sizes)
loader = DataLoader(Squares(), batch_size=16, shuffle=True)
with mw.deferred_init():
    model = ViTForImageClassification(config)
model = mw.auto_parallelize(model, next(iter(loader)), dp=torch.distributed.get_world_size())

optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
for epoch in range(3):
    right = rows = 0
    for batch in mw.shard_loader(loader, model=model):  # a rank decodes only its pictures
        result = model(**batch)
        result.loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        right += (result.logits.argmax(-1) == batch["labels"]).sum().item()  # of all ranks
        rows += len(batch["labels"])
    value = result.loss.item()
    if torch.distributed.get_rank() == 0:
        print(f"step {epoch:3d}  loss {value:.4f}  accuracy {right / rows:.2f}")
torch.distributed.destroy_process_group()
