"""Data files of a model, found without its weights; and limits of inlining functions."""

import io
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import ModelProto, helper, numpy_helper

from amp_rewrite.errors import ModelError
from amp_rewrite.files import loading
from amp_rewrite.files.loading import check_expansion
from amp_rewrite.files.model import Model
from amp_rewrite.files.store import check_target, data_files_in, outdated


class Counting(io.BytesIO):
    """A file that counts the bytes read."""

    count = 0

    def read(self, size: int | None = -1) -> bytes:
        content = super().read(size)
        self.count += len(content)
        return content


def model(*locations: str, inline: int = 4) -> ModelProto:
    proto = ModelProto()
    proto.graph.initializer.append(numpy_helper.from_array(np.zeros(inline, np.float32), "w"))
    for number, location in enumerate(locations):
        tensor = proto.graph.initializer.add(name=f"t{number}", data_type=1, data_location=1)
        tensor.external_data.add(key="location", value=location)
        tensor.external_data.add(key="offset", value="0")
    return proto


@pytest.mark.parametrize("inline", [4, 1 << 20])
def test_the_data_files_of_a_model_are_found_without_its_weights(inline: int) -> None:
    content = model("b.data", "a.data", "b.data", inline=inline).SerializeToString()
    file = Counting(content)
    assert data_files_in(file, len(content), Path("in/m.onnx")) == [Path("in/a.data"), Path("in/b.data")]
    assert 0 < file.count < 200_000


def test_data_read_only_by_the_replaced_model_is_outdated(tmp_path: Path) -> None:
    own = [f"m.{digit * 16}.data" for digit in "0123"]
    for name in (*own, "other.data"):
        (tmp_path / name).write_bytes(b"")
    file = tmp_path / "m.onnx"
    onnx.save(model(*own, "other.data"), file)
    onnx.save(model(own[1]), tmp_path / "n.onnx")
    assert outdated(file, {str((tmp_path / own[2]).resolve())}) == [tmp_path / own[0], tmp_path / own[3]]
    (tmp_path / "link.onnx").symlink_to(file)
    assert outdated(tmp_path / "link.onnx", ()) == outdated(tmp_path / "none.onnx", ()) == []
    (tmp_path / "link.onnx").unlink()
    (tmp_path / "again.bin").hardlink_to(file)
    assert outdated(file, ()) == []


@pytest.mark.parametrize("suffix", [".onnxtxt", ".PBTXT", ".json"])
def test_models_as_text_are_refused_with_a_remedy(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"m{suffix}"
    with pytest.raises(ModelError, match="only the binary format can be written"):
        check_target(path, overwrite=False)
    path.write_text("text")
    with pytest.raises(
        ModelError, match=r"it is a text file: if it contains a model, in Python, onnx\.save\(onnx\.load\("
    ):
        Model.load(path)


def test_a_data_file_that_is_a_link_to_itself_is_not_the_target(tmp_path: Path) -> None:
    (tmp_path / "m.onnx").write_bytes(model("w.bin").SerializeToString())
    (tmp_path / "w.bin").symlink_to("w.bin")
    (tmp_path / "out.onnx").touch()
    check_target(tmp_path / "out.onnx", True, loaded_from=tmp_path / "m.onnx")


CIRCLE = "its local functions call each other in a cycle, or more than 3 deep"


def calling(calls: Mapping[str, str], *, branch: bool = False) -> onnx.ModelProto:
    """Build a model that calls the function a, possibly in a branch; `calls` lists each one's calls, "R" for a Relu."""

    def nodes(called: str) -> list[onnx.NodeProto]:
        words = (("Relu", "") if name == "R" else (name, "own") for name in called)
        return [helper.make_node(op, ["x"], ["y"], domain=domain) for op, domain in words]

    imports = [helper.make_opsetid("", 17), helper.make_opsetid("own", 1)]
    functions = [helper.make_function("own", name, ["x"], ["y"], nodes(body), imports) for name, body in calls.items()]
    main = nodes("a")
    if branch:
        body = helper.make_graph(main, "body", [], [])
        main = [helper.make_node("If", ["c"], ["z"], then_branch=body, else_branch=body)]
    return helper.make_model(helper.make_graph(main, "g", [], []), functions=functions, opset_imports=imports)


@pytest.mark.parametrize("branch", [False, True])
@pytest.mark.parametrize(
    ("calls", "refusal"),
    [
        ({}, ""),
        ({"a": "b", "b": "c", "c": "R"}, ""),
        ({"a": "b", "b": "c", "c": "d", "d": "R"}, CIRCLE),
        ({"a": "a"}, CIRCLE),
        ({"b": "b"}, ""),  # it is never called
        ({"a": "bbbb", "b": "cccc", "c": "RRRR"}, "inlining its local functions turns {1} nodes into {0}"),
        ({"a": "bb", "b": "cc", "c": "RRR"}, ""),
    ],
)
def test_functions_are_inlined_within_limits(
    calls: Mapping[str, str], refusal: str, branch: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading, "_MAX_CALL_DEPTH", 3)
    monkeypatch.setattr(loading, "_MAX_NODES", 30)
    monkeypatch.setattr(loading, "_MAX_GROWTH", 2)
    proto = calling(calls, branch=branch)
    if not refusal:
        check_expansion(proto, "m")
        return
    nodes = (1 + 2 * 85, 15) if branch else (85, 13)  # of the longest row
    with pytest.raises(ModelError) as error:
        check_expansion(proto, "m")
    assert str(error.value).startswith(f"m: {refusal.format(*nodes)}")
