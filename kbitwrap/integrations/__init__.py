"""Integrations with the libraries that train: one file each.

Importing this package imports transformers; ``import kbitwrap`` does not import this package. What is for TRL is in
``kbitwrap.integrations.trl``.

Example:
    >>> from kbitwrap.integrations import KbitTrainerCallback, SuspendedEvaluation
"""

from .trainer import KbitTrainerCallback, SuspendedEvaluation

__all__ = ["KbitTrainerCallback", "SuspendedEvaluation"]
