"""A backend of a third party: checkpoints under one folder, each below the name of its user."""

from __future__ import annotations

import os
from collections.abc import Iterator

from meshwright_checkpoint.storage.filesystem import LocalPlace
from meshwright_dtensor.plugins import BackendSpec, hookimpl


def place(path: str | os.PathLike[str]) -> LocalPlace:
    return LocalPlace(f"{os.fspath(path)}-of-acme")


@hookimpl
def meshwright_checkpoint_backends() -> Iterator[BackendSpec]:
    yield BackendSpec(name="acme", target="backend_plugin:place", summary="for a test")
