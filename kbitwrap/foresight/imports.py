"""A hook on the import of libraries. It loads none itself: a script may set what they read at their import."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any


@contextlib.contextmanager
def when_imported(hooks: Mapping[str, Callable[[Any], object]]) -> Iterator[None]:
    """Call functions with modules inside a with-block: at once where a module is there, else once it is imported.

    Args:
        hooks: The functions by the names of the modules.
    """
    for name in hooks.keys() & sys.modules.keys():
        hooks[name](sys.modules[name])
    finder = _Finder(hooks)
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)


class _Finder:
    """Finds modules as the other finders do, and calls functions with them as soon as they have been executed."""

    def __init__(self, hooks: Mapping[str, Callable[[Any], object]]) -> None:
        self._hooks = hooks

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: Any = None
    ) -> Any:
        """Find a module that is waited for; ``None`` for every other."""
        if name not in self._hooks:
            return None
        for finder in sys.meta_path:
            spec = None if finder is self else finder.find_spec(name, path, target)
            if spec is not None:
                self._call_after(spec.loader, self._hooks[name])
                return spec
        return None

    def _call_after(self, loader: Any, hook: Callable[[Any], object]) -> None:
        """Let a loader call a function with the module that it has executed."""
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            # If two hooks wrapped one loader, the outer one has removed the attribute.
            vars(loader).pop("exec_module", None)
            execute(module)
            hook(module)

        loader.exec_module = exec_module
