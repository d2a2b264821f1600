"""The cases: float32 models with inputs and expected outputs from the onnx wheel."""

import copy
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

import numpy as np
import onnx
from onnx import GraphProto, ModelProto, TensorProto, TypeProto, ValueInfoProto, numpy_helper
from onnx.backend.test.case.test_case import TestCase

from amp_rewrite.files.protos import bodies
from support.objections import element

NEWEST_OPSET, NEWEST_IR = 26, 13
"""The newest opset of ai.onnx and the newest IR version that onnxruntime 1.31.1 opens."""
FOLDERS = ("simple", "pytorch-converted", "pytorch-operator")
DATA = Path(onnx.__file__).parent / "backend" / "test" / "data"
UNTESTED_DOMAIN = "ai.onnx.preview.training"

Sample = tuple[Sequence[object], Sequence[object]]
"""Inputs and expected outputs, in the graph's order."""


@dataclass(frozen=True)
class Case:
    """A model of the standard. `suite`: "node", one of `FOLDERS`, or "light"."""

    suite: str
    name: str
    origin: TestCase | Path

    @cached_property
    def original(self) -> ModelProto:
        """The standard's model, unchanged."""
        if isinstance(self.origin, Path):
            return onnx.load(self.origin)
        assert self.origin.model is not None
        return self.origin.model

    @property
    def relabeled(self) -> bool:
        """Whether the model's opset or IR version is too new for onnxruntime."""
        too_new = any(o.domain in ("", "ai.onnx") and o.version > NEWEST_OPSET for o in self.original.opset_import)
        return too_new or self.original.ir_version > NEWEST_IR

    @property
    def model(self) -> ModelProto:
        """A copy of the model with the newest versions that onnxruntime opens; it may fail the checker."""
        model = copy.deepcopy(self.original)
        model.ir_version = min(model.ir_version, NEWEST_IR)
        for opset in model.opset_import:
            if opset.domain in ("", "ai.onnx"):
                opset.version = min(opset.version, NEWEST_OPSET)
        return model

    @property
    def samples(self) -> tuple[Sample, ...]:
        """All inputs with their expected outputs."""
        if not isinstance(self.origin, Path):
            return tuple((ins, outs) for ins, outs in self.origin.data_sets or ())
        if self.suite == "light":
            return (_light_sample(self.origin, self.original),)
        return tuple(_stored_sample(folder, self.original) for folder in sorted(self.origin.parent.glob("test_data_*")))


@cache
def cases() -> Mapping[str, Case]:
    """Return every case with float32 inputs or outputs by "suite/name", in order, except models with gradients."""
    found = sorted(_all(), key=lambda case: (case.suite, case.name))
    return {f"{case.suite}/{case.name}": case for case in found if _belongs(case.original)}


def _all() -> Iterator[Case]:
    from onnx.backend.test.case.node import collect_testcases

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deliberate overflows
        yield from (Case("node", test.name, test) for test in collect_testcases(None))
    for suite in FOLDERS:
        yield from (Case(suite, path.parent.name, path) for path in (DATA / suite).glob("*/model.onnx"))
    yield from (Case("light", path.stem, path) for path in (DATA / "light").glob("*.onnx"))


def _belongs(model: ModelProto) -> bool:
    if any(opset.domain == UNTESTED_DOMAIN for opset in model.opset_import):
        return False
    return any(element(value.type) == TensorProto.FLOAT for value in (*model.graph.input, *model.graph.output))


def inputs_to_feed(model: ModelProto) -> list[ValueInfoProto]:
    """Return the inputs without an initializer; before IR 4 initializers are listed among the inputs."""
    filled = {tensor.name for tensor in model.graph.initializer}
    return [value for value in model.graph.input if value.name not in filled]


def _stored_sample(folder: Path, model: ModelProto) -> Sample:
    def read(kind: str, values: Sequence[ValueInfoProto]) -> list[object]:
        count = len(list(folder.glob(f"{kind}_*.pb")))
        return [_read(folder / f"{kind}_{at}.pb", values[at].type) for at in range(count)]

    return read("input", inputs_to_feed(model)), read("output", model.graph.output)


def _read(path: Path, proto: TypeProto) -> object:
    if proto.WhichOneof("value") == "sequence_type":
        return numpy_helper.to_list(onnx.SequenceProto.FromString(path.read_bytes()))
    return numpy_helper.to_array(TensorProto.FromString(path.read_bytes()))


def _light_sample(path: Path, model: ModelProto) -> Sample:
    """Return the ramp from 0 to 1 with which the standard computed its stored outputs."""
    ramps = []
    for value in inputs_to_feed(model):
        shape = [d.dim_value or 1 for d in value.type.tensor_type.shape.dim]
        size = int(np.prod(shape))
        ramps.append((np.arange(size).reshape(shape) / size).astype(np.float32))
    stored = TensorProto.FromString(path.with_name(f"{path.stem}_output_0.pb").read_bytes())
    return ramps, [numpy_helper.to_array(stored)]


# -- a small selection with every operator ------------------------------------------------------------------

SLOW = frozenset({"light/light_vgg19", "light/light_densenet121", "light/light_inception_v2", "light/light_resnet50"})


def subset(cases: Mapping[str, Case]) -> tuple[str, ...]:
    """Select the last case for each set of operators."""
    chosen = {frozenset(_operators(case.original.graph)): key for key, case in cases.items() if key not in SLOW}
    return tuple(sorted(chosen.values()))


def _operators(graph: GraphProto) -> Iterator[str]:
    for node in graph.node:
        yield node.op_type
        for _, body in bodies(node):
            yield from _operators(body)
