"""What makes a config tiny: values by field name, the same for every architecture."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

VOCABULARY = 128
SPECIAL = 10
"""Token ids below this are special ones; batches draw from the others."""

WIDTH, HEADS, HEAD_WIDTH = 32, 4, 8

_NAMES: tuple[tuple[int, str], ...] = (
    (
        WIDTH,
        "hidden_size d_model n_embd dim emb_dim embed_dim embedding_size embedding_dim word_embed_proj_dim dim_model "
        "hidden_size_global true_hidden_size attention_hidden_size lru_width out_hidden_size encoder_hidden_size "
        "cross_attention_hidden_size pooler_output_size projection_size index_hidden_size backbone_hidden_size "
        "decoder_hidden_size d_latents hidden_dim projection_dim input_embedding_size output_embedding_size "
        "prediction_head_size entity_emb_size audio_hidden_size projector_input_dim projector_output_dim",
    ),
    (
        64,
        "intermediate_size ffn_dim encoder_ffn_dim decoder_ffn_dim d_ff dff dim_ff ffn_hidden_size d_inner "
        "feed_forward_size mlp_dim intermediate_size_mlp dense_intermediate_size speech_encoder_intermediate_size "
        "t2u_encoder_ffn_dim t2u_decoder_ffn_dim max_position_embeddings n_positions n_ctx max_seq_len "
        "max_source_positions max_target_positions model_max_length context_length max_2d_position_embeddings "
        "max_encoder_position_embeddings max_decoder_position_embeddings original_max_position_embeddings "
        "t2u_max_position_embeddings num_position_embeddings",
    ),
    (
        24,
        "moe_intermediate_size shared_expert_intermediate_size expert_ffn_hidden_size moe_shared_expert_intermediate_size "
        "shared_experts_intermediate_size",
    ),
    (
        VOCABULARY,
        "vocab_size decoder_vocab_size src_vocab_size tgt_vocab_size vocab_size_per_layer_input unpadded_vocab_size "
        "entity_vocab_size audio_vocab_size t2u_vocab_size char_vocab_size unit_hifi_gan_vocab_size codebook_size "
        "num_centroids ngram_vocab_size_base encoder_hash_byte_group_vocab shape_vocab_size pronunciation_vocab_size",
    ),
    (
        HEADS,
        "num_attention_heads n_head n_heads num_heads encoder_attention_heads decoder_attention_heads attention_heads "
        "num_encoder_attention_heads num_decoder_attention_heads swa_num_attention_heads num_query_groups mamba_n_heads "
        "mamba_num_heads linear_num_value_heads linear_num_heads index_n_heads conf_num_attention_heads "
        "num_self_attention_heads num_cross_attention_heads speech_encoder_attention_heads t2u_encoder_attention_heads "
        "t2u_decoder_attention_heads num_experts num_local_experts n_routed_experts moe_num_experts",
    ),
    (
        2,
        "linear_num_key_heads num_experts_per_tok num_experts_per_token moe_topk moe_k n_groups mamba_n_groups "
        "mamba_ngroups num_global_tokens num_hidden_layers n_layer n_layers num_layers encoder_layers decoder_layers "
        "num_decoder_layers num_encoder_layers conf_num_hidden_layers speech_encoder_layers t2u_encoder_layers "
        "t2u_decoder_layers depth num_self_attends_per_block num_global_layers max_window_layers num_layers_per_stack "
        "num_speakers num_langs",
    ),
    (
        HEAD_WIDTH,
        "head_dim d_kv qk_rope_head_dim qk_nope_head_dim v_head_dim kv_channels global_head_dim swa_head_dim "
        "linear_key_head_dim linear_value_head_dim linear_head_dim index_head_dim dim_head attention_head_size "
        "attention_head_dim d_head mamba_d_head mamba_head_dim rotary_dim ssm_state_size state_size mamba_d_state "
        "index_topk num_latents chunk_size mamba_chunk_size block_size expert_capacity num_hash base_channels",
    ),
    (
        16,
        "q_lora_rank kv_lora_rank o_lora_rank laurel_rank time_step_rank mamba_dt_rank hidden_size_per_layer_input "
        "router_hidden_size adapter_rank gated_norm_rank sliding_window attention_window_size local_attention "
        "num_mel_bins relative_attention_num_buckets num_buckets ple_embed_dim codebook_dim hc_lowrank",
    ),
)

TINY: Mapping[str, int] = MappingProxyType({name: value for value, names in _NAMES for name in names.split()})
"""Field name -> its value in a tiny config, where the field is a number."""

IMAGE, PATCH = 32, 8
PLAIN_IMAGE = 64
"""Pixels of an image for a model whose config names no size: enough for a convolutional network's last stage."""

STAGED: Mapping[str, tuple[int, ...]] = MappingProxyType(
    {
        "depths": (1,),
        "num_heads": (2,),
        "num_attention_heads": (2,),
        "hidden_sizes": (8, 16, 24, 32),
        "embed_dim": (8, 16, 24, 32),
        "embed_dims": (8, 16, 24, 32),
        "block_repeats": (1,),
    }
)
"""Field name -> its value per stage, where the field is a list; the last value serves all further stages."""
