"""The option of all tests: `--device TYPE`."""

from __future__ import annotations

pytest_plugins = ["meshwright_dtensor.testing.device_option"]
