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
        adapter_in_dim adapter_input_size adapter_out_dim audio_hidden_size backbone_hidden_size codebook_dim
        cross_hidden_size d_inner d_model decoder_hidden_size emb_dim embed_dim embedding_size encoder_hidden_size
        hidden_dim hidden_size hidden_size_global image_text_hidden_size image_token_embed_dim input_dim
        input_embedding_size lang_embed_dim moe_hidden_size n_embd out_hidden_size output_dim output_embedding_size
        output_proj_dims patch_embed_hidden_size projection_dim projection_hidden_dim projection_hidden_size
        projector_hidden_size projector_input_dim projector_output_dim pronunciation_embed_dim resampler_head_dim
        router_hidden_size shape_embed_dim spkr_embed_dim text_hidden_size thinker_hidden_size unit_embed_dim
        upsample_groups vision_hidden_size vision_output_dim""",
    ),
    (
        INNER,
        """
        alignment_intermediate_size d_ff decoder_ffn_dim dense_intermediate_size dff dim_ff encoder_ffn_dim
        feed_forward_size ffn_dim ffn_hidden_size intermediate_size intermediate_size_mlp mlp_dim
        projection_intermediate_size prompt_mid_dim shared_intermediate_size speech_encoder_intermediate_size""",
    ),
    (
        HEAD_DIM,
        """
        attention_head_size attention_window attention_window_size cross_head_dim d_kv feature_projection_input_dim
        feature_size hc_lowrank head_dim hidden_size_per_layer_input index_head_dim input_feat_size input_size
        kv_channels kv_lora_rank linear_head_dim linear_key_head_dim linear_value_head_dim mamba_head_dim n_mel_bins
        num_conv_pos_embeddings num_filters num_mel_bins o_lora_rank q_lora_rank rel_extent resampler_dim_head
        sliding_window sliding_window_size swa_head_dim""",
    ),
    (
        HEADS,
        """
        block_size cross_num_attention_heads cross_num_key_value_heads decoder_attention_heads encoder_attention_heads
        linear_num_heads linear_num_value_heads mask_time_length mm_tokens_per_image moe_num_experts n_head n_heads
        n_routed_experts num_attention_heads num_conv_pos_embedding_groups num_decoder_attention_heads
        num_encoder_attention_heads num_experts num_heads num_local_experts num_sparse_encoder_layers resampler_heads
        resampler_n_heads speech_encoder_attention_heads swa_num_attention_heads t2u_decoder_attention_heads
        t2u_encoder_attention_heads""",
    ),
    (
        VOCABULARY,
        """
        char_vocab_size codebook_vocab_size encoder_hash_byte_group_vocab pronunciation_vocab_size shape_vocab_size
        src_vocab_size t2u_vocab_size tgt_vocab_size unit_hifi_gan_vocab_size unpadded_vocab_size vocab_size
        vocab_size_per_layer_input""",
    ),
    (
        128,
        """
        context_length max_decoder_position_embeddings max_encoder_position_embeddings max_position_embeddings
        max_seq_len max_target_positions n_ctx n_positions""",
    ),
    (
        32,
        """
        base_channels conv_channels crop_size downsample_hidden_size expert_ffn_hidden_size image_size latent_channels
        max_source_positions max_state_dim moe_intermediate_size moe_shared_expert_intermediate_size
        nemo_conv_channels output_channels share_expert_dim shared_expert_intermediate_size
        shared_experts_intermediate_size subsampling_conv_channels upsample_initial_channel""",
    ),
    (
        8,
        """
        adapter_rank chunk_size codebook_size index_topk latent_query_num laurel_rank local_attn_chunk_length
        lsh_attn_chunk_length mamba_chunk_size mamba_d_state mamba_n_heads mamba_num_heads num_embeddings
        num_query_tokens patch_size qk_nope_head_dim qk_rope_head_dim resampler_n_latents resampler_num_latents
        rotary_dim ssm_state_size state_size v_head_dim""",
    ),
    (
        2,
        """
        decoder_layers decoder_num_layers encoder_layers eos_token_id expert_capacity index_n_heads kv_n_heads
        linear_num_key_heads moe_k moe_top_k moe_topk num_blocks num_decoder_layers num_dense_layers
        num_encoder_layers num_experts_per_tok num_key_value_heads num_kv_shared_layers num_random_blocks
        num_res_blocks resampler_depth speech_encoder_layers swa_num_key_value_heads t2u_decoder_layers
        t2u_encoder_layers zero_expert_num""",
    ),
    (
        1,
        """
        bos_token_id first_k_dense_replace mamba_n_groups mamba_ngroups moe_num_shared_experts n_group n_groups
        n_shared_experts num_shared_experts topk_group""",
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
_PINPOINTS = {"image_grid_pinpoints": [[32, 32], [32, 64]]}
_SHARED_KV = {
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "num_kv_shared_layers": 2,
    "global_head_dim": HEAD_DIM,
}
_HYBRID = {"layers_block_type": ["linear_attention", "hybrid"] * 2}
_SAM = {"downsample_channels": [32, 64]}
_VQ = {"channel_multiplier": (1, 1)}
_WAVEFORM = {"conv_dim": (32, 32), "conv_stride": (5, 4), "conv_kernel": (10, 4)}
_CODEC = {"downsampling_ratios": (4, 5), "depths": (1, 1, 1)}


def _mrope(*sections: int) -> dict[str, Any]:
    """Rotary positions of images: how many frequencies are for time, for height and for width."""
    return {"rope_parameters": {**_ROPE, "mrope_section": list(sections)}}


def _codes(pattern: str) -> dict[str, int]:
    """Names and ids of the tokens that stand for the codes of an image tokenizer."""
    return {pattern.format(code=code, letter="ABCDEFGH"[code]): 32 + code for code in range(8)}


_TEXT: dict[str, dict[str, Any]] = {
    "big_bird": {"num_random_blocks": 1},
    "bigbird_pegasus": {"num_random_blocks": 1},
    "cohere_compass_text": {"rope_parameters": {"full_attention": _ROPE}},
    "dbrx": {"attn_config": {"rope_theta": 10000.0, "clip_qkv": 8.0}},
    "deepseek_ocr2_text": {"mlp_layer_types": ["dense", "sparse"] * 2},
    "diffusion_gemma_text": {"num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 32},
    "dots1": {"n_shared_experts": 1},
    "dots3_note_text": {
        "head_dim": 16,
        "swa_head_dim": 16,
        "swa_kv_lora_rank": 16,
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 4,
        "swa_q_lora_rank": 16,
        "swa_qk_nope_head_dim": 8,
        "swa_v_head_dim": 8,
    },
    "ernie4_5_vl_moe_text": {"moe_intermediate_size": [32, 32], **_mrope(3, 3, 2)},
    "gemma4_assistant": {
        "text_config": {
            "hidden_size_per_layer_input": 0,
            "num_kv_shared_layers": 4,
            "vocab_size_per_layer_input": 0,
        }
    },
    "gemma4_text": _SHARED_KV,
    "gemma4_unified_text": _SHARED_KV,
    "glm5_next_text": {"index_kpool": 8},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "hy_v4_vl_text": _mrope(2, 1, 1),
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "longcat_flash": {"head_dim": 8},
    "mamba2": {"head_dim": 32},
    "nemotron": {"num_key_value_heads": 2},
    "nemotron_h": {"layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"]},
    "qwen4_exp_text": {
        "indexer_budget": 8,
        "indexer_compress_ratio": 4,
        "indexer_head_dim": 16,
        "indexer_kv_heads": 1,
        "indexer_n_heads": 2,
    },
    "reformer": {"axial_pos_embds_dim": (32, 32), "axial_pos_shape": (4, 8), "hash_seed": 0, "is_decoder": True},
    "step3p5": {"sliding_window": 16},
    "xmod": {"default_language": "en_XX"},
    "zamba": _HYBRID,
    "zamba2": _HYBRID,
    "zaya": {"num_experts_per_tok": 1},
}
_IMAGES: dict[str, dict[str, Any]] = {
    "apertus1p5": {"audio_token_offset": 108, "image_token_offset": 100},
    "apertus1p5_vision_tokenizer": _VQ,
    "aria": {"projector_patch_to_query_dict": {16: 4}},
    "blip-2": {"image_token_index": 8},
    "chameleon": {"vocabulary_map": {"<image>": 8, **_codes("IMGIMG{letter}Z")}},
    "chameleon_vqgan": _VQ,
    "cosmos3_edge_text": _mrope(4, 2, 2),
    "deepseek_ocr2_sam_vision_model": _SAM,
    "dots3_note_vision_encoder": {"pyramid_num_routed": [0, 4]},
    "emu3": {"vocabulary_map": {"<image>": 8, "<|extra_200|>": 9, **_codes("<|visual token {code:06d}|>")}},
    "emu3_vqgan": {"hidden_size": 32, **_VQ},
    "florence_vision": {
        "depths": (1, 1),
        "embed_dim": (32, 64),
        "num_groups": (2, 4),
        "num_heads": (2, 4),
        "patch_padding": (3, 1),
        "patch_prenorm": (False, True),
        "patch_size": (7, 3),
        "patch_stride": (4, 2),
        "window_size": 4,
    },
    "gemma4": {"audio_config": {}, "vision_config": {}},
    "gemma4_unified": {"audio_config": {}, "vision_config": {}},
    "gemma4_unified_vision": {"mm_embed_dim": WIDTH},
    "glm4v_moe_text": _mrope(2, 1, 1),
    "glm4v_text": _mrope(2, 3, 3),
    "glm_ocr_text": _mrope(2, 3, 3),
    "granite4_vision": {
        "deepstack_layer_map": [[0, 0]],
        "downsample_rate": "2/4",
        "spatial_target_layers": [0, 1, 2, 3],
        **_PINPOINTS,
    },
    "granite_docling_vision": {"deepstack_visual_indexes": [0]},
    "hunyuan_vl_text": _mrope(2, 3, 3),
    "hunyuan_vl_vision": {"max_image_size": 128},
    "hy_v4_vl_vision": {"max_image_size": 128},
    "idefics": {"freeze_text_layers": False, "freeze_vision_layers": False},
    "instructblip": {"image_token_index": 8},
    "instructblipvideo": {"video_token_index": 8},
    "janus_vqgan": _VQ,
    "llama4_vision_model": {"intermediate_size": 4 * WIDTH},
    "llava_next": _PINPOINTS,
    "llava_next_video": _PINPOINTS,
    "llava_onevision": _PINPOINTS,
    "minicpm_ocr": {"image_token_id": 8},
    "minicpmv4_6": {"image_token_id": 8},
    "minicpmv4_7": {"image_token_id": 8},
    "mllama_vision_model": {
        "intermediate_layers_indices": [0, 1],
        "num_global_layers": 1,
        "vision_output_dim": 3 * WIDTH,
    },
    "molmo2_adapter": {"vision_feature_layer": [1, 0]},
    "molmo2_vision": {"image_size": [32, 32]},
    "muse_glimmer": {"out_hidden_size": 4 * WIDTH},
    "muse_spark": {"out_hidden_size": 4 * WIDTH},
    "paddleocr_vl_text": _mrope(2, 3, 3),
    "pp_formulanet_vision": {
        "post_conv_in_channels": 32,
        "post_conv_mid_channels": 32,
        "post_conv_out_channels": 64,
    },
    "qwen2_5_omni_text": _mrope(2, 3, 3),
    "qwen2_5_omni_thinker": {"vision_end_token_id": 61, "vision_start_token_id": 60},
    "qwen2_5_vl_text": _mrope(2, 3, 3),
    "qwen2_vl_text": _mrope(2, 3, 3),
    "qwen3_omni_moe_thinker": {"audio_end_token_id": 62, "vision_end_token_id": 61, "vision_start_token_id": 60},
    "radio": {"max_img_size": 128},
    "unlimited_ocr_sam_vision_model": _SAM,
    "vipllava": {"vision_feature_layers": [-2, -1]},
}
_SOUND: dict[str, dict[str, Any]] = {
    "fun_asr_nano": {"adaptor_config": {"intermediate_size": WIDTH // 4}},
    "glmasr_encoder": {"intermediate_size": 4 * WIDTH},
    "mimi": {"num_filters": 4},
    "moonshine_streaming": {"num_key_value_heads": 4},
    "muse_spark_audio": {"depths": (1, 1, 1, 1), "hidden_sizes": (16, 32, 32, 64), "num_hidden_layers": 4},
    "nemotron_h_omni": {
        "audio_config": {"projection_bias": False, "projection_hidden_size": WIDTH},
        "audio_token_id": 6,
        "image_token_id": 4,
    },
    "omniasr_audio": _WAVEFORM,
    "phi4_multimodal_audio": {"depthwise_separable_out_channel": 64, "ext_pw_out_channel": 64},
    "speecht5": _WAVEFORM,
    "vibevoice_acoustic_tokenizer": _CODEC,
    "vibevoice_acoustic_tokenizer_encoder": _CODEC,
    "voxtral": {"audio_token_id": 8},
    "voxtral_encoder": {"intermediate_size": 4 * WIDTH},
    "wav2vec2": _WAVEFORM,
}
OVERRIDES = _TEXT | _IMAGES | _SOUND
"""By model type. A configuration inside another one is found under its own type, or by its name in the outer one."""
