"""Write every model of this folder: `python tests/models/export.py [NAME …]`.

Needs torch 2.13 and transformers 5. Weights are random and seeded, sizes are tiny. Each model is exported with torch's
dynamo or TorchScript exporter, stripped of stack traces and doc strings (which contain the machine's paths), and only
saved if onnxruntime's CPU provider reproduces torch's outputs. An `.npz` beside it has one batch: `input/NAME` and
torch's `output/NAME`.
"""

import argparse
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
import onnx
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

from amp_rewrite.files.protos import all_graphs

HERE = Path(__file__).parent
SEED = 20
VOCAB = 64
HIDDEN = 32

# Hugging Face's default of 0.02 gives activations so small that a broken model would look merely rounded.
SPREAD = 0.15
SIZES = {"hidden_size": HIDDEN, "num_hidden_layers": 2, "intermediate_size": 64, "initializer_range": SPREAD}


@dataclass(frozen=True, slots=True)
class Built:
    """A module with its inputs, names and dynamic axes."""

    module: nn.Module
    inputs: dict[str, Tensor]
    outputs: tuple[str, ...]
    dynamic: dict[str, dict[int, str]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Fixture:
    """A file to write: its model, exporter and opset."""

    build: Callable[[], Built]
    exporter: str
    opset: int
    external: bool = False
    options: dict[str, object] = field(default_factory=dict)


# Convolutional network, residual.


class Residual(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.bn2(self.conv2(y)) + x)


class Cnn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, stride=2, padding=1)
        self.bn = nn.BatchNorm2d(16)
        self.block1 = Residual(16)
        self.block2 = Residual(16)
        self.head = nn.Linear(16, 10)

    def forward(self, image: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.bn(self.stem(image))), 2)
        x = self.block2(self.block1(x))
        return self.head(x.mean((2, 3)))


def cnn() -> Built:
    model = Cnn()
    for batch_norm in (m for m in model.modules() if isinstance(m, nn.BatchNorm2d)):
        nn.init.normal_(batch_norm.running_mean, 0, 0.2)
        nn.init.uniform_(batch_norm.running_var, 0.5, 1.5)
        nn.init.uniform_(batch_norm.weight, 0.5, 1.5)
        nn.init.normal_(batch_norm.bias, 0, 0.2)
    return Built(model.eval(), {"image": torch.randn(2, 3, 32, 32)}, ("logits",), {"image": {0: "batch"}})


# Transformers, built from a configuration.


class Bert(nn.Module):
    def __init__(self, attention: str) -> None:
        super().__init__()
        heads = {"num_attention_heads": 2, "attn_implementation": attention}
        config = transformers.BertConfig(**SIZES, **heads, vocab_size=VOCAB, max_position_embeddings=32)
        self.bert = transformers.BertModel(config)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> tuple[Tensor, Tensor]:
        out = self.bert(input_ids=input_ids, attention_mask=attention_mask)
        return out.last_hidden_state, out.pooler_output


def bert(attention: str = "sdpa") -> Built:
    mask = torch.ones(2, 12, dtype=torch.int64)
    mask[1, 8:] = 0
    inputs = {"input_ids": torch.randint(0, VOCAB, (2, 12)), "attention_mask": mask}
    axes = {0: "batch", 1: "sequence"}
    return Built(
        Bert(attention).eval(),
        inputs,
        ("last_hidden_state", "pooler_output"),
        {"input_ids": axes, "attention_mask": axes},
    )


class Gpt2(nn.Module):
    """One decoding step: tokens and the key/value cache in, logits and the longer cache out."""

    def __init__(self) -> None:
        super().__init__()
        config = transformers.GPT2Config(
            vocab_size=VOCAB,
            n_embd=HIDDEN,
            n_layer=2,
            n_head=2,
            n_positions=32,
            initializer_range=SPREAD,
            bos_token_id=0,
            eos_token_id=0,
        )
        self.gpt2 = transformers.GPT2LMHeadModel(config)

    def forward(self, input_ids: Tensor, k0: Tensor, v0: Tensor, k1: Tensor, v1: Tensor) -> tuple[Tensor, ...]:
        cache = transformers.DynamicCache(((k0, v0), (k1, v1)))
        out = self.gpt2(input_ids=input_ids, past_key_values=cache, use_cache=True)
        layers = out.past_key_values.layers
        return out.logits, *(t for layer in layers for t in (layer.keys, layer.values))


def gpt2() -> Built:
    caches = {f"past_{i}_{kind}": torch.randn(1, 2, 5, 16) for i in (0, 1) for kind in ("key", "value")}
    present = tuple(name.replace("past", "present") for name in caches)
    return Built(Gpt2().eval(), {"input_ids": torch.randint(0, VOCAB, (1, 4)), **caches}, ("logits", *present))


class Llama(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
        config = transformers.LlamaConfig(**SIZES, **heads, vocab_size=VOCAB, max_position_embeddings=64)
        self.llama = transformers.LlamaForCausalLM(config)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        return self.llama(input_ids=input_ids, attention_mask=attention_mask, use_cache=False).logits


def llama(batch: int = 2) -> Built:
    """Padded on the right, because torch and ONNX differ on rows without a visible token."""
    mask = torch.ones(batch, 10, dtype=torch.int64)
    mask[-1, 7:] = 0
    inputs = {"input_ids": torch.randint(0, VOCAB, (batch, 10)), "attention_mask": mask}
    axes = {0: "batch", 1: "sequence"} if batch > 1 else {1: "sequence"}
    return Built(Llama().eval(), inputs, ("logits",), {"input_ids": axes, "attention_mask": axes})


class T5(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        config = transformers.T5Config(
            vocab_size=VOCAB,
            d_model=HIDDEN,
            d_kv=16,
            d_ff=64,
            num_layers=2,
            num_heads=2,
            decoder_start_token_id=0,
            attn_implementation="eager",
        )
        self.t5 = transformers.T5ForConditionalGeneration(config)

    def forward(self, input_ids: Tensor, decoder_input_ids: Tensor) -> tuple[Tensor, Tensor]:
        out = self.t5(input_ids=input_ids, decoder_input_ids=decoder_input_ids, use_cache=False)
        return out.logits, out.encoder_last_hidden_state


def t5() -> Built:
    inputs = {
        "input_ids": torch.randint(1, VOCAB, (2, 9)),
        "decoder_input_ids": torch.randint(1, VOCAB, (2, 5)),
    }
    return Built(T5().eval(), inputs, ("logits", "encoder_hidden"), {name: {0: "batch"} for name in inputs})


class Vit(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        config = transformers.ViTConfig(**SIZES, num_attention_heads=2, image_size=32, patch_size=8, num_labels=10)
        self.vit = transformers.ViTForImageClassification(config)

    def forward(self, pixel_values: Tensor) -> Tensor:
        return self.vit(pixel_values=pixel_values).logits


def vit() -> Built:
    return Built(
        Vit().eval(),
        {"pixel_values": torch.randn(2, 3, 32, 32)},
        ("logits",),
        {"pixel_values": {0: "batch"}},
    )


def whisper_model() -> transformers.WhisperModel:
    config = transformers.WhisperConfig(
        vocab_size=VOCAB,
        num_mel_bins=8,
        d_model=HIDDEN,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=64,
        decoder_ffn_dim=64,
        max_source_positions=16,
        max_target_positions=16,
        init_std=SPREAD,
        pad_token_id=0,
        bos_token_id=0,
        eos_token_id=0,
        decoder_start_token_id=1,
        suppress_tokens=None,
        begin_suppress_tokens=None,
    )
    return transformers.WhisperModel(config)


class WhisperEncoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = whisper_model().encoder

    def forward(self, input_features: Tensor) -> Tensor:
        return self.encoder(input_features).last_hidden_state


def whisper_encoder() -> Built:
    features = torch.randn(2, 8, 32)
    return Built(WhisperEncoder().eval(), {"input_features": features}, ("hidden",), {"input_features": {0: "batch"}})


class WhisperStep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.decoder = whisper_model().decoder

    def forward(self, input_ids: Tensor, encoder_hidden: Tensor) -> Tensor:
        hidden = self.decoder(
            input_ids=input_ids, encoder_hidden_states=encoder_hidden, use_cache=False
        ).last_hidden_state
        return hidden[:, -1] @ self.decoder.embed_tokens.weight.T


def whisper_step() -> Built:
    inputs = {"input_ids": torch.randint(1, VOCAB, (2, 4)), "encoder_hidden": torch.randn(2, 16, HIDDEN)}
    return Built(WhisperStep().eval(), inputs, ("logits",))


# A denoising network, as in diffusion models.


class Block(nn.Module):
    def __init__(self, cin: int, cout: int, time: int) -> None:
        super().__init__()
        self.norm1, self.conv1 = nn.GroupNorm(4, cin), nn.Conv2d(cin, cout, 3, padding=1)
        self.time = nn.Linear(time, cout)
        self.norm2, self.conv2 = nn.GroupNorm(4, cout), nn.Conv2d(cout, cout, 3, padding=1)
        self.skip = nn.Conv2d(cin, cout, 1)

    def forward(self, x: Tensor, emb: Tensor) -> Tensor:
        y = self.conv1(F.silu(self.norm1(x))) + self.time(F.silu(emb))[:, :, None, None]
        return self.conv2(F.silu(self.norm2(y))) + self.skip(x)


class SpatialAttention(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(4, channels)
        self.qkv, self.out = nn.Conv1d(channels, 3 * channels, 1), nn.Conv1d(channels, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        batch, channels, height, width = x.shape
        q, k, v = self.qkv(self.norm(x).reshape(batch, channels, height * width)).chunk(3, 1)
        weight = torch.softmax(q.transpose(1, 2) @ k * channels**-0.5, -1)
        return x + self.out(v @ weight.transpose(1, 2)).reshape(batch, channels, height, width)


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.time = nn.Sequential(nn.Linear(16, 32), nn.SiLU(), nn.Linear(32, 32))
        self.stem = nn.Conv2d(4, 8, 3, padding=1)
        self.down1, self.down2 = Block(8, 8, 32), Block(8, 16, 32)
        self.shrink1, self.shrink2 = nn.Conv2d(8, 8, 3, 2, 1), nn.Conv2d(16, 16, 3, 2, 1)
        self.middle, self.attention = Block(16, 16, 32), SpatialAttention(16)
        self.grow2 = nn.ConvTranspose2d(16, 16, 2, 2)
        self.up2, self.up1 = Block(32, 8, 32), Block(16, 8, 32)
        self.head = nn.Conv2d(8, 4, 3, padding=1)

    def forward(self, sample: Tensor, timestep: Tensor) -> Tensor:
        rate = torch.exp(torch.arange(8, dtype=torch.float32) * (-np.log(10000.0) / 8))
        angle = timestep.to(torch.float32)[:, None] * rate[None]
        emb = self.time(torch.cat([torch.cos(angle), torch.sin(angle)], 1))
        skip1 = self.down1(self.stem(sample), emb)
        skip2 = self.down2(self.shrink1(skip1), emb)
        x = self.attention(self.middle(self.shrink2(skip2), emb))
        x = self.up2(torch.cat([self.grow2(x), skip2], 1), emb)
        x = F.interpolate(x, scale_factor=2.0, mode="nearest")
        return self.head(F.silu(self.up1(torch.cat([x, skip1], 1), emb)))


def unet() -> Built:
    inputs = {"sample": torch.randn(2, 4, 16, 16), "timestep": torch.tensor([3, 871])}
    return Built(UNet().eval(), inputs, ("noise",), {name: {0: "batch"} for name in inputs})


# Recurrent network.


class Lstm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, 24)
        self.lstm = nn.LSTM(24, HIDDEN, num_layers=2, bidirectional=True, batch_first=True)
        self.head = nn.Linear(2 * HIDDEN, 10)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        y, (hidden, _) = self.lstm(self.embed(tokens))
        return self.head(y), hidden


def lstm() -> Built:
    return Built(Lstm().eval(), {"tokens": torch.randint(0, VOCAB, (2, 7))}, ("tags", "hidden"))


# Control flow.


class Cond(nn.Module):
    """If the mean is positive one projection, else another; both see a value captured from outside."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.wide, self.thin = nn.Linear(16, HIDDEN), nn.Linear(HIDDEN, 8), nn.Linear(HIDDEN, 8)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.relu(self.stem(x))

        def positive(h: Tensor) -> Tensor:
            return self.wide(h) * 2.0

        def negative(h: Tensor) -> Tensor:
            return torch.tanh(self.thin(h))

        return torch.cond(x.mean() > 0, positive, negative, (hidden,)) @ self.wide.weight


def cond() -> Built:
    return Built(Cond().eval(), {"x": torch.randn(3, 16)}, ("y",))


class While(nn.Module):
    """Repeats one layer while the counter is below a bound: the state and the counter go round."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.step = nn.Linear(16, HIDDEN), nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: Tensor, steps: Tensor) -> Tensor:
        def more(i: Tensor, h: Tensor) -> Tensor:
            return i < steps

        def body(i: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
            return i + 1, torch.tanh(self.step(h)) + 0.5 * h

        _, h = torch.while_loop(more, body, (torch.zeros((), dtype=torch.int64), self.stem(x)))
        return h


def while_loop() -> Built:
    return Built(While().eval(), {"x": torch.randn(3, 16), "steps": torch.tensor(4)}, ("y",))


class ScriptedLoop(While):
    def forward(self, x: Tensor, steps: Tensor) -> Tensor:
        h = self.stem(x)
        for _ in range(int(steps)):
            h = torch.tanh(self.step(h)) + 0.5 * h
        return h


def scripted_loop() -> Built:
    return Built(torch.jit.script(ScriptedLoop().eval()), {"x": torch.randn(3, 16), "steps": torch.tensor(4)}, ("y",))


class ScriptedIf(Cond):
    def forward(self, x: Tensor, wide: Tensor) -> Tensor:
        hidden = torch.relu(self.stem(x))
        if bool(wide):
            y = self.wide(hidden) * 2.0
        else:
            y = torch.tanh(self.thin(hidden))
        return torch.softmax(y, -1)


def scripted_if() -> Built:
    return Built(torch.jit.script(ScriptedIf().eval()), {"x": torch.randn(3, 16), "wide": torch.tensor(True)}, ("y",))


# Mixture of experts.


class Moe(nn.Module):
    """Two of four experts for each token: the router's integers choose, its probabilities weigh."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.router = nn.Linear(16, HIDDEN), nn.Linear(HIDDEN, 4, bias=False)
        self.up = nn.ModuleList(nn.Linear(HIDDEN, 48) for _ in range(4))
        self.down = nn.ModuleList(nn.Linear(48, HIDDEN) for _ in range(4))
        self.norm = nn.LayerNorm(HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(self.stem(x))
        probability = torch.softmax(self.router(hidden), -1)
        weight, expert = torch.topk(probability, 2, -1)
        weight = weight / weight.sum(-1, keepdim=True)
        out = torch.zeros_like(hidden)
        for i, (up, down) in enumerate(zip(self.up, self.down, strict=True)):
            share = (weight * (expert == i)).sum(-1)
            rows = torch.nonzero(share > 0).squeeze(-1)
            y = down(F.gelu(up(hidden[rows]))) * share[rows][:, None]
            out = out.index_add(0, rows, y)
        return hidden + out


def moe() -> Built:
    model = Moe().eval()
    # Well-separated scores: a rounding must not send a token to another expert.
    nn.init.normal_(model.router.weight, 0, 1.0)
    return Built(model, {"x": torch.randn(12, 16)}, ("y",))


FIXTURES: dict[str, Fixture] = {
    "cnn_dynamo18": Fixture(cnn, "dynamo", 18, options={"optimize": False}),
    "cnn_ts13": Fixture(cnn, "torchscript", 13, options={"training": torch.onnx.TrainingMode.PRESERVE}),
    "cnn_external_dynamo22": Fixture(cnn, "dynamo", 22, external=True),
    "bert_dynamo20": Fixture(bert, "dynamo", 20),
    "bert_dynamo23": Fixture(bert, "dynamo", 23),
    "bert_ts13": Fixture(partial(bert, "eager"), "torchscript", 13),
    "gpt2_dynamo18": Fixture(gpt2, "dynamo", 18),
    "gpt2_ts17": Fixture(gpt2, "torchscript", 17),
    "llama_dynamo21": Fixture(llama, "dynamo", 21),
    # Batch 1: onnxruntime 1.31's RotaryEmbedding does not broadcast the cosine table over a batch.
    "llama_dynamo23": Fixture(partial(llama, 1), "dynamo", 23),
    "llama_ts16": Fixture(llama, "torchscript", 16),
    "t5_dynamo18": Fixture(t5, "dynamo", 18),
    "t5_ts14": Fixture(t5, "torchscript", 14),
    "vit_dynamo22": Fixture(vit, "dynamo", 22),
    "vit_ts17": Fixture(vit, "torchscript", 17),
    "whisper_encoder_dynamo19": Fixture(whisper_encoder, "dynamo", 19),
    "whisper_encoder_ts17": Fixture(whisper_encoder, "torchscript", 17),
    "whisper_step_dynamo20": Fixture(whisper_step, "dynamo", 20),
    "unet_dynamo21": Fixture(unet, "dynamo", 21),
    "unet_ts15": Fixture(unet, "torchscript", 15),
    "lstm_dynamo18": Fixture(lstm, "dynamo", 18),
    "lstm_ts13": Fixture(lstm, "torchscript", 13),
    "if_dynamo20": Fixture(cond, "dynamo", 20),
    "if_ts13": Fixture(scripted_if, "torchscript", 13),
    "loop_dynamo21": Fixture(while_loop, "dynamo", 21),
    "loop_ts16": Fixture(scripted_loop, "torchscript", 16),
    "moe_dynamo21": Fixture(moe, "dynamo", 21),
    "moe_ts17": Fixture(moe, "torchscript", 17),
}


def export(fixture: Fixture, built: Built, path: Path) -> None:
    """Writes the exporter's model to `path`, weights inline."""
    if fixture.exporter == "torchscript":
        exporter = {"dynamo": False, "dynamic_axes": {n: dict(a) for n, a in built.dynamic.items()}}
    else:
        dims = {name: torch.export.Dim(name) for axes in built.dynamic.values() for name in axes.values()}
        shapes = tuple({axis: dims[name] for axis, name in built.dynamic.get(n, {}).items()} for n in built.inputs)
        exporter = {"dynamo": True, "dynamic_shapes": shapes if built.dynamic else None, "external_data": False}
    names = {"input_names": list(built.inputs), "output_names": list(built.outputs)}
    args = tuple(built.inputs.values())
    torch.onnx.export(built.module, args, path, opset_version=fixture.opset, **exporter, **names, **fixture.options)


def strip(model: onnx.ModelProto) -> None:
    """Takes out what the exporter wrote about the machine and the source; names and types stay."""
    main = list(all_graphs(model.graph))
    parts = [part for g in main for part in (*g.input, *g.output, *g.initializer)]
    for holder in (*main, *model.functions):
        parts += [holder, *holder.node, *holder.value_info]
    for part in parts:
        del part.metadata_props[:]
        part.ClearField("doc_string")


def runtime_outputs(path: Path, inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    import onnxruntime as ort

    session = ort.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    names = [o.name for o in session.get_outputs()]
    kept = {i.name for i in session.get_inputs()}
    return dict(zip(names, session.run(names, {k: v for k, v in inputs.items() if k in kept}), strict=True))


def make(name: str, fixture: Fixture) -> str:
    """Makes NAME.onnx and NAME.npz; one line about them."""
    torch.manual_seed(SEED)
    built = fixture.build()
    with torch.no_grad():
        result = built.module(*built.inputs.values())
    expected = [t.numpy() for t in ((result,) if isinstance(result, Tensor) else result)]
    path = HERE / f"{name}.onnx"
    export(fixture, built, path)
    model = onnx.load(path)
    strip(model)
    inputs = {k: v.numpy() for k, v in built.inputs.items()}
    if fixture.external:
        (path.parent / f"{name}.onnx.data").unlink(missing_ok=True)
        onnx.save(model, path, save_as_external_data=True, location=f"{name}.onnx.data", size_threshold=256)
        (path.parent / f"{name}.onnx.data").chmod(0o644)
    else:
        onnx.save(model, path)
    onnx.checker.check_model(path, full_check=True)
    actual = runtime_outputs(path, inputs)
    worst = 0.0
    for output, want in zip(built.outputs, expected, strict=True):
        np.testing.assert_allclose(actual[output], want, rtol=0, atol=1e-4, err_msg=f"{name}: {output}")
        worst = max(worst, float(np.abs(actual[output] - want).max()))
    outputs = dict(zip(built.outputs, expected, strict=True))
    np.savez_compressed(
        path.with_suffix(".npz"),
        **{f"input/{k}": v for k, v in inputs.items()},
        **{f"output/{k}": v for k, v in outputs.items()},
    )
    size = path.stat().st_size / 1024
    nodes = sum(len(g.node) for g in all_graphs(model.graph))
    scale = max(float(np.abs(v).max()) for v in expected)
    return f"{name}: {nodes} nodes, {size:.0f} KiB, largest output {scale:.3g}, off torch by {worst:.1e}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("name", nargs="*", help=f"one of {', '.join(FIXTURES)}; all by default")
    names = parser.parse_args().name or list(FIXTURES)
    if unknown := [name for name in names if name not in FIXTURES]:
        parser.error(f"no fixture {', '.join(unknown)}")
    warnings.simplefilter("ignore")
    for name in names:
        print(make(name, FIXTURES[name]), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
