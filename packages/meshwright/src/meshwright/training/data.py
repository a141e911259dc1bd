"""The rows that a model learns from, and their order: they depend on the recipe alone, not on ranks or plans."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from meshwright.ranks import ignore_signals
from meshwright.recipes.rules import TOKEN_FILES, expand
from meshwright.recipes.schema import Recipe, Source
from meshwright.sources import call_with
from meshwright.training.tokens import Tokenizer, check_tokens, checksum, prepared, tokens_of
from meshwright_dtensor.devices import HOST
from meshwright_dtensor.errors import UsageError

IGNORED = -100
"""The label of a position that no loss counts."""

Sample = dict[str, torch.Tensor]


class Rows(Dataset[Sample]):
    """Rows of tokens: input_ids and labels, int64 (length,); padded rows of documents have an attention_mask too.

    parts: arrays of tokens that no row crosses. ends: where the documents of the only part end, if they are kept apart.
    """

    def __init__(
        self, parts: Sequence[np.ndarray], ends: np.ndarray | None, length: int, tokenizer: Tokenizer
    ) -> None:
        self.parts, self.ends, self.length, self.tokenizer = parts, ends, length, tokenizer
        self.starts = [np.arange(len(part) // length) * length for part in parts]
        if ends is not None:
            # what is left of a document, but for a row of one token, which has nothing to predict
            pairs = itertools.pairwise([0, *ends.tolist()])
            self.starts = [np.concatenate([ends[:0], *(np.arange(a, b - 1, length) for a, b in pairs)])]
        self.offsets = np.cumsum([0, *map(len, self.starts)])

    def __len__(self) -> int:
        return int(self.offsets[-1])

    def __getitem__(self, index: int) -> Sample:
        part = int(np.searchsorted(self.offsets, index, side="right")) - 1
        start = int(self.starts[part][index - self.offsets[part]])
        until = start + self.length
        if self.ends is not None:
            until = min(until, int(self.ends[np.searchsorted(self.ends, start, side="right")]))
        ids = self.parts[part][start:until].astype(np.int64)
        check_tokens(ids, self.tokenizer, f"row {index}")
        row = torch.from_numpy(ids)
        if self.ends is None:
            return {"input_ids": row, "labels": row.clone()}
        filled = {"input_ids": self.tokenizer.end, "labels": IGNORED, "attention_mask": 0}
        sample = {name: torch.full((self.length,), value, device=HOST) for name, value in filled.items()}
        for name, values in (("input_ids", row), ("labels", row), ("attention_mask", torch.ones_like(row))):
            sample[name][: len(row)] = values
        return sample


def rows_of(source: Source, recipe: Recipe, tokenizer: Tokenizer) -> Any:
    """The dataset of a source, with len() and [index]. Text becomes tokens in the run's folder, once. Raises UsageError."""
    if source.function is not None:
        rows = call_with("data", source.function, sequence_length=recipe.sequence_length)
        if not (
            hasattr(rows, "__getitem__")
            and hasattr(rows, "__len__")
            and len(rows)
            and isinstance(rows[0], dict)
        ):
            rule = "it must return a dataset with len() and [index], of dicts of tensors"
            raise UsageError(f"data: {source.function} returned a {type(rows).__name__}; {rule}")
        return rows
    files = expand(*source.files, out=recipe.out)
    parts = [tokens_of(file, source.dtype) for file in files if file.suffix in TOKEN_FILES]
    ends = None
    if texts := [file for file in files if file.suffix not in TOKEN_FILES]:
        text, ends = prepared(texts, source.column, recipe, tokenizer)
        parts.append(text)
    if rows := Rows(parts, None if recipe.packing else ends, recipe.sequence_length, tokenizer):
        return rows
    raise UsageError(
        f"data: {', '.join(source.files)} has {sum(map(len, parts))} tokens, and a row sequence_length = "
        f"{recipe.sequence_length}; give more data, or shorter rows"
    )


class Order:
    """The row numbers of batch after batch, without end: every epoch has all rows in an order of its own.

    first: rows that were taken before; what follows depends on it, the seed and the number of rows alone.
    """

    def __init__(self, rows: int, batch: int, seed: int, first: int = 0) -> None:
        self.rows, self.batch, self.seed, self.first = rows, batch, seed, first

    def __iter__(self) -> Iterator[list[int]]:
        epoch, taken = divmod(self.first, self.rows)
        left = torch.empty(0, dtype=torch.int64, device=HOST)
        for number in itertools.count(epoch):
            generator = torch.Generator().manual_seed(self.seed * 1_000_003 + number)
            order = torch.cat([left, torch.randperm(self.rows, generator=generator, device=HOST)[taken:]])
            taken, whole = 0, len(order) // self.batch * self.batch
            for start in range(0, whole, self.batch):
                yield order[start : start + self.batch].tolist()
            left = order[whole:]


def in_order(rows: int, batch: int, most: int | None) -> list[list[int]]:
    """The row numbers of whole batches, in order and once, at most so many. Raises UsageError where there is none."""
    if rows < batch:
        raise UsageError(f"evaluation.data has {rows} rows, and a batch {batch}; give more, or shorter rows")
    return [list(range(start, start + batch)) for start in range(0, rows - batch + 1, batch)][:most]


def loader_of(rows: Dataset[Any], batches: Iterable[list[int]], workers: int = 0) -> DataLoader[Any]:
    """Loads these batches. The generator is given so that the model's random numbers stay as they are.

    Workers outlast SIGINT and SIGTERM, which torchrun, terminals and Slurm send to all processes of a rank, also where they are not
    forked (see `ranks.signals`): they end with the loader, or with the rank.
    """
    options: Any = {
        "batch_sampler": batches,
        "num_workers": workers,
        "worker_init_fn": ignore_signals if workers else None,
    }
    return DataLoader(rows, generator=torch.Generator().manual_seed(0), **options)


def identity(rows: Any, recipe: Recipe, tokenizer: Tokenizer) -> dict[str, Any]:
    """What must be equal for a run to go on; of a function's rows only their number is compared."""
    parts = [] if not isinstance(rows, Rows) else [*rows.parts, *([] if rows.ends is None else [rows.ends])]
    return {
        "tokens": checksum(*(("", part) for part in parts)),
        "tokenizer": tokenizer.digest,
        "rows": len(rows),
        "sequence_length": recipe.sequence_length,
        "packing": recipe.packing,
        "seed": recipe.seed,
        "optimizer.name": recipe.optimizer.name,
    }


def check_same(before: dict[str, Any], now: dict[str, Any], out: str) -> None:
    """Check that a run in the folder `out` can go on: what must be equal, before and now. Raises UsageError."""
    texts = {
        "tokens": "other data",
        "rows": "other data, of {} rows and not {}",
        "tokenizer": "other files of the tokenizer",
    }
    wrong = [name for name in now if name in before and before[name] != now[name]]
    # which follow from other fields
    follows = {
        "tokenizer": ("tokens", "rows"),
        "sequence_length": ("rows",),
        "packing": ("tokens", "rows"),
        "tokens": ("rows",),
    }
    wrong = [name for name in wrong if not any(name in follows.get(other, ()) for other in wrong)]
    if wrong:
        cause = ", ".join(
            texts.get(name, f"{name} = {{}}, not {{}}").format(before[name], now[name]) for name in wrong
        )
        rule = "a run goes on with the same rows in the same order, and the same model and optimizer"
        raise UsageError(f"{out} is a run with {cause}: {rule}; restore that, or give another out")


def settings_of(config: Any) -> dict[str, Any]:
    """The settings of a model that must be equal, from its config as JSON; nothing of one without such a config."""
    passing = ("transformers_version", "dtype", "torch_dtype", "use_cache", "architectures")
    kept = (config or {}).items()
    return {f"model.{k}": v for k, v in kept if not k.startswith("_") and k not in passing}
