"""The list of models: attention as other people write it, each small enough to run in seconds.

A model is added by a line. Sizes are small, but every part that the package gives the model is there.
"""

from __future__ import annotations

from typing import Any

from workshop.bench.packages.description import Given, Made, Model, Named, Noise, Numbers

IMAGE = Noise((2, 3, 32, 32))
TOKENS = Numbers((2, 64), 60, 3)


def _many(package: str, rows: dict[str, tuple[Made, list[Any]]]) -> list[Model]:
    return [Model(package, name, made, inputs) for name, (made, inputs) in rows.items()]


# --- proteins and genomes ---

_ALPHABET = Made("esm.data:Alphabet.from_architecture", "ESM-1b")
_ESM = {
    "layers": 2, "embed_dim": 32, "ffn_embed_dim": 64, "attention_heads": 4, "max_positions": 64,
    "max_tokens": 4096, "dropout": 0.0, "attention_dropout": 0.0, "activation_dropout": 0.0,
    "emb_layer_norm_before": True, "token_dropout": False, "final_bias": True,
}  # fmt: skip
_PROTEINS = _many("fair-esm", {
    "ESM2": (Made("esm.model.esm2:ESM2", 2, 32, 4), [Numbers((2, 24), 30, 4)]),
    "ESM-1b": (Made("esm.model.esm1:ProteinBertModel",
                    Made("argparse:Namespace", arch="roberta_large", **_ESM), _ALPHABET),
               [Numbers((2, 24), 30, 4)]),
    "ESM-1": (Made("esm.model.esm1:ProteinBertModel",
                   Made("argparse:Namespace", arch="protein_bert_base", **_ESM), _ALPHABET),
              [Numbers((2, 24), 30, 4)]),
    "MSATransformer": (Made("esm.model.msa_transformer:MSATransformer",
                            Made("argparse:Namespace", embed_positions_msa=True, **_ESM),
                            Made("esm.data:Alphabet.from_architecture", "msa_transformer")),
                       [Numbers((2, 5, 24), 30, 4)]),
})  # fmt: skip
_GENOMES = _many("enformer-pytorch", {
    "Enformer": (Made("enformer_pytorch:Enformer.from_hparams", dim=48, depth=2, heads=2, attn_dim_key=16,
                      target_length=8, num_downsamples=3, dim_divisible_by=8,
                      output_heads={"human": 5}), [Noise((1, 128, 4))]),
    "Attention": (Made("enformer_pytorch.modeling_enformer:Attention", 48, num_rel_pos_features=12, heads=2,
                       dim_key=16, dim_value=24), [Noise((2, 40, 48))]),
})  # fmt: skip

# --- latents, slots, low rank ---

_PERCEIVER = {
    "num_freq_bands": 3, "depth": 2, "max_freq": 8.0, "num_latents": 12, "latent_dim": 32, "latent_heads": 2,
    "cross_dim_head": 16, "latent_dim_head": 16, "num_classes": 5,
}  # fmt: skip
_IO = {
    "dim": 32, "depth": 2, "num_latents": 12, "latent_dim": 32, "latent_heads": 2,
    "cross_dim_head": 16, "latent_dim_head": 16,
}  # fmt: skip
_PERCEIVERS = [
    *_many("perceiver-pytorch", {
        "Perceiver": (Made("perceiver_pytorch:Perceiver", **_PERCEIVER), [Noise((2, 16, 16, 3))]),
        "Perceiver, tied layers": (Made("perceiver_pytorch:Perceiver", weight_tie_layers=True, **_PERCEIVER),
                                   [Noise((2, 16, 16, 3))]),
        "Perceiver, gated": (Made("perceiver_pytorch.gated:Perceiver", **_PERCEIVER),
                             [Noise((2, 16, 16, 3))]),
        "Perceiver, mixed latents": (Made("perceiver_pytorch.mixed_latents:Perceiver", **_PERCEIVER),
                                     [Noise((2, 16, 16, 3))]),
        "PerceiverLM": (Made("perceiver_pytorch.perceiver_io:PerceiverLM", num_tokens=60, max_seq_len=64,
                             **_IO), [TOKENS]),
    }),
    Model("perceiver-pytorch", "PerceiverIO, masked",
          Made("perceiver_pytorch:PerceiverIO", queries_dim=24, **_IO),
          [Noise((2, 40, 32))], {"mask": Given((((True,) * 40), ((True,) * 30 + (False,) * 10))),
                                 "queries": Noise((9, 24))}),
]  # fmt: skip
_LOW_RANK = [
    *_many("linformer", {
        "Linformer": (Made("linformer:Linformer", 32, 64, 2, k=16, heads=4), [Noise((2, 64, 32))]),
        "LinformerLM, one key head": (Made("linformer:LinformerLM", 60, 32, 64, 2, k=16, heads=4,
                                           one_kv_head=True, share_kv=True), [TOKENS]),
    }),
    *_many("nystrom-attention", {
        "Nystromformer": (Made("nystrom_attention:Nystromformer", dim=32, depth=2, heads=2, dim_head=16,
                               num_landmarks=8), [Noise((1, 64, 32))]),
    }),
    *_many("performer-pytorch", {
        "PerformerLM": (Made("performer_pytorch:PerformerLM", num_tokens=60, max_seq_len=64, dim=32, depth=2,
                             heads=2, dim_head=16), [TOKENS]),
        "PerformerLM, local heads": (Made("performer_pytorch:PerformerLM", num_tokens=60, max_seq_len=64,
                                          dim=32, depth=2, heads=4, dim_head=16, local_attn_heads=2,
                                          local_window_size=16), [TOKENS]),
    }),
]  # fmt: skip
_SLOTS = _many("slot-attention", {
    "SlotAttention": (Made("slot_attention:SlotAttention", num_slots=4, dim=32), [Noise((2, 50, 32))]),
    "MultiHeadSlotAttention": (Made("slot_attention:MultiHeadSlotAttention", num_slots=4, dim=32, heads=2,
                                    dim_head=16), [Noise((2, 50, 32))]),
})  # fmt: skip

# --- local, axial, hashed, routed ---

_LOCAL_LM = {"num_tokens": 60, "max_seq_len": 64, "dim": 32, "depth": 2, "heads": 2, "dim_head": 16}
_LOCAL = _many("local-attention", {
    "LocalAttention": (Made("local_attention:LocalAttention", 16, causal=True, dim=16),
                       [Noise((2, 2, 64, 16))] * 3),
    "LocalAttention, both sides": (Made("local_attention:LocalAttention", 16, look_forward=1, dim=16,
                                        autopad=True), [Noise((2, 2, 60, 16))] * 3),
    "LocalMHA": (Made("local_attention.transformer:LocalMHA", dim=32, window_size=16, heads=2, dim_head=16,
                      causal=True, qk_rmsnorm=True, prenorm=True), [Noise((2, 64, 32))]),
    "LocalTransformer": (Made("local_attention.transformer:LocalTransformer", local_attn_window_size=16,
                              **_LOCAL_LM), [TOKENS]),
    "LocalTransformer, learned bias": (Made("local_attention.transformer:LocalTransformer",
                                            local_attn_window_size=16, use_dynamic_pos_bias=True,
                                            **_LOCAL_LM), [TOKENS]),
})  # fmt: skip
_AXIAL = _many("axial-attention", {
    "AxialAttention": (Made("axial_attention:AxialAttention", dim=16, heads=2, dim_index=1),
                       [Noise((2, 16, 12, 8))]),
    "AxialImageTransformer": (Made("axial_attention:AxialImageTransformer", dim=16, depth=2, heads=2,
                                   reversible=False, axial_pos_emb_shape=(12, 8)), [Noise((2, 16, 12, 8))]),
    "AxialImageTransformer, reversible": (Made("axial_attention:AxialImageTransformer", dim=16, depth=2,
                                               heads=2), [Noise((2, 16, 12, 8))]),
})  # fmt: skip
_HASHED = [
    *_many("reformer-pytorch", {
        "ReformerLM": (Made("reformer_pytorch:ReformerLM", num_tokens=60, dim=32, depth=2, max_seq_len=64,
                            heads=2, dim_head=16, bucket_size=8, n_hashes=2, causal=True), [TOKENS]),
        "ReformerLM, whole attention": (Made("reformer_pytorch:ReformerLM", num_tokens=60, dim=32, depth=2,
                                             max_seq_len=64, heads=2, dim_head=16, bucket_size=8,
                                             use_full_attn=True, causal=True), [TOKENS]),
    }),
    *_many("routing-transformer", {
        "RoutingTransformerLM": (Made("routing_transformer:RoutingTransformerLM", num_tokens=60, dim=32,
                                      depth=2, max_seq_len=64, heads=2, dim_head=16, window_size=16,
                                      n_local_attn_heads=1, causal=True), [TOKENS]),
    }),
    *_many("sinkhorn-transformer", {
        "SinkhornTransformerLM": (Made("sinkhorn_transformer:SinkhornTransformerLM", num_tokens=60, dim=32,
                                       depth=2, max_seq_len=64, heads=2, bucket_size=16, causal=True),
                                  [TOKENS]),
        "SinkhornTransformerLM, both sides": (Made("sinkhorn_transformer:SinkhornTransformerLM",
                                                   num_tokens=60, dim=32, depth=2, max_seq_len=64, heads=2,
                                                   bucket_size=16), [TOKENS]),
    }),
    *_many("CoLT5-attention", {
        "ConditionalRoutedTransformerBlock": (
            Made("colt5_attention:ConditionalRoutedTransformerBlock", 32, num_heavy_attn_tokens_q=8,
                 num_heavy_attn_tokens_kv=8, num_heavy_ff_tokens=8, light_dim_head=16, light_heads=2,
                 light_window_size=16, heavy_dim_head=16, heavy_heads=2), [Noise((2, 64, 32))]),
    }),
]  # fmt: skip

# --- tables ---

_TABLES = [
    *_many("tab-transformer-pytorch", {
        "TabTransformer": (Made("tab_transformer_pytorch:TabTransformer", categories=(5, 4, 3, 6),
                                num_continuous=3, dim=32, depth=2, heads=2, mlp_act=Made("torch.nn:ReLU")),
                           [Numbers((4, 4), 3), Noise((4, 3))]),
        "FTTransformer": (Made("tab_transformer_pytorch:FTTransformer", categories=(5, 4, 3, 6),
                               num_continuous=3, dim=32, depth=2, heads=2),
                          [Numbers((4, 4), 3), Noise((4, 3))]),
    }),
    *_many("rtdl_revisiting_models", {
        "FTTransformer": (Made("rtdl_revisiting_models:FTTransformer", n_cont_features=3,
                               cat_cardinalities=[5, 4], d_out=2, n_blocks=2, d_block=32,
                               attention_n_heads=4, attention_dropout=0.1, ffn_d_hidden=None,
                               ffn_d_hidden_multiplier=1.5, ffn_dropout=0.0, residual_dropout=0.0),
                          [Noise((4, 3)), Numbers((4, 2), 4)]),
        "FTTransformer, compressed keys": (
            Made("rtdl_revisiting_models:FTTransformer", n_cont_features=9, cat_cardinalities=[5, 4],
                 d_out=2, n_blocks=2, d_block=32, attention_n_heads=4, attention_dropout=0.1,
                 ffn_d_hidden=None, ffn_d_hidden_multiplier=1.5, ffn_dropout=0.0, residual_dropout=0.0,
                 linformer_kv_compression_ratio=0.5, linformer_kv_compression_sharing="headwise"),
            [Noise((4, 9)), Numbers((4, 2), 4)]),
    }),
]  # fmt: skip

# --- speech and sound ---

_WHISPER = {
    "n_mels": 16, "n_audio_ctx": 24, "n_audio_state": 32, "n_audio_head": 2, "n_audio_layer": 2,
    "n_vocab": 60, "n_text_ctx": 64, "n_text_state": 32, "n_text_head": 2, "n_text_layer": 2,
}  # fmt: skip
_SOUND = [
    *_many("openai-whisper", {
        "Whisper": (Made("whisper.model:Whisper", Made("whisper.model:ModelDimensions", **_WHISPER)),
                    [Noise((2, 16, 48)), Numbers((2, 10), 60)]),
        "AudioEncoder": (Made("whisper.model:AudioEncoder", 16, 24, 32, 2, 2), [Noise((2, 16, 48))]),
        "TextDecoder": (Made("whisper.model:TextDecoder", 60, 64, 32, 2, 2),
                        [Numbers((2, 10), 60), Noise((2, 24, 32))]),
    }),
    *_many("demucs", {
        "CrossTransformerEncoder": (Made("demucs.transformer:CrossTransformerEncoder", 32, num_heads=2,
                                         num_layers=3), [Noise((1, 32, 6, 9)), Noise((1, 32, 40))]),
        "HTDemucs": (Made("demucs.htdemucs:HTDemucs", ["a", "b"], channels=8, nfft=512, t_layers=2,
                          t_heads=2, depth=3, use_train_segment=False), [Noise((1, 2, 8192))]),
        "Demucs, local attention": (Made("demucs.demucs:Demucs", ["a", "b"], channels=8, depth=4,
                                         dconv_lstm=9, dconv_attn=2, dconv_mode=3, resample=False),
                                    [Noise((1, 2, 4096))]),
    }),
]  # fmt: skip

# --- images ---

_CLIP_IMAGE = {"layers": 2, "width": 32, "head_width": 16, "patch_size": 8, "image_size": 32}
_CLIP_TEXT = {"context_length": 16, "vocab_size": 60, "width": 32, "heads": 2, "layers": 2}
_PAIR = [IMAGE, Numbers((2, 16), 60)]
_CLIP = _many("open_clip_torch", {
    "CLIP": (Made("open_clip.model:CLIP", 24, dict(_CLIP_IMAGE), dict(_CLIP_TEXT)), _PAIR),
    "CLIP, attentional pooling": (
        Made("open_clip.model:CLIP", 32, {**_CLIP_IMAGE, "attentional_pool": True, "attn_pooler_queries": 4,
                                          "attn_pooler_heads": 2}, {**_CLIP_TEXT, "width": 32}), _PAIR),
    "CLIP, scaled heads": (
        Made("open_clip.model:CLIP", 24, {**_CLIP_IMAGE, "scale_attn": True, "scale_heads": True},
             {**_CLIP_TEXT, "qk_norm": True}), _PAIR),
    "CustomTextCLIP": (Made("open_clip.model:CustomTextCLIP", 24, dict(_CLIP_IMAGE),
                            {**_CLIP_TEXT, "embed_cls": True, "pool_type": "last"}),
                       [IMAGE, Numbers((2, 15), 60)]),
    "CoCa": (Made("open_clip.coca_model:CoCa", 32,
                  {**_CLIP_TEXT, "attn_pooler_heads": 2, "n_queries": 8},
                  {**_CLIP_TEXT, "embed_cls": True, "output_tokens": True},
                  {**_CLIP_IMAGE, "attentional_pool": True, "attn_pooler_heads": 2, "attn_pooler_queries": 8,
                   "output_tokens": True}),
             [IMAGE, Numbers((2, 15), 60)]),
})  # fmt: skip
_SWIN = {
    "patch_size": [4, 4], "embed_dim": 16, "depths": [2, 2], "num_heads": [2, 4], "window_size": [4, 4],
    "num_classes": 5,
}  # fmt: skip
_VISION = _many("torchvision", {
    "VisionTransformer": (Made("torchvision.models:VisionTransformer", 32, 8, 2, 2, 32, 64, num_classes=5),
                          [IMAGE]),
    "SwinTransformer": (Made("torchvision.models:SwinTransformer", **_SWIN), [IMAGE]),
    "SwinTransformer V2": (
        Made("torchvision.models:SwinTransformer", **_SWIN,
             block=Named("torchvision.models.swin_transformer:SwinTransformerBlockV2"),
             downsample_layer=Named("torchvision.models.swin_transformer:PatchMergingV2")), [IMAGE]),
    "MaxVit": (Made("torchvision.models:MaxVit", (32, 32), 16, 4, [16, 32], [1, 1], 8, 0.0, num_classes=5),
               [IMAGE]),
})  # fmt: skip
_TIMM_VIT = Made("timm.models.vision_transformer:VisionTransformer", img_size=32, patch_size=8, embed_dim=32,
                 depth=2, num_heads=2, num_classes=0)  # fmt: skip
_LIGHTLY = _many("lightly", {
    "MaskedVisionTransformerTIMM": (Made("lightly.models.modules:MaskedVisionTransformerTIMM", _TIMM_VIT),
                                    [IMAGE]),
    "MAEDecoderTIMM": (Made("lightly.models.modules:MAEDecoderTIMM", 16, 8, embed_dim=32,
                            decoder_embed_dim=32, decoder_depth=2, decoder_num_heads=2),
                       [Noise((2, 17, 32))]),
    "MaskedVisionTransformerTorchvision": (
        Made("lightly.models.modules:MaskedVisionTransformerTorchvision",
             Made("torchvision.models:VisionTransformer", 32, 8, 2, 2, 32, 64)), [IMAGE]),
})  # fmt: skip
_SEGMENTATION = _many("segmentation_models_pytorch", {
    "MAnet": (Made("segmentation_models_pytorch:MAnet", "resnet18", encoder_depth=3, encoder_weights=None,
                   decoder_channels=(16, 8, 8), decoder_pab_channels=8), [IMAGE]),
    "Segformer": (Made("segmentation_models_pytorch:Segformer", "mit_b0", encoder_weights=None,
                       decoder_segmentation_channels=16), [Noise((1, 3, 64, 64))]),
    "DPT": (Made("segmentation_models_pytorch:DPT", "tu-vit_tiny_patch16_224", encoder_weights=None,
                 dynamic_img_size=True, decoder_intermediate_channels=(8, 8, 8, 8),
                 decoder_fusion_channels=8), [Noise((1, 3, 64, 64))]),
})  # fmt: skip

# --- graphs ---

_EDGES = Given(((0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 0, 2), (1, 2, 3, 4, 5, 6, 7, 8, 9, 0, 5, 7)))
_OF_NODES = Given((0,) * 4 + (1,) * 6)
_GPS_CONV = Made("torch_geometric.nn:GCNConv", 16, 16)
_GRAPHS = _many("torch-geometric", {
    "GPSConv": (Made("torch_geometric.nn:GPSConv", 16, _GPS_CONV, heads=2),
                [Noise((10, 16)), _EDGES, _OF_NODES]),
    "GPSConv, performer": (Made("torch_geometric.nn:GPSConv", 16, _GPS_CONV, heads=2, attn_type="performer"),
                           [Noise((10, 16)), _EDGES, _OF_NODES]),
    "SetTransformerAggregation": (Made("torch_geometric.nn:SetTransformerAggregation", 16, 2, heads=2),
                                  [Noise((10, 16)), _OF_NODES]),
    "GraphMultisetTransformer": (Made("torch_geometric.nn:GraphMultisetTransformer", 16, 3, heads=2),
                                 [Noise((10, 16)), _OF_NODES]),
    "QFormer": (Made("torch_geometric.nn.attention:QFormer", 16, 16, 16, 2, 2), [Noise((2, 10, 16))]),
    "SGFormerAttention": (Made("torch_geometric.nn.attention:SGFormerAttention", 16, 2, 8),
                          [Noise((2, 10, 16))]),
    "PolynormerAttention": (Made("torch_geometric.nn.attention:PolynormerAttention", 16, 2, 8),
                            [Noise((2, 10, 16))]),
    "TransformerConv": (Made("torch_geometric.nn:TransformerConv", 16, 8, heads=2),
                        [Noise((10, 16)), _EDGES]),
    "GATv2Conv": (Made("torch_geometric.nn:GATv2Conv", 16, 8, heads=2), [Noise((10, 16)), _EDGES]),
})  # fmt: skip

# --- language ---

_LIT = {
    "block_size": 64, "n_layer": 2, "n_embd": 32, "vocab_size": 60, "padding_multiple": 4, "n_head": 4,
}  # fmt: skip
_LLAMA = {
    "rotary_percentage": 1.0, "parallel_residual": False, "bias": False, "norm_class_name": "RMSNorm",
    "mlp_class_name": "LLaMAMLP", "intermediate_size": 64,
}  # fmt: skip


def _lit(**settings: Any) -> tuple[Made, list[Any]]:
    return Made("litgpt.model:GPT", Made("litgpt.config:Config", **_LIT, **settings)), [TOKENS]


_LANGUAGE = _many("litgpt", {
    "GPT, as Pythia": _lit(),
    "GPT, as Llama": _lit(**_LLAMA, n_query_groups=2),
    "GPT, as Gemma 2": _lit(**_LLAMA, n_query_groups=2, sliding_window_size=16, sliding_window_indices=[1, 0],
                            attention_logit_softcapping=50.0, final_logit_softcapping=30.0,
                            post_attention_norm=True, post_mlp_norm=True, scale_embeddings=True,
                            attention_scores_scalar=8),
    "GPT, as Mixtral": _lit(**{**_LLAMA, "mlp_class_name": "LLaMAMoE"}, n_expert=4, n_expert_per_token=2),
    "GPT, as Falcon": _lit(n_query_groups=1, rotary_percentage=1.0, shared_attention_norm=True, bias=False),
})  # fmt: skip

# --- blocks, halves, both directions ---

_SMALL = {"heads": 2, "dim_head": 16}
_TEXT = {"num_tokens": 60, "dim": 32, "depth": 2, "max_seq_len": 64, **_SMALL}
_MAPS = {"dim_out": 32, "proj_factor": 2, "num_layers": 2, "heads": 2, "dim_head": 8}
_MORE = [
    *_many("isab-pytorch", {
        "ISAB": (Made("isab_pytorch:ISAB", dim=32, heads=2, num_latents=5), [Noise((2, 40, 32))]),
    }),
    *_many("halonet-pytorch", {
        "HaloAttention": (Made("halonet_pytorch:HaloAttention", dim=16, block_size=4, halo_size=2, dim_head=8,
                               heads=2), [Noise((1, 16, 8, 8))]),
    }),
    *_many("bottleneck-transformer-pytorch", {
        "BottleStack, relative": (Made("bottleneck_transformer_pytorch:BottleStack", dim=16, fmap_size=8,
                                       rel_pos_emb=True, **_MAPS), [Noise((2, 16, 8, 8))]),
        "BottleStack, absolute": (Made("bottleneck_transformer_pytorch:BottleStack", dim=16, fmap_size=8,
                                       **_MAPS), [Noise((2, 16, 8, 8))]),
    }),
    *_many("lambda-networks", {
        "LambdaLayer": (Made("lambda_networks:LambdaLayer", dim=16, dim_out=16, n=8, dim_k=4, heads=2,
                             dim_u=1), [Noise((2, 16, 8, 8))]),
        "LambdaLayer, local": (Made("lambda_networks:LambdaLayer", dim=16, dim_out=16, r=3, dim_k=4, heads=2,
                                    dim_u=2), [Noise((2, 16, 8, 8))]),
    }),
    *_many("bidirectional-cross-attention", {
        f"BidirectionalCrossAttention{name}": (
            Made("bidirectional_cross_attention:BidirectionalCrossAttention", dim=32, context_dim=24,
                 **_SMALL, **more), [Noise((2, 40, 32)), Noise((2, 20, 24))])
        for name, more in (("", {}), (", talking heads", {"talking_heads": True}))
    }),
    *_many("conformer", {
        "Conformer": (Made("conformer:Conformer", dim=32, depth=2, conv_kernel_size=7, **_SMALL),
                      [Noise((2, 40, 32))]),
        "Conformer, causal convolutions": (
            Made("conformer:Conformer", dim=32, depth=2, conv_kernel_size=7, conv_causal=True, **_SMALL),
            [Noise((2, 40, 32))]),
    }),
    *_many("memory-efficient-attention-pytorch", {
        "Attention": (Made("memory_efficient_attention_pytorch:Attention", dim=32, causal=True, **_SMALL),
                      [Noise((2, 64, 32))]),
        "Attention, in blocks": (Made("memory_efficient_attention_pytorch:Attention", dim=32, causal=True,
                                      memory_efficient=True, q_bucket_size=32, k_bucket_size=16, **_SMALL),
                                 [Noise((2, 64, 32))]),
    }),
    *_many("h-transformer-1d", {
        f"HTransformer1D{name}": (
            Made("h_transformer_1d:HTransformer1D", block_size=8, causal=causal, **_TEXT), [TOKENS])
        for name, causal in (("", False), (", causal", True))
    }),
    *_many("feedback-transformer-pytorch", {
        "FeedbackTransformer": (
            Made("feedback_transformer_pytorch:FeedbackTransformer", num_tokens=60, dim=32, depth=2,
                 seq_len=4, mem_len=8, **_SMALL), [Numbers((2, 8), 60, 3)]),
    }),
    *_many("linear-attention-transformer", {
        "LinearAttentionTransformerLM": (
            Made("linear_attention_transformer:LinearAttentionTransformerLM", causal=True, **_TEXT),
            [TOKENS]),
        "LinearAttentionTransformerLM, local heads": (
            Made("linear_attention_transformer:LinearAttentionTransformerLM", n_local_attn_heads=1,
                 local_attn_window_size=16, **_TEXT), [TOKENS]),
    }),
    *_many("hourglass-transformer-pytorch", {
        "HourglassTransformerLM": (
            Made("hourglass_transformer_pytorch:HourglassTransformerLM", shorten_factor=2,
                 **{**_TEXT, "depth": (1, 2, 1)}), [TOKENS]),
    }),
]  # fmt: skip

MODELS: tuple[Model, ...] = (
    *_PROTEINS, *_GENOMES, *_PERCEIVERS, *_LOW_RANK, *_SLOTS, *_LOCAL, *_AXIAL, *_HASHED, *_TABLES, *_SOUND,
    *_CLIP, *_VISION, *_LIGHTLY, *_SEGMENTATION, *_GRAPHS, *_LANGUAGE, *_MORE,
)  # fmt: skip
