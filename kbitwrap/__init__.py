"""Reversible preparation of quantized models for training.

Importing it loads no torch: a public name that needs torch is loaded when it is first
used.

Example:
    >>> from kbitwrap import KbitPreparedModel, Precision
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from .config import Precision, PrepareConfig, QuantKind
from .errors import (
    ConfigError,
    EditError,
    ExportError,
    KbitWrapError,
    ManifestError,
    ManifestMismatchError,
    ManifestVersionError,
    MemoryBudgetError,
    RestoreError,
    StateError,
    UnsupportedModelError,
)
from .reports import (
    ExportReport,
    LifecycleState,
    RestoreReport,
    ShardingOutcome,
    ShardingReport,
    StateDiff,
)

if TYPE_CHECKING:
    from .checkpoints.convert import convert_checkpoint
    from .checkpoints.doctor import DoctorReport, doctor
    from .checkpoints.inspection import CheckpointReport, inspect_checkpoint
    from .checkpoints.merge import merge_checkpoint
    from .checkpoints.stamp import stamp_adapter
    from .checkpoints.text import MergeComparison, TextMeasure, compare_merges
    from .drop_in import (
        patch_peft,
        patched,
        prepare_model_for_kbit_training,
        prepared_of,
        restore,
    )
    from .foresight.memory import StepMemory
    from .foresight.predict import StepPredictor, predict_step
    from .foresight.scripts import instead_of_training
    from .foresight.tracker import StepTracker
    from .manifest.diff import ManifestDiff
    from .manifest.manifest import Manifest
    from .manifest.schema import TensorRecord
    from .preparation.engines import check_sharding
    from .preparation.plan import Plan, build_plan
    from .prepared import KbitPreparedModel

_HOMES = {
    "checkpoints.convert": ("convert_checkpoint",),
    "checkpoints.doctor": ("DoctorReport", "doctor"),
    "checkpoints.inspection": ("CheckpointReport", "inspect_checkpoint"),
    "checkpoints.merge": ("merge_checkpoint",),
    "checkpoints.stamp": ("stamp_adapter",),
    "checkpoints.text": ("MergeComparison", "TextMeasure", "compare_merges"),
    "drop_in": (
        "patch_peft",
        "patched",
        "prepare_model_for_kbit_training",
        "prepared_of",
        "restore",
    ),
    "foresight.memory": ("StepMemory",),
    "foresight.predict": ("StepPredictor", "predict_step"),
    "foresight.scripts": ("instead_of_training",),
    "foresight.tracker": ("StepTracker",),
    "manifest.diff": ("ManifestDiff",),
    "manifest.manifest": ("Manifest",),
    "manifest.schema": ("TensorRecord",),
    "preparation.engines": ("check_sharding",),
    "preparation.plan": ("Plan", "build_plan"),
    "prepared": ("KbitPreparedModel",),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "CheckpointReport",
    "ConfigError",
    "DoctorReport",
    "EditError",
    "ExportError",
    "ExportReport",
    "KbitPreparedModel",
    "KbitWrapError",
    "LifecycleState",
    "Manifest",
    "ManifestDiff",
    "ManifestError",
    "ManifestMismatchError",
    "ManifestVersionError",
    "MemoryBudgetError",
    "MergeComparison",
    "Plan",
    "Precision",
    "PrepareConfig",
    "QuantKind",
    "RestoreError",
    "RestoreReport",
    "ShardingOutcome",
    "ShardingReport",
    "StateDiff",
    "StateError",
    "StepMemory",
    "StepPredictor",
    "StepTracker",
    "TensorRecord",
    "TextMeasure",
    "UnsupportedModelError",
    "build_plan",
    "check_sharding",
    "compare_merges",
    "convert_checkpoint",
    "doctor",
    "inspect_checkpoint",
    "instead_of_training",
    "merge_checkpoint",
    "patch_peft",
    "patched",
    "predict_step",
    "prepare_model_for_kbit_training",
    "prepared_of",
    "restore",
    "stamp_adapter",
]


def __getattr__(name: str) -> Any:
    """Load a public name that needs torch (PEP 562)."""
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{_HOME_OF[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """List the public names, loaded or not."""
    return __all__
