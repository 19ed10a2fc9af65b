"""Reversible preparation of quantized models for training.

Example:
    >>> from kbitwrap import KbitPreparedModel, Precision
"""

from .comparison import ManifestDiff
from .config import Precision, PrepareConfig
from .convert import convert_checkpoint
from .drop_in import prepare_model_for_kbit_training, restore
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
from .inspection import CheckpointReport, inspect_checkpoint
from .manifest import Manifest
from .preparation.plan import Plan, build_plan
from .prepared import KbitPreparedModel, LifecycleState, prepared_of
from .reports import ExportReport, RestoreReport, StateDiff
from .schema import TensorRecord

__all__ = [
    "CheckpointReport",
    "ConfigError",
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
    "Plan",
    "Precision",
    "PrepareConfig",
    "RestoreError",
    "RestoreReport",
    "StateDiff",
    "StateError",
    "TensorRecord",
    "UnsupportedModelError",
    "build_plan",
    "convert_checkpoint",
    "inspect_checkpoint",
    "prepare_model_for_kbit_training",
    "prepared_of",
    "restore",
]
