"""The Vision Transformer: an image as a sequence of patches (Dosovitskiy et al. 2021, section 3.1).

    x = [class; patch_1 E; ... patch_N E] + position          (equation 1)
    x = x + Attention(LayerNorm(x))                           (equation 2)
    x = x + MLP(LayerNorm(x))                                 (equation 3)
    logits = LayerNorm(x[0]) W_head                           (equation 4)

Patches are P x P squares, left to right and then down, each flattened and projected by E. Every
token sees every other; the head reads only the class token.

Shapes: images `[B, channels, height, width]`, logits `[B, classes]`; T = N + 1 with
N = height * width / P^2.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from attngraph.models.attention import AttentionConfig, MultiHeadAttention, require_multiple
from attngraph.models.decoder_lm import MLP
from attngraph.models.positions import LearnedPositions


@dataclass(frozen=True)
class ViTConfig:
    """Sizes of the model; the defaults are ViT-B/16 at 224 x 224.

    `image` is (height, width) in pixels, multiples of `patch`; `width` is C, a multiple of `heads`.
    Raises ValueError where they are not.
    """

    image: tuple[int, int] = (224, 224)
    patch: int = 16
    channels: int = 3
    classes: int = 1000
    layers: int = 12
    width: int = 768
    heads: int = 12
    hidden: int = 3072
    dropout: float = 0.0
    norm_epsilon: float = 1e-6

    def __post_init__(self) -> None:
        require_multiple(self.width, self.heads)
        if self.image[0] % self.patch != 0 or self.image[1] % self.patch != 0:
            raise ValueError(
                f"an image of {self.image[0]} x {self.image[1]} cannot be cut into patches of "
                f"{self.patch} x {self.patch}: both sides must be multiples of patch"
            )

    @property
    def patches(self) -> int:
        """N, the number of patches of an image."""
        return (self.image[0] // self.patch) * (self.image[1] // self.patch)

    @property
    def attention(self) -> AttentionConfig:
        """The sizes of the attention in each block."""
        return AttentionConfig.of_width(self.width, self.heads, dropout=self.dropout)


class PatchEmbedding(nn.Module):
    """Cut into patches and project each: `[B, channels, height, width]` to `[B, N, C]`.

    A convolution whose kernels neither overlap nor leave gaps is this product.
    """

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.project = nn.Conv2d(config.channels, config.width, config.patch, stride=config.patch)

    def forward(self, images: Tensor) -> Tensor:
        patches: Tensor = self.project(images)  # [B, C, height / P, width / P]
        return patches.flatten(2).transpose(1, 2)


class ViTBlock(nn.Module):
    """Attention, then MLP, each added to its input: `[B, T, C]` to `[B, T, C]`."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.width, eps=config.norm_epsilon)
        self.attention = MultiHeadAttention(config.attention)
        self.mlp_norm = nn.LayerNorm(config.width, eps=config.norm_epsilon)
        self.mlp = MLP(config.width, config.hidden, dropout=config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        x = x + self.mlp(self.mlp_norm(x))
        return x


class ViT(nn.Module):
    """Image classifier: images `[B, channels, height, width]` to logits `[B, classes]`.

    With `targets` int64 `[B]`, returns `(logits, loss)` with the mean cross entropy as a scalar.
    Raises ValueError for images of another size.
    """

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.config = config
        self.patch_embedding = PatchEmbedding(config)
        self.class_token = nn.Parameter(torch.zeros(config.width))
        self.positions = LearnedPositions(config.patches + 1, config.width)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList([ViTBlock(config) for _ in range(config.layers)])
        self.norm = nn.LayerNorm(config.width, eps=config.norm_epsilon)
        self.head = nn.Linear(config.width, config.classes)

    def forward(self, images: Tensor, targets: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        size = (images.shape[2], images.shape[3])
        if size != self.config.image:
            raise ValueError(
                f"the images are {size[0]} x {size[1]}, but the model has positions for "
                f"image={self.config.image}: configure that size"
            )
        patches = self.patch_embedding(images)  # [B, N, C]
        class_token = self.class_token.expand(images.shape[0], 1, -1)  # [B, 1, C]
        x = self.positions(torch.cat([class_token, patches], dim=1))  # [B, T, C]
        x = self.dropout(x)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x[:, 0]))  # [B, classes]
        if targets is None:
            return logits
        return logits, functional.cross_entropy(logits, targets)
