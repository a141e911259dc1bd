"""Architectures as pipelines against one device: python -m integration_tests.architectures.pipelines [--only NAME].

Each is planned with `pp` and a schedule, cut where the planner cuts, and run for one step with four microbatches: loss, every
gradient, parameter and buffer are those of one device. What normalises by the whole batch runs as one microbatch.
"""

from __future__ import annotations

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import sys
import time
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch.nn.modules.batchnorm import _BatchNorm

import meshwright as mw
from meshwright_dtensor.errors import MeshwrightError
from meshwright_dtensor.testing import RankPool
from meshwright_parallel import verify

from .batches import batch_of
from .catalogue import Architecture, NotBuildable, architectures, build
from .run_one import _quiet, loss_of

PIPELINES: Mapping[str, tuple[int, str]] = MappingProxyType(
    {"pp2 1f1b": (2, "1f1b"), "pp4 1f1b": (4, "1f1b"), "pp2 interleaved": (2, "interleaved")}
)

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
    known = {each.name: each for each in architectures()}
    return [known[name] for name in NAMES if name in known]


def run(rank: int, size: int, architecture: Architecture, schedule: str) -> tuple[str, str]:
    """("exact", largest distance), ("wrong", what), ("refused" or "error", why) or ("not built", why)."""
    _quiet()
    try:
        torch.manual_seed(0)
        model = build(architecture)
    except NotBuildable as error:
        return "not built", str(error)[:120]
    batch = batch_of(architecture, model)
    count = 1 if any(isinstance(m, _BatchNorm) for m in model.modules()) else 4
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
            lambda: build(architecture), batch, plan, steps=1, loss=lambda output: loss_of(output, batch)
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
    options = parser.parse_args(arguments)
    todo = [a for a in chosen() if not options.only or any(part in a.name for part in options.only)]
    bad, tally = 0, dict[tuple[str, str], int]()
    with RankPool() as pool:
        for architecture in todo:
            told = []
            for name in options.pipeline or PIPELINES:
                size, schedule = PIPELINES[name]
                start = time.monotonic()
                kind, text = pool.run(size, run, architecture, schedule, timeout=200)[0]
                bad += kind in ("wrong", "error")
                tally[name, kind] = tally.get((name, kind), 0) + 1
                told.append(f"{name}: {kind} {text} ({time.monotonic() - start:.0f} s)")
            print(architecture.name, "|", " | ".join(told), flush=True)
    print(tally)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
