"""Plugin registration. Imports without torch."""

from __future__ import annotations

from collections.abc import Iterator

from meshwright_dtensor.plugins import BackendSpec, CommandSpec, hookimpl

meshwright_hook_api = "1.0"

DEFAULT = "safetensors"
"""The default backend of save and load."""


@hookimpl
def meshwright_commands() -> Iterator[CommandSpec]:
    """`meshwright checkpoint ...`."""
    yield CommandSpec(
        name="checkpoint",
        target="meshwright_checkpoint.commands:command",
        summary="inspect, verify, compare, export and reshard checkpoints",
    )


@hookimpl
def meshwright_checkpoint_backends() -> Iterator[BackendSpec]:
    """Checkpoint backends."""
    yield BackendSpec(
        name=DEFAULT,
        target="meshwright_checkpoint.storage.backend:storage_of_path",
        summary="safetensors and a manifest, in a directory or at a URL that fsspec knows",
    )
    yield BackendSpec(
        name="dcp",
        target="meshwright_checkpoint.dcp.backend:DcpStorage",
        summary="the format of torch.distributed.checkpoint, read without unpickling",
    )
