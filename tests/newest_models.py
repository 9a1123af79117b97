"""Small stand-ins for the newest kinds of models, with the call signatures, token orders and blocks
of their public code: several views with frame and global attention, a diffusion transformer at a
timestep, an encoder and its predictor, two decoders that read each other."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tests.small_vits import DIM, PATCH, SIDE, Attention, Embedding, blocks, feed_forward

HALF = (0.5, 0.5, 0.5)
SIZE = {"input_size": (3, SIDE, SIDE), "mean": HALF, "std": HALF}
CELLS = (SIDE // PATCH) ** 2


class ViewEmbedding(Embedding):
    """A small transformer of single views, of which the patches alone go on (VGGT: a DINOv2)."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = blocks(2)

    def forward(self, images: Tensor) -> Tensor:
        x = self.embed(images)
        for block in self.blocks:
            x = block(x)
        return self.last(x)[:, 1:]


class MultiView(nn.Module):
    """Views (scenes, views, 3, rows, cols): blocks within each view alternate with blocks over all
    views; each view has a camera token and registers, the first view others than the rest."""

    def __init__(self, depth: int = 2, n_registers: int = 2, embed: bool = False) -> None:
        super().__init__()
        self.patch_embed: nn.Module = (
            ViewEmbedding() if embed else nn.Conv2d(3, DIM, PATCH, PATCH)
        )
        self.camera_token = nn.Parameter(torch.randn(1, 2, 1, DIM))
        self.register_token = nn.Parameter(torch.randn(1, 2, n_registers, DIM))
        self.frame_blocks, self.global_blocks = blocks(depth), blocks(depth)

    def of_views(self, token: Tensor, n_scenes: int, n_views: int) -> Tensor:
        """(scenes x views, tokens, dim): one for the first view, another for all others."""
        first = token[:, :1].expand(n_scenes, 1, -1, -1)
        others = token[:, 1:].expand(n_scenes, n_views - 1, -1, -1)
        return torch.cat([first, others], 1).flatten(0, 1)

    def forward(self, views: Tensor) -> list[Tensor]:
        n_scenes, n_views = views.shape[:2]
        x = self.patch_embed(views.flatten(0, 1))
        x = x.flatten(2).transpose(1, 2) if x.ndim == 4 else x
        camera = self.of_views(self.camera_token, n_scenes, n_views)
        registers = self.of_views(self.register_token, n_scenes, n_views)
        x = torch.cat([camera, registers, x], 1)
        n_tokens = x.shape[1]
        outputs = []
        for frame, whole in zip(self.frame_blocks, self.global_blocks, strict=True):
            within = frame(x.reshape(n_scenes * n_views, n_tokens, DIM))
            x = whole(within.reshape(n_scenes, n_views * n_tokens, DIM))
            by_view = n_scenes, n_views, n_tokens, DIM
            outputs.append(torch.cat([within.view(by_view), x.view(by_view)], -1))
        return outputs


class DiffusionBlock(nn.Module):
    """x + gate * attention, x + gate * MLP, with shifts, scales and gates of the condition."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(DIM, elementwise_affine=False)
        self.norm2 = nn.LayerNorm(DIM, elementwise_affine=False)
        self.attn, self.mlp = Attention(), feed_forward()
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), nn.Linear(DIM, 6 * DIM))

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        shift_1, scale_1, gate_1, shift_2, scale_2, gate_2 = (
            chunk.unsqueeze(1)
            for chunk in self.adaLN_modulation(condition).chunk(6, dim=1)
        )
        x = x + gate_1 * self.attn(self.norm1(x) * (1 + scale_1) + shift_1)
        return x + gate_2 * self.mlp(self.norm2(x) * (1 + scale_2) + shift_2)


class DiffusionTransformer(nn.Module):
    """(latents, timesteps, labels) -> the noise, in the latents' shape."""

    def __init__(self, depth: int = 3, channels: int = 3) -> None:
        super().__init__()
        self.x_embedder = nn.Conv2d(channels, DIM, PATCH, PATCH)
        self.t_embedder = nn.Sequential(
            nn.Linear(16, DIM), nn.SiLU(), nn.Linear(DIM, DIM)
        )
        self.y_embedder = nn.Embedding(11, DIM)
        self.pos_embed = nn.Parameter(torch.randn(1, CELLS, DIM))
        self.blocks = nn.ModuleList(DiffusionBlock() for _ in range(depth))
        self.final = nn.Linear(DIM, PATCH * PATCH * channels)

    def forward(self, x: Tensor, t: Tensor, y: Tensor) -> Tensor:
        frequencies = torch.exp(-9.2 * torch.arange(8) / 8)
        angles = t[:, None].float() * frequencies
        waves = torch.cat([angles.cos(), angles.sin()], 1)
        condition = self.t_embedder(waves) + self.y_embedder(y)
        x = self.x_embedder(x).flatten(2).transpose(1, 2) + self.pos_embed
        for block in self.blocks:
            x = block(x, condition)
        return nn.functional.fold(
            self.final(x).transpose(1, 2), SIDE, PATCH, stride=PATCH
        )


class AtTimestep(nn.Module):
    """A diffusion transformer as a module of images: at one timestep, of no class, the noise of
    each image drawn from its own pixels so that no other image has a part in it."""

    def __init__(
        self, model: DiffusionTransformer, timestep: int, steps: int = 1000
    ) -> None:
        super().__init__()
        self.model, self.timestep = model, timestep
        self.register_buffer("noise", torch.randn(1, 3, SIDE, SIDE))
        self.kept = 1 - timestep / steps

    def forward(self, images: Tensor) -> Tensor:
        noisy = self.kept**0.5 * images + (1 - self.kept) ** 0.5 * self.noise
        timesteps = torch.full((len(images),), self.timestep, device=images.device)
        labels = torch.full((len(images),), 10, device=images.device)
        return self.model(noisy, timesteps, labels)


class VideoEncoder(nn.Module):
    """Clips (clips, channels, frames, rows, cols) in tubelets of two frames."""

    def __init__(self, depth: int = 2, num_frames: int = 4, masks: bool = False) -> None:
        super().__init__()
        self.patch_embed = nn.Conv3d(3, DIM, (2, PATCH, PATCH), (2, PATCH, PATCH))
        self.pos_embed = nn.Parameter(torch.randn(1, num_frames // 2 * CELLS, DIM))
        self.blocks, self.norm = blocks(depth), nn.LayerNorm(DIM)

    def forward(self, x: Tensor, masks: Any = None) -> Tensor:
        x = self.patch_embed(x).flatten(2).transpose(1, 2) + self.pos_embed
        for block in self.blocks:
            x = block(x)
        return self.norm(x)


class VideoPredictor(nn.Module):
    """What an encoder's tokens say of masked ones: no module of clips."""

    def __init__(self) -> None:
        super().__init__()
        self.predictor_embed, self.predictor_blocks = nn.Linear(DIM, DIM), blocks(2)

    def forward(self, x: Tensor, masks_x: Tensor, masks_y: Tensor) -> Tensor:
        x = self.predictor_embed(x)
        for block in self.predictor_blocks:
            x = block(x)
        return x


class CrossBlock(nn.Module):
    """Attention within a view, then to the tokens of the other, then an MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2, self.norm3, self.norm_y = (
            nn.LayerNorm(DIM) for _ in range(4)
        )
        self.attn, self.mlp = Attention(), feed_forward()
        self.cross_attn = nn.MultiheadAttention(DIM, 3, batch_first=True)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        x = x + self.attn(self.norm1(x))
        other = self.norm_y(y)
        x = x + self.cross_attn(self.norm2(x), other, other, need_weights=False)[0]
        return x + self.mlp(self.norm3(x)), y


class TwoViews(nn.Module):
    """One encoder for both views, and a decoder for each that reads the other (DUSt3R)."""

    def __init__(self, depth: int = 2) -> None:
        super().__init__()
        self.patch_embed = nn.Conv2d(3, DIM, PATCH, PATCH)
        self.enc_blocks, self.enc_norm = blocks(depth), nn.LayerNorm(DIM)
        self.dec_blocks = nn.ModuleList(CrossBlock() for _ in range(depth))
        self.dec_blocks2 = nn.ModuleList(CrossBlock() for _ in range(depth))

    def encode(self, images: Tensor) -> Tensor:
        x = self.patch_embed(images).flatten(2).transpose(1, 2)
        for block in self.enc_blocks:
            x = block(x)
        return self.enc_norm(x)

    def forward(
        self, view1: dict[str, Tensor], view2: dict[str, Tensor]
    ) -> tuple[Tensor, Tensor]:
        both = torch.cat([view1["img"], view2["img"]])
        one, two = self.encode(both).chunk(2)
        for first, second in zip(self.dec_blocks, self.dec_blocks2, strict=True):
            (one, _), (two, _) = first(one, two), second(two, one)
        return one, two


class EncoderAlone(nn.Module):
    """The encoder of such a model, as a module of images."""

    def __init__(self, model: TwoViews) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Tensor) -> Tensor:
        return self.model.encode(images)


class Pairs(nn.Module):
    """Such a model as one of clips of two frames."""

    def __init__(self, model: TwoViews) -> None:
        super().__init__()
        self.model = model

    def forward(self, pairs: Tensor) -> tuple[Tensor, Tensor]:
        return self.model({"img": pairs[:, 0]}, {"img": pairs[:, 1]})
