"""Integrations with the libraries that train: one file each.

Importing this package imports transformers; ``import kbitwrap`` does not import this
package. The integration with TRL is ``kbitwrap.integrations.trl``.

Example:
    >>> from kbitwrap.integrations import (
    ...     KbitTrainerCallback,
    ...     SuspendedEvaluation,
    ...     prepared_trainer,
    ... )
"""

from .trainer import KbitTrainerCallback, SuspendedEvaluation, prepared_trainer

__all__ = ["KbitTrainerCallback", "SuspendedEvaluation", "prepared_trainer"]
