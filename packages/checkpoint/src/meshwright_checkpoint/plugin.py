"""What this distribution registers with the plugin host. Imports without torch."""

from __future__ import annotations

from collections.abc import Iterator

from meshwright_dtensor.plugins import CommandSpec, hookimpl


@hookimpl
def meshwright_commands() -> Iterator[CommandSpec]:
    """`meshwright checkpoint ...`."""
    yield CommandSpec(
        name="checkpoint",
        target="meshwright_checkpoint.commands:command",
        summary="inspect, verify, compare, export and rewrite checkpoints",
    )
