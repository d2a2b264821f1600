"""`export` writes a PyTorch module to a converted file in one call."""

import logging
from pathlib import Path

import pytest

import amp_rewrite
from amp_rewrite.errors import FeedError, MachineError, ModelError
from amp_rewrite.pipeline import torch_export


def test_without_torch_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(torch_export, "find_spec", lambda name: None)
    with pytest.raises(MachineError, match="export requires torch and onnxscript; pip install torch onnxscript"):
        amp_rewrite.export(object(), (), tmp_path / "net.onnx")


@pytest.mark.torch
@pytest.mark.filterwarnings("ignore")
def test_a_module_is_exported_to_a_checked_file(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    pytest.importorskip("onnxscript")
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Dropout(0.5), torch.nn.Linear(32, 4)).train()
    image, path = torch.randn(3, 16), tmp_path / "net.onnx"
    free = ({0: torch.export.Dim("batch")},)
    report = amp_rewrite.export(net, image, path, dynamic_shapes=free, input_names=["image"], output_names=["y"])
    assert net.training
    assert (report.totals.compute_lowered, report.evidence.level, report.evidence.random) == (2, "smoke", False)
    with torch.no_grad():
        expected = net.eval()(image).numpy()
    (found,) = amp_rewrite.Session(path).run(None, {"image": image.numpy()})
    assert abs(found - expected).max() < 1e-2
    assert report.model.name == "Sequential"
    assert report.text().endswith("\nnext: the same call with tolerance=1e-2, overwrite=True\n")
    verified = amp_rewrite.export(net, image, path, tolerance=1e-2, overwrite=True)
    assert verified.evidence.level == "verified" and "next: " not in verified.text()
    with pytest.raises(ModelError, match="not OrderedDict; load weights into a module"):
        amp_rewrite.export(net.state_dict(), image, path)
    with pytest.raises(FeedError, match="args must be tensors, not ndarray"):
        amp_rewrite.export(net, image.numpy(), path)
    with pytest.raises(ModelError, match="exists"):  # before the export, which would fail with these arguments
        amp_rewrite.export(net, (image[:, :3],), path)
    with torch.no_grad():
        net[0].weight *= 1e5
        net[2].weight *= 1e-5
    repaired = amp_rewrite.export(net, (image,), path, overwrite=True)
    assert repaired.evidence.level == "repaired" and repaired.evidence.keep
    with torch.no_grad():
        net[2].weight *= 1e9
    with pytest.raises(ModelError, match=r"fails its check: .* nothing was written"):
        amp_rewrite.export(net, (image,), tmp_path / "none.onnx", io="low")
    assert not (tmp_path / "none.onnx").exists()
