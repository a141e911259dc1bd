"""A residual network with BatchNorm: statistics are those of the whole batch, as on one device. No SyncBatchNorm is needed.

torchrun --nproc-per-node 2 examples/cnn_batchnorm.py
"""

import torch
import torch.nn.functional as F
from torch import nn

import meshwright as mw

STEPS = 6


class Residual(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.conv1 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm1, self.norm2 = nn.BatchNorm2d(width), nn.BatchNorm2d(width)

    def forward(self, x):
        return F.relu(x + self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x))))))


class Network(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()
        )
        self.blocks = nn.Sequential(*(Residual(width) for _ in range(2)))
        self.head = nn.Linear(width, 10)

    def forward(self, pictures):
        return self.head(self.blocks(self.stem(pictures)).mean(dim=(2, 3)))


mw.init()
torch.manual_seed(0)
pictures, labels = torch.randn(16, 3, 12, 12), torch.randint(10, (16,))
model = mw.auto_parallelize(Network(), pictures, dp=torch.distributed.get_world_size())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
for step in range(STEPS):
    loss = F.cross_entropy(model(pictures), labels)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    value = loss.item()
    if torch.distributed.get_rank() == 0:
        print(f"step {step:3d}  loss {value:.4f}")
model.eval()
with torch.no_grad():
    value = F.cross_entropy(model(pictures), labels).item()  # with the running statistics
if torch.distributed.get_rank() == 0:
    print(f"step {STEPS:3d}  loss {value:.4f}")
torch.distributed.destroy_process_group()
