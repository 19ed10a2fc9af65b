"""A hook on the import of libraries. It loads none itself: a script may set what they read at their import."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import ModuleType, SimpleNamespace
from typing import Any


@contextlib.contextmanager
def when_imported(hooks: Mapping[str, Callable[[Any], object]]) -> Iterator[None]:
    """Call functions with modules inside a with-block: at once where a module is there, else once it is imported.

    Args:
        hooks: The functions by the names of the modules.
    """
    for name in hooks.keys() & sys.modules.keys():
        hooks[name](sys.modules[name])

    def find_spec(name: str, path: Sequence[str] | None, target: Any = None) -> Any:
        if name not in hooks:
            return None
        others = (one for one in sys.meta_path if one is not finder)
        found = (other.find_spec(name, path, target) for other in others)
        spec = next(filter(None, found), None)
        if spec is not None:
            loader: Any = spec.loader
            execute = loader.exec_module

            def exec_module(module: ModuleType) -> None:
                # If two hooks wrapped one loader, the outer one has removed the attribute.
                vars(loader).pop("exec_module", None)
                execute(module)
                hooks[name](module)

            loader.exec_module = exec_module
        return spec

    finder: Any = SimpleNamespace(find_spec=find_spec)
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
