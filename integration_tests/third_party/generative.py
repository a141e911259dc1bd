"""Diffusion models, flows, quantisation and other density models."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from .making import Called, Catalogue, Inside, Made, floats, images, new


def _steps(rows: int = 4) -> Tensor:
    return torch.randint(1000, (rows,))


def _unet(**options: Any) -> nn.Module:
    """A model of images and time steps of the package denoising-diffusion-pytorch."""
    model: nn.Module = new(
        "denoising_diffusion_pytorch:Unet", dim=8, dim_mults=(1, 2), flash_attn=False, **options
    )
    return model


def _diffusion(name: str, **options: Any) -> Made:
    return new(f"denoising_diffusion_pytorch:{name}", _unet(**options), image_size=16), (
        torch.rand(4, 3, 16, 16),
    )


def _sd_unet() -> Made:
    model = new(
        "diffusers:UNet2DConditionModel",
        sample_size=16,
        in_channels=4,
        out_channels=4,
        layers_per_block=1,
        block_out_channels=(16, 32),
        norm_num_groups=8,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        cross_attention_dim=32,
        attention_head_dim=4,
    )
    return model, {
        "sample": floats(4, 4, 16, 16),
        "timestep": _steps(),
        "encoder_hidden_states": floats(4, 8, 32),
    }


def _flux() -> Made:
    model = new(
        "diffusers:FluxTransformer2DModel",
        patch_size=1,
        in_channels=4,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=32,
        pooled_projection_dim=32,
        axes_dims_rope=(4, 4, 8),
    )
    batch = {
        "hidden_states": floats(4, 16, 4),
        "encoder_hidden_states": floats(4, 8, 32),
        "pooled_projections": floats(4, 32),
        "timestep": torch.rand(4),
        "img_ids": torch.zeros(16, 3),
        "txt_ids": torch.zeros(8, 3),
    }
    return model, batch


def _sd3() -> Made:
    model = new(
        "diffusers:SD3Transformer2DModel",
        sample_size=16,
        patch_size=2,
        in_channels=4,
        num_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=32,
        caption_projection_dim=32,
        pooled_projection_dim=32,
        out_channels=4,
    )
    batch = {
        "hidden_states": floats(4, 4, 16, 16),
        "encoder_hidden_states": floats(4, 8, 32),
        "pooled_projections": floats(4, 32),
        "timestep": _steps(),
    }
    return model, batch


def _pixart() -> Made:
    model = new(
        "diffusers:PixArtTransformer2DModel",
        num_attention_heads=2,
        attention_head_dim=16,
        in_channels=4,
        out_channels=8,
        num_layers=2,
        cross_attention_dim=32,
        sample_size=16,
        caption_channels=32,
        use_additional_conditions=False,
    )
    batch = {
        "hidden_states": floats(4, 4, 16, 16),
        "encoder_hidden_states": floats(4, 8, 32),
        "timestep": _steps(),
        "added_cond_kwargs": {"resolution": None, "aspect_ratio": None},
    }
    return model, batch


def _wan() -> Made:
    model = new(
        "diffusers:WanTransformer3DModel",
        patch_size=(1, 2, 2),
        num_attention_heads=2,
        attention_head_dim=16,
        in_channels=4,
        out_channels=4,
        text_dim=32,
        freq_dim=32,
        ffn_dim=64,
        num_layers=2,
        rope_max_seq_len=32,
    )
    batch = {
        "hidden_states": floats(4, 4, 2, 8, 8),
        "encoder_hidden_states": floats(4, 8, 32),
        "timestep": _steps(),
    }
    return model, batch


def _flow(name: str, **options: Any) -> Made:
    """A flow of zuko: a function of the context that returns a distribution."""
    return _LogProb(new(f"zuko.flows:{name}", 6, 4, **options)), (floats(8, 6), floats(8, 4))


class _LogProb(nn.Module):
    def __init__(self, flow: nn.Module) -> None:
        super().__init__()
        self.flow = flow

    def forward(self, x: Tensor, context: Tensor) -> Tensor:
        return -self.flow(context).log_prob(x).mean()


def _nflow(*transforms: Any) -> Made:
    flow = new(
        "nflows.flows.base:Flow",
        new("nflows.transforms.base:CompositeTransform", list(transforms)),
        new("nflows.distributions.normal:StandardNormal", [6]),
    )
    return Called(flow, "log_prob"), (floats(8, 6),)


def _maf() -> Made:
    path = "nflows.transforms.autoregressive:MaskedAffineAutoregressiveTransform"
    swap = "nflows.transforms.permutations:ReversePermutation"
    return _nflow(
        new(path, features=6, hidden_features=16),
        new(swap, features=6),
        new(path, features=6, hidden_features=16),
    )


def _splines() -> Made:
    path = "nflows.transforms.autoregressive:MaskedPiecewiseRationalQuadraticAutoregressiveTransform"
    parts = [
        new(path, features=6, hidden_features=16, num_bins=4, tails="linear", tail_bound=3.0)
        for _ in range(2)
    ]
    return _nflow(parts[0], new("nflows.transforms.lu:LULinear", 6), parts[1])


def _realnvp() -> Made:
    flows = []
    for place in range(4):
        mask = torch.tensor([1.0, 0.0] * 3) if place % 2 else torch.tensor([0.0, 1.0] * 3)
        s, t = (new("normflows.nets:MLP", [6, 16, 6], init_zeros=False) for _ in range(2))
        flows += [new("normflows.flows:MaskedAffineFlow", mask, t, s), new("normflows.flows:ActNorm", 6)]
    model = new("normflows:NormalizingFlow", new("normflows.distributions:DiagGaussian", 6), flows)
    return Called(model, "forward_kld"), (floats(8, 6),)


def _neural_splines() -> Made:
    flows = []
    for _ in range(2):
        flows += [
            new("normflows.flows:AutoregressiveRationalQuadraticSpline", 6, 1, 16),
            new("normflows.flows:LULinearPermute", 6),
        ]
    model = new("normflows:NormalizingFlow", new("normflows.distributions:DiagGaussian", 6), flows)
    return Called(model, "forward_kld"), (floats(8, 6),)


def _invertible() -> Made:
    def subnet(into: int, out: int) -> nn.Module:
        return nn.Sequential(nn.Linear(into, 16), nn.ReLU(), nn.Linear(16, out))

    network = new("FrEIA.framework:SequenceINN", 6)
    from FrEIA.modules import AllInOneBlock

    for _ in range(3):
        network.append(AllInOneBlock, subnet_constructor=subnet, permute_soft=True)
    return network, (floats(8, 6),)


GENERATIVE: Catalogue = {
    "diffusers": {
        "UNet2DModel": lambda: (
            new(
                "diffusers:UNet2DModel",
                sample_size=16,
                in_channels=3,
                out_channels=3,
                layers_per_block=1,
                block_out_channels=(16, 32),
                norm_num_groups=8,
                attention_head_dim=4,
                down_block_types=("DownBlock2D", "AttnDownBlock2D"),
                up_block_types=("AttnUpBlock2D", "UpBlock2D"),
            ),
            {"sample": floats(4, 3, 16, 16), "timestep": _steps()},
        ),
        "UNet2DConditionModel": _sd_unet,
        "AutoencoderKL": lambda: (
            new(
                "diffusers:AutoencoderKL",
                block_out_channels=(16, 32),
                down_block_types=("DownEncoderBlock2D",) * 2,
                up_block_types=("UpDecoderBlock2D",) * 2,
                norm_num_groups=8,
                latent_channels=4,
            ),
            images(),
        ),
        "VQModel": lambda: (
            new(
                "diffusers:VQModel",
                block_out_channels=(16, 32),
                down_block_types=("DownEncoderBlock2D",) * 2,
                up_block_types=("UpDecoderBlock2D",) * 2,
                norm_num_groups=8,
                latent_channels=4,
                num_vq_embeddings=16,
            ),
            images(),
        ),
        "DiTTransformer2DModel": lambda: (
            new(
                "diffusers:DiTTransformer2DModel",
                num_attention_heads=2,
                attention_head_dim=16,
                in_channels=4,
                out_channels=8,
                num_layers=2,
                sample_size=8,
                num_embeds_ada_norm=10,
            ),
            {
                "hidden_states": floats(4, 4, 8, 8),
                "timestep": _steps(),
                "class_labels": torch.randint(10, (4,)),
            },
        ),
        "PixArtTransformer2DModel": _pixart,
        "SD3Transformer2DModel": _sd3,
        "FluxTransformer2DModel": _flux,
        "WanTransformer3DModel": _wan,
    },
    "denoising-diffusion-pytorch": {
        "Unet": lambda: (_unet(), (floats(4, 3, 16, 16), _steps())),
        "GaussianDiffusion": partial(_diffusion, "GaussianDiffusion"),
        "ElucidatedDiffusion": lambda: (
            new(
                "denoising_diffusion_pytorch:ElucidatedDiffusion",
                _unet(learned_sinusoidal_cond=True),
                image_size=16,
            ),
            (torch.rand(4, 3, 16, 16),),
        ),
        "GaussianDiffusion1D": lambda: (
            new(
                "denoising_diffusion_pytorch:GaussianDiffusion1D",
                new("denoising_diffusion_pytorch:Unet1D", dim=8, dim_mults=(1, 2), channels=4),
                seq_length=16,
            ),
            (torch.rand(4, 4, 16),),
        ),
    },
    "vector-quantize-pytorch": {
        "VectorQuantize": lambda: (
            Inside(new("vector_quantize_pytorch:VectorQuantize", dim=32, codebook_size=16), 32),
            (floats(4, 16, 32),),
        ),
        "VectorQuantize, learnt codebook": lambda: (
            Inside(
                new(
                    "vector_quantize_pytorch:VectorQuantize",
                    dim=32,
                    codebook_size=16,
                    learnable_codebook=True,
                    ema_update=False,
                ),
                32,
            ),
            (floats(4, 16, 32),),
        ),
        "ResidualVQ": lambda: (
            Inside(new("vector_quantize_pytorch:ResidualVQ", dim=32, codebook_size=16, num_quantizers=2), 32),
            (floats(4, 16, 32),),
        ),
        "FSQ": lambda: (
            Inside(new("vector_quantize_pytorch:FSQ", levels=[8, 5, 5], dim=32), 32),
            (floats(4, 16, 32),),
        ),
        "LFQ": lambda: (
            Inside(new("vector_quantize_pytorch:LFQ", codebook_size=16, dim=32), 32),
            (floats(4, 16, 32),),
        ),
        "SimVQ": lambda: (
            Inside(new("vector_quantize_pytorch:SimVQ", dim=32, codebook_size=16), 32),
            (floats(4, 16, 32),),
        ),
    },
    "nflows": {
        "masked autoregressive flow": _maf,
        "neural splines": _splines,
        "SimpleRealNVP": lambda: (
            Called(
                new("nflows.flows.realnvp:SimpleRealNVP", 6, 16, num_layers=2, num_blocks_per_layer=1),
                "log_prob",
            ),
            (floats(8, 6),),
        ),
    },
    "normflows": {"RealNVP": _realnvp, "neural splines": _neural_splines},
    "zuko": {
        "MAF": partial(_flow, "MAF", hidden_features=(16, 16)),
        "NSF": partial(_flow, "NSF", hidden_features=(16, 16), bins=4),
        "NICE": partial(_flow, "NICE", hidden_features=(16, 16)),
        "NAF": partial(_flow, "NAF", hidden_features=(16, 16), network={"hidden_features": (8, 8)}),
        "GMM": partial(_flow, "GMM", components=3, hidden_features=(16, 16)),
        "CNF": partial(_flow, "CNF", hidden_features=(16, 16)),
    },
    "FrEIA": {"AllInOneBlock": _invertible},
    "lampe": {
        "NPE": lambda: (
            Called(new("lampe.inference:NPE", 3, 5, hidden_features=[16] * 2, transforms=2), "forward"),
            (floats(8, 3), floats(8, 5)),
        ),
        "NRE": lambda: (
            new("lampe.inference:NRE", 3, 5, hidden_features=[16] * 2),
            (floats(8, 3), floats(8, 5)),
        ),
    },
}
