"""Any layout with meshwright: the model is the one of one device, the batch the global one."""

from typing import Any

from peers.model import Batch, Llama, Step, optimizer_of

import meshwright as mw


def setup(model: Llama, batch: Batch, **layout: Any) -> Step:
    mw.auto_parallelize(model, batch, **layout)
    optimizer = optimizer_of(model.parameters())

    def step():
        loss = model(**batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step
