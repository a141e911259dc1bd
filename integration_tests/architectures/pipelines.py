"""Schedules against one device, on many architectures: python -m integration_tests.architectures.pipelines [--only NAME].

Each is planned with `pp` and a schedule, cut where the planner cuts, and run for one step with four microbatches: loss, every
gradient, parameter and buffer are those of one device. What normalises by the whole batch runs as one microbatch.
`python -m integration_tests.architectures --layout pp2` runs all architectures under 1f1b on two ranks.

    python -m integration_tests.architectures.pipelines                          # 1f1b and interleaved on two and four ranks
    python -m integration_tests.architectures.pipelines --schedules              # every schedule on a few architectures
    python -m integration_tests.architectures.pipelines --store FILE             # go on where a sweep was cut off; again, to tally
"""

from __future__ import annotations

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import sys
from collections.abc import Mapping, Sequence
from functools import partial
from types import MappingProxyType

from rich.console import Console

from meshwright_dtensor.schedule.registry import schedule_named

from .batches import ROWS
from .catalogue import Architecture, architectures
from .layouts import Layout, pipelined
from .sweep import argument_parser, sweep, wanted
from .table import terminal
from .tiny import Tiny

SCHEDULES = ("gpipe", "1f1b", "interleaved", "looped-bfs", "zero-bubble", "zbv", "dualpipev")
# dualpipev takes two microbatches for each rank
PIPELINES: Mapping[str, Layout] = MappingProxyType(
    {
        f"pp{ranks} {schedule}": pipelined(ranks, schedule, 2 * ranks if schedule == "dualpipev" else 4)
        for ranks in (2, 4)
        for schedule in SCHEDULES
    }
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


def subject(architecture: Architecture, pipeline: str) -> Tiny:
    """The tiny model, with the layers and rows that a pipeline needs."""
    layout, schedule = PIPELINES[pipeline], schedule_named(PIPELINES[pipeline].pins["schedule"])
    layers = DEEP if layout.ranks * schedule.stages_each > layout.ranks == 4 else None
    return Tiny(architecture, layers, layout.pins["microbatches"] // ROWS)


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code 0 when whatever could be built is that of one device, or refused."""
    parser = argument_parser("integration_tests.architectures.pipelines")
    parser.add_argument("--pipeline", action="append", default=[], choices=list(PIPELINES))
    parser.add_argument("--schedules", action="store_true", help="every schedule, on a few architectures")
    options = parser.parse_args(arguments)
    named = wanted([a for a in chosen() if not options.schedules or a.name in SOME], options.only)
    kinds = list[str]()
    for name in options.pipeline or (PIPELINES if options.schedules else USUAL):
        rows = sweep(named, {name: PIPELINES[name]}, options.store, partial(subject, pipeline=name))
        Console().print(terminal(rows, [name]))
        kinds += [row.verdicts[name].kind for row in rows if name in row.verdicts]
    return int(not {"passed", "refused"}.issuperset(kinds))


if __name__ == "__main__":
    sys.exit(main())
