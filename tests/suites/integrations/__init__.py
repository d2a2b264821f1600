"""Other people's packages beside this one, each in an environment of its own, since their versions exclude one another.

`make integrations` makes them all, `make integrations INTEGRATIONS="olive genai"` some. For NAME there are two files:

- `NAME.txt`, requirements: the packages, and the onnxruntime that they want (this package brings none there);
- `test_NAME.py`, whose first lines skip it where the package is missing:
  `pytest.importorskip("MODULE", reason="needs PACKAGE; make integrations sets it up")`.

`tests/conftest.py` gives each test here the marker `integrations`. Warnings of other packages are no errors here.
"""
