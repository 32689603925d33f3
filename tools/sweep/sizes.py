"""The sizes of the tiny models, as data: by the name of a configuration's field, and by model type where that is not
enough.

One width, one head size and one vocabulary for everything keeps the parts of a model that meet one another compatible.
"""

from typing import Any

WIDTH, INNER, HEADS, HEAD_DIM, VOCABULARY = 64, 96, 4, 16, 160

_NAMES: tuple[tuple[int, str], ...] = (
    (
        WIDTH,
        """
        hidden_size d_model n_embd dim embed_dim emb_dim embedding_dim embedding_size word_embed_proj_dim lru_width
        attention_hidden_size out_hidden_size output_dim output_proj_dims projection_dim projector_hidden_size
        backbone_hidden_size hidden_dim text_hidden_size vision_hidden_size audio_hidden_size thinker_hidden_size
        cross_hidden_size encoder_hidden_size decoder_hidden_size input_embedding_size output_embedding_size
        adapter_out_dim adapter_in_dim adapter_input_size d_inner router_hidden_size projection_hidden_dim
        projection_hidden_size vision_output_dim projector_input_dim projector_output_dim patch_embed_hidden_size
        upsample_groups codebook_dim pronunciation_embed_dim shape_embed_dim moe_hidden_size image_text_hidden_size
        lang_embed_dim spkr_embed_dim unit_embed_dim resampler_head_dim image_token_embed_dim input_dim""",
    ),
    (
        INNER,
        """
        intermediate_size ffn_dim n_inner d_ff dff dim_ff decoder_ffn_dim encoder_ffn_dim ffn_hidden_size
        dense_intermediate_size shared_intermediate_size alignment_intermediate_size projection_intermediate_size
        intermediate_size_mlp feed_forward_size speech_encoder_intermediate_size mlp_dim prompt_mid_dim""",
    ),
    (
        32,
        """
        moe_intermediate_size shared_expert_intermediate_size expert_ffn_hidden_size share_expert_dim
        moe_shared_expert_intermediate_size shared_experts_intermediate_size
        image_size crop_size output_channels base_channels latent_channels downsample_hidden_size max_state_dim
        subsampling_conv_channels conv_channels upsample_initial_channel nemo_conv_channels""",
    ),
    (
        HEADS,
        """
        num_attention_heads n_head n_heads num_heads decoder_attention_heads encoder_attention_heads
        num_encoder_attention_heads num_decoder_attention_heads swa_num_attention_heads linear_num_value_heads
        linear_num_heads cross_num_attention_heads cross_num_key_value_heads speech_encoder_attention_heads
        t2u_encoder_attention_heads t2u_decoder_attention_heads resampler_n_heads resampler_heads
        num_experts num_local_experts n_routed_experts moe_num_experts num_sparse_encoder_layers""",
    ),
    (
        2,
        """
        num_key_value_heads num_kv_heads swa_num_key_value_heads linear_num_key_heads index_n_heads kv_n_heads
        num_experts_per_tok moe_topk moe_top_k moe_k expert_capacity
        encoder_layers decoder_layers num_encoder_layers num_decoder_layers num_dense_layers num_kv_shared_layers
        speech_encoder_layers t2u_encoder_layers t2u_decoder_layers num_blocks resampler_depth num_res_blocks
        eos_token_id zero_expert_num num_random_blocks window_size decoder_num_layers""",
    ),
    (
        HEAD_DIM,
        """
        head_dim d_kv d_head attention_head_size attention_head_dim kv_channels swa_head_dim cross_head_dim
        q_lora_rank kv_lora_rank o_lora_rank hc_lowrank index_head_dim linear_head_dim linear_key_head_dim
        linear_value_head_dim mamba_d_head mamba_head_dim resampler_dim_head
        sliding_window sliding_window_size attention_window attention_window_size hidden_size_per_layer_input
        num_mel_bins n_mel_bins feature_size input_size input_feat_size feature_projection_input_dim
        num_conv_pos_embeddings num_filters rel_extent""",
    ),
    (
        8,
        """
        rotary_dim qk_nope_head_dim qk_rope_head_dim v_head_dim qk_head_dim laurel_rank state_size ssm_state_size
        mamba_d_state mamba_n_heads mamba_num_heads chunk_size mamba_chunk_size time_step_rank mamba_dt_rank
        patch_size index_topk adapter_rank num_query_tokens resampler_n_latents resampler_num_latents
        local_attn_chunk_length lsh_attn_chunk_length latent_query_num codebook_size num_embeddings n_window""",
    ),
    (
        128,
        """
        max_position_embeddings n_positions n_ctx max_source_positions max_target_positions max_seq_len
        max_encoder_position_embeddings max_decoder_position_embeddings context_length""",
    ),
    (
        VOCABULARY,
        """
        vocab_size vocab_size_per_layer_input src_vocab_size tgt_vocab_size unpadded_vocab_size
        pronunciation_vocab_size shape_vocab_size encoder_hash_byte_group_vocab t2u_vocab_size char_vocab_size
        unit_hifi_gan_vocab_size codebook_vocab_size""",
    ),
    (4, "block_size mamba_conv mask_time_length num_conv_pos_embedding_groups"),
    (
        1,
        """
        bos_token_id n_shared_experts moe_num_shared_experts num_shared_experts n_group topk_group n_groups
        mamba_n_groups mamba_ngroups first_k_dense_replace""",
    ),
    (0, "pad_token_id"),
)
SIZES = {name: size for size, names in _NAMES for name in names.split()}

EVEN_IF_NONE = {"head_dim", "num_experts_per_tok", "n_routed_experts"}
"""Fields that are None by default and without which the model does not train."""

DEPTH_NAMES = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "depth", "layers")
DEPTH = {"language": 4, "tower": 2}

_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_MROPE = {**_ROPE, "mrope_section": [2, 3, 3]}
_SHARED_KV = {
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "num_kv_shared_layers": 2,
    "global_head_dim": HEAD_DIM,
}
_CONVOLUTIONS = {"conv_dim": (32, 32), "conv_stride": (5, 2), "conv_kernel": (10, 3)}
_HYBRID = {"layers_block_type": ["linear_attention", "hybrid"] * 2}
_SAM = {"global_attn_indexes": (1,)}
_VQ = {"channel_multiplier": (1, 1)}

OVERRIDES: dict[str, dict[str, Any]] = {
    # -- text -------------------------------------------------------------------------------------------------------
    "cohere_compass_text": {"rope_parameters": {"full_attention": _ROPE}},
    "dbrx": {"attn_config": {"rope_theta": 10000.0}},
    "dots1": {"n_shared_experts": 1},
    "ernie4_5_vl_moe_text": {"moe_intermediate_size": [32, 32]},
    "gemma4_text": _SHARED_KV,
    "gemma4_unified_text": _SHARED_KV,
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "hy_v4_vl_text": {"rope_parameters": {**_ROPE, "mrope_section": [2, 1, 1]}},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "longcat_flash": {"head_dim": 8, "qk_head_dim": 16},
    "mamba2": {"head_dim": 32},
    "reformer": {"is_decoder": True, "axial_pos_shape": (4, 8), "axial_pos_embds_dim": (32, 32), "hash_seed": 0},
    "step3p5": {"sliding_window": 16},
    "xmod": {"default_language": "en_XX"},
    "zamba": _HYBRID,
    "zamba2": _HYBRID,
    "zaya": {"num_experts_per_tok": 1},
}
