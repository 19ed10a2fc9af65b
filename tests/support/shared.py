"""What a process shares with those that it starts; nothing is imported for it."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from pathlib import Path

_FOLDER = "KBITWRAP_ZOO"


def checkpoints() -> Path:
    """The folder of all checkpoints: the environment names it, so that processes started by this one read the same."""
    if _FOLDER not in os.environ:
        os.environ[_FOLDER] = tempfile.mkdtemp(prefix="zoo-")
        atexit.register(shutil.rmtree, os.environ[_FOLDER], ignore_errors=True)
    return Path(os.environ[_FOLDER])
