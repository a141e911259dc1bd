"""Which of torch's answers about devices are names again, and which are kept."""

from __future__ import annotations

import pytest
import torch

from meshwright_dtensor._torch import accelerators
from meshwright_dtensor.devices import moves, unnamed_device


@pytest.mark.host("the test sets the default device")
def test_the_device_of_tensors_that_name_none_is_the_one_of_now() -> None:
    before = unnamed_device()
    torch.set_default_device("meta")
    try:
        assert unnamed_device().type == "meta"
    finally:
        torch.set_default_device(None)
    assert unnamed_device() == before
    with torch.device("meta"):
        assert unnamed_device() == torch.ones(1).device
    assert unnamed_device() == before == torch.ones(1).device


def test_methods_that_move_are_asked_of_torch_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each method of a tensor of a pipeline asks."""
    names: list[str] = []

    def is_type(name: str) -> bool:
        names.append(name)
        return False

    monkeypatch.setattr(accelerators, "is_type", is_type)
    assert [moves("never_asked_before") for _ in range(3)] == [False] * 3
    assert names == ["never_asked_before"]
    assert moves("to")
