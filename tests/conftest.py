"""ONNX text is read by the package in all tests: nodes have names in it, which onnx 1.17 does not read by itself."""

import onnx.parser

from amp_rewrite.files.text import parse_model

onnx.parser.parse_model = parse_model
