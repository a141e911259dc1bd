"""The names of rich that reports use, imported without a draw from Python's random numbers.

rich.style draws from `random` when it is first imported. A report in the middle of a run would then change the numbers
that the user's script draws afterwards, and on the reporting rank alone.
"""

from __future__ import annotations

import random

_state = random.getstate()

from rich import box  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.measure import Measurement  # noqa: E402
from rich.table import Table  # noqa: E402
from rich.text import Text  # noqa: E402

random.setstate(_state)

__all__ = ["Console", "Measurement", "Table", "Text", "box"]
