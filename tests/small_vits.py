"""Small transformers of images whose blocks run in other orders than they stand in: alternating
lists, a list from its end, a U-shape, two towers, an encoder behind its decoder."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

DIM, HEADS, SIDE, PATCH = 24, 3, 32, 8
N_CELLS = (SIDE // PATCH) ** 2


class Attention(nn.Module):
    """Attention of every token to every token."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(DIM, 3 * DIM)
        self.out = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.heads(x)
        mixed = functional.scaled_dot_product_attention(query, key, value)
        return self.out(mixed.transpose(1, 2).flatten(2))

    def heads(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values (images, heads, tokens, dim)."""
        by_head = self.qkv(x).unflatten(2, (3, HEADS, DIM // HEADS))
        query, key, value = by_head.permute(2, 0, 3, 1, 4)
        return query, key, value

    def probabilities(self, x: Tensor) -> Tensor:
        """The softmax of the scores, (images, heads, tokens, tokens)."""
        query, key, _ = self.heads(x)
        return (query @ key.transpose(2, 3) / (DIM // HEADS) ** 0.5).softmax(-1)


def feed_forward() -> nn.Sequential:
    return nn.Sequential(nn.Linear(DIM, 2 * DIM), nn.GELU(), nn.Linear(2 * DIM, DIM))


class Block(nn.Module):
    """x + attention, x + MLP, with norms before each."""

    def __init__(self) -> None:
        super().__init__()
        self.before_attention, self.before_mlp = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.attention, self.feed_forward = Attention(), feed_forward()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.before_attention(x))
        return x + self.feed_forward(self.before_mlp(x))

    def probabilities(self, x: Tensor) -> Tensor:
        """The attention of this block for what enters it."""
        return self.attention.probabilities(self.before_attention(x))


def blocks(n: int) -> nn.ModuleList:
    return nn.ModuleList(Block() for _ in range(n))


class Embedding(nn.Module):
    """Patches and a class token, with positions; the model's last norm."""

    def __init__(self) -> None:
        super().__init__()
        self.cut = nn.Conv2d(3, DIM, PATCH, PATCH)
        self.cls_token = nn.Parameter(torch.randn(1, 1, DIM))
        self.positions = nn.Parameter(0.3 * torch.randn(1, N_CELLS + 1, DIM))
        self.last = nn.LayerNorm(DIM)

    def embed(self, images: Tensor) -> Tensor:
        cells = self.cut(images).flatten(2).transpose(1, 2)
        return (
            torch.cat([self.cls_token.expand(len(cells), -1, -1), cells], 1)
            + self.positions
        )


class Alternating(Embedding):
    """frame 0, whole 0, frame 1, whole 1, ... as in VGGT's aggregator."""

    def __init__(self, depth: int = 3) -> None:
        super().__init__()
        self.frame_blocks, self.global_blocks = blocks(depth), blocks(depth)

    def forward(self, images: Tensor) -> Tensor:
        x = self.embed(images)
        for block in self.in_order():
            x = block(x)
        return self.last(x)

    def in_order(self) -> list[nn.Module]:
        pairs = zip(self.frame_blocks, self.global_blocks, strict=True)
        return [block for pair in pairs for block in pair]


class FromTheEnd(Embedding):
    """The blocks of one list, the last one first."""

    def __init__(self, depth: int = 3) -> None:
        super().__init__()
        self.blocks = blocks(depth)

    def forward(self, images: Tensor) -> Tensor:
        x = self.embed(images)
        for block in self.in_order():
            x = block(x)
        return self.last(x)

    def in_order(self) -> list[nn.Module]:
        return list(self.blocks)[::-1]


class OnAnotherModel(Embedding):
    """Alternating blocks behind a smaller transformer that embeds the patches."""

    def __init__(self, depth: int = 3) -> None:
        super().__init__()
        self.patch_embed = FromTheEnd(2)
        self.frame_blocks, self.global_blocks = blocks(depth), blocks(depth)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patch_embed(images)
        for frame, whole in zip(self.frame_blocks, self.global_blocks, strict=True):
            x = whole(frame(x))
        return self.last(x)


class UShape(Embedding):
    """Blocks down, one in the middle, and blocks up that also take what came out on the way down,
    as in U-ViT."""

    def __init__(self, depth: int = 2) -> None:
        super().__init__()
        self.in_blocks, self.mid_block, self.out_blocks = (
            blocks(depth),
            Block(),
            blocks(depth),
        )
        self.joints = nn.ModuleList(nn.Linear(2 * DIM, DIM) for _ in range(depth))

    def forward(self, images: Tensor) -> Tensor:
        x = self.embed(images)
        kept = []
        for block in self.in_blocks:
            x = block(x)
            kept.append(x)
        x = self.mid_block(x)
        for block, joint in zip(self.out_blocks, self.joints, strict=True):
            x = block(joint(torch.cat([x, kept.pop()], -1)))
        return self.last(x)


class JoiningBlock(Block):
    """A block that takes what came out on the way down itself."""

    def __init__(self) -> None:
        super().__init__()
        self.joint = nn.Linear(2 * DIM, DIM)

    def forward(self, x: Tensor, other: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(self.joint(torch.cat([x, other], -1)))


class UShapeInside(UShape):
    """The same with the joints inside the blocks on the way up."""

    def __init__(self, depth: int = 2) -> None:
        super().__init__(depth)
        self.out_blocks = nn.ModuleList(JoiningBlock() for _ in range(depth))

    def forward(self, images: Tensor) -> Tensor:
        x = self.embed(images)
        kept = []
        for block in self.in_blocks:
            x = block(x)
            kept.append(x)
        x = self.mid_block(x)
        for block in self.out_blocks:
            x = block(x, kept.pop())
        return self.last(x)


class Towers(Embedding):
    """Two lists that both begin at the patches, and are added in the end."""

    def __init__(self, depth: int = 2) -> None:
        super().__init__()
        self.left, self.right = blocks(depth), blocks(depth)

    def forward(self, images: Tensor) -> Tensor:
        x = y = self.embed(images)
        for block in self.left:
            x = block(x)
        for block in self.right:
            y = block(y)
        return self.last(x + y)


class Reading(nn.Module):
    """A block that also takes what another tower gave."""

    def __init__(self) -> None:
        super().__init__()
        self.own, self.join = Block(), nn.Linear(DIM, DIM)

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        return self.own(x + self.join(memory))


class DecoderFirst(Embedding):
    """An encoder that stands behind the decoder which reads what it gives."""

    def __init__(self, depth: int = 2) -> None:
        super().__init__()
        self.decoder = nn.ModuleList(Reading() for _ in range(depth))
        self.encoder = blocks(depth)

    def forward(self, images: Tensor) -> Tensor:
        x = y = self.embed(images)
        for block in self.encoder:
            x = block(x)
        for block in self.decoder:
            y = block(y, x)
        return self.last(y)


class Repeated(Embedding):
    """Blocks of a list in a given order, each as often as it stands there."""

    def __init__(self, order: tuple[int, ...] = (0, 1, 2, 1)) -> None:
        super().__init__()
        self.blocks, self.order = blocks(max(order) + 1), order

    def forward(self, images: Tensor) -> Tensor:
        x = self.embed(images)
        for number in self.order:
            x = self.blocks[number](x)
        return self.last(x)
