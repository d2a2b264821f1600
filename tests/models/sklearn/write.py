"""Train small models with scikit-learn on its iris set, and export them with skl2onnx: `python write.py [FOLDER]`.

Each NAME.onnx has batches of its own set in data.npz. ZipMap is on by default, as for most users; `_plain` is without
it. Needs scikit-learn and skl2onnx, which the tests do not.
"""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from skl2onnx import to_onnx
from sklearn.datasets import load_iris
from sklearn.ensemble import RandomForestClassifier, RandomForestRegressor
from sklearn.linear_model import LinearRegression, LogisticRegression
from sklearn.neural_network import MLPClassifier, MLPRegressor
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.svm import SVC, SVR

FOREST = {"n_estimators": 3, "max_depth": 3, "random_state": 0}
HIDDEN = {"hidden_layer_sizes": (16, 8), "max_iter": 400, "random_state": 0}


def models() -> dict[str, Any]:
    """Return the estimators by name; those with `str` in the name learn the names of classes, not their numbers."""
    return {
        "logistic": LogisticRegression(max_iter=400),
        "logistic_str": LogisticRegression(max_iter=400),
        "mlp": MLPClassifier(**HIDDEN),
        "forest": RandomForestClassifier(**FOREST),
        "svc": SVC(kernel="linear"),
        "svc_probability": SVC(kernel="rbf", C=0.5, probability=True, random_state=0),
        "scaled_logistic": make_pipeline(StandardScaler(), LogisticRegression(max_iter=400)),
        "scaled_mlp_str": make_pipeline(StandardScaler(), MLPClassifier(**HIDDEN)),
        "linear_regression": LinearRegression(),
        "mlp_regression": make_pipeline(StandardScaler(), MLPRegressor(**HIDDEN)),
        "forest_regression": RandomForestRegressor(**FOREST),
        "svr": make_pipeline(StandardScaler(), SVR(kernel="linear")),
    }


def main(folder: Path) -> None:
    """Write all models and their data."""
    x, y, names = *load_iris(return_X_y=True), load_iris().target_names
    x = x.astype(np.float32)
    np.savez(folder / "data.npz", **{f"{i}/X": x[i::3] for i in range(3)})
    for name, model in models().items():
        regresses, classes = "regression" in name or name == "svr", names[y] if name.endswith("_str") else y
        model.fit(x[:, :4] if not regresses else x, x[:, 3] if regresses else classes)
        plain = {f"{name}_plain": {"zipmap": False}} if name in ("logistic", "mlp", "forest") else {}
        for file, options in {name: None, **plain}.items():
            last = model.steps[-1][1] if hasattr(model, "steps") else model
            chosen = {id(last): options} if options else None
            onnx.save(to_onnx(model, x[:1], options=chosen, target_opset=17), folder / f"{file}.onnx")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent)
