"""The subcommands of `meshwright`, one module each; every module's `command` is a `click.Command`."""
