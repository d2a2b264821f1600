"""A pass for Microsoft Olive. docs/how-to/pipelines.md shows how to register it."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Union

from olive.common.config_utils import ParamCategory
from olive.hardware.accelerator import AcceleratorSpec
from olive.model import ONNXModelHandler
from olive.model.utils import resolve_onnx_path
from olive.passes import Pass
from olive.passes.pass_config import BasePassConfig, PassConfigParam
from olive.search.search_parameter import Categorical

from amp_rewrite.errors import AmpRewriteError, EvidenceError
from amp_rewrite.files.store import data_files
from amp_rewrite.pipeline.convert import convert
from amp_rewrite.pipeline.repair import repair
from amp_rewrite.settings.choices import BY_PROVIDER, HEADROOM
from amp_rewrite.settings.option import Kind, Option
from amp_rewrite.settings.request import KEYWORDS, OPTIONS, Request

logger = logging.getLogger("olive.passes.amp_rewrite")  # a child of Olive's logger, whose level a workflow sets

_PATH = Union[Path, str]  # noqa: UP007
_TYPES: Mapping[Kind, Any] = {
    Kind.TEXT: str,
    Kind.LIST: Union[str, list[Any]],  # noqa: UP007  # pydantic reads it
    Kind.SWITCH: bool,
    Kind.NUMBER: float,
    Kind.WHOLE: int,
    Kind.PATH: _PATH,
}
_SEARCH_DEFAULTS = {"level": Categorical(["default", "tensor-cores-only", "treat-gray-as-deny"])}
_CATEGORIES = {"data": ParamCategory.DATA, "ranges": ParamCategory.PATH}
_OTHER_OPTIONS = ("data", "tolerance", "ranges", "headroom", "external_data")
"""Options in addition to those of `convert`."""


class AmpRewrite(Pass):  # type: ignore[misc]  # Olive has no types here
    """Convert a model to mixed precision; with data and a tolerance, repair it.

    The parameters are the options of `amp_rewrite.convert`, and data, tolerance, ranges, headroom and external_data. A
    search tries the values of `level`, and of any other option that the workflow gives as a Categorical.
    """

    @classmethod
    def _default_config(cls, accelerator_spec: AcceleratorSpec) -> dict[str, PassConfigParam]:
        target = BY_PROVIDER.get(str(accelerator_spec.execution_provider))
        config = {name: _parameter(OPTIONS[name]) for name in (*KEYWORDS, *_OTHER_OPTIONS)}
        config["fuse"].default_value = "basic"  # later passes may not know onnxruntime's operators
        config["headroom"].default_value = HEADROOM
        if target is not None:
            config["target"].default_value = target.value
        return config

    @classmethod
    def validate_config(cls, config: type[BasePassConfig], accelerator_spec: AcceleratorSpec) -> bool:
        """Return True if the options can be combined; a search skips other combinations."""
        options = _options(config)
        try:
            Request.of(**{name: value for name, value in options.items() if name in KEYWORDS})
        except AmpRewriteError as error:
            logger.error("AmpRewrite: %s", error)
            return False
        if "tolerance" in options and "data" not in options:
            logger.error("AmpRewrite: a tolerance requires data to measure errors on; also set data")
            return False
        return True

    def _run_for_config(
        self, model: ONNXModelHandler, config: type[BasePassConfig], output_model_path: str
    ) -> ONNXModelHandler:
        source = Path(model.model_path)
        path = Path(resolve_onnx_path(output_model_path, source.name))
        options = _options(config)
        external = f"{path.name}.data" if options.pop("external_data", False) else None  # named as in Olive
        if "tolerance" in options:
            repaired = repair(source, options.pop("data"), **options)
            if not repaired.solved:
                raise EvidenceError(
                    f"no choice of ops in float32 brings the outputs within {options['tolerance']}; widen the"
                    " tolerance, or keep float32 inputs and outputs"
                )
            converted = repaired.converted
        else:
            converted = convert(source, **options)
        logger.info("AmpRewrite: %s", converted.report.brief)
        converted.save(path, overwrite=True, external_data=external)
        if data_files(path):
            return ONNXModelHandler(model_path=str(path.parent), onnx_file_name=path.name)
        return ONNXModelHandler(model_path=str(path))


def _parameter(option: Option) -> PassConfigParam:
    return PassConfigParam(
        type_=Union[int, str] if option.name in ("opset", "shift") else _TYPES[option.kind],  # noqa: UP007
        default_value=None if option.environment else option.default or None,  # None: the environment variable is used
        description=option.doc.replace("`", ""),
        search_defaults=_SEARCH_DEFAULTS.get(option.name),
        category=_CATEGORIES.get(option.name, ParamCategory.NONE),
    )


def _options(config: type[BasePassConfig]) -> dict[str, Any]:
    values: Mapping[str, Any] = config.model_dump()
    return {name: values[name] for name in (*KEYWORDS, *_OTHER_OPTIONS) if values.get(name) is not None}
