"""Casting, and tensors whose bytes lie in files."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import TensorProto, numpy_helper

from amp_rewrite.dtypes import DType
from amp_rewrite.errors import ModelError
from amp_rewrite.files import tensors
from amp_rewrite.files.fit import Fit
from amp_rewrite.files.tensors import Source, Sources

LOW = [DType.FLOAT16, DType.BFLOAT16]


def numbers(to: DType) -> np.ndarray:
    """All finite numbers of a 16-bit type that are not negative, in order of their codes."""
    with np.errstate(invalid="ignore"):
        every = np.arange(1 << 15, dtype=np.uint16).view(to.numpy).astype(np.float64)
    return every[np.isfinite(every)]


def edges(to: DType) -> np.ndarray:
    """float64 values at, between and just beside the numbers of a low type, of both signs."""
    finite = numbers(to)
    last = finite[-1] + (finite[-1] - finite[-2]) / 2
    halves = [*((finite[1:] + finite[:-1]) / 2), last, 1e300]
    out = np.concatenate([finite, halves, np.nextafter(halves, 0), np.nextafter(halves, np.inf)])
    return np.concatenate([out, -out])


def nearest(values: np.ndarray, to: DType) -> np.ndarray:
    """Rounding to nearest even by search among all numbers of the type, saturating: the definition itself."""
    known = numbers(to)
    sizes = np.minimum(np.abs(values), known[-1])
    above = np.searchsorted(known, sizes).clip(1)
    low, high = sizes - known[above - 1], known[above] - sizes
    code = np.where((high < low) | ((high == low) & (above % 2 == 0)), above, above - 1).astype(np.uint16)
    return (code | (np.signbit(values).astype(np.uint16) << 15)).view(to.numpy)


@pytest.mark.parametrize("to", LOW)
@pytest.mark.parametrize("kind", [np.float32, np.float64])
def test_every_number_and_every_tie_rounds_to_nearest_even_and_saturates(to, kind):
    with np.errstate(over="ignore"):
        values = edges(to).astype(kind)
    values = values[np.isfinite(values)]
    np.testing.assert_array_equal(
        tensors.cast(values, to).view(np.uint16), nearest(values.astype(float), to).view("u2")
    )


def test_a_double_is_not_rounded_twice():
    value = np.array([1 + 2.0**-8 + 2.0**-40])
    assert float(tensors.cast(value, DType.BFLOAT16)[0]) == 1 + 2.0**-7
    assert float(value.astype(ml_dtypes.bfloat16)[0]) == 1.0


@pytest.mark.parametrize("to", [*LOW, DType.FLOAT])
def test_infinity_and_nan_stay_and_finite_overflow_becomes_the_largest_number(to):
    values = np.array([np.inf, -np.inf, np.nan, 1e300, -1e300])
    found = tensors.cast(values, to).astype(np.float64)
    np.testing.assert_array_equal(found, [np.inf, -np.inf, np.nan, to.max, -to.max])


@pytest.mark.parametrize("to", LOW)
@pytest.mark.parametrize("kind", [np.float32, np.float64])
def test_a_fit_counts_what_casting_does(to, kind):
    with np.errstate(over="ignore"):
        values = np.concatenate([edges(to).astype(kind), np.array([np.nan, np.inf, 0], kind)])
    finite = values[np.isfinite(values)]
    low = np.abs(tensors.cast(finite, to).astype(np.float64))
    with np.errstate(all="ignore"):
        overflow = (np.abs(finite).astype(float) >= to.max * (1 + to.eps / (2 - to.eps) / 2)).sum()
    expected = Fit(
        count=values.size,
        nonfinite=values.size - finite.size,
        absmax=float(np.abs(finite).max()),
        absmin=float(np.abs(finite[finite != 0]).min()),
        overflow=int(overflow),
        flushed=int(((low == 0) & (finite != 0)).sum()),
        subnormal=int(((low > 0) & (low < to.tiny)).sum()),
    )
    assert Fit.of(np.array_split(values, 7), to) == expected
    assert min(expected.overflow, expected.flushed, expected.subnormal) > 0


@pytest.mark.parametrize("values", [[], [0.0, -0.0], [np.nan, np.inf]])
def test_a_fit_without_finite_nonzero_values_has_no_bounds(values):
    found = Fit.of([np.array(values, np.float32)], DType.FLOAT16)
    bad = sum(not np.isfinite(v) for v in values)
    assert found == Fit(count=len(values), nonfinite=bad)


def stub(folder: Path, values: np.ndarray, *, skip: int = 8) -> TensorProto:
    """A stub whose bytes lie in a file of their own, after `skip` others."""
    tensor = numpy_helper.from_array(values, "w")
    file = folder / "w.bin"
    file.write_bytes(b"\xff" * skip + tensor.raw_data)
    kind = tensors.dtype(tensor)
    place = Source(str(file), skip, len(tensor.raw_data), kind, tensors.stamp(file.stat()), False)
    tensors.make_stub(tensor, place)
    return tensor


@pytest.mark.parametrize(
    "dtype", ["float32", "float64", "float16", ml_dtypes.bfloat16, "int64", "bool", "complex64", ml_dtypes.float8_e5m2]
)
def test_a_stub_reads_as_what_it_was(tmp_path, dtype):
    values = np.arange(6).reshape(2, 3).astype(dtype)
    with Sources() as sources:
        found = tensors.array(stub(tmp_path, values), sources)
    assert found.dtype == values.dtype
    np.testing.assert_array_equal(found, values)


@pytest.mark.parametrize("dtype", [ml_dtypes.int4, ml_dtypes.uint4])
def test_packed_values_read_as_what_they_were(tmp_path, dtype):
    values = np.array([1, 2, 3, 4, 5], dtype)
    tensor = stub(tmp_path, values)
    with Sources() as sources:
        np.testing.assert_array_equal(tensors.array(tensor, sources), values)
        assert [c.tolist() for c in tensors.chunks(tensor, 2, sources)] == [[1, 2], [3, 4], [5]]
        assert tensors.materialized(tensor, sources) == numpy_helper.from_array(values, "w")


@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (1,), (7,), (2, 4)])
def test_chunks_cover_the_tensor_in_order(tmp_path, shape):
    values = np.arange(np.prod(shape, dtype=int), dtype=np.float32).reshape(shape)
    for tensor in (stub(tmp_path, values), numpy_helper.from_array(values)):
        with Sources() as sources:
            found = list(tensors.chunks(tensor, 3, sources))
            assert tensors.array(tensor, sources).shape == shape
        assert all(0 < c.size <= 3 for c in found)
        np.testing.assert_array_equal(np.concatenate([np.empty(0), *found]), values.ravel())


@pytest.mark.parametrize("to", LOW)
def test_baking_a_stub_and_baking_values_in_memory_give_the_same_values(tmp_path, to):
    values = edges(to).astype(np.float64)
    lazy = stub(tmp_path, values)
    lazy.doc_string = "kept"
    eager = numpy_helper.from_array(values, "w")
    with Sources() as sources:
        first = tensors.baked(lazy, to, name="v", sources=sources)
        second = tensors.baked(eager, to, name="v", sources=sources)
        assert tensors.is_stub(first) and not tensors.is_stub(second)
        assert (first.name, first.data_type, first.doc_string) == ("v", to.code, "kept")
        assert tensors.nbytes(first) == tensors.nbytes(second) == 2 * values.size
        np.testing.assert_array_equal(
            tensors.array(first, sources).view("u2"), numpy_helper.to_array(second).view("u2")
        )
        assert b"".join(map(bytes, tensors.payload(first, sources))) == second.raw_data


def test_baking_twice_rounds_twice_as_asked(tmp_path):
    value = np.array([1 + 2.0**-8 + 2.0**-12], np.float32)
    with Sources() as sources:
        once = tensors.baked(stub(tmp_path, value), DType.BFLOAT16, sources=sources)
        again = tensors.baked(once, DType.FLOAT16, sources=sources)
        assert tensors.array(again, sources).tolist() == [1 + 2.0**-7]


@pytest.mark.parametrize("value", [np.array([1], np.int64), np.array(["a"], object)])
def test_only_floating_tensors_are_baked(value):
    tensor = numpy_helper.from_array(value, "n")
    with (
        Sources() as sources,
        pytest.raises(ModelError, match=r"tensor 'n' is .*; only floating types cast to float16"),
    ):
        tensors.baked(tensor, DType.FLOAT16, sources=sources)


def test_a_file_that_changed_since_is_not_read(tmp_path):
    tensor = stub(tmp_path, np.ones(4, np.float32))
    other = tmp_path / "other"
    other.write_bytes(bytes(24))
    other.replace(tmp_path / "w.bin")
    with Sources() as sources, pytest.raises(ModelError, match=r"w\.bin has changed since .*; load it again"):
        tensors.array(tensor, sources)


def test_a_file_that_became_a_link_is_not_followed(tmp_path):
    tensor = stub(tmp_path, np.ones(4, np.float32))
    (tmp_path / "w.bin").rename(tmp_path / "moved")
    (tmp_path / "w.bin").symlink_to("moved")
    with Sources() as sources, pytest.raises(ModelError, match=r"cannot read .*w\.bin"):
        tensors.array(tensor, sources)


def test_more_files_than_are_kept_open_are_read(tmp_path):
    stubs = []
    for n in range(100):
        (tmp_path / str(n)).mkdir()
        stubs.append(stub(tmp_path / str(n), np.array([n], np.float32)))
    open_before = len(list(Path("/dev/fd").iterdir()))
    with Sources() as sources:
        assert [float(tensors.array(t, sources)[0]) for t in stubs * 2] == [*range(100)] * 2
        assert len(list(Path("/dev/fd").iterdir())) <= open_before + 32
    assert len(list(Path("/dev/fd").iterdir())) == open_before


def test_external_data_that_nobody_resolved_is_refused():
    tensor = TensorProto(name="w", data_type=1, dims=[1], data_location=TensorProto.EXTERNAL)
    tensor.external_data.add(key="location", value="w.bin")
    with Sources() as sources, pytest.raises(ModelError, match="tensor 'w' has external data that was not resolved"):
        tensors.array(tensor, sources)


def test_values_that_do_not_fill_their_dims_are_an_error():
    tensor = TensorProto(name="w", data_type=1, dims=[3], raw_data=bytes(8))
    with Sources() as sources, pytest.raises(ModelError, match="tensor 'w' cannot be read"):
        tensors.array(tensor, sources)


def test_strings_pass():
    tensor = onnx.helper.make_tensor("s", TensorProto.STRING, [2], [b"a", b"b"])
    with Sources() as sources:
        assert tensors.array(tensor, sources).tolist() == ["a", "b"]
