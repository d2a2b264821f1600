"""PyTorch networks not found in model libraries: generators, diffusion, video, sound, graphs, detection."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.architectures.architecture import Architecture, Built, livened, seed_of


class Generator(nn.Module):
    """A DCGAN generator: transposed convolutions, BatchNormalization, tanh."""

    def __init__(self) -> None:
        super().__init__()
        widths = (32, 32, 16, 8)
        layers: list[nn.Module] = [nn.ConvTranspose2d(16, widths[0], 4)]
        for a, b in itertools.pairwise(widths):
            layers += [nn.BatchNorm2d(a), nn.ReLU(), nn.ConvTranspose2d(a, b, 4, 2, 1)]
        self.layers = nn.Sequential(*layers, nn.BatchNorm2d(8), nn.ReLU(), nn.ConvTranspose2d(8, 3, 4, 2, 1), nn.Tanh())

    def forward(self, noise: Tensor) -> Tensor:
        return self.layers(noise[:, :, None, None])


class Modulated(nn.Module):
    """StyleGAN2's convolution: weights scaled by a style, then divided by their norm, one group per image."""

    def __init__(self, into: int, out: int, style: int) -> None:
        super().__init__()
        self.style = nn.Linear(style, into)
        self.weight = nn.Parameter(torch.randn(out, into, 3, 3))
        self.noise = nn.Parameter(torch.full((), 0.1))

    def forward(self, x: Tensor, w: Tensor, noise: Tensor) -> Tensor:
        rows, channels, height, width = x.shape
        weight = self.weight[None] * (self.style(w) + 1)[:, None, :, None, None]
        weight = weight * torch.rsqrt(weight.square().sum((2, 3, 4), keepdim=True) + 1e-8)
        grouped = x.reshape(1, rows * channels, height, width)
        y = F.conv2d(grouped, weight.flatten(0, 1), padding=1, groups=rows).reshape(rows, -1, height, width)
        return F.leaky_relu(y + self.noise * noise, 0.2) * math.sqrt(2)


class StyleGenerator(nn.Module):
    """A mapping network with pixel norm, and three modulated convolutions with upsampling between."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        style = max(width, 32)
        self.mapping = nn.ModuleList(nn.Linear(style, style) for _ in range(4))
        self.start = nn.Parameter(torch.randn(1, width, 4, 4))
        self.blocks = nn.ModuleList(Modulated(width, width, style) for _ in range(3))
        self.image = nn.Conv2d(width, 3, 1)

    def forward(self, z: Tensor, noise: Tensor) -> Tensor:
        w = z * torch.rsqrt(z.square().mean(1, keepdim=True) + 1e-8)
        for layer in self.mapping:
            w = F.leaky_relu(layer(w), 0.2)
        x = self.start.expand(z.shape[0], -1, -1, -1)
        for block in self.blocks:
            x = block(x, w, noise[:, :, : x.shape[2], : x.shape[3]])
            x = F.interpolate(x, scale_factor=2.0, mode="bilinear", align_corners=False)
        return self.image(x)


class Decoder(nn.Module):
    """The decoder of an image autoencoder, as in latent diffusion: group norms, attention, upsampling."""

    def __init__(self, width: int = 32, groups: int = 8) -> None:
        super().__init__()
        self.entry = nn.Conv2d(4, width, 3, padding=1)
        self.norms = nn.ModuleList(nn.GroupNorm(groups, width) for _ in range(4))
        self.convs = nn.ModuleList(nn.Conv2d(width, width, 3, padding=1) for _ in range(4))
        self.mix_norm, self.qkv = nn.GroupNorm(groups, width), nn.Conv2d(width, 3 * width, 1)
        self.out, self.exit = nn.Conv2d(width, width, 1), nn.Conv2d(width, 3, 3, padding=1)

    def forward(self, latent: Tensor) -> Tensor:
        x = self.entry(latent / 0.18215)
        q, k, v = (y.flatten(2).transpose(1, 2) for y in self.qkv(self.mix_norm(x)).chunk(3, dim=1))
        mixed = F.scaled_dot_product_attention(q[:, None], k[:, None], v[:, None])[:, 0]
        x = x + self.out(mixed.transpose(1, 2).reshape(x.shape))
        for i, (norm, conv) in enumerate(zip(self.norms, self.convs, strict=True)):
            x = x + conv(F.silu(norm(x)))
            if i % 2:
                x = F.interpolate(x, scale_factor=2.0, mode="nearest")
        return ((self.exit(F.silu(x)) / 2 + 0.5).clamp(0, 1) * 255).round()


class DiffusionTransformer(nn.Module):
    """DiT: patches, sines of the time step, adaptive LayerNormalization without an affine part, gates."""

    def __init__(self, width: int = 32, heads: int = 4, side: int = 16) -> None:
        super().__init__()
        self.width, self.heads, self.side = width, heads, side
        self.patch = nn.Conv2d(4, width, 2, 2)
        self.place = nn.Parameter(torch.randn(1, (side // 2) ** 2, width) * 0.1)
        self.time1, self.time2, self.label = nn.Linear(32, width), nn.Linear(width, width), nn.Embedding(10, width)
        self.tune = nn.ModuleList(nn.Linear(width, 6 * width) for _ in range(2))
        self.qkv = nn.ModuleList(nn.Linear(width, 3 * width) for _ in range(2))
        self.out = nn.ModuleList(nn.Linear(width, width) for _ in range(2))
        self.up = nn.ModuleList(nn.Linear(width, 4 * width) for _ in range(2))
        self.down = nn.ModuleList(nn.Linear(4 * width, width) for _ in range(2))
        self.last = nn.Linear(width, 16)

    def forward(self, latent: Tensor, timestep: Tensor, label: Tensor) -> Tensor:
        frequencies = torch.exp(-math.log(10000.0) * torch.arange(16) / 16)
        angles = timestep[:, None].float() * frequencies[None]
        time = self.time2(F.silu(self.time1(torch.cat((angles.cos(), angles.sin()), dim=-1))))
        condition = F.silu(time + self.label(label))
        x = self.patch(latent).flatten(2).transpose(1, 2) + self.place
        norm = (self.width,)
        for i in range(2):
            a, b, c, d, e, f = self.tune[i](condition)[:, None].chunk(6, dim=-1)
            y = F.layer_norm(x, norm, eps=1e-6) * (1 + b) + a
            q, k, v = (t.unflatten(2, (self.heads, -1)).transpose(1, 2) for t in self.qkv[i](y).chunk(3, dim=-1))
            x = x + c * self.out[i](F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
            y = F.layer_norm(x, norm, eps=1e-6) * (1 + e) + d
            x = x + f * self.down[i](F.gelu(self.up[i](y), approximate="tanh"))
        half = self.side // 2
        y = self.last(F.layer_norm(x, norm, eps=1e-6)).reshape(-1, half, half, 2, 2, 4)
        return y.permute(0, 5, 1, 3, 2, 4).reshape(-1, 4, self.side, self.side)


class SmallUNet(nn.Module):
    """A segmentation U-Net: transposed convolutions, skips, instance norms, a bilinear head."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList(nn.Conv2d(a, b, 3, padding=1) for a, b in ((3, 8), (8, 16), (16, 32)))
        self.norms = nn.ModuleList(nn.InstanceNorm2d(n, affine=True) for n in (8, 16, 32))
        self.up = nn.ModuleList(nn.ConvTranspose2d(a, b, 2, 2) for a, b in ((32, 16), (16, 8)))
        self.join = nn.ModuleList(nn.Conv2d(a, b, 3, padding=1) for a, b in ((32, 16), (16, 8)))
        self.exit = nn.Conv2d(8, 4, 1)

    def forward(self, image: Tensor) -> tuple[Tensor, Tensor]:
        x, kept = image, []
        for i, (conv, norm) in enumerate(zip(self.down, self.norms, strict=True)):
            x = F.leaky_relu(norm(conv(x)), 0.01)
            if i < 2:
                kept.append(x)
                x = F.max_pool2d(x, 2)
        for up, join in zip(self.up, self.join, strict=True):
            x = F.relu(join(torch.cat((up(x), kept.pop()), dim=1)))
        scores = F.interpolate(self.exit(x), size=(96, 96), mode="bilinear", align_corners=True)
        return scores, scores.argmax(1)


class Video(nn.Module):
    """3-D convolutions, BatchNormalization, pooling over time and place."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv3d(3, 8, 3, padding=1), nn.BatchNorm3d(8)
        self.conv2, self.norm2 = nn.Conv3d(8, 16, (3, 1, 1), padding=(1, 0, 0)), nn.BatchNorm3d(16)
        self.conv3 = nn.Conv3d(16, 16, (1, 3, 3), padding=(0, 1, 1))
        self.head = nn.Linear(16, 5)

    def forward(self, clip: Tensor) -> Tensor:
        x = F.max_pool3d(F.relu(self.norm1(self.conv1(clip))), 2)
        x = F.relu(self.norm2(self.conv2(x)))
        x = F.avg_pool3d(F.relu(self.conv3(x)), 2)
        return self.head(F.adaptive_avg_pool3d(x, 1).flatten(1)).softmax(-1)


class Temporal(nn.Module):
    """A TCN: dilated causal convolutions with residuals over a sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.entry = nn.Conv1d(8, 16, 1)
        self.convs = nn.ModuleList(nn.Conv1d(16, 16, 3, dilation=2**i) for i in range(4))
        self.head = nn.Linear(16, 3)

    def forward(self, series: Tensor) -> Tensor:
        x = self.entry(series)
        for i, conv in enumerate(self.convs):
            x = x + F.relu(conv(F.pad(x, (2 * 2**i, 0))))
        return self.head(x.transpose(1, 2))


class Speech(nn.Module):
    """Log-mel features, two strided convolutions, a bidirectional GRU, an LSTM, CTC scores."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 8, 3, 2, 1), nn.Conv2d(8, 8, 3, 2, 1)
        self.gru = nn.GRU(8 * 10, 16, bidirectional=True, batch_first=True)
        self.lstm = nn.LSTM(32, 16, batch_first=True)
        self.head = nn.Linear(16, 29)

    def forward(self, power: Tensor) -> tuple[Tensor, Tensor]:
        x = torch.log(power.clamp(min=1e-10))
        x = (x - x.mean((1, 2), keepdim=True)) / (x.std((1, 2), keepdim=True) + 1e-5)
        x = F.relu(self.conv2(F.relu(self.conv1(x[:, None]))))
        x, _ = self.gru(x.permute(0, 3, 1, 2).flatten(2))
        x, _ = self.lstm(x)
        scores = self.head(x).log_softmax(-1)
        return scores, scores.argmax(-1)


class Graph(nn.Module):
    """Two rounds of attention over the edges of a graph, sums scattered to the nodes, mean over the graph."""

    def __init__(self, into: int = 8, width: int = 16) -> None:
        super().__init__()
        self.into, self.edge = nn.Linear(into, width), nn.ModuleList(nn.Linear(2 * width, 1) for _ in range(2))
        self.pass_on = nn.ModuleList(nn.Linear(width, width) for _ in range(2))
        self.head = nn.Linear(width, 3)

    def forward(self, features: Tensor, edges: Tensor) -> Tensor:
        x = self.into(features)
        source, target = edges[0], edges[1]
        for score, move in zip(self.edge, self.pass_on, strict=True):
            weight = F.leaky_relu(score(torch.cat((x[source], x[target]), dim=-1)), 0.2).exp()
            zero = torch.zeros(x.shape[0], 1)
            total = zero.index_add(0, target, weight)
            degree = zero.index_add(0, target, torch.ones_like(weight))
            summed = torch.zeros_like(x).index_add(0, target, weight * move(x)[source])
            x = x + F.relu(summed / (total + 1e-12)) / (degree + 1).sqrt()
        return self.head(x.mean(0))


class Recommender(nn.Module):
    """DLRM: logarithms of counts, tables of ids, the sum of a history's rows, all inner products, a click's chance.

    It also returns the counts, like models that are served with their features.
    """

    def __init__(self, counts: int = 5, tables: int = 6, rows: int = 100, width: int = 16, hidden: int = 32) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(rows, width) for _ in range(tables))
        self.history = nn.Embedding(rows, width)
        self.bottom = nn.ModuleList((nn.Linear(counts, hidden), nn.Linear(hidden, width)))
        pairs = (tables + 2) * (tables + 1) // 2
        self.top = nn.ModuleList((nn.Linear(pairs + width, hidden), nn.Linear(hidden, hidden), nn.Linear(hidden, 1)))
        first, second = torch.triu_indices(tables + 2, tables + 2, 1)
        self.register_buffer("pairs", first * (tables + 2) + second)

    def forward(self, counts: Tensor, ids: Tensor, history: Tensor) -> tuple[Tensor, Tensor]:
        dense = torch.log1p(counts)
        for layer in self.bottom:
            dense = F.relu(layer(dense))
        seen = self.history(history).sum(1)
        vectors = torch.stack((dense, seen, *(table(ids[:, i]) for i, table in enumerate(self.tables))), 1)
        inner = (vectors @ vectors.transpose(1, 2)).flatten(1)[:, self.pairs]
        x = torch.cat((dense, inner), 1)
        for layer in self.top[:-1]:
            x = F.relu(layer(x))
        return self.top[-1](x).sigmoid(), counts / counts.sum(1, keepdim=True).clamp(min=1)


class Detector(nn.Module):
    """A one-stage detector: a grid of anchors, boxes decoded in pixels, the best 20 and their classes."""

    def __init__(self, size: int = 320) -> None:
        super().__init__()
        self.size = size
        widths = (3, 8, 16, 16, 16)
        self.convs = nn.ModuleList(nn.Conv2d(a, b, 3, 2, 1) for a, b in itertools.pairwise(widths))
        self.head = nn.Conv2d(16, 2 * 9, 1)
        self.register_buffer("anchors", torch.tensor([[24.0, 40.0], [90.0, 61.0]]))

    def forward(self, image: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x = image / 255
        for conv in self.convs:
            x = F.silu(conv(x))
        rows, columns = x.shape[2:]
        y = self.head(x).unflatten(1, (2, 9)).permute(0, 1, 3, 4, 2).sigmoid()
        ys, xs = torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij")
        grid = torch.stack((xs, ys), -1).float()
        center = (y[..., :2] * 2 - 0.5 + grid) * (self.size / rows)
        extent = (y[..., 2:4] * 2) ** 2 * self.anchors[None, :, None, None]
        boxes = torch.cat((center - extent / 2, center + extent / 2), dim=-1).flatten(1, 3)
        scores, classes = (y[..., 4:5] * y[..., 5:]).flatten(1, 3).max(-1)
        best, order = scores.topk(20, dim=1)
        return boxes.gather(1, order[..., None].expand(-1, -1, 4)), best, classes.gather(1, order)


class AnchorFree(nn.Module):
    """An anchor-free detector: distances to four sides as means over bins, at two strides, boxes in pixels."""

    def __init__(self, size: int = 640) -> None:
        super().__init__()
        widths = (3, 8, 16, 16, 16)
        self.convs = nn.ModuleList(nn.Conv2d(a, b, 3, 2, 1) for a, b in itertools.pairwise(widths))
        self.shrink = nn.Conv2d(16, 16, 3, 2, 1)
        self.heads = nn.ModuleList(nn.Conv2d(16, 64 + 8, 1) for _ in range(2))
        places = []
        for stride in (16, 32):
            ys, xs = torch.meshgrid(*(torch.arange(size // stride) + 0.5,) * 2, indexing="ij")
            places.append(torch.stack((xs, ys, torch.full_like(xs, stride))).flatten(1))
        self.register_buffer("places", torch.cat(places, 1))

    def forward(self, image: Tensor) -> Tensor:
        x = image / 255
        for conv in self.convs:
            x = F.silu(conv(x))
        found = torch.cat(
            [head(y).flatten(2) for head, y in zip(self.heads, (x, F.silu(self.shrink(x))), strict=True)], 2
        )
        bins, scores = found.split((64, 8), dim=1)
        bins = bins.unflatten(1, (4, 16)).transpose(1, 2).softmax(1)
        sides = F.conv2d(bins, torch.arange(16.0)[None, :, None, None]).squeeze(1)
        near, far = sides.chunk(2, dim=1)
        low, high = self.places[None, :2] - near, self.places[None, :2] + far
        boxes = torch.cat(((low + high) / 2, high - low), dim=1) * self.places[2]
        return torch.cat((boxes, scores.sigmoid()), dim=1)


class Sampler(nn.Module):
    """A flow network: features of two images, their correlations, a warp by the flow through grid_sample."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(3, 16, 3, 2, 1), nn.Conv2d(16, 16, 3, 2, 1)
        self.flow = nn.Conv2d(16 + 60 * 60, 2, 3, padding=1)

    def forward(self, first: Tensor, second: Tensor) -> Tensor:
        a, b = (self.conv2(F.relu(self.conv1(x))) for x in (first, second))
        height, width = a.shape[2:]
        related = torch.einsum("bchw,bcn->bnhw", a, b.flatten(2)) / math.sqrt(16)
        flow = self.flow(torch.cat((a, related), dim=1))
        ys, xs = torch.meshgrid(torch.arange(height).float(), torch.arange(width).float(), indexing="ij")
        places = torch.stack((xs, ys))[None] + flow
        places = F.interpolate(places, scale_factor=4.0, mode="bilinear", align_corners=False) * 4
        scale = torch.tensor([first.shape[3] - 1, first.shape[2] - 1], dtype=torch.float32)
        grid = places.permute(0, 2, 3, 1) / scale * 2 - 1
        return F.grid_sample(second, grid, align_corners=True)


def _net(make: Callable[[], nn.Module], **shapes: tuple[int, ...]) -> Callable[[], Built]:
    """Return a network with normal inputs of the given shapes."""

    def build() -> Built:
        inputs = {name: torch.randn(*shape) for name, shape in shapes.items()}
        return livened(make()), inputs

    return build


def _diffusion() -> Built:
    module, inputs = _net(DiffusionTransformer, latent=(2, 4, 16, 16))()
    return module, {**inputs, "timestep": torch.tensor([981, 7]), "label": torch.tensor([3, 9])}


def _speech() -> Built:
    module, inputs = _net(Speech, power=(1, 40, 64))()
    return module, {"power": inputs["power"].square() * torch.logspace(-6, 2, 40)[:, None]}


def _graph() -> Built:
    module, inputs = _net(Graph, features=(50, 8))()
    return module, {**inputs, "edges": torch.randint(0, 50, (2, 300))}


def _recommended() -> Built:
    inputs = {
        "counts": torch.floor(torch.exp(torch.randn(4, 5) * 3 + 2)).clamp(max=5e5),
        "ids": torch.randint(0, 100, (4, 6)),
        "history": torch.randint(0, 100, (4, 20)),
    }
    return livened(Recommender()), inputs


def _detector() -> Built:
    module, _ = _net(Detector)()
    return module, {"image": torch.rand(1, 3, 320, 320) * 255}


_BUILDS: dict[str, Callable[[], Built]] = {
    "dcgan": _net(Generator, noise=(2, 16)),
    "stylegan": _net(StyleGenerator, z=(2, 32), noise=(2, 1, 32, 32)),
    "vae_decoder": _net(Decoder, latent=(1, 4, 8, 8)),
    "dit": _diffusion,
    "unet_segmentation": _net(SmallUNet, image=(1, 3, 64, 64)),
    "video_3d": _net(Video, clip=(1, 3, 8, 32, 32)),
    "tcn": _net(Temporal, series=(1, 8, 100)),
    "speech_rnn": _speech,
    "graph_attention": _graph,
    "recommender": _recommended,
    "detector": _detector,
    "detector_anchor_free": lambda: (livened(AnchorFree()), {"image": torch.rand(1, 3, 640, 640) * 255}),
    "flow_warp": _net(Sampler, first=(1, 3, 240, 240), second=(1, 3, 240, 240)),
}


def _seeded(name: str) -> Built:
    torch.manual_seed(seed_of(name))
    return _BUILDS[name]()


NETS = tuple(Architecture(name, partial(_seeded, name)) for name in _BUILDS)
