"""Measure a WebGPU device: python -m suites.webgpu table|page|render (see the Makefile)."""

import argparse
import json
from contextlib import closing
from pathlib import Path

from suites.webgpu.worker import Device


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("step", choices=["table", "page", "render"])
    parser.add_argument("--write", type=Path, required=True)
    parser.add_argument("--results", type=Path, help="measured numbers, as JSON")
    arguments = parser.parse_args()
    if arguments.step == "render":
        from suites.webgpu.page import page

        arguments.write.write_text(page(json.loads(arguments.results.read_text("utf-8"))), "utf-8")
        return
    with closing(Device()) as device:
        if device.absence is not None:
            raise SystemExit(f"no WebGPU device: {device.absence}")
        if arguments.step == "table":
            from suites.webgpu.probe import table, tables

            arguments.write.write_text(tables.spell(table(device), "kernels"), "utf-8")
        else:
            from suites.webgpu.measure import measured
            from suites.webgpu.page import page

            numbers = measured(device)
            arguments.results.write_text(json.dumps(numbers, indent=1) + "\n", "utf-8")
            arguments.write.write_text(page(numbers), "utf-8")


if __name__ == "__main__":
    main()
