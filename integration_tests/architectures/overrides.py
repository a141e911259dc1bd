"""Changes of single configs, as data: what a tiny form of them needs beyond the sizes of sizes.py.

Keys are class names of transformers; a mapping as value changes a part of the config (text_config, ...).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Changes = Mapping[str, Any]

_MAMBA: Changes = {"mamba_d_head": 16}
_SHARED_CACHE: Changes = {
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "num_kv_shared_layers": 2,
    "intermediate_size": 64,
}
_REFORMER: Changes = {
    "attn_layers": ["local", "lsh"],
    "axial_pos_shape": (4, 4),
    "axial_pos_embds_dim": (8, 24),
    "local_attn_chunk_length": 4,
    "lsh_attn_chunk_length": 4,
    "num_buckets": 2,
    "feed_forward_size": 64,
    "is_decoder": True,
    "hash_seed": 0,
    # every layer draws a seed that nobody can set, so that one device does not repeat its own dropout either
    "hidden_dropout_prob": 0.0,
    "local_attention_probs_dropout_prob": 0.0,
}
_PERCEIVER: Changes = {"d_latents": 32, "d_model": 32, "num_latents": 8, "max_position_embeddings": 16}

_WINDOWS: Changes = {"depths": [2, 2, 1], "num_heads": [2, 2, 4]}
_LEVIT: Changes = {
    "image_size": 64,
    "patch_size": 16,
    "hidden_sizes": [16, 24, 32],
    "num_attention_heads": [2, 2, 4],
}

OVERRIDES: Mapping[str, Changes] = {
    "BambaForCausalLM": {**_MAMBA, "attn_layer_indices": [1]},
    "FalconH1ForCausalLM": {**_MAMBA, "mamba_d_ssm": 64},
    "GraniteMoeHybridForCausalLM": {**_MAMBA, "layer_types": ["linear_attention", "full_attention"]},
    "Mamba2ForCausalLM": {"head_dim": 16},
    "ZambaForCausalLM": {
        "num_hidden_layers": 4,
        "layers_block_type": ["linear_attention", "hybrid", "linear_attention", "hybrid"],
        "num_key_value_heads": 4,
        "attention_hidden_size": 64,
        "attention_head_dim": 16,
    },
    "Zamba2ForCausalLM": {
        "num_hidden_layers": 3,
        "layers_block_type": ["linear_attention", "linear_attention", "hybrid"],
        "n_mamba_heads": 4,
        "num_key_value_heads": 4,
    },
    "GPTNeoForCausalLM": {"attention_types": [[["global", "local"], 1]], "window_size": 4},
    "NemotronForCausalLM": {"num_key_value_heads": 2},
    "Lfm2MoeForCausalLM": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "Dots1ForCausalLM": {
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "first_k_dense_replace": 1,
    },
    "EsmForMaskedLM": {"vocab_size": 128, "mask_token_id": 4, "pad_token_id": 1},
    "EsmcForMaskedLM": {"num_key_value_heads": 4, "vocab_size": 128},
    "MPNetForMaskedLM": {"relative_attention_num_buckets": 32},
    "XmodForMaskedLM": {"default_language": "en_XX"},
    "XmodForCausalLM": {"default_language": "en_XX"},
    "DeepseekV2ForCausalLM": {"n_group": 1, "topk_group": 1, "num_experts_per_tok": 2},
    "AXK1ForCausalLM": {"n_group": 2, "topk_group": 1},
    "JambaForCausalLM": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "RecurrentGemmaForCausalLM": {"num_hidden_layers": 3},
    "HrmTextForCausalLM": {"num_layers_per_stack": None},
    "xLSTMForCausalLM": {
        "hidden_size": 128,
        "embedding_dim": 128,
        "chunk_size": 8,
        "mode": "train",
        "return_last_states": False,
    },
    "LEDForConditionalGeneration": {"attention_window": 8},
    "Qwen4ExpForCausalLM": {
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 8,
        "indexer_budget": 8,
        "indexer_compress_ratio": 2,
    },
    "NeoMMEForMaskedLM": {"head_dim": 16},
    "Gemma3nForCausalLM": _SHARED_CACHE,
    "Gemma3nForConditionalGeneration": {"text_config": _SHARED_CACHE},
    "Gemma4AssistantForCausalLM": {
        "text_config": {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0, **_SHARED_CACHE},
    },
    "DbrxForCausalLM": {"attn_config": {"rope_theta": 10000.0, "clip_qkv": 8}},
    "ReformerModelWithLMHead": _REFORMER,
    "ReformerForMaskedLM": {**_REFORMER, "is_decoder": False},
    "BitForImageClassification": {"num_groups": 4},
    "SwinForImageClassification": {"window_size": 4, "patch_size": 2, **_WINDOWS},
    "Swinv2ForImageClassification": {"window_size": 4, "patch_size": 2, **_WINDOWS},
    "DonutSwinForImageClassification": {"window_size": 4, "patch_size": 2, **_WINDOWS},
    "LevitForImageClassification": _LEVIT,
    "LevitForImageClassificationWithTeacher": _LEVIT,
    "TextNetForImageClassification": {
        "image_size": (64, 64),
        "stem_out_channels": 8,
        "hidden_sizes": [8, 8, 16, 24, 32],
        "conv_layer_kernel_sizes": [[[3, 3]], [[3, 3], [1, 3]], [[3, 3], [3, 1]], [[3, 3]]],
        "conv_layer_strides": [[2], [1, 2], [2, 1], [2]],
    },
    "ImageGPTForImageClassification": {"n_positions": 64},
    "PerceiverForMaskedLM": _PERCEIVER,
    "PerceiverForImageClassificationLearned": _PERCEIVER,
    "PerceiverForImageClassificationFourier": {**_PERCEIVER, "num_cross_attention_heads": 1},
    "PerceiverForImageClassificationConvProcessing": {**_PERCEIVER, "num_cross_attention_heads": 1},
    "EfficientNetForImageClassification": {
        "width_coefficient": 0.25,
        "depth_coefficient": 0.25,
        "hidden_dim": 320,
    },
    "HGNetV2ForImageClassification": {
        "stem_channels": [3, 8, 8],
        "stage_in_channels": [8, 16, 24, 32],
        "stage_mid_channels": [8, 8, 8, 8],
        "stage_out_channels": [16, 24, 32, 32],
        "hidden_sizes": [16, 24, 32, 32],
        "stage_num_blocks": [1, 1, 1, 1],
        "stage_numb_of_layers": [2, 2, 2, 2],
    },
    "MobileNetV1ForImageClassification": {"depth_multiplier": 0.25},
    "MobileViTV2ForImageClassification": {
        "width_multiplier": 0.25,
        "n_attn_blocks": [1, 1, 1],
        "image_size": 64,
    },
    "Qwen3ASRForConditionalGeneration": {"audio_config": {"downsample_hidden_size": 8}},
    "VibeVoiceAsrForConditionalGeneration": {
        "acoustic_tokenizer_encoder_config": {"num_filters": 2, "depths": [1] * 7},
        "semantic_tokenizer_encoder_config": {"num_filters": 2, "depths": [1] * 7},
    },
}
