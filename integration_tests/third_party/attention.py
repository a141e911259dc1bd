"""Attention of many kinds, Perceivers, state spaces, and layers of them."""

from __future__ import annotations

from functools import partial

import torch
from torch import nn

from .making import Called, Catalogue, floats, images, layer, new, text, tokens


class Tagger(nn.Module):
    """A recurrence with a CRF on it, in training: the negative log likelihood of the tags."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(64, 32)
        self.rnn = nn.LSTM(32, 16, bidirectional=True, batch_first=True)
        self.out = nn.Linear(32, 5)
        self.crf = new("torchcrf:CRF", 5, batch_first=True)

    def forward(self, tokens: torch.Tensor, tags: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return -self.crf(self.out(self.rnn(self.emb(tokens))[0]), tags, mask=mask, reduction="mean")


ATTENTION: Catalogue = {
    "perceiver-pytorch": {
        "Perceiver": lambda: (
            new(
                "perceiver_pytorch:Perceiver",
                input_channels=3,
                input_axis=2,
                num_freq_bands=2,
                max_freq=4.0,
                depth=2,
                num_latents=8,
                latent_dim=32,
                cross_dim_head=16,
                latent_heads=2,
                latent_dim_head=16,
                num_classes=10,
                attn_dropout=0.1,
            ),
            (floats(4, 16, 16, 3),),
        ),
        "PerceiverIO": lambda: (
            new(
                "perceiver_pytorch:PerceiverIO",
                dim=32,
                queries_dim=32,
                num_latents=8,
                latent_dim=32,
                depth=2,
                latent_heads=2,
                cross_dim_head=16,
                latent_dim_head=16,
            ),
            {"data": floats(4, 16, 32), "queries": floats(4, 8, 32)},
        ),
    },
    "nystrom-attention": {
        "Nystromformer": lambda: (
            new("nystrom_attention:Nystromformer", dim=32, dim_head=8, heads=4, depth=2, num_landmarks=4),
            (floats(4, 16, 32),),
        ),
    },
    "local-attention": {
        "LocalTransformer": partial(
            text,
            "local_attention:LocalTransformer",
            max_seq_len=16,
            heads=2,
            dim_head=16,
            local_attn_window_size=8,
            causal=True,
        ),
    },
    "mega-pytorch": {
        "Mega": partial(text, "mega_pytorch:Mega", ema_heads=2),
    },
    "gated-state-spaces-pytorch": {
        "GatedStateSpacesLM": partial(text, "gated_state_spaces_pytorch:GatedStateSpacesLM"),
    },
    "token-shift-gpt": {
        "TokenShiftGPT": partial(text, "token_shift_gpt:TokenShiftGPT", max_seq_len=16),
    },
    "rela-transformer": {
        "ReLATransformer": partial(
            text, "rela_transformer:ReLATransformer", max_seq_len=16, heads=2, dim_head=16
        ),
    },
    "charformer-pytorch": {
        "GBST": lambda: (
            new("charformer_pytorch:GBST", num_tokens=64, dim=32, max_block_size=4, downsample_factor=4),
            (tokens(),),
        ),
    },
    "tranception-pytorch": {
        "Tranception": partial(
            text,
            "tranception_pytorch:Tranception",
            heads=4,
            dim_head=8,
            causal=True,
        ),
    },
    "infini-transformer-pytorch": {
        "InfiniTransformer": partial(
            text, "infini_transformer_pytorch:InfiniTransformer", heads=2, dim_head=16
        ),
    },
    "HTM-pytorch": {
        "HTMBlock": lambda: (
            new("htm_pytorch:HTMBlock", dim=32, topk_mems=2, mem_chunk_size=4, heads=2, dim_head=16),
            (floats(4, 16, 32), floats(4, 16, 32)),
        ),
    },
    "remixer-pytorch": {
        "RemixerBlock": partial(layer, "remixer_pytorch:RemixerBlock", dim=32, seq_len=16),
    },
    "coca-pytorch": {
        "CoCa": lambda: (
            Called(
                new(
                    "coca_pytorch:CoCa",
                    dim=32,
                    img_encoder=new(
                        "vit_pytorch.extractor:Extractor",
                        new(
                            "vit_pytorch:ViT",
                            image_size=32,
                            patch_size=8,
                            num_classes=10,
                            dim=32,
                            depth=1,
                            heads=2,
                            mlp_dim=64,
                        ),
                        return_embeddings_only=True,
                        detach=False,
                    ),
                    image_dim=32,
                    num_tokens=64,
                    unimodal_depth=1,
                    multimodal_depth=1,
                    dim_head=16,
                    heads=2,
                ),
                "forward",
                return_loss=True,
            ),
            (tokens(), images()[0]),
        ),
    },
    "flamingo-pytorch": {
        "PerceiverResampler": lambda: (
            new("flamingo_pytorch:PerceiverResampler", dim=32, depth=2, dim_head=16, heads=2, num_latents=4),
            (floats(4, 2, 8, 32),),
        ),
    },
    "bidirectional-cross-attention": {
        "BidirectionalCrossAttention": lambda: (
            new("bidirectional_cross_attention:BidirectionalCrossAttention", dim=32, heads=2, dim_head=16),
            (floats(4, 16, 32), floats(4, 8, 32)),
        ),
    },
    "gateloop-transformer": {
        "GateLoop Transformer": partial(
            text, "gateloop_transformer:Transformer", use_gate_looped_attn=True, dim_gate_looped_attn=16
        ),
    },
    "mogrifier": {
        "Mogrifier": lambda: (
            new("mogrifier:Mogrifier", dim=32, iters=3, factorize_k=8),
            (floats(4, 16, 32), floats(4, 16, 32)),
        ),
    },
    "taylor-series-linear-attention": {
        "TaylorSeriesLinearAttn": partial(
            layer, "taylor_series_linear_attention:TaylorSeriesLinearAttn", dim=32, dim_head=8, heads=2
        ),
    },
    "memory-efficient-attention-pytorch": {
        "Attention": partial(
            layer,
            "memory_efficient_attention_pytorch:Attention",
            dim=32,
            dim_head=16,
            heads=2,
            memory_efficient=True,
            q_bucket_size=8,
            k_bucket_size=8,
        ),
    },
    "linformer": {
        "LinformerLM": partial(text, "linformer:LinformerLM", seq_len=16, heads=2, k=8),
    },
    "x-mlps-pytorch": {
        "MLP": lambda: (new("x_mlps_pytorch:MLP", 32, 64, 64, 16), (floats(8, 32),)),
    },
    "pytorch-crf": {
        "LSTM with CRF": lambda: (
            Tagger(),
            {"tokens": tokens(8), "tags": tokens(8, 5), "mask": torch.ones(4, 8, dtype=torch.bool)},
        ),
    },
}
