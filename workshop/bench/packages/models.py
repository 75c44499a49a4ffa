"""The list of models: attention as other people write it, each small enough to run in seconds.

A model is a line below its package: its name, the expression that makes it, and the arguments of a call.
`module:name` in an expression is what that module has; nothing is imported before a model is built, so the
list can be read where its packages are missing. Sizes are small, but every part that the package gives the
model is there.
"""

from __future__ import annotations

import importlib
import operator
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Model:
    """A row of the table: `name` is unique within the package (a distribution); `made` and `arguments` are
    expressions."""

    package: str
    name: str
    made: str
    arguments: str

    @property
    def title(self) -> str:
        return f"{self.package} {self.name}"


_PATH = re.compile(r"(?<![\w.'])[a-zA-Z_][\w.]*:[A-Za-z_][\w.]*")


def build(expression: str) -> Any:
    """What an expression gives; tensors are drawn in the order in which they stand."""
    return eval(_PATH.sub(r"named('\g<0>')", expression), dict(_SPACE))


def named(path: str) -> Any:
    """What `module:name` names."""
    module, _, name = path.partition(":")
    return operator.attrgetter(name)(importlib.import_module(module))


def call_of(arguments: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and named arguments, built."""
    found: tuple[tuple[Any, ...], dict[str, Any]] = build(f"arguments({arguments})")
    return found


def noise(*shape: int) -> Tensor:
    return torch.randn(shape)


def ids(shape: tuple[int, ...], high: int, low: int = 0) -> Tensor:
    """Random integers from `low` to below `high`."""
    return torch.randint(low, high, shape)


_SPACE: dict[str, Any] = {
    "named": named, "noise": noise, "ids": ids, "given": torch.tensor, "arguments": lambda *a, **k: (a, k),
    "image": lambda: noise(2, 3, 32, 32), "tokens": lambda: ids((2, 64), 60, 3),
    "MASK": [[True] * 40, [True] * 30 + [False] * 10],
    "EDGES": [[0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 0, 2], [1, 2, 3, 4, 5, 6, 7, 8, 9, 0, 5, 7]],
    "_ESM": {"layers": 2, "embed_dim": 32, "ffn_embed_dim": 64, "attention_heads": 4, "max_positions":
        64, "max_tokens": 4096, "dropout": 0.0, "attention_dropout": 0.0, "activation_dropout": 0.0,
        "emb_layer_norm_before": True, "token_dropout": False, "final_bias": True},
    "_PERCEIVER": {"num_freq_bands": 3, "depth": 2, "max_freq": 8.0, "num_latents": 12, "latent_dim":
        32, "latent_heads": 2, "cross_dim_head": 16, "latent_dim_head": 16, "num_classes": 5},
    "_IO": {"dim": 32, "depth": 2, "num_latents": 12, "latent_dim": 32, "latent_heads": 2,
        "cross_dim_head": 16, "latent_dim_head": 16},
    "_LOCAL_LM": {"num_tokens": 60, "max_seq_len": 64, "dim": 32, "depth": 2, "heads": 2, "dim_head":
        16},
    "_WHISPER": {"n_mels": 16, "n_audio_ctx": 24, "n_audio_state": 32, "n_audio_head": 2,
        "n_audio_layer": 2, "n_vocab": 60, "n_text_ctx": 64, "n_text_state": 32, "n_text_head": 2,
        "n_text_layer": 2},
    "_CLIP_IMAGE": {"layers": 2, "width": 32, "head_width": 16, "patch_size": 8, "image_size": 32},
    "_CLIP_TEXT": {"context_length": 16, "vocab_size": 60, "width": 32, "heads": 2, "layers": 2},
    "_SWIN": {"patch_size": [4, 4], "embed_dim": 16, "depths": [2, 2], "num_heads": [2, 4],
        "window_size": [4, 4], "num_classes": 5},
    "_LIT": {"block_size": 64, "n_layer": 2, "n_embd": 32, "vocab_size": 60, "padding_multiple": 4,
        "n_head": 4},
    "_LLAMA": {"rotary_percentage": 1.0, "parallel_residual": False, "bias": False, "norm_class_name":
        "RMSNorm", "mlp_class_name": "LLaMAMLP", "intermediate_size": 64},
    "_SMALL": {"heads": 2, "dim_head": 16},
    "_TEXT": {"num_tokens": 60, "dim": 32, "depth": 2, "max_seq_len": 64, "heads": 2, "dim_head": 16},
    "_MAPS": {"dim_out": 32, "proj_factor": 2, "num_layers": 2, "heads": 2, "dim_head": 8},
}  # fmt: skip
"""What expressions may use."""

_LIST = """
fair-esm:
  ESM2 | esm.model.esm2:ESM2(2, 32, 4) | ids((2, 24), 30, 4)
  ESM-1b | esm.model.esm1:ProteinBertModel(argparse:Namespace(arch='roberta_large', **_ESM),
      esm.data:Alphabet.from_architecture('ESM-1b')) | ids((2, 24), 30, 4)
  ESM-1 | esm.model.esm1:ProteinBertModel(argparse:Namespace(arch='protein_bert_base', **_ESM),
      esm.data:Alphabet.from_architecture('ESM-1b')) | ids((2, 24), 30, 4)
  MSATransformer | esm.model.msa_transformer:MSATransformer(argparse:Namespace(embed_positions_msa=True,
      **_ESM), esm.data:Alphabet.from_architecture('msa_transformer')) | ids((2, 5, 24), 30, 4)
enformer-pytorch:
  Enformer | enformer_pytorch:Enformer.from_hparams(dim=48, depth=2, heads=2, attn_dim_key=16,
      target_length=8, num_downsamples=3, dim_divisible_by=8, output_heads={'human': 5}) | noise(1, 128,
      4)
  Attention | enformer_pytorch.modeling_enformer:Attention(48, num_rel_pos_features=12, heads=2,
      dim_key=16, dim_value=24) | noise(2, 40, 48)
perceiver-pytorch:
  Perceiver | perceiver_pytorch:Perceiver(**_PERCEIVER) | noise(2, 16, 16, 3)
  Perceiver, tied layers | perceiver_pytorch:Perceiver(weight_tie_layers=True, **_PERCEIVER) | noise(2,
      16, 16, 3)
  Perceiver, gated | perceiver_pytorch.gated:Perceiver(**_PERCEIVER) | noise(2, 16, 16, 3)
  Perceiver, mixed latents | perceiver_pytorch.mixed_latents:Perceiver(**_PERCEIVER) | noise(2, 16, 16,
      3)
  PerceiverLM | perceiver_pytorch.perceiver_io:PerceiverLM(num_tokens=60, max_seq_len=64, **_IO) |
      tokens()
  PerceiverIO, masked | perceiver_pytorch:PerceiverIO(queries_dim=24, **_IO) | noise(2, 40, 32),
      mask=given(MASK), queries=noise(9, 24)
linformer:
  Linformer | linformer:Linformer(32, 64, 2, k=16, heads=4) | noise(2, 64, 32)
  LinformerLM, one key head | linformer:LinformerLM(60, 32, 64, 2, k=16, heads=4, one_kv_head=True,
      share_kv=True) | tokens()
nystrom-attention:
  Nystromformer | nystrom_attention:Nystromformer(dim=32, depth=2, num_landmarks=8, **_SMALL) | noise(1,
      64, 32)
performer-pytorch:
  PerformerLM | performer_pytorch:PerformerLM(**_LOCAL_LM) | tokens()
  PerformerLM, local heads | performer_pytorch:PerformerLM(num_tokens=60, max_seq_len=64, dim=32,
      depth=2, heads=4, dim_head=16, local_attn_heads=2, local_window_size=16) | tokens()
slot-attention:
  SlotAttention | slot_attention:SlotAttention(num_slots=4, dim=32) | noise(2, 50, 32)
  MultiHeadSlotAttention | slot_attention:MultiHeadSlotAttention(num_slots=4, dim=32, **_SMALL) |
      noise(2, 50, 32)
local-attention:
  LocalAttention | local_attention:LocalAttention(16, causal=True, dim=16) | noise(2, 2, 64, 16),
      noise(2, 2, 64, 16), noise(2, 2, 64, 16)
  LocalAttention, both sides | local_attention:LocalAttention(16, look_forward=1, dim=16, autopad=True)
      | noise(2, 2, 60, 16), noise(2, 2, 60, 16), noise(2, 2, 60, 16)
  LocalMHA | local_attention.transformer:LocalMHA(dim=32, window_size=16, causal=True, qk_rmsnorm=True,
      prenorm=True, **_SMALL) | noise(2, 64, 32)
  LocalTransformer | local_attention.transformer:LocalTransformer(local_attn_window_size=16,
      **_LOCAL_LM) | tokens()
  LocalTransformer, learned bias |
      local_attention.transformer:LocalTransformer(local_attn_window_size=16, use_dynamic_pos_bias=True,
      **_LOCAL_LM) | tokens()
axial-attention:
  AxialAttention | axial_attention:AxialAttention(dim=16, heads=2, dim_index=1) | noise(2, 16, 12, 8)
  AxialImageTransformer | axial_attention:AxialImageTransformer(dim=16, depth=2, heads=2,
      reversible=False, axial_pos_emb_shape=(12, 8)) | noise(2, 16, 12, 8)
  AxialImageTransformer, reversible | axial_attention:AxialImageTransformer(dim=16, depth=2, heads=2) |
      noise(2, 16, 12, 8)
reformer-pytorch:
  ReformerLM | reformer_pytorch:ReformerLM(bucket_size=8, n_hashes=2, causal=True, **_LOCAL_LM) |
      tokens()
  ReformerLM, whole attention | reformer_pytorch:ReformerLM(bucket_size=8, use_full_attn=True,
      causal=True, **_LOCAL_LM) | tokens()
routing-transformer:
  RoutingTransformerLM | routing_transformer:RoutingTransformerLM(window_size=16, n_local_attn_heads=1,
      causal=True, **_LOCAL_LM) | tokens()
sinkhorn-transformer:
  SinkhornTransformerLM | sinkhorn_transformer:SinkhornTransformerLM(num_tokens=60, dim=32, depth=2,
      max_seq_len=64, heads=2, bucket_size=16, causal=True) | tokens()
  SinkhornTransformerLM, both sides | sinkhorn_transformer:SinkhornTransformerLM(num_tokens=60, dim=32,
      depth=2, max_seq_len=64, heads=2, bucket_size=16) | tokens()
CoLT5-attention:
  ConditionalRoutedTransformerBlock | colt5_attention:ConditionalRoutedTransformerBlock(32,
      num_heavy_attn_tokens_q=8, num_heavy_attn_tokens_kv=8, num_heavy_ff_tokens=8, light_dim_head=16,
      light_heads=2, light_window_size=16, heavy_dim_head=16, heavy_heads=2) | noise(2, 64, 32)
tab-transformer-pytorch:
  TabTransformer | tab_transformer_pytorch:TabTransformer(categories=(5, 4, 3, 6), num_continuous=3,
      dim=32, depth=2, heads=2, mlp_act=torch.nn:ReLU()) | ids((4, 4), 3), noise(4, 3)
  FTTransformer | tab_transformer_pytorch:FTTransformer(categories=(5, 4, 3, 6), num_continuous=3,
      dim=32, depth=2, heads=2) | ids((4, 4), 3), noise(4, 3)
rtdl_revisiting_models:
  FTTransformer | rtdl_revisiting_models:FTTransformer(n_cont_features=3, cat_cardinalities=[5, 4],
      d_out=2, n_blocks=2, d_block=32, attention_n_heads=4, attention_dropout=0.1, ffn_d_hidden=None,
      ffn_d_hidden_multiplier=1.5, ffn_dropout=0.0, residual_dropout=0.0) | noise(4, 3), ids((4, 2), 4)
  FTTransformer, compressed keys | rtdl_revisiting_models:FTTransformer(n_cont_features=9,
      cat_cardinalities=[5, 4], d_out=2, n_blocks=2, d_block=32, attention_n_heads=4,
      attention_dropout=0.1, ffn_d_hidden=None, ffn_d_hidden_multiplier=1.5, ffn_dropout=0.0,
      residual_dropout=0.0, linformer_kv_compression_ratio=0.5,
      linformer_kv_compression_sharing='headwise') | noise(4, 9), ids((4, 2), 4)
openai-whisper:
  Whisper | whisper.model:Whisper(whisper.model:ModelDimensions(**_WHISPER)) | noise(2, 16, 48), ids((2,
      10), 60)
  AudioEncoder | whisper.model:AudioEncoder(16, 24, 32, 2, 2) | noise(2, 16, 48)
  TextDecoder | whisper.model:TextDecoder(60, 64, 32, 2, 2) | ids((2, 10), 60), noise(2, 24, 32)
demucs:
  CrossTransformerEncoder | demucs.transformer:CrossTransformerEncoder(32, num_heads=2, num_layers=3) |
      noise(1, 32, 6, 9), noise(1, 32, 40)
  HTDemucs | demucs.htdemucs:HTDemucs(['a', 'b'], channels=8, nfft=512, t_layers=2, t_heads=2, depth=3,
      use_train_segment=False) | noise(1, 2, 8192)
  Demucs, local attention | demucs.demucs:Demucs(['a', 'b'], channels=8, depth=4, dconv_lstm=9,
      dconv_attn=2, dconv_mode=3, resample=False) | noise(1, 2, 4096)
open_clip_torch:
  CLIP | open_clip.model:CLIP(24, {'layers': 2, 'width': 32, 'head_width': 16, 'patch_size': 8,
      'image_size': 32}, {'context_length': 16, 'vocab_size': 60, 'width': 32, 'heads': 2, 'layers': 2})
      | image(), ids((2, 16), 60)
  CLIP, attentional pooling | open_clip.model:CLIP(32, {'layers': 2, 'width': 32, 'head_width': 16,
      'patch_size': 8, 'image_size': 32, 'attentional_pool': True, 'attn_pooler_queries': 4,
      'attn_pooler_heads': 2}, {'context_length': 16, 'vocab_size': 60, 'width': 32, 'heads': 2,
      'layers': 2}) | image(), ids((2, 16), 60)
  CLIP, scaled heads | open_clip.model:CLIP(24, {'layers': 2, 'width': 32, 'head_width': 16,
      'patch_size': 8, 'image_size': 32, 'scale_attn': True, 'scale_heads': True}, {'context_length':
      16, 'vocab_size': 60, 'width': 32, 'heads': 2, 'layers': 2, 'qk_norm': True}) | image(), ids((2,
      16), 60)
  CustomTextCLIP | open_clip.model:CustomTextCLIP(24, {'layers': 2, 'width': 32, 'head_width': 16,
      'patch_size': 8, 'image_size': 32}, {'context_length': 16, 'vocab_size': 60, 'width': 32, 'heads':
      2, 'layers': 2, 'embed_cls': True, 'pool_type': 'last'}) | image(), ids((2, 15), 60)
  CoCa | open_clip.coca_model:CoCa(32, {'context_length': 16, 'vocab_size': 60, 'width': 32, 'heads': 2,
      'layers': 2, 'attn_pooler_heads': 2, 'n_queries': 8}, {'context_length': 16, 'vocab_size': 60,
      'width': 32, 'heads': 2, 'layers': 2, 'embed_cls': True, 'output_tokens': True}, {'layers': 2,
      'width': 32, 'head_width': 16, 'patch_size': 8, 'image_size': 32, 'attentional_pool': True,
      'attn_pooler_heads': 2, 'attn_pooler_queries': 8, 'output_tokens': True}) | image(), ids((2, 15),
      60)
torchvision:
  VisionTransformer | torchvision.models:VisionTransformer(32, 8, 2, 2, 32, 64, num_classes=5) | image()
  SwinTransformer | torchvision.models:SwinTransformer(**_SWIN) | image()
  SwinTransformer V2 |
      torchvision.models:SwinTransformer(block=torchvision.models.swin_transformer:SwinTransformerBlockV2,
      downsample_layer=torchvision.models.swin_transformer:PatchMergingV2, **_SWIN) | image()
  MaxVit | torchvision.models:MaxVit((32, 32), 16, 4, [16, 32], [1, 1], 8, 0.0, num_classes=5) | image()
lightly:
  MaskedVisionTransformerTIMM |
      lightly.models.modules:MaskedVisionTransformerTIMM(timm.models.vision_transformer:VisionTransformer(img_size=32,
      patch_size=8, embed_dim=32, depth=2, num_heads=2, num_classes=0)) | image()
  MAEDecoderTIMM | lightly.models.modules:MAEDecoderTIMM(16, 8, embed_dim=32, decoder_embed_dim=32,
      decoder_depth=2, decoder_num_heads=2) | noise(2, 17, 32)
  MaskedVisionTransformerTorchvision |
      lightly.models.modules:MaskedVisionTransformerTorchvision(torchvision.models:VisionTransformer(32,
      8, 2, 2, 32, 64)) | image()
segmentation_models_pytorch:
  MAnet | segmentation_models_pytorch:MAnet('resnet18', encoder_depth=3, encoder_weights=None,
      decoder_channels=(16, 8, 8), decoder_pab_channels=8) | image()
  Segformer | segmentation_models_pytorch:Segformer('mit_b0', encoder_weights=None,
      decoder_segmentation_channels=16) | noise(1, 3, 64, 64)
  DPT | segmentation_models_pytorch:DPT('tu-vit_tiny_patch16_224', encoder_weights=None,
      dynamic_img_size=True, decoder_intermediate_channels=(8, 8, 8, 8), decoder_fusion_channels=8) |
      noise(1, 3, 64, 64)
torch-geometric:
  GPSConv | torch_geometric.nn:GPSConv(16, torch_geometric.nn:GCNConv(16, 16), heads=2) | noise(10, 16),
      given(EDGES), given((0, 0, 0, 0, 1, 1, 1, 1, 1, 1))
  GPSConv, performer | torch_geometric.nn:GPSConv(16, torch_geometric.nn:GCNConv(16, 16), heads=2,
      attn_type='performer') | noise(10, 16), given(EDGES), given((0, 0, 0, 0, 1, 1, 1, 1, 1, 1))
  SetTransformerAggregation | torch_geometric.nn:SetTransformerAggregation(16, 2, heads=2) | noise(10,
      16), given((0, 0, 0, 0, 1, 1, 1, 1, 1, 1))
  GraphMultisetTransformer | torch_geometric.nn:GraphMultisetTransformer(16, 3, heads=2) | noise(10,
      16), given((0, 0, 0, 0, 1, 1, 1, 1, 1, 1))
  QFormer | torch_geometric.nn.attention:QFormer(16, 16, 16, 2, 2) | noise(2, 10, 16)
  SGFormerAttention | torch_geometric.nn.attention:SGFormerAttention(16, 2, 8) | noise(2, 10, 16)
  PolynormerAttention | torch_geometric.nn.attention:PolynormerAttention(16, 2, 8) | noise(2, 10, 16)
  TransformerConv | torch_geometric.nn:TransformerConv(16, 8, heads=2) | noise(10, 16), given(EDGES)
  GATv2Conv | torch_geometric.nn:GATv2Conv(16, 8, heads=2) | noise(10, 16), given(EDGES)
litgpt:
  GPT, as Pythia | litgpt.model:GPT(litgpt.config:Config(**_LIT)) | tokens()
  GPT, as Llama | litgpt.model:GPT(litgpt.config:Config(n_query_groups=2, **_LIT, **_LLAMA)) | tokens()
  GPT, as Gemma 2 | litgpt.model:GPT(litgpt.config:Config(n_query_groups=2, sliding_window_size=16,
      sliding_window_indices=[1, 0], attention_logit_softcapping=50.0, final_logit_softcapping=30.0,
      post_attention_norm=True, post_mlp_norm=True, scale_embeddings=True, attention_scores_scalar=8,
      **_LIT, **_LLAMA)) | tokens()
  GPT, as Mixtral | litgpt.model:GPT(litgpt.config:Config(rotary_percentage=1.0,
      parallel_residual=False, bias=False, norm_class_name='RMSNorm', mlp_class_name='LLaMAMoE',
      intermediate_size=64, n_expert=4, n_expert_per_token=2, **_LIT)) | tokens()
  GPT, as Falcon | litgpt.model:GPT(litgpt.config:Config(n_query_groups=1, rotary_percentage=1.0,
      shared_attention_norm=True, bias=False, **_LIT)) | tokens()
isab-pytorch:
  ISAB | isab_pytorch:ISAB(dim=32, heads=2, num_latents=5) | noise(2, 40, 32)
halonet-pytorch:
  HaloAttention | halonet_pytorch:HaloAttention(dim=16, block_size=4, halo_size=2, dim_head=8, heads=2)
      | noise(1, 16, 8, 8)
bottleneck-transformer-pytorch:
  BottleStack, relative | bottleneck_transformer_pytorch:BottleStack(dim=16, fmap_size=8,
      rel_pos_emb=True, **_MAPS) | noise(2, 16, 8, 8)
  BottleStack, absolute | bottleneck_transformer_pytorch:BottleStack(dim=16, fmap_size=8, **_MAPS) |
      noise(2, 16, 8, 8)
lambda-networks:
  LambdaLayer | lambda_networks:LambdaLayer(dim=16, dim_out=16, n=8, dim_k=4, heads=2, dim_u=1) |
      noise(2, 16, 8, 8)
  LambdaLayer, local | lambda_networks:LambdaLayer(dim=16, dim_out=16, r=3, dim_k=4, heads=2, dim_u=2) |
      noise(2, 16, 8, 8)
bidirectional-cross-attention:
  BidirectionalCrossAttention | bidirectional_cross_attention:BidirectionalCrossAttention(dim=32,
      context_dim=24, **_SMALL) | noise(2, 40, 32), noise(2, 20, 24)
  BidirectionalCrossAttention, talking heads |
      bidirectional_cross_attention:BidirectionalCrossAttention(dim=32, context_dim=24,
      talking_heads=True, **_SMALL) | noise(2, 40, 32), noise(2, 20, 24)
conformer:
  Conformer | conformer:Conformer(dim=32, depth=2, conv_kernel_size=7, **_SMALL) | noise(2, 40, 32)
  Conformer, causal convolutions | conformer:Conformer(dim=32, depth=2, conv_kernel_size=7,
      conv_causal=True, **_SMALL) | noise(2, 40, 32)
memory-efficient-attention-pytorch:
  Attention | memory_efficient_attention_pytorch:Attention(dim=32, causal=True, **_SMALL) | noise(2, 64,
      32)
  Attention, in blocks | memory_efficient_attention_pytorch:Attention(dim=32, causal=True,
      memory_efficient=True, q_bucket_size=32, k_bucket_size=16, **_SMALL) | noise(2, 64, 32)
h-transformer-1d:
  HTransformer1D | h_transformer_1d:HTransformer1D(block_size=8, causal=False, **_LOCAL_LM) | tokens()
  HTransformer1D, causal | h_transformer_1d:HTransformer1D(block_size=8, causal=True, **_LOCAL_LM) |
      tokens()
feedback-transformer-pytorch:
  FeedbackTransformer | feedback_transformer_pytorch:FeedbackTransformer(num_tokens=60, dim=32, depth=2,
      seq_len=4, mem_len=8, **_SMALL) | ids((2, 8), 60, 3)
linear-attention-transformer:
  LinearAttentionTransformerLM | linear_attention_transformer:LinearAttentionTransformerLM(causal=True,
      **_LOCAL_LM) | tokens()
  LinearAttentionTransformerLM, local heads |
      linear_attention_transformer:LinearAttentionTransformerLM(n_local_attn_heads=1,
      local_attn_window_size=16, **_LOCAL_LM) | tokens()
hourglass-transformer-pytorch:
  HourglassTransformerLM | hourglass_transformer_pytorch:HourglassTransformerLM(shorten_factor=2,
      num_tokens=60, dim=32, depth=(1, 2, 1), max_seq_len=64, **_SMALL) | tokens()
boltz:
  TriangleAttention | boltz.model.layers.triangular_attention.attention:TriangleAttention(32, 16, 2) |
      noise(1, 24, 24, 32), mask=noise(1, 24, 24).gt(-1).float()
  TriangleAttention, ending | boltz.model.layers.triangular_attention.attention:TriangleAttention(32, 16,
      2, starting=False) | noise(1, 24, 24, 32), mask=noise(1, 24, 24).gt(-1).float()
  AttentionPairBias | boltz.model.layers.attention:AttentionPairBias(64, 32, 4) | noise(1, 24, 64),
      noise(1, 24, 24, 32), noise(1, 24).gt(-1).float()
  PairformerLayer | boltz.model.layers.pairformer:PairformerLayer(64, 32, 4, pairwise_head_width=16,
      pairwise_num_heads=2, v2=True) | noise(1, 24, 64), noise(1, 24, 24, 32), noise(1,
      24).gt(-1).float(), noise(1, 24, 24).gt(-1).float()
openfold3:
  TriangleAttention | openfold3.core.model.layers.triangular_attention:TriangleAttention(32, 16, 2) |
      noise(1, 24, 24, 32), mask=noise(1, 24, 24).gt(-1).float()
  AttentionPairBias | openfold3.core.model.layers.attention_pair_bias:AttentionPairBias(64, 64, 64, 64,
      32, 16, 4) | noise(1, 24, 64), noise(1, 24, 24, 32), mask=noise(1, 24).gt(-1).float()
"""


def _models() -> Iterator[Model]:
    package = ""
    for line in re.sub(r"\n {6}", " ", _LIST).strip().splitlines():
        if line.startswith(" "):
            name, made, arguments = map(str.strip, line.split(" | "))
            yield Model(package, name, made, arguments)
        else:
            package = line.removesuffix(":")


MODELS = tuple(_models())
