"""Twenty models for every change, each of another package and in one layout."""

from __future__ import annotations

from collections.abc import Iterator

from .catalogue import Model, models
from .layouts import LAYOUTS

NAMES = (
    "mlp-mixer-pytorch: MLPMixer",
    "res-mlp-pytorch: ResMLP",
    "perceiver-pytorch: PerceiverIO",
    "isab-pytorch: ISAB",
    "conformer: Conformer",
    "siren-pytorch: SirenNet",
    "lambda-networks: LambdaLayer",
    "charformer-pytorch: GBST",
    "nflows: masked autoregressive flow",
    "normflows: RealNVP",
    "torchdiffeq: odeint_adjoint",
    "pytorch-tcn: TCN",
    "unet: UNet2D",
    "rtdl-revisiting-models: FTTransformer",
    "swin-transformer-pytorch: SwinTransformer",
    "pytorch-crf: LSTM with CRF",
    "zuko: MAF",
    "x-transformers: decoder, T5 bias, sandwich",
    "rela-transformer: ReLATransformer",
    "token-shift-gpt: TokenShiftGPT",
)


def sample() -> Iterator[tuple[Model, str]]:
    """Model and layout; layouts of two ranks take turns."""
    by_key = {model.key: model for model in models()}
    layouts = [name for name, layout in LAYOUTS.items() if layout.pins and layout.ranks == 2]
    for place, name in enumerate(NAMES):
        yield by_key[name], layouts[place % len(layouts)]
