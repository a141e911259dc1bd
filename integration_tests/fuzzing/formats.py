"""The formats that are read from outside: for each right inputs, how they are changed, and what reads them."""

from __future__ import annotations

import hashlib
import json
import pickle
import random
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn

import meshwright as mw
from meshwright.recipes.recipe_input import read_recipe
from meshwright_checkpoint.dcp.backend import DcpCheckpoint
from meshwright_checkpoint.format.manifest import NAME, Manifest
from meshwright_checkpoint.format.safetensors_file import header_length, read_header
from meshwright_checkpoint.pretrained import INDEX, Pretrained
from meshwright_dtensor.plan import ParallelPlan, ParameterRule, PipelineRule
from meshwright_planner.clusters import file as cluster_file

from .mutations import DEPTH, changed_bytes, changed_json, changed_value


@dataclass(frozen=True)
class Format:
    """A format.

    right: inputs that are read without an error.
    changed: one input, made of these.
    read: reads an input; its errors have to be ours.
    """

    right: tuple[bytes, ...]
    changed: Callable[[random.Random], bytes]
    read: Callable[[bytes], Any]


RECIPE = {
    "model": {"model_type": "gpt2", "n_embd": 16, "n_layer": 2, "n_head": 2},
    "out": "run",
    "steps": 6,
    "batch_size": 4,
    "sequence_length": 16,
    "optimizer": {"name": "adamw", "lr": 0.01, "betas": [0.9, 0.95]},
    "schedule": {"warm_up": 2},
    "plan": {"dp": 2},
    "checkpoints": {"interval": 2},
}
TOML = b"""model = {model_type = "gpt2", n_embd = 16, n_layer = 2, n_head = 2}
data = "WORDS"
out = "run"
steps = 6
batch_size = 4
sequence_length = 16
[optimizer]
lr = 1e-2
betas = [0.9, 0.95]
[plan]
dp = 2
"""
YAML = b"""model: {model_type: gpt2, n_embd: 16, n_layer: 2, n_head: 2}
data: "WORDS"
out: run
steps: 6
batch_size: 4
sequence_length: 16
optimizer:
  lr: 1e-2
  betas: [0.9, 0.95]
plan:
  dp: 2
"""
HOSTILE_YAML = (
    b"a: &a [" + b"x, " * 9 + b"x]\n" + b"".join(b"%c: &%c [" % (c, c) + b"*%c, " % (c - 1) * 9 + b"]\n" for c in range(98, 110)),
    b"model: &m {a: *m}\n",
    b"data: &d [*d]\n",
    b"steps: 2001-99-99\n",
    b"? [a, b]\n: 1\n",
    b"steps: !!python/object/apply:os.system [\"true\"]\n",
    b"[" * DEPTH,
    b"- 1\n- 2\n",
    b"steps: 0x" + b"f" * 5000 + b"\n",
    b"steps: " + b"9" * 5000 + b"\n",
    b"<<: 3\n",
)  # fmt: skip
HOSTILE_TOML = (
    b"a = " + b"[" * DEPTH,
    b"steps = " + b"9" * 5000,
    b"a" + b".a" * 5000 + b" = 1",
    b"steps = 2001-99-99",
)


@contextmanager
def formats() -> Iterator[dict[str, Format]]:
    """All formats, by name; files that they need are there inside."""
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder)
        yield {
            "plan": _plan(),
            "cluster": _cluster(made),
            "manifest": _manifest(made),
            "recipe in TOML": _recipe(made, ".toml", TOML, HOSTILE_TOML),
            "recipe in YAML": _recipe(made, ".yaml", YAML, HOSTILE_YAML),
            "DCP metadata": _dcp(made),
            "safetensors header": _header(made),
            "safetensors index": _index(made),
        }


def _of_json(*right: Any, read: Callable[[bytes], Any]) -> Format:
    texts = tuple(json.dumps(value).encode() for value in right)
    return Format(texts, lambda choose: changed_json(choose.choice(right), choose), read)


def _plan() -> Format:
    rule = PipelineRule(stages=(("emb", "a"), ("b",)), microbatches=2)
    parameters = (ParameterRule(pattern="a.weight", placement={"tp": "S(0)"}),)
    plans = (
        ParallelPlan(world_size=2, degrees={"dp": 2}),
        ParallelPlan(world_size=8, degrees={"pp": 2, "tp": 2, "zero": 2}, parameters=parameters, pipeline=rule, zero={"stage": 3}),
        mw.plan(nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16)), torch.ones(4, 16), world_size=2, cluster="laptop-cpu"),
    )  # fmt: skip
    return _of_json(*(json.loads(plan.to_json()) for plan in plans), read=ParallelPlan.from_json)


def _cluster(folder: Path) -> Format:
    profiles = Path(cluster_file.__file__).parent / "profiles"
    right = [json.loads((profiles / f"{name}.json").read_text()) for name in ("laptop-cpu", "dgx-h100")]
    file = folder / "cluster.json"

    def read(data: bytes) -> Any:
        file.write_bytes(data)
        return cluster_file.read(file)

    return _of_json(*right, read=read)


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4))


def _manifest(folder: Path) -> Format:
    model = _model()
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    path = folder / "saved" / "step-1"
    mw.save(path, model=model, optimizer=optimizer, extra={"epoch": 1, "loss": torch.ones(2)}).wait()
    whole = (path / NAME).read_bytes()
    body = whole.partition(b",\n")[2]
    value = json.loads(b"{" + body)

    def sealed(text: bytes) -> bytes:
        # what a random change would never find
        return b'{"sha256": "%s",\n' % hashlib.sha256(text).hexdigest().encode() + text

    def changed(choose: random.Random) -> bytes:
        kind = choose.randrange(10)
        if kind == 0:
            return changed_bytes(whole, choose)
        if kind < 3:
            return sealed(changed_bytes(body, choose))
        return sealed(json.dumps(changed_value(value, choose)).encode()[1:])

    return Format((whole,), changed, lambda data: Manifest.from_bytes(data, "here"))


def _recipe(folder: Path, suffix: str, text: bytes, hostile: tuple[bytes, ...]) -> Format:
    file, words = folder / f"recipe{suffix}", folder / "words.txt"
    words.write_text("some words")
    text = text.replace(b"WORDS", str(words).encode())
    recipe = RECIPE | {"data": {"files": [str(words)], "column": "text"}}

    def read(data: bytes) -> Any:
        file.write_bytes(data)
        return read_recipe([str(file)])

    def changed(choose: random.Random) -> bytes:
        kind = choose.randrange(20)
        if kind == 0:
            return choose.choice(hostile)
        if kind < 10 and suffix == ".yaml":
            # JSON is YAML
            return changed_json(recipe, choose)
        return changed_bytes(text, choose)

    return Format((text,), changed, read)


def _dcp(folder: Path) -> Format:
    model, path = _model(), folder / "dcp"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({"model": model.state_dict()}, checkpoint_id=path, no_dist=True)
    file = path / ".metadata"
    right = file.read_bytes()
    plain = pickle.dumps({"a": [1, 2.0, "x", (None, True)], "b": {3}})

    def read(data: bytes) -> None:
        file.write_bytes(data)
        checkpoint = DcpCheckpoint(path, model)
        checkpoint.close()

    def changed(choose: random.Random) -> bytes:
        kind = choose.randrange(30)
        if kind == 0:
            return changed_bytes(plain, choose)
        if kind == 1:
            return b"\x80\x02" + b"(" * DEPTH + choose.choice([b"", b"l" * DEPTH, b"]" * DEPTH]) + b"."
        return changed_bytes(right, choose)

    return Format((right,), changed, read)


def _header(folder: Path) -> Format:
    value = {
        "__metadata__": {"format": "pt"},
        "a": {"dtype": "F32", "shape": [4, 8], "data_offsets": [0, 128]},
        "b": {"dtype": "BF16", "shape": [8], "data_offsets": [128, 144]},
    }

    def with_length(text: bytes) -> bytes:
        return len(text).to_bytes(8, "little") + text

    def read(data: bytes) -> None:
        nbytes = 8 + len(data) + 144
        length = header_length(data[:8], nbytes, "here")
        read_header(data[: 8 + length], len(data) + 144, "here")

    def changed(choose: random.Random) -> bytes:
        if choose.randrange(6) == 0:
            return changed_bytes(with_length(json.dumps(value).encode()), choose)
        return with_length(changed_json(value, choose))

    return Format((with_length(json.dumps(value).encode()),), changed, read)


def _index(folder: Path) -> Format:
    from safetensors.torch import save_file

    model, path = _model(), folder / "pretrained"
    path.mkdir()
    (path / "config.json").write_text("{}")
    shards = {"model-1.safetensors": ["0.weight", "0.bias"], "model-2.safetensors": ["1.weight", "1.bias"]}
    for name, keys in shards.items():
        save_file({key: model.state_dict()[key] for key in keys}, path / name)
    weight_map = {key: name for name, keys in shards.items() for key in keys}
    right = {"metadata": {"total_size": 272}, "weight_map": weight_map}

    def read(data: bytes) -> None:
        (path / INDEX).write_bytes(data)
        Pretrained(path, model).close()

    return _of_json(right, read=read)
