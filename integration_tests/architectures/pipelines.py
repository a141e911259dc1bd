"""Architectures as pipelines against one device: python -m integration_tests.architectures.pipelines [--only NAME].

Each is planned with `pp` and a schedule, cut where the planner cuts, and run for one step with four microbatches: loss, every
gradient, parameter and buffer are those of one device. What normalises by the whole batch runs as one microbatch.

    python -m integration_tests.architectures.pipelines                          # 1f1b and interleaved on two and four ranks
    python -m integration_tests.architectures.pipelines --schedules              # every schedule on a few architectures
    python -m integration_tests.architectures.pipelines --store FILE             # go on where a sweep was cut off; again, to tally
"""

from __future__ import annotations

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch.nn.modules.batchnorm import _BatchNorm

import meshwright as mw
from meshwright_dtensor.errors import MeshwrightError
from meshwright_dtensor.schedule.registry import schedule_named
from meshwright_dtensor.testing.rank_pool import RankError, RankPool
from meshwright_parallel import verify

from .batches import batch_of
from .catalogue import Architecture, architectures, build
from .run_one import quiet
from .subject import NotBuildable
from .tiny import loss_of

RENEWED = 20
"""After so many architectures ranks start afresh, so that what they remember of models does not pile up."""
Verdict = tuple[str, str]
"""Kind and text, see `run`."""

SCHEDULES = ("gpipe", "1f1b", "interleaved", "looped-bfs", "zero-bubble", "zbv", "dualpipev")
PIPELINES: Mapping[str, tuple[int, str]] = MappingProxyType(
    {f"pp{size} {schedule}": (size, schedule) for size in (2, 4) for schedule in SCHEDULES}
)
USUAL = ("pp2 1f1b", "pp4 1f1b", "pp2 interleaved", "pp4 interleaved")
DEEP = 8
"""Layers of a model of which four ranks hold two stages each, where it has a field that says so."""

NAMES = (
    "ApertusForCausalLM ArceeForCausalLM BambaForCausalLM BloomForCausalLM Cohere2ForCausalLM CohereForCausalLM "
    "DeepseekV2ForCausalLM DeepseekV3ForCausalLM Ernie4_5ForCausalLM Exaone4ForCausalLM FalconForCausalLM "
    "Gemma2ForCausalLM Gemma3ForCausalLM GemmaForCausalLM Glm4ForCausalLM GPT2LMHeadModel GPTBigCodeForCausalLM "
    "GPTNeoXForCausalLM GptOssForCausalLM GraniteForCausalLM GraniteMoeForCausalLM JambaForCausalLM LlamaForCausalLM "
    "MambaForCausalLM Mamba2ForCausalLM MistralForCausalLM MixtralForCausalLM MptForCausalLM NemotronForCausalLM "
    "Olmo2ForCausalLM OlmoeForCausalLM OPTForCausalLM Phi3ForCausalLM PhiForCausalLM Qwen2ForCausalLM "
    "Qwen2MoeForCausalLM Qwen3ForCausalLM Qwen3MoeForCausalLM SmolLM3ForCausalLM StableLmForCausalLM "
    "Starcoder2ForCausalLM BertForMaskedLM DebertaV2ForMaskedLM DistilBertForMaskedLM ElectraForMaskedLM "
    "ModernBertForMaskedLM RobertaForMaskedLM XLMRobertaForMaskedLM BartForConditionalGeneration "
    "M2M100ForConditionalGeneration MarianMTModel PegasusForConditionalGeneration T5ForConditionalGeneration "
    "SwitchTransformersForConditionalGeneration WhisperForConditionalGeneration BeitForImageClassification "
    "ConvNextForImageClassification DeiTForImageClassification Dinov2ForImageClassification "
    "SwinForImageClassification ViTForImageClassification ResNetForImageClassification"
).split()


def chosen() -> list[Architecture]:
    """The architectures of the sweep that this version of transformers has."""
    by_name = {each.name: each for each in architectures()}
    by_name["WhisperForConditionalGeneration"] = Architecture("WhisperForConditionalGeneration", "speech")
    return [by_name[name] for name in NAMES if name in by_name]


SOME = (
    "LlamaForCausalLM GPT2LMHeadModel MixtralForCausalLM T5ForConditionalGeneration BartForConditionalGeneration "
    "WhisperForConditionalGeneration"
).split()
"""Every schedule is run on these."""


def run(rank: int, size: int, architecture: Architecture, schedule: str) -> Verdict:
    """("exact", largest distance), ("wrong", what), ("refused" or "error", why) or ("not built", why)."""
    quiet()
    layers = DEEP if size * schedule_named(schedule).stages_each > size == 4 else None
    try:
        torch.manual_seed(0)
        model = build(architecture, layers)
    except NotBuildable as error:
        return "not built", str(error)[:120]
    batch = batch_of(architecture, model)
    count = 1 if any(isinstance(m, _BatchNorm) for m in model.modules()) else 4
    if schedule == "dualpipev" and size == 4:  # it takes two microbatches for each rank
        batch = {name: torch.cat([value, value.flip(0)]) for name, value in batch.items()}
        count *= 2
    try:
        plan: Any = mw.plan(
            model,
            batch,
            world_size=size,
            pp=size,
            microbatches=count,
            schedule=schedule,
            cluster="laptop-cpu",
        )
        report = verify(
            lambda: build(architecture, layers),
            batch,
            plan,
            steps=1,
            loss=lambda output: loss_of(output, batch),
        )
    except MeshwrightError as error:
        return "refused", " ".join(str(error).split())[:230]
    except Exception as error:  # whatever an architecture raises is the verdict
        return "error", f"{type(error).__name__}: {' '.join(str(error).split())[:230]}"
    if not report.ok:
        worst = max(report.failures, key=lambda c: c.difference)
        names = ", ".join(f"{c.kind} {c.name}" for c in report.failures[:3])
        return "wrong", f"{len(report.failures)} of {len(report.comparisons)}: {names} {worst.difference:.1e}"
    measured = [c.difference / c.scale for c in report.comparisons if c.measured and c.scale]
    return "exact", f"{max(measured):.1e}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code 0 when whatever could be built is exact or refused."""
    parser = argparse.ArgumentParser(prog="python -m integration_tests.architectures.pipelines")
    parser.add_argument(
        "--only", action="append", default=[], help="classes whose name contains this; repeatable"
    )
    parser.add_argument("--pipeline", action="append", default=[], choices=list(PIPELINES))
    parser.add_argument("--schedules", action="store_true", help="every schedule, on a few architectures")
    parser.add_argument("--store", type=Path, help="a file of verdicts: those in it are not run again")
    parser.add_argument("--timeout", type=float, default=400.0, help="seconds for one of them")
    options = parser.parse_args(arguments)
    by_name = [a for a in chosen() if a.name in SOME] if options.schedules else chosen()
    todo = [a for a in by_name if not options.only or any(part in a.name for part in options.only)]
    names = list(options.pipeline or (PIPELINES if options.schedules else USUAL))
    stored = _stored(options.store)
    results: dict[tuple[str, str], Verdict] = {}
    for first in range(0, len(todo), RENEWED):
        with RankPool() as pool:
            for architecture, name in ((a, n) for a in todo[first : first + RENEWED] for n in names):
                key, start = (architecture.name, name), time.monotonic()
                results[key] = stored.get(key) or _verdict(pool, architecture, name, options.timeout)
                if key not in stored:
                    _keep(options.store, key, results[key])
                    print(*key, *results[key], f"({time.monotonic() - start:.0f} s)", sep=" | ", flush=True)
    for name in names:
        verdicts = {key[0]: verdict for key, verdict in results.items() if key[1] == name}
        kinds = Counter(kind for kind, _ in verdicts.values())
        worst = max((float(text) for kind, text in verdicts.values() if kind == "exact"), default=0.0)
        others = "; ".join(
            f"{key}: {kind} {text}" for key, (kind, text) in verdicts.items() if kind != "exact"
        )
        print(f"{name}: {dict(kinds)}, largest difference {worst:.1e}. {others}")
    return int(any(kind not in ("exact", "refused", "not built") for kind, _ in results.values()))


def _verdict(pool: RankPool, architecture: Architecture, name: str, timeout: float) -> Verdict:
    size, schedule = PIPELINES[name]
    try:
        return pool.run(size, run, architecture, schedule, timeout=timeout)[0]
    except RankError as error:  # a rank that died, or none that answered in time
        return "error", " ".join(str(error).split())[:230]


def _stored(path: Path | None) -> dict[tuple[str, str], Verdict]:
    """What a file says; of one pipeline of an architecture, its last line."""
    lines = path.read_text().splitlines() if path is not None and path.exists() else []
    entries = [json.loads(line) for line in lines]
    return {(entry["name"], entry["pipeline"]): (entry["kind"], entry["text"]) for entry in entries}


def _keep(path: Path | None, key: tuple[str, str], verdict: Verdict) -> None:
    if path is not None:
        entry = dict(zip(("name", "pipeline", "kind", "text"), (*key, *verdict), strict=True))
        with path.open("a") as file:
            file.write(json.dumps(entry) + "\n")


if __name__ == "__main__":
    sys.exit(main())
