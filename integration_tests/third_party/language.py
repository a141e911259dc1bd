"""Language models, long-range attention, mixtures of experts, recurrences."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import nn

from .making import Called, Catalogue, Inside, Made, floats, images, layer, new, text, tokens


def _wrapped(options: dict[str, Any], **layers: Any) -> Made:
    inner = new("x_transformers:Decoder", dim=32, depth=2, heads=2, attn_dim_head=16, **layers)
    model = new(
        "x_transformers:TransformerWrapper", num_tokens=64, max_seq_len=16, attn_layers=inner, **options
    )
    return model, (tokens(),)


def _loss(path: str, length: int = 16, **options: Any) -> Made:
    """The same, where the forward returns a loss on request."""
    return Called(new(path, num_tokens=64, dim=32, depth=2, **options), "forward", return_loss=True), (
        tokens(length),
    )


def _retnet() -> Made:
    config = new(
        "torchscale.architecture.config:RetNetConfig",
        vocab_size=64,
        decoder_embed_dim=32,
        decoder_value_embed_dim=64,
        decoder_ffn_embed_dim=64,
        decoder_layers=2,
        decoder_retention_heads=2,
        dropout=0.1,
    )
    model = new("torchscale.architecture.retnet:RetNetDecoder", config, embed_tokens=nn.Embedding(64, 32))
    return model, (tokens(),)


def _torchscale_encoder() -> Made:
    config = new(
        "torchscale.architecture.config:EncoderConfig",
        vocab_size=64,
        encoder_embed_dim=32,
        encoder_ffn_embed_dim=64,
        encoder_layers=2,
        encoder_attention_heads=2,
        dropout=0.1,
        no_output_layer=False,
    )
    model = new("torchscale.architecture.encoder:Encoder", config, embed_tokens=nn.Embedding(64, 32))
    return model, {"src_tokens": tokens()}


def _xlstm() -> Made:
    config = new(
        "xlstm:xLSTMBlockStackConfig",
        mlstm_block=new(
            "xlstm:mLSTMBlockConfig",
            mlstm=new("xlstm:mLSTMLayerConfig", conv1d_kernel_size=4, qkv_proj_blocksize=4, num_heads=2),
        ),
        context_length=16,
        num_blocks=2,
        embedding_dim=32,
        slstm_at=[],
    )
    return new("xlstm:xLSTMBlockStack", config), (floats(4, 16, 32),)


LANGUAGE: Catalogue = {
    "x-transformers": {
        "decoder": partial(_wrapped, {}, attn_dropout=0.1, ff_dropout=0.1),
        "decoder, rotary, SwiGLU, RMSNorm": partial(
            _wrapped, {}, rotary_pos_emb=True, ff_swish=True, ff_glu=True, use_rmsnorm=True
        ),
        "decoder, ALiBi, grouped queries": partial(_wrapped, {}, alibi_pos_bias=True, attn_kv_heads=1),
        "decoder, T5 bias, sandwich": partial(_wrapped, {}, rel_pos_bias=True, sandwich_norm=True),
        "decoder, talking heads, memory": partial(
            _wrapped, {"num_memory_tokens": 4}, attn_pre_talking_heads=True, attn_num_mem_kv=4
        ),
        "decoder, residual attention, gates": partial(
            _wrapped, {"emb_dropout": 0.1}, residual_attn=True, gate_residual=True, attn_gate_values=True
        ),
        "decoder, loss": lambda: (
            new("x_transformers:AutoregressiveWrapper", _wrapped({}, rotary_pos_emb=True)[0]),
            (tokens(17),),
        ),
        "ViT": lambda: (
            new(
                "x_transformers:ViTransformerWrapper",
                image_size=32,
                patch_size=8,
                num_classes=10,
                attn_layers=new("x_transformers:Encoder", dim=32, depth=2, heads=2),
            ),
            images(),
        ),
        "encoder-decoder": lambda: (
            new(
                "x_transformers:XTransformer",
                dim=32,
                enc_num_tokens=64,
                enc_depth=1,
                enc_heads=2,
                enc_max_seq_len=16,
                dec_num_tokens=64,
                dec_depth=1,
                dec_heads=2,
                dec_max_seq_len=16,
            ),
            (tokens(), tokens()),
        ),
        "continuous": lambda: (
            new(
                "x_transformers:ContinuousTransformerWrapper",
                dim_in=8,
                dim_out=8,
                max_seq_len=16,
                attn_layers=new("x_transformers:Encoder", dim=32, depth=2, heads=2),
            ),
            (floats(4, 16, 8),),
        ),
    },
    "performer-pytorch": {
        "PerformerLM": partial(
            text,
            "performer_pytorch:PerformerLM",
            max_seq_len=16,
            heads=2,
            dim_head=16,
            causal=False,
            nb_features=8,
        ),
        "PerformerLM causal": partial(
            text,
            "performer_pytorch:PerformerLM",
            max_seq_len=16,
            heads=2,
            dim_head=16,
            causal=True,
            nb_features=8,
        ),
        "SelfAttention": partial(
            layer, "performer_pytorch:SelfAttention", dim=32, heads=2, dim_head=16, nb_features=8
        ),
    },
    "reformer-pytorch": {
        "ReformerLM": partial(
            text,
            "reformer_pytorch:ReformerLM",
            max_seq_len=16,
            heads=2,
            bucket_size=4,
            n_hashes=2,
            causal=True,
        ),
    },
    "linear-attention-transformer": {
        "LinearAttentionTransformerLM": partial(
            text,
            "linear_attention_transformer:LinearAttentionTransformerLM",
            max_seq_len=16,
            heads=2,
            causal=True,
            blindspot_size=1,
            local_attn_window_size=8,
            n_local_attn_heads=1,
        ),
        "non-causal": partial(
            text, "linear_attention_transformer:LinearAttentionTransformerLM", max_seq_len=16, heads=2
        ),
    },
    "routing-transformer": {
        "RoutingTransformerLM": partial(
            text,
            "routing_transformer:RoutingTransformerLM",
            max_seq_len=16,
            heads=2,
            window_size=8,
            causal=True,
        ),
    },
    "sinkhorn-transformer": {
        "SinkhornTransformerLM": partial(
            text,
            "sinkhorn_transformer:SinkhornTransformerLM",
            max_seq_len=16,
            heads=2,
            bucket_size=4,
            causal=True,
        ),
    },
    "h-transformer-1d": {
        "HTransformer1D": partial(
            text,
            "h_transformer_1d:HTransformer1D",
            max_seq_len=16,
            heads=2,
            dim_head=16,
            block_size=4,
            causal=True,
        ),
    },
    "hourglass-transformer-pytorch": {
        "HourglassTransformerLM": lambda: (
            new(
                "hourglass_transformer_pytorch:HourglassTransformerLM",
                num_tokens=64,
                dim=32,
                max_seq_len=16,
                depth=(1, 1, 1),
                shorten_factor=2,
                heads=2,
                dim_head=16,
                causal=True,
            ),
            (tokens(),),
        ),
    },
    "block-recurrent-transformer-pytorch": {
        "BlockRecurrentTransformer": partial(
            text,
            "block_recurrent_transformer_pytorch:BlockRecurrentTransformer",
            heads=2,
            dim_head=16,
            max_seq_len=16,
            block_width=8,
            num_state_vectors=8,
            recurrent_layers=(2,),
        ),
    },
    "recurrent-memory-transformer-pytorch": {
        "RecurrentMemoryTransformer": partial(
            text,
            "recurrent_memory_transformer_pytorch:RecurrentMemoryTransformer",
            num_memory_tokens=4,
            seq_len=16,
            heads=2,
            dim_head=16,
            causal=True,
        ),
    },
    "MEGABYTE-pytorch": {
        "MEGABYTE": lambda: (
            Called(
                new(
                    "MEGABYTE_pytorch:MEGABYTE",
                    num_tokens=64,
                    dim=(32, 16),
                    max_seq_len=(4, 4),
                    depth=(1, 1),
                    heads=2,
                    dim_head=16,
                ),
                "forward",
                return_loss=True,
            ),
            (tokens(),),
        ),
    },
    "simple-hierarchical-transformer": {
        "HierarchicalTransformer": partial(
            text,
            "simple_hierarchical_transformer:HierarchicalTransformer",
            seq_len=16,
            hierarchies=(1, 2),
            window_sizes=(8, 8),
            heads=2,
            dim_head=16,
        ),
    },
    "mixture-of-experts": {
        "MoE": lambda: (
            new("mixture_of_experts:MoE", dim=32, num_experts=4, hidden_dim=64),
            (floats(4, 16, 32),),
        ),
    },
    "st-moe-pytorch": {
        "SparseMoEBlock": lambda: (
            new(
                "st_moe_pytorch:SparseMoEBlock",
                new("st_moe_pytorch:MoE", dim=32, num_experts=4, gating_top_n=2),
                add_ff_before=True,
                add_ff_after=True,
            ),
            (floats(4, 16, 32),),
        ),
    },
    "PEER-pytorch": {
        "PEER": partial(
            layer, "PEER_pytorch:PEER", dim=32, heads=2, num_experts=16, num_experts_per_head=4, dim_key=16
        ),
    },
    "product-key-memory": {
        "PKM": partial(layer, "product_key_memory:PKM", dim=32, heads=2, num_keys=8, topk=4, dim_head=16),
    },
    "colt5-attention": {
        "ConditionalRoutedFeedForward": partial(
            layer,
            "colt5_attention:ConditionalRoutedFeedForward",
            dim=32,
            light_ff_mult=0.5,
            heavy_ff_mult=2,
            num_heavy_tokens=4,
        ),
    },
    "torchscale": {"RetNet": _retnet, "Encoder": _torchscale_encoder},
    "PaLM-rlhf-pytorch": {
        "PaLM": partial(_loss, "palm_rlhf_pytorch:PaLM", heads=2, dim_head=16),
    },
    "mambapy": {
        "Mamba": lambda: (
            new("mambapy.mamba:Mamba", new("mambapy.mamba:MambaConfig", d_model=32, n_layers=2, d_state=8)),
            (floats(4, 16, 32),),
        ),
    },
    "xlstm": {"xLSTMBlockStack": _xlstm},
    "titans-pytorch": {
        "MemoryAsContextTransformer": lambda: (
            new(
                "titans_pytorch:MemoryAsContextTransformer",
                num_tokens=64,
                dim=32,
                depth=2,
                segment_len=8,
                heads=2,
                dim_head=16,
                neural_memory_layers=(),
            ),
            (tokens(),),
        ),
        "NeuralMemory": lambda: (
            Inside(new("titans_pytorch:NeuralMemory", dim=32, chunk_size=4), 32),
            (floats(4, 16, 32),),
        ),
    },
}
