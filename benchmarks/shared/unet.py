"""A UNet like that of latent diffusion models, in plain PyTorch, with about 400 M parameters."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTHS = (320, 640, 1280)
TEXT = 768
HEADS = 8


class Residual(nn.Module):
    """Two convolutions, with the time embedding added between them."""

    def __init__(self, into: int, out: int, time: int) -> None:
        super().__init__()
        self.norm1, self.conv1 = nn.GroupNorm(32, into), nn.Conv2d(into, out, 3, padding=1)
        self.norm2, self.conv2 = nn.GroupNorm(32, out), nn.Conv2d(out, out, 3, padding=1)
        self.time = nn.Linear(time, out)
        self.skip = nn.Conv2d(into, out, 1) if into != out else nn.Identity()

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        y = self.conv1(F.silu(self.norm1(x)))
        y = y + self.time(F.silu(time))[:, :, None, None]
        return self.skip(x) + self.conv2(F.silu(self.norm2(y)))


class Attention(nn.Module):
    """Self-attention over an image, or cross-attention to a text."""

    def __init__(self, width: int, source: int) -> None:
        super().__init__()
        self.q = nn.Linear(width, width, bias=False)
        self.k = nn.Linear(source, width, bias=False)
        self.v = nn.Linear(source, width, bias=False)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor, source: Tensor) -> Tensor:
        q, k, v = (self._heads(y) for y in (self.q(x), self.k(source), self.v(source)))
        mixed = F.scaled_dot_product_attention(q, k, v)
        return self.out(mixed.transpose(1, 2).flatten(2))

    def _heads(self, y: Tensor) -> Tensor:
        return y.unflatten(2, (HEADS, -1)).transpose(1, 2)


class Transformer(nn.Module):
    """Self-attention, cross-attention and a gated layer, over the pixels."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(32, width)
        self.into, self.out = nn.Conv2d(width, width, 1), nn.Conv2d(width, width, 1)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(3))
        self.own, self.cross = Attention(width, width), Attention(width, TEXT)
        self.up, self.down = nn.Linear(width, 8 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor, text: Tensor) -> Tensor:
        height = x.shape[2]
        y = self.into(self.norm(x)).flatten(2).transpose(1, 2)
        z = self.norms[0](y)
        y = y + self.own(z, z)
        y = y + self.cross(self.norms[1](y), text)
        value, gate = self.up(self.norms[2](y)).chunk(2, dim=-1)
        y = y + self.down(value * F.gelu(gate))
        return x + self.out(y.transpose(1, 2).unflatten(2, (height, -1)))


class UNet(nn.Module):
    """Predict the noise from a noisy latent, the time and a text."""

    def __init__(self) -> None:
        super().__init__()
        time = 4 * WIDTHS[0]
        self.time1, self.time2 = nn.Linear(WIDTHS[0], time), nn.Linear(time, time)
        self.entry = nn.Conv2d(4, WIDTHS[0], 3, padding=1)
        pairs = list(zip((WIDTHS[0], *WIDTHS[:-1]), WIDTHS, strict=True))
        self.down = nn.ModuleList(Residual(a, b, time) for a, b in pairs)
        self.down_mix = nn.ModuleList(Transformer(b) for _, b in pairs)
        self.shrink = nn.ModuleList(nn.Conv2d(b, b, 3, stride=2, padding=1) for _, b in pairs[:-1])
        self.middle, self.middle_mix = Residual(WIDTHS[-1], WIDTHS[-1], time), Transformer(WIDTHS[-1])
        self.up = nn.ModuleList(Residual(2 * b, a, time) for a, b in reversed(pairs))
        self.up_mix = nn.ModuleList(Transformer(a) for a, _ in reversed(pairs))
        self.grow = nn.ModuleList(nn.Conv2d(a, a, 3, padding=1) for a, _ in list(reversed(pairs))[:-1])
        self.norm, self.exit = nn.GroupNorm(32, WIDTHS[0]), nn.Conv2d(WIDTHS[0], 4, 3, padding=1)

    def forward(self, sample: Tensor, timestep: Tensor, text: Tensor) -> Tensor:
        phases = _phases(timestep, WIDTHS[0]).to(self.time1.weight.dtype)  # angles are always float32
        time = self.time2(F.silu(self.time1(phases)))
        x = self.entry(sample)
        skips = []
        for i, (residual, mix) in enumerate(zip(self.down, self.down_mix, strict=True)):
            x = mix(residual(x, time), text)
            skips.append(x)
            if i < len(self.shrink):
                x = self.shrink[i](x)
        x = self.middle_mix(self.middle(x, time), text)
        for i, (residual, mix) in enumerate(zip(self.up, self.up_mix, strict=True)):
            x = mix(residual(torch.cat((x, skips.pop()), dim=1), time), text)
            if i < len(self.grow):
                x = self.grow[i](F.interpolate(x, scale_factor=2.0, mode="nearest"))
        return self.exit(F.silu(self.norm(x)))


def _phases(timestep: Tensor, width: int) -> Tensor:
    """Return sines and cosines of the time, at frequencies from 1 to 1/10000."""
    frequencies = torch.exp(-math.log(10000.0) * torch.arange(width // 2, device=timestep.device) / (width // 2))
    angles = timestep[:, None] * frequencies[None]
    return torch.cat((torch.cos(angles), torch.sin(angles)), dim=-1)
