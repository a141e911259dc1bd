"""The host as a device of torch."""

from __future__ import annotations

import torch

HOST = torch.device("cpu")
"""The memory of the process, whatever accelerator it uses."""
