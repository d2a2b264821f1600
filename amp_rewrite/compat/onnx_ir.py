"""A pass for onnx_ir, and the conversion of torch's exported programs. Weights stay lazy."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Unpack

import onnx_ir
from onnx import TensorProto
from onnx_ir.passes import FunctionalPass, PassResult

from amp_rewrite.errors import PolicyError
from amp_rewrite.files import tensors, wire
from amp_rewrite.files.external_data import map_tensors
from amp_rewrite.files.model import IrModel, Model
from amp_rewrite.files.protos import clone
from amp_rewrite.pipeline.convert import convert
from amp_rewrite.reports.report import Report
from amp_rewrite.settings.option import Options
from amp_rewrite.settings.request import Request


class MixedPrecision(FunctionalPass):  # type: ignore[misc]  # onnx_ir has no types here
    """A pass for `onnx_ir.passes.Sequential`. It returns a new model and does not change its input.

    Weights stay lazy: converted weights are read and cast when the model is saved, and the others are the tensors
    of the original model. The metadata of the proto is kept, but not the `meta` of onnx_ir.

    Attributes:
        report: the report on the last model; None before the first.
    """

    def __init__(self, **options: Unpack[Options]) -> None:
        """Create a pass with the options of a conversion.

        Args:
            **options: those of `amp_rewrite.convert`, see docs/reference/options.md.

        Raises:
            PolicyError: an option has an unknown value.
            ListError: an op list is invalid.

        Example:
            >>> import onnx_ir
            >>> from onnx_ir.passes.common import RemoveUnusedNodesPass
            >>> from amp_rewrite.compat.onnx_ir import MixedPrecision
            >>> passes = onnx_ir.passes.Sequential(RemoveUnusedNodesPass(), MixedPrecision(to="float16"))
            >>> half = passes(onnx_ir.load("model.onnx")).model
            >>> onnx_ir.save(half, "model_fp16.onnx")
        """
        self._options: Options = {"fuse": "basic", **options}  # later passes may not know onnxruntime's operators
        Request.of(**self._options)
        self.report: Report | None = None

    def call(self, model: onnx_ir.Model) -> PassResult:
        """Return the converted model, and True if it differs from the original."""
        source = Model.load(model)
        converted = convert(source, **self._options)
        self.report = converted.report
        ir_model = to_ir(converted.result)
        return PassResult(ir_model, converted.result.proto != source.proto)


def convert_program(program: Any, **options: Unpack[Options]) -> Report:
    """Convert the model of a torch ONNXProgram in place; calling and saving the program then use the new model.

    Weights are cast when they are needed, and must not change until then.

    Args:
        program: the result of `torch.onnx.export(…, dynamo=True)`.
        **options: those of `amp_rewrite.convert`, see docs/reference/options.md.

    Returns:
        The report: the type of each op, with the reason.

    Raises:
        PolicyError: the argument is not an ONNXProgram, or an option has an unknown value.
        AmpRewriteError: `amp_rewrite.convert` raises it.

    Example:
        >>> import torch
        >>> from amp_rewrite.compat.onnx_ir import convert_program
        >>> program = torch.onnx.export(torch.nn.Linear(64, 64), (torch.ones(2, 64),), dynamo=True, verbose=False)
        >>> report = convert_program(program, to="float16")
        >>> program.save("linear_fp16.onnx")
    """
    if not isinstance(getattr(program, "model", None), onnx_ir.Model):
        raise PolicyError(
            f"{type(program).__qualname__} is not an ONNXProgram with an onnx_ir.Model, so it cannot be converted in"
            " place; export with torch.onnx.export(…, dynamo=True), or use amp_rewrite.convert"
        )
    conversion = MixedPrecision(**options)
    program.model = conversion(program.model).model
    program.release()  # closes a session of the old model
    assert conversion.report is not None
    return conversion.report


def to_ir(model: Model) -> IrModel:
    """Return a model as an onnx_ir.Model, with heavy weights read on demand.

    Args:
        model: the model of a result, `convert(…).result`.

    Example:
        >>> import amp_rewrite
        >>> from amp_rewrite.compat.onnx_ir import to_ir
        >>> half = to_ir(amp_rewrite.convert("model.onnx").result)
    """
    proto = clone(model.proto)
    stubs: dict[str, TensorProto] = {}
    for tensor in filter(tensors.is_stub, wire.tensors(proto)):
        stub = TensorProto()
        stub.CopyFrom(tensor)
        location = str(len(stubs))
        stubs[location] = stub
        tensor.ClearField("external_data")
        tensor.external_data.add(key="location", value=location)
    ir_model = onnx_ir.from_proto(proto)

    def replaced(tensor: Any) -> Any:
        return _lazy(model, stubs[tensor.location], tensor) if isinstance(tensor, onnx_ir.ExternalTensor) else tensor

    map_tensors(ir_model, replaced)
    return ir_model  # type: ignore[no-any-return]


def _lazy(model: Model, stub: TensorProto, external: Any) -> Any:
    place, name, dtype, shape = tensors.source(stub), external.name, external.dtype, external.shape
    facts = {"name": name, "doc_string": external.doc_string, "metadata_props": dict(external.metadata_props)}
    if tensors.is_pending(stub) or (place.tensor is not None and place.tensor.tensor.name != name):
        return onnx_ir.LazyTensor(
            lambda: onnx_ir.Tensor(model.array(stub), dtype=dtype, name=name), dtype, shape, **facts
        )
    if place.tensor is not None:
        return place.tensor.tensor
    path = Path(place.path)
    return onnx_ir.ExternalTensor(
        path.name, place.offset, place.length, dtype, shape=shape, base_dir=path.parent, **facts
    )
