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
        cross_hidden_size encoder_hidden_size decoder_hidden_size hidden_size_global input_embedding_size output_embedding_size
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
        max_source_positions moe_intermediate_size shared_expert_intermediate_size expert_ffn_hidden_size share_expert_dim
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
        eos_token_id zero_expert_num num_random_blocks decoder_num_layers""",
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
        local_attn_chunk_length lsh_attn_chunk_length latent_query_num codebook_size num_embeddings""",
    ),
    (
        128,
        """
        max_position_embeddings n_positions n_ctx max_target_positions max_seq_len
        max_encoder_position_embeddings max_decoder_position_embeddings context_length""",
    ),
    (
        VOCABULARY,
        """
        vocab_size vocab_size_per_layer_input src_vocab_size tgt_vocab_size unpadded_vocab_size
        pronunciation_vocab_size shape_vocab_size encoder_hash_byte_group_vocab t2u_vocab_size char_vocab_size
        unit_hifi_gan_vocab_size codebook_vocab_size""",
    ),
    (4, "mm_tokens_per_image block_size mamba_conv mask_time_length num_conv_pos_embedding_groups"),
    (
        1,
        """
        bos_token_id n_shared_experts moe_num_shared_experts num_shared_experts n_group topk_group n_groups
        mamba_n_groups mamba_ngroups first_k_dense_replace""",
    ),
    (0, "pad_token_id"),
)
SIZES = {name: size for size, names in _NAMES for name in names.split()}
SIZES["initializer_range"] = 0.02  # some have 1e-10, and the gradients of what is behind such weights underflow

LISTS = {
    "deepstack_visual_indexes": [0],
    "fullatt_block_indexes": [1],
    "global_attn_indexes": [1],
}
"""Fields that name layers of a tower."""

EVEN_IF_NONE = {"head_dim", "num_experts_per_tok", "n_routed_experts"}
"""Fields that are None by default and without which the model does not train."""

DEPTH_NAMES = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "depth", "layers")
DEPTH = {"language": 4, "tower": 2}

_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_SHARED_KV = {
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "num_kv_shared_layers": 2,
    "global_head_dim": HEAD_DIM,
}
_HYBRID = {"layers_block_type": ["linear_attention", "hybrid"] * 2}
_WAVEFORM = {"conv_dim": (32, 32), "conv_stride": (5, 4), "conv_kernel": (10, 4)}
_SAM = {"downsample_channels": [32, 64], "image_size": 64}
_VQ = {"channel_multiplier": (1, 1)}
_CODEC = {"downsampling_ratios": (4, 5), "depths": (1, 1, 1), "num_filters": 16}


def _mrope(*sections: int) -> dict[str, Any]:
    """Rotary positions in time, height and width: how many of the frequencies each of them has."""
    return {"rope_parameters": {**_ROPE, "mrope_section": list(sections)}}


def _vq_names(pattern: str) -> dict[str, int]:
    return {pattern.format(code=code, letter="ABCDEFGH"[code]): 32 + code for code in range(8)}


OVERRIDES: dict[str, dict[str, Any]] = {
    # Text
    "bigbird_pegasus": {"block_size": 4, "num_random_blocks": 1},
    "big_bird": {"block_size": 4, "num_random_blocks": 1},
    "cohere_compass_text": {"rope_parameters": {"full_attention": _ROPE}},
    "dbrx": {"attn_config": {"rope_theta": 10000.0, "clip_qkv": 8.0}},
    "deepseek_ocr2_text": {"mlp_layer_types": ["dense", "sparse", "dense", "sparse"]},
    "diffusion_gemma_text": {"num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 32},
    "dots1": {"n_shared_experts": 1},
    "dots3_note_text": {
        "head_dim": 16,
        "swa_q_lora_rank": 16,
        "swa_kv_lora_rank": 16,
        "swa_head_dim": 16,
        "swa_qk_nope_head_dim": 8,
        "swa_v_head_dim": 8,
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 4,
    },
    "ernie4_5_vl_moe_text": {"moe_intermediate_size": [32, 32], **_mrope(3, 3, 2)},
    "gemma4_assistant": {"text_config": {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0, "num_kv_shared_layers": 4}},
    "gemma4_text": _SHARED_KV,
    "gemma4_unified_text": _SHARED_KV,
    "glm5_next_text": {"index_kpool": 8},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "hy_v4_vl_text": _mrope(2, 1, 1),
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "longcat_flash": {"head_dim": 8, "qk_head_dim": 16},
    "mamba2": {"head_dim": 32},
    "nemotron": {"num_key_value_heads": 2},
    "nemotron_h": {"layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"]},
    "qwen4_exp_text": {
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 8,
        "indexer_compress_ratio": 4,
    },
    "reformer": {"is_decoder": True, "axial_pos_shape": (4, 8), "axial_pos_embds_dim": (32, 32), "hash_seed": 0},
    "step3p5": {"sliding_window": 16},
    "xmod": {"default_language": "en_XX"},
    "zamba": _HYBRID,
    "zamba2": _HYBRID,
    "zaya": {"num_experts_per_tok": 1},
    # Vision
    "apertus1p5": {"image_token_offset": 100, "audio_token_offset": 108},
    "apertus1p5_vision_tokenizer": _VQ,
    "aria": {"projector_patch_to_query_dict": {16: 4}},
    "chameleon": {"vocabulary_map": {"<image>": 8, **_vq_names("IMGIMG{letter}Z")}},
    "chameleon_vqgan": _VQ,
    "cosmos3_edge_text": _mrope(4, 2, 2),
    "deepseek_ocr2_sam_vision_model": _SAM,
    "dots3_note_vision_encoder": {"pyramid_num_routed": [0, 4]},
    "emu3": {"vocabulary_map": {"<image>": 8, **_vq_names("<|visual token {code:06d}|>")}},
    "florence_vision": {
        "depths": (1, 1),
        "patch_size": (7, 3),
        "patch_stride": (4, 2),
        "patch_padding": (3, 1),
        "patch_prenorm": (False, True),
        "embed_dim": (32, 64),
        "num_heads": (2, 4),
        "num_groups": (2, 4),
        "window_size": 4,
    },
    "granite4_vision": {
        "downsample_rate": "2/4",
        "deepstack_layer_map": [[0, 0]],
        "spatial_target_layers": [0, 1, 2, 3],
        "image_grid_pinpoints": [[32, 32], [32, 64]],
    },
    "hunyuan_vl_text": _mrope(2, 3, 3),
    "hunyuan_vl_vision": {"max_image_size": 128},
    "hy_v4_vl_vision": {"max_image_size": 128},
    "janus_vqgan": _VQ,
    "blip-2": {"image_token_index": 8},
    "instructblip": {"image_token_index": 8},
    "instructblipvideo": {"video_token_index": 8},
    "llava_next": {"image_grid_pinpoints": [[32, 32], [32, 64]]},
    "llava_next_video": {"image_grid_pinpoints": [[32, 32], [32, 64]]},
    "llava_onevision": {"image_grid_pinpoints": [[32, 32], [32, 64]]},
    "vipllava": {"vision_feature_layers": [-2, -1]},
    "gemma4": {"vision_config": {}, "audio_config": {}},
    "gemma4_unified": {"vision_config": {}, "audio_config": {}},
    "glm4v_text": _mrope(2, 3, 3),
    "glm4v_moe_text": _mrope(2, 1, 1),
    "glm_ocr_text": _mrope(2, 3, 3),
    "paddleocr_vl_text": _mrope(2, 3, 3),
    "mllama_vision_model": {"intermediate_layers_indices": [0, 1], "num_global_layers": 1, "vision_output_dim": 3 * WIDTH},
    "muse_glimmer": {"out_hidden_size": 4 * WIDTH},
    "muse_spark": {"out_hidden_size": 4 * WIDTH},
    "voxtral": {"audio_token_id": 8},
    "emu3_vqgan": {"hidden_size": 32, "latent_channels": 4, "embed_dim": 4, **_VQ},
    "granite_docling_vision": {"deepstack_visual_indexes": [0]},
    "idefics": {"freeze_text_layers": False, "freeze_vision_layers": False},
    "minicpm_ocr": {"image_token_id": 8, "video_token_id": 9},
    "minicpmv4_6": {"image_token_id": 8, "video_token_id": 9},
    "minicpmv4_7": {"image_token_id": 8, "video_token_id": 9},
    "molmo2_vision": {"image_size": [32, 32]},
    "gemma4_unified_vision": {"mm_embed_dim": WIDTH, "mm_posemb_size": 8},
    "glmasr_encoder": {"intermediate_size": 4 * WIDTH},
    "voxtral_encoder": {"intermediate_size": 4 * WIDTH},
    "qwen2_5_omni_thinker": {"vision_start_token_id": 60, "vision_end_token_id": 61},
    "qwen3_omni_moe_thinker": {"vision_start_token_id": 60, "vision_end_token_id": 61},
    "llama4_vision_model": {"intermediate_size": 256},
    "molmo2_adapter": {"vision_feature_layer": [1, 0]},
    "pp_formulanet_vision": {
        **_SAM,
        "post_conv_in_channels": 32,
        "post_conv_mid_channels": 32,
        "post_conv_out_channels": 64,
    },
    "qwen2_5_omni_text": _mrope(2, 3, 3),
    "qwen2_5_vl_text": _mrope(2, 3, 3),
    "qwen2_vl_text": _mrope(2, 3, 3),
    "radio": {"max_img_size": 128},
    "unlimited_ocr_sam_vision_model": _SAM,
    # Audio
    "fun_asr_nano": {"adaptor_config": {"intermediate_size": WIDTH // 4}},
    "mimi": {"num_filters": 4, "upsampling_ratios": [4, 4]},
    "moonshine_streaming": {"num_key_value_heads": 4},
    "muse_spark_audio": {"hidden_sizes": (16, 32, 32, 64), "depths": (1, 1, 1, 1), "num_hidden_layers": 4},
    "nemotron_h_omni": {
        "audio_config": {"projection_hidden_size": WIDTH, "projection_bias": False},
        "image_token_id": 4,
        "video_token_id": 5,
        "audio_token_id": 6,
    },
    "omniasr_audio": _WAVEFORM,
    "phi4_multimodal_audio": {"ext_pw_out_channel": 64, "depthwise_separable_out_channel": 64, "nemo_conv_channels": 64},
    "qwen3_omni_moe_talker_text": {"shared_expert_intermediate_size": 32},
    "speecht5": _WAVEFORM,
    "vibevoice_acoustic_tokenizer": _CODEC,
    "vibevoice_acoustic_tokenizer_encoder": _CODEC,
    "wav2vec2": _WAVEFORM,
}
"""By model type. A configuration inside another one is named by its own type or by its name in the outer one."""
