"""Other packages together with this one, each in a separate environment, because their versions conflict.

`make integrations` runs all of them, `make integrations INTEGRATIONS="olive genai"` some. NAME has two files:

- `NAME.txt`, requirements: the packages and their onnxruntime (this package installs none there);
- `test_NAME.py`, which skips itself if the package is missing:
  `pytest.importorskip("MODULE", reason="needs PACKAGE; make integrations sets it up")`.

`tests/conftest.py` marks each test here with `integrations` and ignores warnings of other packages.
"""
