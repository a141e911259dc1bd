"""python -m integration_tests.third_party [--only NAME] [--layout LAYOUT] [--write PATH] [--store FILE]."""

from __future__ import annotations

import os
import sys
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
# as the tests of this folder import each other
sys.path.insert(0, str(Path(__file__).parents[1]))

from third_party.command import main

if __name__ == "__main__":
    sys.exit(main())
