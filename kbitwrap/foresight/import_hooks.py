"""Calls functions with modules as soon as these are imported; nothing is imported here but the standard library."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any


@contextlib.contextmanager
def when_imported(hooks: Mapping[str, Callable[[Any], None]]) -> Iterator[None]:
    """Call a function with each module once that is there: a script may set what libraries read at their import.

    Args:
        hooks: The functions, by the names of the modules.

    Yields:
        Nothing; functions whose modules were not imported by the end are not called.
    """
    missing = {name: hook for name, hook in hooks.items() if name not in sys.modules}
    finder = _Finder(missing)
    sys.meta_path.insert(0, finder)
    try:
        for name in hooks.keys() - missing.keys():
            hooks[name](sys.modules[name])
        yield
    finally:
        sys.meta_path.remove(finder)


class _Finder:
    """Finds modules as the other finders do, and calls functions with them as soon as they have been executed."""

    def __init__(self, hooks: dict[str, Callable[[Any], None]]) -> None:
        self._hooks = hooks

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: Any = None
    ) -> Any:
        """Find a module that a function waits for; ``None`` for every other."""
        if name not in self._hooks:
            return None
        others = [finder for finder in sys.meta_path if finder is not self]
        found = (finder.find_spec(name, path, target) for finder in others)
        spec: Any = next(filter(None, found), None)
        if spec is None:
            return None
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            vars(spec.loader).pop("exec_module", None)
            execute(module)
            # whoever only looks for a module does not execute it
            hook = self._hooks.pop(name, None)
            if hook is not None:
                hook(module)

        spec.loader.exec_module = exec_module
        return spec
