"""Rules of a recipe's fields beyond their types: what must be on the disk, and which fields go together. Torch-free.

A rule takes a value and the fields above it (those that are valid), and returns what is wrong, or None. So pydantic
reports a broken rule together with all other errors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from glob import glob
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from pydantic import AfterValidator, ValidationInfo

from meshwright.documents import TABLES
from meshwright_dtensor.errors import UsageError
from meshwright_dtensor.plan import ParallelPlan
from meshwright_dtensor.plugins import discover
from meshwright_dtensor.strategy.plan_request import PlanRequest
from meshwright_dtensor.utils.names import suggestion

Above = Mapping[str, Any]
TOKEN_FILES = (".bin", ".npy")
WRITTEN = ("metrics.jsonl", "plan.json", "recipe.json", "checkpoints", "data", "tensorboard")
"""What a run writes into its folder."""


def obeys(rule: Callable[[Any, Above], str | None]) -> AfterValidator:
    """The validator of a field that has this rule."""

    def check(value: Any, info: ValidationInfo) -> Any:
        try:
            wrong = None if value is None else rule(value, info.data)
        except OSError as error:
            # of a path that is too long, or that this user may not read
            wrong = f"{error.filename} cannot be read: {error.strerror}; give another path"
        if wrong:
            raise ValueError(wrong)
        return value

    return AfterValidator(check)


def is_function(value: object) -> bool:
    """Whether a value names a function of a file, as "file.py:function"."""
    return isinstance(value, str) and ".py:" in value


def expand(*patterns: str, out: str | None = None) -> list[Path]:
    """The files of some paths: a file, all files in a folder but hidden ones and __pycache__, or those of a pattern.

    out: a run's folder; what runs write there is left out, unless a path names the file.
    """
    files: list[Path] = []
    written = [Path(out, name).resolve() for name in WRITTEN] if out is not None else []
    for pattern in patterns:
        path, hidden = Path(pattern), (".", "__pycache__")
        inside: Iterable[Path] = [path] if path.exists() else map(Path, glob(pattern, recursive=True))
        if path.is_dir():
            tree = ((file, file.relative_to(path).parts) for file in path.rglob("*"))
            inside = (file for file, parts in tree if not any(part.startswith(hidden) for part in parts))
        matching = sorted(file for file in inside if file.is_file())
        if not path.is_file():
            matching = [file for file in matching if not any(map(file.resolve().is_relative_to, written))]
        files += matching
    return files


def function(value: str, above: Above) -> str | None:
    file, _, name = value.rpartition(":")
    if above.get("files"):
        return "files are given too; leave one of them out"
    if not Path(file).is_file():
        return f"there is no file {file}; give file.py:function"
    return (
        None
        if name in Path(file).read_text("utf-8")
        else f"{file} has no function {name!r}; give the name of one"
    )


def source(value: Any, above: Above) -> str | None:
    return None if value.files or value.function else "give files or a function"


def files(value: tuple[str, ...], above: Above) -> str | None:
    for pattern in value:
        if not (matching := expand(pattern) if pattern else []):
            return f"there is no file {pattern or repr(pattern)}, and none in such a folder; check the path"
        if find_spec("pyarrow") is None and (tables := [file for file in matching if file.suffix in TABLES]):
            return f"{tables[0]} needs pyarrow; pip install pyarrow, or give JSONL"
    return None


def dtype(value: str, above: Above) -> str | None:
    raw = any(file.suffix == ".bin" for file in expand(*above.get("files", ())))
    return None if raw else "it has no effect without a .bin file; leave it out"


def moments(value: object, above: Above) -> str | None:
    return "it has no effect on sgd; leave it out" if above.get("name") == "sgd" else None


def momentum(value: object, above: Above) -> str | None:
    name = above.get("name", "sgd")
    return None if name == "sgd" else f"it has no effect on {name}; leave it out"


def installed(value: bool, above: Above) -> str | None:
    missing = value and find_spec("tensorboard") is None
    return "TensorBoard is not installed; pip install tensorboard, or leave it out" if missing else None


def model(value: str | dict[str, Any], above: Above) -> str | None:
    if isinstance(value, dict):
        if "dtype" in value or "torch_dtype" in value:
            return "dtype has no effect, for parameters are float32; leave it out, and set precision for the computation"
        named = isinstance(value.get("model_type"), str)
        return None if named else 'a table is a config of transformers and has its model_type, as "gpt2"'
    if is_function(value):
        return function(value, {})
    path, config = Path(value), Path(value) / "config.json"
    if config.is_file() and not any(path.glob("*.safetensors")):
        return f"{value} has no *.safetensors; give {config} for random weights"
    if config.is_file() or (path.is_file() and path.suffix == ".json"):
        return None
    return f"{value} is no folder with a config.json, no config.json and no file.py:function; give one, or a table"


def tokenizer(value: str, above: Above) -> str | None:
    if value == "bytes" or any(Path(value).glob("tokenizer*")):
        return None
    return f'{value} is no folder of a tokenizer; give one, or "bytes"{suggestion(value, ("bytes",))}'


def absent(value: str, above: Above) -> str | None:
    return f"{value} exists already; remove it first, or give another" if Path(value).exists() else None


def outside(value: str, above: Above) -> str | None:
    folders = [path for path in (above["data"].files if "data" in above else ()) if Path(path).is_dir()]
    inside = next(
        (path for path in folders if Path(value).resolve().is_relative_to(Path(path).resolve())), None
    )
    return f"{value} is in {inside}, which is data; give another folder" if inside else None


def divides(value: int, above: Above) -> str | None:
    rows = above.get("batch_size", value)
    return (
        f"it must divide batch_size, {rows}: a forward has batch_size / accumulate rows"
        if rows % value
        else None
    )


def packing(value: bool, above: Above) -> str | None:
    data = above.get("data")
    if value or data is None:
        return None
    if data.function:
        return "it has no effect on the rows of a function; leave it out"
    return (
        "files of tokens have no documents to keep apart; leave it out" if has_tokens(data, above) else None
    )


def has_tokens(source: Any, above: Above) -> bool:
    """Whether one of a source's files holds tokens."""
    return any(file.suffix in TOKEN_FILES for file in expand(*source.files, out=above.get("out")))


def evaluation(value: Any, above: Above) -> str | None:
    """A function's rows may be held out too: a loss counts as its labels, if it has any."""
    if above.get("packing", True) or not has_tokens(value.data, above):
        return None
    return "files of tokens in its data have no documents to keep apart; give text, or leave packing out"


def spike(value: float, above: Above) -> str | None:
    never = above.get("rewinds") == 0
    return "it has no effect without rewinds; say how often the run may go back" if never else None


def warms_up(value: Any, above: Above) -> str | None:
    steps = above.get("steps", math.inf)
    return (
        f"warm_up = {value.warm_up} leaves nothing of {steps} steps; give less"
        if value.warm_up >= steps
        else None
    )


def plan(value: Any, above: Above) -> str | None:
    """A plan file fixes everything; what is pinned must be possible."""
    pinned = {**value.pinned(), **({"precision": above["precision"]} if above.get("precision") else {})}
    ranks = above.get("world_size")
    try:
        if value.file is not None:
            if pinned:
                return f"{value.file} fixes what {', '.join(pinned)} asks for; leave that out, or the file"
            planned = ParallelPlan.load(value.file).world_size
            return (
                f"{value.file} is for {planned} ranks; leave world_size out"
                if ranks not in (None, planned)
                else None
            )
        request = PlanRequest(world_size=ranks, **pinned)
        request.check(sorted({entry.record.axis for entry in discover().strategies().values()}))
    except UsageError as error:
        return str(error)
    product = math.prod(request.pins.values())
    wrong = ranks is not None and ranks % product != 0
    return f"the degrees multiply to {product}, which does not divide world_size, {ranks}" if wrong else None
