"""List the benchmarks, or run one of them.

    python benchmarks/run.py                     # list all
    python benchmarks/run.py NAME [ARGUMENT …]   # run one; --help prints its arguments

NAME is a script in a subfolder, without `.py`. A benchmark starts its helper scripts with the same command in other
processes, some of them in environments with another converter and without this package.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
USAGE = "python benchmarks/run.py {}"
QUOTES = '"""'


def listing() -> str:
    """Return the benchmarks by folder with the first lines of their docstrings, without helper scripts."""
    lines = [USAGE.format("NAME [ARGUMENT …]")]
    folder = ""
    for path in sorted(HERE.glob("*/*.py")):
        text = path.read_text("utf-8")
        if USAGE.format(path.stem) not in text:
            continue
        if path.parent.name != folder:
            folder = path.parent.name
            lines += ["", f"{folder}/"]
        lines.append(f"  {path.stem:15} {text.removeprefix(QUOTES).splitlines()[0].removesuffix(QUOTES)}")
    return "\n".join(lines)


def main() -> None:
    words = sys.argv[1:]
    if not words or words[0] in ("-h", "--help"):
        print(listing())
        return
    script = next((path for path in HERE.glob("*/*.py") if path.stem == words[0]), None)
    if script is None:
        sys.exit(f"there is no benchmark {words[0]!r}; run this command without a name to list them")
    root = HERE.parent
    sys.path[0] = str(root)
    sys.path.append(str(root / "tests"))  # some benchmarks use models built by the tests
    sys.argv = [str(script), *words[1:]]
    runpy.run_module(f"benchmarks.{script.parent.name}.{script.stem}", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
