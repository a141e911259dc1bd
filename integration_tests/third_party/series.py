"""Tables, time series, recommendation, audio, spiking and other recurrent networks."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from .making import Catalogue, Made, floats, get, new, tokens


def _tsai(path: str, *arguments: Any, **options: Any) -> Made:
    """A classifier of series: 3 variables, 5 classes, 16 steps."""
    return new(f"tsai.models.{path}", *arguments, **options), (floats(4, 3, 16),)


def _click(name: str, **options: Any) -> Made:
    """A model of click-through rates: four categorical columns and two numbers, as one float matrix."""
    sparse = [
        new("deepctr_torch.inputs:SparseFeat", f"c{i}", vocabulary_size=8, embedding_dim=4) for i in range(4)
    ]
    dense = [new("deepctr_torch.inputs:DenseFeat", f"d{i}", 1) for i in range(2)]
    columns = sparse + dense
    model = new(
        f"deepctr_torch.models:{name}", columns, columns, dnn_hidden_units=(16, 8), device="cpu", **options
    )
    return model, (torch.cat([torch.randint(8, (8, 4)).float(), torch.rand(8, 2)], 1),)


def _ranking(path: str, **options: Any) -> Made:
    """A model of the package torch-rechub: a dict of columns."""
    columns = [
        new("torch_rechub.basic.features:SparseFeature", f"c{i}", vocab_size=8, embed_dim=4) for i in range(4)
    ]
    model = new(
        f"torch_rechub.models.ranking:{path}",
        columns,
        mlp_params={"dims": [16, 8], "dropout": 0.1},
        **options,
    )
    return model, ({f"c{i}": torch.randint(8, (8,)) for i in range(4)},)


def _wired(name: str) -> Made:
    wiring = new("ncps.wirings:AutoNCP", 16, 4)
    return new(f"ncps.torch:{name}", 6, wiring), (floats(4, 5, 6),)


class _Spiking(nn.Module):
    """Two layers of leaky neurons, over time."""

    def __init__(self) -> None:
        super().__init__()
        surrogate = new("snntorch.surrogate:fast_sigmoid")
        self.a, self.b = nn.Linear(8, 16), nn.Linear(16, 4)
        self.first = new("snntorch:Leaky", beta=0.9, spike_grad=surrogate)
        self.second = new("snntorch:Leaky", beta=0.9, spike_grad=surrogate, learn_beta=True)

    def forward(self, x: Tensor) -> Tensor:
        m1, m2 = self.first.init_leaky(), self.second.init_leaky()
        result = []
        for step in range(x.shape[1]):
            spikes, m1 = self.first(self.a(x[:, step]), m1)
            _, m2 = self.second(self.b(spikes), m2)
            result.append(m2)
        return torch.stack(result, 1)


def _survival() -> Made:
    return new("torchtuples.practical:MLPVanilla", 8, [16, 16], 5, batch_norm=True, dropout=0.1), (
        floats(8, 8),
    )


SERIES: Catalogue = {
    "pytorch-tabnet": {
        "TabNet": lambda: (
            new(
                "pytorch_tabnet.tab_network:TabNet",
                8,
                3,
                n_d=8,
                n_a=8,
                n_steps=2,
                group_attention_matrix=torch.eye(8),
                virtual_batch_size=8,
            ),
            (floats(8, 8),),
        ),
    },
    "tab-transformer-pytorch": {
        "TabTransformer": lambda: (
            new(
                "tab_transformer_pytorch:TabTransformer",
                categories=(4, 5, 6),
                num_continuous=4,
                dim=16,
                dim_out=1,
                depth=2,
                heads=2,
                attn_dropout=0.1,
                ff_dropout=0.1,
                mlp_act=nn.ReLU(),
            ),
            (torch.randint(4, (8, 3)), floats(8, 4)),
        ),
        "FTTransformer": lambda: (
            new(
                "tab_transformer_pytorch:FTTransformer",
                categories=(4, 5, 6),
                num_continuous=4,
                dim=16,
                dim_out=1,
                depth=2,
                heads=2,
            ),
            (torch.randint(4, (8, 3)), floats(8, 4)),
        ),
    },
    "rtdl-revisiting-models": {
        "MLP": lambda: (
            new("rtdl_revisiting_models:MLP", d_in=8, d_out=2, n_blocks=2, d_block=16, dropout=0.1),
            (floats(8, 8),),
        ),
        "ResNet": lambda: (
            new(
                "rtdl_revisiting_models:ResNet",
                d_in=8,
                d_out=2,
                n_blocks=2,
                d_block=16,
                d_hidden=32,
                d_hidden_multiplier=None,
                dropout1=0.1,
                dropout2=0.0,
            ),
            (floats(8, 8),),
        ),
        "FTTransformer": lambda: (
            new(
                "rtdl_revisiting_models:FTTransformer",
                n_cont_features=4,
                cat_cardinalities=[4, 5],
                d_out=2,
                n_blocks=2,
                d_block=16,
                attention_n_heads=2,
                attention_dropout=0.1,
                ffn_d_hidden=32,
                ffn_d_hidden_multiplier=None,
                ffn_dropout=0.1,
                residual_dropout=0.0,
            ),
            (floats(8, 4), torch.randint(4, (8, 2))),
        ),
    },
    "rtdl-num-embeddings": {
        "PeriodicEmbeddings": lambda: (
            nn.Sequential(
                new("rtdl_num_embeddings:PeriodicEmbeddings", 4, 8, lite=False),
                nn.Flatten(),
                nn.Linear(32, 2),
            ),
            (floats(8, 4),),
        ),
        "LinearReLUEmbeddings": lambda: (
            nn.Sequential(
                new("rtdl_num_embeddings:LinearReLUEmbeddings", 4, 8), nn.Flatten(), nn.Linear(32, 2)
            ),
            (floats(8, 4),),
        ),
    },
    "tabm": {
        "TabM": lambda: (
            get("tabm:TabM").make(n_num_features=6, d_out=2, n_blocks=2, d_block=16, dropout=0.1, k=4),
            (floats(8, 6),),
        ),
    },
    "deepctr-torch": {
        "DeepFM": partial(_click, "DeepFM"),
        "xDeepFM": partial(_click, "xDeepFM", cin_layer_size=(8, 8)),
        "DCN": partial(_click, "DCN"),
        "AutoInt": partial(_click, "AutoInt", att_head_num=2),
    },
    "torch-rechub": {
        "WideDeep": lambda: (
            new(
                "torch_rechub.models.ranking:WideDeep",
                *[
                    [
                        new("torch_rechub.basic.features:SparseFeature", f"c{i}", vocab_size=8, embed_dim=4)
                        for i in range(4)
                    ]
                ]
                * 2,
                mlp_params={"dims": [16, 8], "dropout": 0.1},
            ),
            ({f"c{i}": torch.randint(8, (8,)) for i in range(4)},),
        ),
        "DCN": partial(_ranking, "DCN", n_cross_layers=2),
    },
    "torchtuples": {"MLPVanilla": _survival},
    "tsai": {
        "InceptionTime": partial(_tsai, "InceptionTime:InceptionTime", 3, 5, nf=8),
        "TST": partial(_tsai, "TST:TST", 3, 5, 16, n_layers=2, d_model=32, n_heads=2, d_ff=64),
        "PatchTST": partial(
            _tsai,
            "PatchTST:PatchTST",
            3,
            3,
            16,
            4,
            n_layers=2,
            n_heads=2,
            d_model=32,
            d_ff=64,
            patch_len=4,
            stride=2,
        ),
        "FCN": partial(_tsai, "FCN:FCN", 3, 5, layers=[8, 16, 8]),
        "LSTM_FCN": partial(_tsai, "RNN_FCN:LSTM_FCN", 3, 5, 16, hidden_size=16, conv_layers=[8, 16, 8]),
        "ResNet": partial(_tsai, "ResNet:ResNet", 3, 5),
        "XceptionTime": partial(_tsai, "XceptionTime:XceptionTime", 3, 5, nf=8),
        "TCN": partial(_tsai, "TCN:TCN", 3, 5, layers=[8, 8]),
        "OmniScaleCNN": partial(_tsai, "OmniScaleCNN:OmniScaleCNN", 3, 5, 16),
        "gMLP": partial(_tsai, "gMLP:gMLP", 3, 5, 16, patch_size=1, d_model=16, d_ffn=32, depth=2),
    },
    "pytorch-tcn": {
        "TCN": lambda: (
            new("pytorch_tcn:TCN", 4, [8, 8, 8], kernel_size=3, dropout=0.1),
            (floats(4, 4, 16),),
        ),
    },
    "iTransformer": {
        "iTransformer": lambda: (
            new(
                "iTransformer:iTransformer",
                num_variates=6,
                lookback_len=16,
                dim=32,
                depth=2,
                heads=2,
                dim_head=16,
                pred_length=(4, 8),
                num_tokens_per_variate=1,
            ),
            (floats(4, 16, 6),),
        ),
    },
    "ETSformer-pytorch": {
        "ETSFormer": lambda: (
            new(
                "etsformer_pytorch:ETSFormer",
                time_features=4,
                model_dim=32,
                embed_kernel_size=3,
                layers=2,
                heads=2,
                K=2,
                dropout=0.1,
            ),
            {"x": floats(4, 16, 4), "num_steps_forecast": 4},
        ),
    },
    "ncps": {"CfC": partial(_wired, "CfC"), "LTC": partial(_wired, "LTC")},
    "snntorch": {"Leaky": lambda: (_Spiking(), (floats(4, 5, 8),))},
    "conformer": {
        "Conformer": lambda: (
            new(
                "conformer:Conformer",
                dim=32,
                depth=2,
                dim_head=16,
                heads=2,
                ff_mult=2,
                conv_expansion_factor=2,
                conv_kernel_size=7,
                attn_dropout=0.1,
                ff_dropout=0.1,
                conv_dropout=0.1,
            ),
            (floats(4, 16, 32),),
        ),
    },
    "asteroid-filterbanks": {
        "free filters": lambda: (
            _Separator(),
            (floats(4, 1, 128),),
        ),
    },
    "julius": {
        "resampling in a network": lambda: (
            nn.Sequential(
                nn.Conv1d(1, 4, 9, padding=4), new("julius:ResampleFrac", 4, 2), nn.Conv1d(4, 4, 3)
            ),
            (floats(4, 1, 128),),
        ),
    },
    "blitz-bayesian-pytorch": {
        "BayesianLinear": lambda: (
            nn.Sequential(
                new("blitz.modules:BayesianLinear", 8, 16),
                nn.ReLU(),
                new("blitz.modules:BayesianLinear", 16, 3),
            ),
            (floats(8, 8),),
        ),
        "BayesianLSTM": lambda: (new("blitz.modules:BayesianLSTM", 8, 16), (floats(4, 5, 8),)),
    },
    "fastai": {
        "AWD_LSTM": lambda: (
            new("fastai.text.models.awdlstm:AWD_LSTM", 64, 16, 32, 2),
            (tokens(8),),
        ),
        "xresnet18": lambda: (
            new("fastai.vision.models.xresnet:xresnet18", n_out=10),
            (floats(4, 3, 32, 32),),
        ),
        "TabularModel": lambda: (
            new("fastai.tabular.model:TabularModel", [(5, 4), (6, 4)], 3, 2, [16, 8], ps=0.1),
            (torch.randint(5, (8, 2)), floats(8, 3)),
        ),
    },
    "ptwt": {
        "wavedec2": lambda: (
            _Wavelets(),
            (floats(4, 3, 16, 16),),
        ),
    },
    "torch-dct": {
        "LinearDCT": lambda: (
            nn.Sequential(nn.Linear(16, 16), _Frequencies(), nn.Linear(16, 8)),
            (floats(4, 8, 16),),
        ),
    },
    "stable-baselines3": {
        "MlpExtractor": lambda: (
            new("stable_baselines3.common.torch_layers:MlpExtractor", 8, [16, 16], nn.Tanh, device="cpu"),
            (floats(8, 8),),
        ),
    },
    "pytorch-metric-learning": {
        "SubCenterArcFaceLoss": lambda: (
            _Metric(),
            (floats(8, 8), torch.randint(4, (8,))),
        ),
    },
}


class _Separator(nn.Module):
    """Encoder, mask and decoder of a source separator."""

    def __init__(self) -> None:
        super().__init__()
        bank = partial(new, "asteroid_filterbanks:FreeFB", n_filters=16, kernel_size=16, stride=8)
        self.encoder = new("asteroid_filterbanks:Encoder", bank())
        self.mask = nn.Sequential(nn.Conv1d(16, 32, 1), nn.PReLU(), nn.Conv1d(32, 16, 1), nn.Sigmoid())
        self.decoder = new("asteroid_filterbanks:Decoder", bank())

    def forward(self, x: Tensor) -> Tensor:
        h = self.encoder(x)
        result: Tensor = self.decoder(h * self.mask(h))
        return result


class _Wavelets(nn.Module):
    """A network on the coefficients of a wavelet transform."""

    def __init__(self) -> None:
        super().__init__()
        self.low, self.high = nn.Conv2d(3, 3, 3, padding=1), nn.Conv2d(9, 9, 1)

    def forward(self, x: Tensor) -> Tensor:
        low, bands = get("ptwt:wavedec2")(x, "haar", level=1)
        high = self.high(torch.cat(tuple(bands), 1)).chunk(3, 1)
        result: Tensor = get("ptwt:waverec2")(
            (self.low(low), get("ptwt:WaveletDetailTuple2d")(*high)), "haar"
        )
        return result


class _Frequencies(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = get("torch_dct:dct")(x)
        return result


class _Metric(nn.Module):
    """An encoder with a loss that has weights of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
        self.loss = new(
            "pytorch_metric_learning.losses:SubCenterArcFaceLoss", num_classes=4, embedding_size=8
        )

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        result: Tensor = self.loss(self.encoder(x), labels)
        return result
