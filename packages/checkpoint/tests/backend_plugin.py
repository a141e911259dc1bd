"""A third-party backend: directories with the suffix "-of-acme"."""

from __future__ import annotations

import os
from collections.abc import Iterator

from meshwright_checkpoint.storage.filesystem import DirectoryStorage
from meshwright_dtensor.plugins import BackendSpec, hookimpl


def storage(path: str | os.PathLike[str]) -> DirectoryStorage:
    return DirectoryStorage(f"{os.fspath(path)}-of-acme")


@hookimpl
def meshwright_checkpoint_backends() -> Iterator[BackendSpec]:
    yield BackendSpec(name="acme", target="backend_plugin:storage", summary="for a test")
