"""Feeds of a model: every form of batches, their checks, hostile files, and feedback of states."""

import io
import itertools
import os
import zipfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx.parser
import pytest

from amp_rewrite import Feed, FeedError, Model, calibrate, convert, verify
from amp_rewrite.evidence.data.feedback import state_pairs
from amp_rewrite.evidence.data.sources import parse_shapes
from amp_rewrite.evidence.opening import unrolled
from amp_rewrite.runtime.runner import Runner

X = np.float32([[1, 2, 3], [4, 5, 6]])
I = np.int64([1, 0])  # noqa: E741
BATCH = {"x": X, "i": I}


def parsed(signature: str, body: str = "", opset: int = 20) -> Model:
    text = f'<ir_version: 10, opset_import: ["": {opset}]> g ({signature}) => (bool out) {{ {body} }}'
    model = onnx.parser.parse_model(text)
    return Model(model)


MODEL = parsed("float[n, 3] x, int64[n] i")
B = ml_dtypes.bfloat16
A_BATCH = "must be a mapping from input names to arrays, an array, or a tuple of arrays"


def same(found: Feed, *expected: Mapping[str, Any]) -> None:
    """Check that two passes over the feed give these batches with these types."""
    for _ in range(2):
        batches = list(found)
        assert [list(batch) for batch in batches] == [list(batch) for batch in expected]
        for mine, right in zip(batches, expected, strict=True):
            for name, value in right.items():
                np.testing.assert_array_equal(mine[name], value)
                assert mine[name].dtype == value.dtype
    assert len(found) == len(expected)


def refusal(data: object, model: Model = MODEL, **options: Any) -> str:
    with pytest.raises(FeedError) as error:
        list(Feed.of(data, model, **options))
    return str(error.value)


def files(folder: Path, save: Callable[..., None] = np.savez, **files: Mapping[str, Any]) -> Path:
    """Write arrays to files; return the only file, or their folder, which may contain other files."""
    (folder / "README.md").write_text("what this is")
    for name, arrays in files.items():
        save(folder / f"{name}.npz", **arrays)
    return folder / f"{name}.npz" if len(files) == 1 else folder


def plus(at: int, integers: int = 0) -> dict[str, Any]:
    return {"x": X + at, "i": I + integers}


NUMBERED = {f"{at}/{name}": value + at for at in (10, 2, 0) for name, value in BATCH.items()}
SOURCES: dict[str, tuple[Callable[[Path], Any], list[Any]]] = {
    "a tuple in the order of the inputs": (lambda _: (X, I), [BATCH]),
    "tuples and lists": (lambda _: [(X, I), [X + 1, I]], [BATCH, plus(1)]),
    "a file": (lambda folder: files(folder, d=BATCH), [BATCH]),
    "a compressed file, by a word": (lambda folder: str(files(folder, np.savez_compressed, c=BATCH)), [BATCH]),
    "numbered names, in numeric order": (lambda folder: files(folder, d=NUMBERED), [BATCH, plus(2, 2), plus(10, 10)]),
    "a folder, in natural order": (
        lambda folder: files(folder, b10=plus(10), b9=plus(9), b1=plus(1)),
        [plus(1), plus(9), plus(10)],
    ),
}


@pytest.mark.parametrize("case", SOURCES)
def test_batches_may_be_given_as(case: str, tmp_path: Path) -> None:
    make, expected = SOURCES[case]
    source = make(tmp_path)
    feed = Feed.of(source, MODEL)
    same(feed, *expected)
    assert not isinstance(source, Path) or feed.origin == source.name


def test_inputs_with_defaults_are_optional_and_labels_after_arrays_are_noted() -> None:
    model = parsed("float[3] x, float[3] w")
    model.proto.graph.initializer.add(name="w", data_type=1, dims=[3])
    same(Feed.of({"x": X[0]}, model), {"x": X[0]})
    one = parsed("float[n, 3] x")
    feed = Feed.of([(X, I)], one)
    same(feed, {"x": X})
    assert feed.notes == ("1 array after those for 'x' not fed: the model has no other input",)
    two = parsed("float[n, 3] x, float[3] w")
    two.proto.graph.initializer.add(name="w", data_type=1, dims=[3])
    assert refusal([(X, X[0])], two) == (
        "batch 0 is 2 arrays, and input 'w' has a default, so their order is ambiguous; give a mapping from input names"
        " to arrays"
    )


def test_a_generator_is_read_once_and_only_as_far_as_requested() -> None:
    read = []

    def batches() -> Iterator[Mapping[str, Any]]:
        for number in range(3):
            read.append(number)
            yield {"x": X + number, "i": I}

    feed = Feed.of(batches(), MODEL)
    assert read == [0]
    same(feed, BATCH, {"x": X + 1, "i": I}, {"x": X + 2, "i": I})
    assert read == [0, 1, 2]


def test_passes_with_different_batches_are_refused() -> None:
    counter = itertools.count()
    assert refusal(lambda: iter([{"x": X + next(counter), "i": I}])) == (
        "<lambda>(): a second pass returned different batches, but a search needs the same ones; turn off shuffling"
        " and augmentation, and create a new array for each batch"
    )


@pytest.mark.torch
def test_torch_tensors_and_loaders_are_data() -> None:
    torch = pytest.importorskip("torch")
    x, i = torch.tensor(X, requires_grad=True), torch.tensor(I)
    same(Feed.of({"x": x, "i": i}, MODEL), BATCH)
    same(Feed.of((x.to(torch.bfloat16), i), parsed("bfloat16[n, 3] x, int64[n] i")), {"x": X.astype(B), "i": I})
    pairs = torch.utils.data.TensorDataset(x.detach(), i)
    named = [{"x": x.detach()[at], "i": i[at]} for at in range(2)]
    one = {"x": X[:1], "i": I[:1]}, {"x": X[1:], "i": I[1:]}
    same(Feed.of(torch.utils.data.DataLoader(pairs, batch_size=1), MODEL), *one)
    same(Feed.of(torch.utils.data.DataLoader(named, batch_size=1), MODEL), *one)


def test_a_feed_can_be_used_with_another_model() -> None:
    half = parsed("float16[n, 3] x, int64[n] i")
    feed = Feed.of(Feed.randomly(MODEL, shapes={"x": (2, 3), "i": (2,)}, seed=4), half)
    assert (feed.origin, feed.random, feed.notes) == ("random, seed 4", True, ("x: float32 cast to float16",))
    assert next(iter(feed))["x"].dtype == np.float16


def test_a_later_mismatched_batch_is_named_by_its_number(tmp_path: Path) -> None:
    np.savez(tmp_path / "b0.npz", **BATCH)
    np.savez(tmp_path / "b1.npz", x=X)
    assert refusal(tmp_path) == "batch 1 is missing input 'i'; every batch needs 'x', 'i'"


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (
            7,
            "cannot feed int; give a path, an array, a mapping from input names to arrays, a tuple of arrays in the"
            " order of the inputs, a list, a generator or a DataLoader of these, or a function that yields them",
        ),
        ([], "the batches given: the data contains no batches; give at least one"),
        (
            X,
            "batch 0 is 1 array, but the model has the inputs 'x', 'i'; give a tuple of arrays in this order, or a"
            " mapping from input names to arrays",
        ),
        ([[1.0, "2"]], f"batch 0 {A_BATCH}, not list"),
        (lambda: BATCH, "the function for batches returned dict; make it yield batches"),
        (lambda: 7, "the function for batches returned int; make it yield batches"),
        (lambda: iter([]), "<lambda>(): the data contains no batches; give at least one"),
    ],
)
def test_unsupported_data_is_refused(data: object, message: str) -> None:
    assert refusal(data) == message


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ({}, "batch 0 is missing inputs 'x', 'i'; every batch needs 'x', 'i'"),
        ({"X": X}, "batch 0 has an array 'X', but the model has the inputs 'x', 'i'; rename it to 'x', or drop it"),
        (
            {"x": X, "mask": X},
            "batch 0 has an array 'mask', but the model has the inputs 'x', 'i'; rename it to 'i', or drop it",
        ),
        ({**BATCH, "x": X[0]}, "input 'x' of batch 0 has the shape [3], but the input takes [n, 3]"),
        (
            {**BATCH, "x": X.astype(np.int64)},
            "input 'x' of batch 0 is int64, but the input takes float32; cast it with .astype('float32')",
        ),
        (
            {**BATCH, "i": X[:, 0]},
            "input 'i' of batch 0 is float32, but the input takes int64; cast it with .astype('int64')",
        ),
        (
            {**BATCH, "x": [[1, 2, 3], [4]]},
            "input 'x' of batch 0 cannot be converted to an array: setting an array element",
        ),
        ({**BATCH, "x": None}, "input 'x' of batch 0 contains Python objects; give an array of numbers"),
        ({"x": X[:0], "i": I[:0]}, "batch 0 has no elements: x [0, 3], i [0]; give at least one row"),
        (
            {**BATCH, "x": np.float32([[1, 2, 3], [4, np.nan, np.inf]])},
            "input 'x' of batch 0 contains NaN or infinity; give finite numbers in range, or allow others with",
        ),
        (
            {**BATCH, "x": np.float64([[1, 2, 3], [4, 5, 1e300]])},
            "input 'x' of batch 0 contains NaN or infinity as float32; give finite numbers in range, or",
        ),
    ],
)
def test_a_mismatched_batch_is_refused(batch: Mapping[str, Any], message: str) -> None:
    assert refusal(batch).startswith(message)


LABELS = {**BATCH, "label": I, "weight": X}
NOTE = "ignored, because no input has this name: 'label', 'weight'"


def stored_as(kind: str, folder: Path) -> object:
    """Add labels to a batch, in a mapping or in files; the labels are objects, which are not read from files."""
    objects = {**LABELS, "label": np.array([{}, {}], dtype=object)}
    if kind == "mapping":
        return LABELS
    if kind == "npz":
        np.savez(folder / "d.npz", **objects)
    else:
        np.savez(folder / "d.npz", **{f"{at}/{name}": array for at in (0, 1) for name, array in objects.items()})
    return folder / "d.npz"


@pytest.mark.parametrize("kind", ["mapping", "npz", "numbered npz"])
def test_labels_beside_the_inputs_are_named_and_ignored(tmp_path: Path, kind: str) -> None:
    feed = Feed.of(stored_as(kind, tmp_path), MODEL)
    assert feed.notes == (NOTE,)
    same(feed, *[BATCH] * len(feed))
    assert Feed.of(feed, MODEL).notes == (NOTE,)


@pytest.mark.parametrize(
    ("given", "expected", "element"),
    [
        (np.float64, np.float32, "float"),
        (np.float16, np.float32, "float"),
        (np.float32, np.float16, "float16"),
        (np.float64, np.float16, "float16"),
        (np.float32, ml_dtypes.bfloat16, "bfloat16"),
        (ml_dtypes.bfloat16, np.float32, "float"),
        (np.float32, np.float64, "double"),
        (np.int32, np.int64, "int64"),
        (np.uint8, np.int64, "int64"),
        (np.uint8, np.int32, "int32"),
    ],
)
def test_safe_casts_are_applied_and_noted(given: Any, expected: Any, element: str) -> None:
    value = np.array([1, 2]).astype(given)
    feed = Feed.of({"x": value}, parsed(f"{element}[2] x"))
    same(feed, {"x": value.astype(expected)})
    dtype = {"float": "float32", "double": "float64"}.get(element, element)
    assert feed.notes == (f"x: {np.dtype(given)} cast to {dtype}",)


def test_bfloat16_strings_and_sequences_are_fed_unchanged_even_from_files(tmp_path: Path) -> None:
    """numpy saves bfloat16 as two untyped bytes."""
    value = np.array([1.5, -2], ml_dtypes.bfloat16)
    model = parsed("bfloat16[2] x")
    same(Feed.of({"x": value}, model), {"x": value})
    np.savez(tmp_path / "d.npz", x=value)
    same(Feed.of(tmp_path / "d.npz", model), {"x": value})
    model = parsed("string[2] t")
    np.savez(tmp_path / "d.npz", t=np.array(["a", "bc"]))
    same(Feed.of(tmp_path / "d.npz", model), {"t": np.array(["a", "bc"], object)})
    assert refusal({"t": I}, model) == (
        "input 't' of batch 0 is int64, but the input takes strings; give an array of str"
    )
    data = [X[0], X[1, :2]]
    (batch,) = Feed.of({"s": data}, parsed("seq(float[N]) s"))
    assert batch["s"] is data


def test_random_numbers_have_the_documented_distribution() -> None:
    model = parsed(
        "float[1000] f, float16[9] h, bfloat16[9] b, double[9] d, int32[1000] i, uint8[1000] u, bool[1000] t"
    )
    (batch,) = Feed.randomly(model, int_ranges={"u": (250, 256)})
    kinds = [np.float32, np.float16, ml_dtypes.bfloat16, np.float64, np.int32, np.uint8, np.bool_]
    assert [value.dtype for value in batch.values()] == [np.dtype(kind) for kind in kinds]
    assert set(batch["i"]) == {0, 1}
    assert set(batch["u"]) == set(range(250, 256))
    assert set(batch["t"]) == {False, True}
    # 1000 draws: mean and deviation are within 5 standard errors, 5 / sqrt(1000), of 0 and 1
    assert abs(batch["f"].mean()) < 0.16
    assert abs(batch["f"].std() - 1) < 0.16


@pytest.mark.parametrize(
    ("signature", "options", "message"),
    [
        ("float[2, m] x", {}, "input 'x' has unknown sizes (the shape [2, m]); give all of them, as in shapes={'x'"),
        ("float[] x", {}, "input 'x' has unknown sizes (no shape); give all of them, as in shapes={'x': (64, 64)}"),
        ("float[n] x", {"shapes": {"x": (-1,)}}, "the shape [-1] does not fit input 'x', which has the shape [n]"),
        (
            "float[n] x",
            {"shapes": {"x": (10**12,)}},
            "the shape [1000000000000] of input 'x' is too large; use at most 64 axes and 4294967296 bytes",
        ),
        (
            "float[n] pixels",
            {"shapes": {"pixel": (1,)}},
            "a shape is given for 'pixel', which is not an input; did you mean 'pixels'?",
        ),
        (
            "float[2] x",
            {"int_ranges": {"x": (0, 1)}},
            "a range of integers is given for input 'x', which is float32; omit",
        ),
        ("int64[2] i", {"int_ranges": {"i": (3, 3)}}, "the int range 3,3 of input 'i' is empty or does not fit int64"),
        ("seq(float[2]) s", {}, "random data cannot fill input 's', which is seq(float32); give data for it"),
        ("float[2] x", {"seed": -1}, "the seed -1 is negative; use 0 or more"),
    ],
)
def test_inputs_without_a_distribution_are_refused(signature: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(FeedError) as error:
        Feed.randomly(parsed(signature), **options)
    assert str(error.value).startswith(message)


@pytest.mark.parametrize("text", ["input", "=1,2", "input=1,x", "input=1.5", "input=1,,2"])
def test_a_malformed_shape_is_refused(text: str) -> None:
    with pytest.raises(FeedError) as error:
        parse_shapes([text])
    assert str(error.value) == f"the shape {text!r} is not of the form input=1,128"


def npy(header: str, body: bytes = b"") -> bytes:
    text = header.encode("latin1") + b"\n"
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text + body


def header(shape: str, descr: str = "'<f4'") -> str:
    return f"{{'descr': {descr}, 'fortran_order': False, 'shape': {shape}, }}"


def written(path: Path, members: Mapping[str, bytes], compression: int = zipfile.ZIP_STORED) -> Path:
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return path


def stored(value: object) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, value)  # type: ignore[arg-type]
    return buffer.getvalue()


ONE = parsed("float[] x")


@pytest.mark.parametrize(
    ("members", "message"),
    [
        ({"x.npy": npy(header("(1000000000000000,)"), b"0" * 10_000)}, "cannot read {path}: "),
        ({"x.npy": npy(header("(100000,)"), b"0" * 10_000)}, "cannot read {path}: "),
        ({"x.npy": npy(header("(-4,)"), b"0" * 16)}, "cannot read {path}: "),
        ({"x.npy": npy(header("(2,)", "[('a', '<f4')]"), b"0" * 8)}, "input 'x' of batch 0 is [('a', '<f4')], but the"),
        ({"x.npy": npy(header("__import__('os')"), b"0" * 8)}, "cannot read {path}: "),
        ({"x.npy": npy("(" * 5000, b"0" * 8)}, "cannot read {path}: "),
        ({"x.npy": stored(X)[:-5]}, "cannot read {path}: "),
        ({"x.npy": stored(np.array([{}], object))}, "cannot read {path}: Object arrays cannot be loaded when"),
        ({"x": b"text"}, "{path}: 'x' is not an array; write arrays with numpy.savez"),
        ({"\x1b[31m.npy": stored(X)}, "batch 0 has an array '\\x1b[31m', but the model has the input 'x'"),
        ({f"{'y' * 60000}.npy": stored(X)}, f"batch 0 has an array '{'y' * 80} …', but the model has the input 'x'"),
        ({"0/x.npy": stored(X), "y.npy": stored(X)}, "batch 0 has an array '0/x', but the model has the input 'x'; "),
        ({}, "d.npz: the data contains no batches; give at least one"),
    ],
)
def test_a_damaged_npz_file_is_refused(tmp_path: Path, members: Mapping[str, bytes], message: str) -> None:
    path = written(tmp_path / "d.npz", members)
    assert refusal(path, ONE).startswith(message.replace("{path}", str(path)))


def test_zip_bombs_and_pipes_are_refused_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = written(tmp_path / "d.npz", {"x.npy": stored(np.zeros(1 << 22, np.float32))}, zipfile.ZIP_DEFLATED)
    assert path.stat().st_size < 1 << 16
    monkeypatch.setattr("amp_rewrite.evidence.data.sources.LIMIT", 1 << 20)
    assert refusal(path, ONE) == f"{path}: a batch has 16777344 bytes, but at most 1048576 are allowed; split it"
    path = tmp_path / "pipe.npz"
    os.mkfifo(path)
    assert refusal(path).startswith(f"cannot read {path}: it is not a regular file; name a .npz file")


def in_directory(offset: int, value: bytes) -> Callable[[bytearray], None]:
    """Overwrite a field of the zip's only directory entry."""

    def change(content: bytearray) -> None:
        at = content.index(b"PK\x01\x02") + offset
        content[at : at + len(value)] = value

    return change


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(in_directory(16, b"\0\0\0\0"), id="another checksum"),
        pytest.param(in_directory(10, b"\x63\x00"), id="an unknown compression"),
        pytest.param(in_directory(8, b"\x01\x00"), id="encrypted"),
        pytest.param(lambda content: content.__delitem__(slice(40, 80)), id="a hole"),
        pytest.param(lambda content: content.__setitem__(slice(0, None), b"not a zip"), id="no zip"),
    ],
)
def test_a_zip_that_was_tampered_with_is_refused(tmp_path: Path, change: Callable[[bytearray], None]) -> None:
    path = tmp_path / "d.npz"
    content = bytearray(written(path, {"x.npy": stored(X)}, zipfile.ZIP_STORED).read_bytes())
    change(content)
    path.write_bytes(content)
    assert str(path) in refusal(path, ONE)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda p: None, "cannot read {path}: there is no such file; name a .npz file, or a folder of .npz files"),
        (lambda p: p.write_text("x"), "cannot read {path}: "),
        (lambda p: p.write_bytes(stored(X)), "cannot read {path}: it is not a .npz file; write arrays with"),
        (lambda p: p.mkdir(), "{path} contains no .npz files; write them with numpy.savez"),
    ],
)
def test_a_path_without_data_is_refused(tmp_path: Path, make: Callable[[Path], object], message: str) -> None:
    path = tmp_path / "d.csv"
    make(path)
    assert refusal(path).startswith(message.replace("{path}", str(path)))


def model(ports: str, body: str, constants: str = "") -> Model:
    """Return a model; "__" in a name stands for a dot."""
    initializers = f"<{constants}>" if constants else ""
    text = f'<ir_version: 8, opset_import: ["": 17]> g {ports} {initializers} {{ {body} }}'
    proto = onnx.parser.parse_model(text)
    for formal in (*proto.graph.input, *proto.graph.output):
        formal.name = formal.name.replace("__", ".")
    for node in proto.graph.node:
        for names in (node.input, node.output):
            names[:] = [name.replace("__", ".") for name in names]
    return Model.load(proto)


SUM = model("(float[2] x, float[2] h) => (float[2] hn, float[2] y)", "hn = Add (h, x) y = Neg (hn)")
ROW = np.float32([1, 2])
CHUNKS = [{"x": np.float32([n, 2 * n])} for n in range(1, 5)]
LEAK = np.diag(np.full(8, 0.999)).astype(np.float32).ravel().tolist()
LEAKY = model(
    "(float[1,8] x, float[1,8] h) => (float[1,8] hn, float[1,8] y)",
    "[leak] k = MatMul (h, keep) [in] hn = Add (k, x) [scale] y = MatMul (hn, turn)",
    f"float[8,8] keep = {{{','.join(map(str, LEAK))}}},"
    f" float[8,8] turn = {{{','.join(map(str, np.eye(8)[::-1].ravel()))}}}",
)
"""A state that loses a thousandth per run: in float16 that is below half a step at 1."""
DRIP = {"x": np.full((1, 8), 1.3e-3, np.float32), "h": np.full((1, 8), 0.5, np.float32)}


def outputs(feed: Feed, of: Model = SUM) -> list[list[float]]:
    runner = Runner.open(of)
    return [np.ravel(runner.run(batch)["hn"]).tolist() for batch in unrolled(feed, of)]


STATES = [{"x": ROW, "h": np.float32([10, 20])}, {"x": ROW, "h": np.float32([99, 99])}]


@pytest.mark.parametrize(
    ("batches", "options", "expected", "message"),
    [
        (CHUNKS, {}, [[1, 2], [3, 6], [6, 12], [10, 20]], "one sequence"),
        (CHUNKS[:2], {"steps": 3}, [[1, 2], [2, 4], [3, 6], [2, 4], [4, 8], [6, 12]], "3 steps each"),
        # a sequence begins with the state in the data, and later ones are not read
        (STATES, {}, [[11, 22], [12, 24]], "one sequence"),
        (STATES, {"steps": 2}, [[11, 22], [12, 24], [100, 101], [101, 103]], "2 steps each"),
    ],
)
def test_batches_are_steps_of_one_sequence_or_each_start_a_new_one(
    batches: Any, options: dict[str, int], expected: list[list[float]], message: str
) -> None:
    feed = Feed.of(batches, SUM, feedback="hn=h", **options)
    assert outputs(feed) == outputs(feed) == expected
    assert (len(feed), feed.origin) == (len(expected), f"the batches given, {message}, hn fed back to h")


def test_a_star_pairs_similar_names_and_a_cache_grows_with_each_step() -> None:
    cache = model("(float[1,2] x, float[past,2] h) => (float[all,2] hn)", "hn = Concat <axis = 0> (h, x)")
    first = {"x": np.ones((1, 2), np.float32), "h": np.zeros((0, 2), np.float32)}
    feed = Feed.of(first, cache, feedback="hn=h", steps=4)
    assert [len(out) for out in outputs(feed, cache)] == [2, 4, 6, 8]
    assert verify(cache, cache, feed, tolerance=0.0).ok
    assert calibrate(cache, feed).values["hn"].count == 2 * (1 + 2 + 3 + 4)
    many = model(
        "(float[2] x, float[2] past__0__k, float[2] past__1__k) => (float[2] present__0__k, float[2] present__1__k)",
        "present__0__k = Add (past__0__k, x) present__1__k = Sub (past__1__k, x)",
    )
    feed = Feed.of({"x": ROW}, many, feedback="present.*=past.*", steps=2)
    assert feed.feedback is not None
    assert feed.feedback.pairs == (("present.0.k", "past.0.k"), ("present.1.k", "past.1.k"))
    assert verify(many, many, feed, tolerance=0.0).fed.origin.endswith("present.0.k fed back to past.0.k and 1 more")


@pytest.mark.parametrize(
    ("words", "steps", "why"),
    [
        ("hn1=h", 2, "feedback='hn1=h': the model has no output 'hn1'; did you mean 'hn'?"),
        ("other=h", 2, "feedback='other=h': the model has no output 'other'; it has 'hn', 'y'"),
        (["hn=h", "y=h"], 2, "feedback='y=h': input 'h' is already fed from 'hn'; name only one output"),
        ("hn", 2, "feedback='hn' is not of the form OUT=IN, such as hn=h or present.*=past.*"),
        ("a*=h*", 2, "feedback='a*=h*' matches no output; the model has 'hn', 'y'"),
        ((), 3, "steps=3 needs feedback='OUT=IN' and at least 1 step"),
        (
            "hn=h",
            None,
            "the arrays given, one sequence, hn fed back to h: one batch is one run, so nothing is fed back; give"
            " several batches, or steps=100 to run the batch 100 times",
        ),
    ],
)
def test_impossible_feedback_is_refused_with_the_possible_pairs(words: Any, steps: int | None, why: str) -> None:
    with pytest.raises(FeedError) as error:
        Feed.of({"x": ROW}, SUM, feedback=words, steps=steps)
    assert str(error.value) == why


@pytest.mark.parametrize(
    ("out", "fact"),
    [
        ("float[3] y", "float32 [3], but input 'h' is float32 [2]"),
        ("seq(float[2]) y", "seq of float32 [2], but input 'h' is float32 [2]"),
    ],
)
def test_feedback_of_another_type_or_shape_is_refused(out: str, fact: str) -> None:
    other = model(f"(float[2] x, float[2] h) => (float[2] hn, {out})", "hn = Add (h, x) y = Neg (hn)")
    with pytest.raises(FeedError) as error:
        Feed.of(CHUNKS, other, feedback="y=h")
    assert str(error.value) == f"feedback='y=h': output 'y' is {fact}; outputs that fit 'h': 'hn'"


def test_each_model_has_its_own_states_and_one_of_unknown_shape_must_be_given() -> None:
    free = model("(float[2] x, float[n] h) => (float[n] hn)", "hn = Add (h, x)")
    with pytest.raises(
        FeedError, match=r"the first batch is missing 'h', .* a tensor of known type and size \(float32 \[n\]\)"
    ):
        Feed.of(CHUNKS, free, feedback="hn=h")
    assert outputs(Feed.of([{"x": ROW, "h": ROW}, {"x": ROW}], free, feedback="hn=h"), free) == [[2, 4], [3, 6]]
    twice = model(
        "(float[2] x, float[2] h) => (float[2] hn, float[2] y)", "d = Add (h, x) hn = Add (d, x) y = Neg (hn)"
    )
    verdict = verify(SUM, twice, Feed.of(CHUNKS, SUM, feedback="hn=h"), outputs="y", tolerance=1e-2)
    values = [(row.batch, row.difference.reference, row.difference.candidate) for row in verdict.rows]
    assert values == [(0, "-2", "-4"), (1, "-6", "-12"), (2, "-12", "-24"), (3, "-20", "-40")]


def test_an_op_that_overflows_at_a_later_step_stays_float32() -> None:
    tens = np.diag(np.full(8, 10)).ravel().tolist()
    growing = model(
        "(float[1,8] x, float[1,8] h) => (float[1,8] hn)",
        "k = MatMul (h, w) hn = Add (k, x)",
        f"float[8,8] w = {{{','.join(map(str, tens))}}}",
    )
    x = np.ones((1, 8), np.float32)
    feeds = [Feed.of({"x": x}, growing, feedback="hn=h", steps=steps) for steps in (2, 7)]
    assert [convert(growing, data=feed, target="onnx", shift="none").plan.empty for feed in feeds] == [False, True]


BODY = "{out} = Add ({into}, x) y = Neg ({out})"


@pytest.mark.parametrize(
    ("out", "into"),
    [
        ("hn", "h"),
        ("h_n", "h_0"),
        ("hn", "h0"),
        ("stateN", "state"),
        ("state_out", "state_in"),
        ("new_state", "prev_state"),
        ("present.0.key", "past_key_values.0.key"),
        ("present_0", "past_0"),
        ("new_cached_key_0", "cached_key_0"),
    ],
)
def test_states_are_recognized_by_name(out: str, into: str) -> None:
    after, before = out.replace(".", "__"), into.replace(".", "__")
    ports = f"(float[2] x, float[2] {before}) => (float[2] {after}, float[2] y)"
    assert state_pairs(model(ports, BODY.format(out=after, into=before))) == {out: into}


@pytest.mark.parametrize(
    ("ports", "body"),
    [
        ("(float[1] x, float[2] u) => (float[2] v, float[3] y)", "v = Add (u, x) y = Pad (v, p)"),  # other names
        ("(float[2] x, int64[2] h) => (float[2] hn)", "f = Cast <to = 1> (h) hn = Add (f, x)"),
        ("(float[2] x, float[1] h) => (float[2] hn)", "hn = Add (h, x)"),
        ("(float[2] h) => (float[2] hn)", "hn = Neg (h)"),  # every input is fed back
    ],
)
def test_names_types_and_shapes_of_a_state_must_fit(ports: str, body: str) -> None:
    assert state_pairs(model(ports, body, "int64[2] p = {0, 1}")) == {}
