"""Networks with problems only at real lengths: retention, linear attention, forecasts, tags, sound, rays, means."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Retention(nn.Module):
    """RetNet's parallel form: scores times powers of a decay per head, divided by the sum of their magnitudes."""

    def __init__(self, width: int, heads: int, length: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(3))
        self.gate, self.out = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.norm = nn.LayerNorm(width)
        decay = torch.log(1 - 2.0 ** (-5 - torch.arange(heads).float()))
        apart = torch.arange(length)[:, None] - torch.arange(length)[None]
        weights = torch.where(apart >= 0, torch.exp(decay[:, None, None] * apart.clamp(min=0)), 0.0)
        self.register_buffer("decay", weights / weights.sum(-1, keepdim=True).sqrt())

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        q, k, v = (layer(y).unflatten(2, (self.heads, -1)).transpose(1, 2) for layer in self.qkv)
        scores = q @ k.transpose(2, 3) * q.shape[-1] ** -0.5 * self.decay
        scores = scores / scores.detach().abs().sum(-1, keepdim=True).clamp(min=1, max=5e4)
        mixed = F.layer_norm((scores @ v).transpose(1, 2), (q.shape[-1],)).flatten(2)
        return x + self.out(F.silu(self.gate(y)) * mixed)


class LinearAttention(nn.Module):
    """Linear attention: positive features, summed over all keys before the queries read them."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.ModuleList(nn.Linear(width, width) for _ in range(3))
        self.out, self.norm = nn.Linear(width, width), nn.LayerNorm(width)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = (layer(self.norm(x)).unflatten(2, (self.heads, -1)).transpose(1, 2) for layer in self.qkv)
        q, k = F.elu(q) + 1, (F.elu(k) + 1) * mask[:, None, :, None]
        seen = k.transpose(2, 3) @ v
        total = (q * k.sum(2, keepdim=True)).sum(-1, keepdim=True) + 1e-6
        return x + self.out(((q @ seen) / total).transpose(1, 2).flatten(2))


class Forecast(nn.Module):
    """N-BEATS: each block explains a part of the past and passes the rest on, at the scale of the data."""

    def __init__(self, past: int, future: int, width: int, blocks: int = 6) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.ModuleList((nn.Linear(past, width), nn.Linear(width, width))) for _ in range(blocks)
        )
        self.back = nn.ModuleList(nn.Linear(width, past) for _ in range(blocks))
        self.ahead = nn.ModuleList(nn.Linear(width, future) for _ in range(blocks))

    def forward(self, series: Tensor) -> Tensor:
        level, scale = series.mean(1, keepdim=True), series.std(1, keepdim=True) + 1e-5
        rest, forecast = (series - level) / scale, torch.zeros(1)
        for layers, back, ahead in zip(self.layers, self.back, self.ahead, strict=True):
            hidden = rest
            for layer in layers:
                hidden = F.relu(layer(hidden))
            rest, forecast = rest - back(hidden), forecast + ahead(hidden)
        return forecast * scale + level


class Tagger(nn.Module):
    """A tagger: scores from convolutions, and the best path by Viterbi's recursion."""

    def __init__(self, width: int, tags: int) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv1d(width, width, 5, padding=2), nn.Linear(width, tags)
        self.step = nn.Parameter(torch.randn(tags, tags))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        scores = self.head(F.relu(self.conv(x.transpose(1, 2))).transpose(1, 2))
        best = scores[:, 0]
        for i in range(1, scores.shape[1]):
            best = (best[:, :, None] + self.step).max(1).values + scores[:, i]
        return best, best.argmax(-1)


class Sound(nn.Module):
    """Normalized log-mel features of a waveform, by convolution with sines, and strided convolutions."""

    def __init__(self, window: int = 400, hop: int = 160, bins: int = 80, width: int = 256) -> None:
        super().__init__()
        self.hop, self.half = hop, window // 2 + 1
        waves = torch.arange(self.half)[:, None] * torch.arange(window)[None] * (2 * math.pi / window)
        taper = torch.hann_window(window)
        self.register_buffer("waves", torch.cat((waves.cos() * taper, waves.sin() * taper))[:, None])
        peaks = torch.linspace(0, self.half - 1, bins + 2)
        rise = (torch.arange(self.half)[None] - peaks[:-2, None]) / (peaks[1:-1] - peaks[:-2])[:, None]
        fall = (peaks[2:, None] - torch.arange(self.half)[None]) / (peaks[2:] - peaks[1:-1])[:, None]
        self.register_buffer("mel", torch.minimum(rise, fall).clamp(min=0) * 0.01)
        self.convs = nn.ModuleList((nn.Conv1d(bins, width, 3, 2, 1), nn.Conv1d(width, width, 3, 2, 1)))
        self.head = nn.Linear(width, 40)

    def forward(self, wave: Tensor) -> Tensor:
        real, imaginary = F.conv1d(wave[:, None], self.waves, stride=self.hop).split(self.half, 1)
        power = self.mel @ (real.square() + imaginary.square())
        x = torch.clamp(power, min=1e-10).log10()
        x = (torch.maximum(x, x.amax((1, 2), keepdim=True) - 8) + 4) / 4
        for conv in self.convs:
            x = F.gelu(conv(x))
        return self.head(x.mean(2))


class Rays(nn.Module):
    """A radiance field: sines of positions at octaves, a network, colors summed along rays by transmittance."""

    def __init__(self, width: int = 256, octaves: int = 10) -> None:
        super().__init__()
        self.register_buffer("octaves", 2.0 ** torch.arange(octaves) * math.pi)
        self.layers = nn.ModuleList((nn.Linear(6 * octaves + 3, width), nn.Linear(width, width), nn.Linear(width, 4)))

    def forward(self, start: Tensor, direction: Tensor, depth: Tensor) -> Tensor:
        places = start[:, None] + direction[:, None] * depth[..., None]
        angles = (places[..., None] * self.octaves).flatten(2)
        x = torch.cat((places, angles.sin(), angles.cos()), -1)
        for layer in self.layers[:-1]:
            x = F.relu(layer(x))
        found = self.layers[-1](x)
        steps = F.pad(depth[:, 1:] - depth[:, :-1], (0, 1), value=0.1)
        dense = F.relu(found[..., 3]) * steps
        weights = torch.exp(dense - dense.cumsum(1)) * (1 - torch.exp(-dense))
        return (weights[..., None] * found[..., :3].sigmoid()).sum(1)


class Embeddings(nn.Module):
    """Masked means over tokens on the unit sphere, and their similarities divided by a temperature."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList((nn.Linear(width, 4 * width), nn.Linear(4 * width, width)))
        self.norm = nn.LayerNorm(width)

    def forward(self, tokens: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        x = self.norm(tokens + self.layers[1](F.gelu(self.layers[0](tokens))))
        shown = mask[..., None].float()
        mean = (x * shown).sum(1) / shown.sum(1).clamp(min=1e-9)
        unit = F.normalize(mean, dim=-1)
        return unit, (unit @ unit.transpose(0, 1) / 0.05).softmax(-1)
