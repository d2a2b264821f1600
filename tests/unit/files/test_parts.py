"""Finished data files of an interrupted save: by which number, size and state they are taken up."""

from __future__ import annotations

from pathlib import Path

from onnx import ModelProto

from amp_rewrite.files.parts import Parts

DIGESTS = "0" * 16, "f" * 16


def _parts(folder: Path, name: str = "m.onnx", *, producer: str = "", shard: int | None = 1) -> Parts:
    return Parts(folder / name, [(None, ModelProto(producer_name=producer))], shard)


def _kept(parts: Parts, folder: Path, number: int, digest: str, content: bytes) -> Path:
    (folder / "file").write_bytes(content)
    return parts.keep(folder / "file", number, digest)


def test_a_part_is_taken_up_by_its_number_and_size(tmp_path: Path) -> None:
    parts = _parts(tmp_path)
    first, second = (_kept(parts, tmp_path, number, DIGESTS[number], b"abc"[number:]) for number in (0, 1))
    assert parts.finished(0, 3) == (first, DIGESTS[0]) and parts.finished(1, 2) == (second, DIGESTS[1])
    assert [parts.finished(*asked) for asked in ((0, 2), (1, 3), (2, 3), (10, 3))] == [None] * 4


def test_parts_of_this_file_are_removed_and_those_of_others_stay(tmp_path: Path) -> None:
    mine, others = (
        _parts(tmp_path),
        [
            _parts(tmp_path, "n.onnx"),
            _parts(tmp_path, producer="p"),
            _parts(tmp_path, shard=None),
        ],
    )
    kept = [_kept(other, tmp_path, 0, DIGESTS[0], b"abc") for other in others]
    assert mine.finished(0, 3) is None
    mine.clear()
    assert list(tmp_path.iterdir()) == kept[:1]


def test_links_and_names_without_a_digest_are_no_parts(tmp_path: Path) -> None:
    parts = _parts(tmp_path)
    part = _kept(parts, tmp_path, 0, DIGESTS[0], b"abc")
    (tmp_path / "elsewhere").write_bytes(b"abc")
    part.rename(part.with_name(part.name.replace(DIGESTS[0], "0" * 15)))
    part.symlink_to(tmp_path / "elsewhere")
    assert parts.finished(0, 3) is None
