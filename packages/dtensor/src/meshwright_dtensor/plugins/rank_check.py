"""Check at start-up that every rank has the same plugins, torch and Python, and settings of torch for numbers.

Ranks with different plugins would plan or place differently and then deadlock in a collective; kernels and random numbers of
another torch are others, and values that several ranks compute differ where one computes in another way. torch is imported only
when the check runs.
"""

from __future__ import annotations

import platform
from hashlib import blake2b
from operator import attrgetter
from typing import Any

from meshwright_dtensor.errors import PluginError, UsageError
from meshwright_dtensor.plugins.host import PluginHost, discover
from meshwright_dtensor.utils.names import listing

# kind, name, distribution, version
Records = set[tuple[str, str, str, str]]

_PRECISIONS = tuple(
    f"{operation}.fp32_precision"
    for operation in "cuda.matmul cudnn.conv cudnn.rnn mkldnn.matmul mkldnn.conv mkldnn.rnn".split()
)
"""Torch's precisions of float32, by backend and operation; each reads what is set for all where it is not set itself."""


def compare_across_ranks(host: PluginHost, group: Any = None) -> None:
    """Raise PluginError on every rank of `group` unless all ranks hold the same records, UsageError for another torch, Python or
    setting of torch for numbers.

    group: a torch.distributed process group; None is the default one. Without one (a world of one) nothing is done.
    Records are compared by kind, name, distribution and version. Every rank of the group must call this.
    """
    _compare(host, None, group)


def discover_on_all_ranks(group: Any = None) -> PluginHost:
    """`discover()`, then `compare_across_ranks`: the host, or PluginError on every rank if any rank has an error.

    If one rank raised alone, the others would wait for it. Every rank of the group must call this.
    """
    host, failure = None, None
    try:
        host = discover()
    except PluginError as error:
        failure = str(error)
    _compare(host, failure, group)
    if host is None:
        raise PluginError(str(failure))
    return host


def _compare(host: PluginHost | None, failure: str | None, group: Any) -> None:
    import torch
    import torch.distributed as dist

    if not dist.is_available() or not dist.is_initialized():
        return
    held: Records = set()
    problems: list[str] = []
    if host is not None:
        held = {(it.record.kind, it.name, it.distribution, it.version) for it in host.everything()}
        problems = [str(problem) for problem in host.problems]
    python = platform.python_version_tuple()
    versions = [f"torch {torch.__version__}", f"Python {python[0]}.{python[1]}"]
    settings: list[str] = []
    try:
        settings = [f"{name}={value}" for name, value in _settings().items()]
    except Exception as error:
        # a rank that raised here alone would leave the others in the collective
        failure = failure or f"settings of torch cannot be read: {type(error).__name__}: {error}"
    # the records of all ranks are compared only where any differ: there are as many as ranks
    if _alike((sorted(held), problems, failure, versions, settings), group) and failure is None:
        return
    gathered: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(gathered, (held, problems, failure, versions, settings), group=group)
    _check_each("versions", "install the same on every rank", [of_rank[3] for of_rank in gathered])
    failures = _by_value([[text] if text else [] for _, _, text, *_ in gathered])
    if failures:
        raise PluginError("; ".join(f"{text}, on {_ranks(ranks)}" for text, ranks in failures.items()))
    _check_each("settings of torch", "set the same on every rank", [of_rank[4] for of_rank in gathered])
    message = difference([held for held, *_ in gathered], [broken for _, broken, *_ in gathered])
    if message:
        raise PluginError(message)


def _settings() -> dict[str, object]:
    """The settings of torch by which the same operations give other numbers."""
    import torch

    # the older getters (torch.get_float32_matmul_precision, allow_tf32) raise where a user has set one of these
    precisions = {f"torch.backends.{name}": attrgetter(name)(torch.backends) for name in _PRECISIONS}
    return {
        "torch.are_deterministic_algorithms_enabled()": torch.are_deterministic_algorithms_enabled(),
        "torch.get_default_dtype()": torch.get_default_dtype(),
        "torch.backends.cudnn.benchmark": torch.backends.cudnn.benchmark,
        # "none", which nobody has set, computes as "ieee"
        **{name: "ieee" if value == "none" else value for name, value in precisions.items()},
    }


def _check_each(what: str, fix: str, of_ranks: list[list[str]]) -> None:
    """Raise UsageError for the first of several values of each rank that differs."""
    for values in zip(*of_ranks, strict=True):
        on_ranks = _by_value([[value] for value in values])
        if len(on_ranks) > 1:
            listed = ", ".join(f"{value} on {_ranks(ranks)}" for value, ranks in on_ranks.items())
            raise UsageError(f"ranks run different {what}: {listed}; {fix}")


def _alike(value: object, group: Any) -> bool:
    """Whether a value has the same text on all ranks (a collective call)."""
    import torch
    import torch.distributed as dist

    from meshwright_dtensor._torch.groups import message_device_type

    number = int.from_bytes(blake2b(repr(value).encode(), digest_size=8).digest(), "little") >> 2
    both = torch.tensor([number, -number], dtype=torch.int64, device=message_device_type(group))
    dist.all_reduce(both, dist.ReduceOp.MAX, group=group)
    largest, negated = both.tolist()
    return bool(largest == -negated)


def difference(records: list[Records], problems: list[list[str]] | None = None) -> str | None:
    """How the ranks' plugin sets differ, in one line, or None if they do not.

    records: per rank, the set of (kind, name, distribution, version).
    problems: per rank, what is broken there: usually the cause.
    """
    everywhere = set.intersection(*records)
    parts = []
    for record in sorted(set.union(*records) - everywhere):
        kind, name, distribution, version = record
        have = [rank for rank, held in enumerate(records) if record in held]
        lack = [rank for rank, held in enumerate(records) if record not in held]
        what = f"{kind} {name!r} of {distribution} {version}"
        parts.append(f"{what} is on {_ranks(have)} but not on {_ranks(lack)}")
    if not parts:
        return None
    text = f"ranks have different plugins: {'; '.join(parts[:6])}"
    if len(parts) > 6:
        text += f"; and {len(parts) - 6} more"
    broken = _by_value(problems or [])
    causes = [f"{cause}, on {_ranks(ranks)}" for cause, ranks in broken.items() if len(ranks) < len(records)]
    if causes:
        text += f"; broken: {listing(causes, 3)}"
    return text + "; install the same versions and set the same MESHWRIGHT_DISABLE_PLUGINS on every rank"


def _by_value(texts: list[list[str]]) -> dict[str, list[int]]:
    """Text -> the ranks that have it."""
    ranks: dict[str, list[int]] = {}
    for rank, held in enumerate(texts):
        for text in held:
            ranks.setdefault(text, []).append(rank)
    return ranks


def _ranks(ranks: list[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {listing((str(rank) for rank in ranks), 8)}"
