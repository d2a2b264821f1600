"""benchmarks/run.py lists each script that takes arguments."""

import re

from support.paths import ROOT, imported


def test_run_lists_each_script_with_arguments_once() -> None:
    listed = re.findall(r"^  (\w+) ", imported("benchmarks.run").listing(), re.MULTILINE)
    paths = [*(ROOT / "benchmarks").glob("*/*.py")]
    scripts = {path.stem for path in paths if "ArgumentParser(" in path.read_text("utf-8")}
    assert sorted(listed) == sorted(scripts - {"export"})  # started by architectures
    assert len({path.stem for path in paths}) == len(paths)
