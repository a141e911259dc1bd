"""Some forty architectures for every change: spread over tasks and families, each in one layout."""

from __future__ import annotations

from collections.abc import Iterator

from .catalogue import Architecture, architectures
from .layouts import LAYOUTS

CAUSAL = (
    "BambaForCausalLM BitNetForCausalLM BloomForCausalLM CohereForCausalLM DbrxForCausalLM DeepseekV3ForCausalLM "
    "ErnieForCausalLM FalconForCausalLM Gemma3ForConditionalGeneration GPTNeoXForCausalLM GPTJForCausalLM "
    "GraniteMoeForCausalLM JambaForCausalLM MambaForCausalLM Olmo2ForCausalLM Phi3ForCausalLM Qwen3MoeForCausalLM "
    "RwkvForCausalLM ReformerModelWithLMHead XLNetLMHeadModel"
)
MASKED = (
    "AlbertForMaskedLM BigBirdForMaskedLM DebertaV2ForMaskedLM FNetForMaskedLM MobileBertForMaskedLM "
    "ModernBertForMaskedLM PerceiverForMaskedLM"
)
SEQ2SEQ = (
    "BartForConditionalGeneration LEDForConditionalGeneration ProphetNetForConditionalGeneration "
    "SwitchTransformersForConditionalGeneration M2M100ForConditionalGeneration"
)
PIPELINES = "EncoderDecoderModel"
IMAGES = (
    "BeitForImageClassification BitForImageClassification ConvNextForImageClassification FocalNetForImageClassification "
    "PoolFormerForImageClassification RegNetForImageClassification ResNetForImageClassification "
    "Swinv2ForImageClassification"
)


def sample() -> Iterator[tuple[Architecture, str]]:
    """Architecture and layout; layouts take turns."""
    by_name = {each.name: each for each in architectures()}
    names = " ".join((CAUSAL, MASKED, SEQ2SEQ, IMAGES)).split()
    layouts = [layout for layout in LAYOUTS if layout != "pp2"]
    for place, name in enumerate(names):
        yield by_name[name], layouts[place % len(layouts)]
    for name in PIPELINES.split():
        yield by_name[name], "pp2"
