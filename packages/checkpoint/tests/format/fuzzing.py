"""Coverage-guided fuzzing of all parsers of stored data: they may raise only errors of this package, in little memory.

python fuzzing.py [-max_total_time=60] [libFuzzer's options].  Needs atheris (`pip install atheris`); the tests run it for a minute.
The inputs are manifests with a correct digest, raw manifests, safetensors headers, pickles of
torch.distributed.checkpoint, and user values.
"""

from __future__ import annotations

import hashlib
import json
import sys
from contextlib import suppress

import atheris

with atheris.instrument_imports(include=["meshwright_checkpoint"]):
    from meshwright_checkpoint.dcp.safe_unpickle import safe_loads
    from meshwright_checkpoint.errors import CheckpointError
    from meshwright_checkpoint.format.json_values import decode
    from meshwright_checkpoint.format.manifest import Manifest
    from meshwright_checkpoint.format.safetensors_file import header_length, read_header
    from meshwright_checkpoint.state.optimizer import refuse_tensor

RIGHT = json.dumps(
    {
        "format": "meshwright-checkpoint",
        "version": 2,
        "id": "0" * 32,
        "created": "2026-01-01",
        "step": 1,
        "world_size": 1,
        "versions": {},
        "plan": None,
        "files": [
            {"name": "data-00000.safetensors", "nbytes": 4196, "header_nbytes": 4096, "header_sums": "0" * 32}
        ],
        "tensors": {
            "model/w": {
                "shape": [5, 5],
                "dtype": "F32",
                "parts": [{"box": [[0, 5], [0, 5]], "file": 0, "offset": 4096, "sums": "0" * 32}],
            }
        },
        "model": {"cls": "M", "config": None, "aliases": {}, "extra_state": {}},
        "optimizer": None,
        "rng": {"streams": {}},
        "extra": None,
    }
)[1:].encode()


def sealed(body: bytes) -> bytes:
    """Add the correct digest, which a fuzzer would never find."""
    return b'{"sha256": "%s",\n' % hashlib.sha256(body).hexdigest().encode() + body


def spliced(data: bytes) -> bytes:
    """A valid manifest with a range replaced by fuzzer input."""
    at, length = int.from_bytes(data[:2], "little") % len(RIGHT), data[2] if len(data) > 2 else 0
    return RIGHT[:at] + data[3:] + RIGHT[at + length :]


def parse(data: bytes) -> None:
    """Give one input to one of the parsers."""
    if not data:
        return
    kind, data = data[0] % 6, data[1:]
    with suppress(CheckpointError):
        if kind == 0:
            Manifest.from_bytes(sealed(spliced(data)), "here")
        elif kind == 1:
            Manifest.from_bytes(sealed(data), "here")
        elif kind == 2:
            Manifest.from_bytes(data, "here")
        elif kind == 3:
            header_length(data[:8], len(data), "here")
            read_header(data, len(data), "here")
        elif kind == 4:
            safe_loads(data, "here")
        else:
            with suppress(ValueError, RecursionError):  # invalid JSON
                value = json.loads(data)
                decode(value, refuse_tensor)


def main() -> None:
    Manifest.from_bytes(sealed(RIGHT), "here")  # the unmodified manifest is valid
    atheris.Setup([sys.argv[0], "-rss_limit_mb=2048", "-max_total_time=60", *sys.argv[1:]], parse)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
