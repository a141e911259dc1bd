"""The `meshwright` command: its subcommands are whatever plugins register as `CommandSpec`, ours included.

Exit codes: 0 done, 1 a bug, 2 usage, 3 infeasible, 4 a check failed. A user's error is one line on stderr; with --json what
went wrong is on stdout too, as {"error", "reason", "exit_code"}.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import click

from meshwright.ranks import fail, is_rank, leave
from meshwright_dtensor.errors import MeshwrightError, PluginError
from meshwright_dtensor.plugins import CommandSpec, PluginHost, discover


@dataclass
class State:
    """What commands share: the arguments as given (to start ranks with), and the plugins, found once."""

    arguments: tuple[str, ...] = ()

    @cached_property
    def host(self) -> PluginHost:
        """The installed plugins. Raises PluginError where they contradict each other."""
        return discover()


class PluginGroup(click.Group):
    """A group whose commands come from the plugin host and are imported when they are used."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_host(ctx).commands())

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        entry = _host(ctx).commands().get(name)
        command = None if entry is None else entry.load()
        if entry is not None and not isinstance(command, click.Command):
            raise PluginError(
                f"command {entry.name!r} of {entry.distribution} is a {type(command).__name__}; "
                f"its target {entry.record.target!r} must be a click.Command"
            )
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and not args[0].startswith("-") and args[0] not in _host(ctx).commands():
            # raises, with what was meant
            _host(ctx).get(CommandSpec, args[0])
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        rows = [(name, command.record.summary) for name, command in _host(ctx).commands().items()]
        if rows:
            with formatter.section("Commands"):
                formatter.write_dl(rows)


def _host(ctx: click.Context) -> PluginHost:
    return ctx.ensure_object(State).host


@click.group(cls=PluginGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="meshwright")
def group() -> None:
    """Run a model that was written for one device on many, unchanged."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit with its code.

    arguments: without the program's name; None takes sys.argv.
    """
    given = tuple(sys.argv[1:] if arguments is None else arguments)
    try:
        state = State(arguments=given)
        result: Any = group.main(list(given), "meshwright", standalone_mode=False, obj=state)
    except click.exceptions.NoArgsIsHelpError as error:
        print(error.format_message())
        sys.exit(2)
    except click.ClickException as error:
        context = getattr(error, "ctx", None)
        hint = f" (see: {context.command_path} --help)" if context else ""
        fail(" ".join(error.format_message().split()) + hint, 2)
    except click.Abort:
        fail("interrupted", 130)
    except MeshwrightError as error:
        data = {"error": type(error).__name__, "reason": str(error), "exit_code": error.exit_code}
        report = json.dumps(data, indent=2) if "--json" in given else None
        if is_rank():
            from meshwright_dtensor.mesh.error_report import tell_error

            tell_error(error)
        fail(str(error) if error.listed else " ".join(str(error).split()), error.exit_code, report)
    except OSError as error:
        if error.filename is None:
            raise
        # of a path that was given: too long, not allowed, a folder in the place of a file
        fail(f"{str(error.filename)[:200]}: {error.strerror}", 2)
    else:
        leave(result if isinstance(result, int) else 0)
