"""The version of the hook API: hooks, records, and the interfaces that plugins implement. docs/plugins.md has the policy.

A plugin says which one it is written for, in its plugin module:

    meshwright_hook_api = "1.1"

The host leaves out, with a reason, a plugin of another major version and one of a later minor version than its own.
"""

from __future__ import annotations

import re

HOOK_API = (1, 1)
"""Major and minor. Minor: something was added. Major: something that was there changed or is gone."""

DECLARATION = "meshwright_hook_api"


def refusal(declared: object) -> str | None:
    """Why the host cannot use a plugin that declares this version; None where it can, or where nothing is declared."""
    if declared is None:
        return None
    match = re.fullmatch(r"(\d+)\.(\d+)", declared) if isinstance(declared, str) else None
    here = version_text()
    if match is None:
        return f'{DECLARATION} is {declared!r}; write the version of the hook API as text, {DECLARATION} = "{here}"'
    major, minor = int(match[1]), int(match[2])
    if major > HOOK_API[0] or (major == HOOK_API[0] and minor > HOOK_API[1]):
        return f"it is written for hook API {declared}, and meshwright-dtensor has {here}; upgrade meshwright-dtensor"
    if major < HOOK_API[0]:
        return (
            f"it is written for hook API {declared}, and meshwright-dtensor has {here}, where something it may use has changed; "
            "upgrade the plugin, or install an older meshwright-dtensor"
        )
    return None


def version_text() -> str:
    """The version as plugins write it."""
    return ".".join(map(str, HOOK_API))
