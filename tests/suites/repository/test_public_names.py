"""The public names are imported on first use, and their list only changes on purpose."""

import subprocess
import sys
from importlib import import_module

import pytest

import amp_rewrite
import amp_rewrite.train

NAMES = {
    "amp_rewrite": """
        AmpRewriteError Cache ConfigError ConversionError Converted DType EvidenceError Feed
        FeedError GradientError ListError MachineError Model ModelError Outcome PatternError
        Policy PolicyError Ranges Repaired Report ReportError Session Target
        TrainingError Verdict View __version__ bench calibrate convert convert_many diff
        disable_mixed_precision_graph_rewrite doctor emulate enable_mixed_precision_graph_rewrite
        explain export global_policy gradients locate policy_scope progress_bar repair report_of set_policy
        train verify""",
    "amp_rewrite.train": """
        Adagrad Adam AdamW CosineDecay DynamicLossScale
        EarlyStopping ExponentialDecay FixedLossScale GradientTape LossScale LossScaleOptimizer
        Losses Metrics ModelLoss Network Optimizer RMSprop SGD Schedule
        StatefulOptimizer Trainer TrainingStep Variable averaged bind
        from_keras from_torch join_replicas save_step
        scale_gradients shard strategy_supports_loss_scaling training_step""",
}
"""Public names by package. Removing a name breaks users; adding one is a promise."""


@pytest.mark.parametrize("package", NAMES)
def test_the_stub_lists_exactly_the_public_names(package: str) -> None:
    assert import_module(package).__all__ == sorted(NAMES[package].split())
    assert dir(import_module(package)) == sorted(NAMES[package].split())


@pytest.mark.parametrize(("package", "name"), [(p, name) for p in NAMES for name in NAMES[p].split()])
def test_every_public_name_can_be_imported(package: str, name: str) -> None:
    assert getattr(import_module(package), name) is not None


def test_functions_stay_functions_after_their_modules_are_imported() -> None:
    code = (
        "import amp_rewrite, amp_rewrite.pipeline.convert, amp_rewrite.reports.diff\n"
        "assert all(callable(getattr(amp_rewrite, n)) for n in ('convert', 'diff', 'doctor', 'repair', 'emulate'))"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'amp_rewrite' has no attribute 'nonsense'"):
        _ = amp_rewrite.nonsense  # type: ignore[attr-defined]


def test_importing_the_package_imports_neither_onnx_nor_numpy() -> None:
    code = "import sys, amp_rewrite, amp_rewrite.train; sys.exit(bool({'onnx', 'numpy', 'click'} & sys.modules.keys()))"
    subprocess.run([sys.executable, "-c", code], check=True)
