"""A fault at the n-th step of a call: a line of the package, or a primitive operation of whoever makes it."""

from __future__ import annotations

import contextlib
import dis
import functools
import io
import linecache
import sys
import types
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from torch.utils.hooks import RemovableHandle

import kbitwrap

PACKAGE = str(Path(kbitwrap.__file__).parent)
_READERS = f"{PACKAGE}/model/"  # its files change nothing

_Model = transformers.PreTrainedModel
_FUNCTIONS = {
    function.__code__
    for function in (
        *(nn.Module.__setattr__, nn.Module.__delattr__, RemovableHandle.__init__),
        *(nn.Module.register_forward_hook, nn.Module.register_forward_pre_hook),
        *(_Model.gradient_checkpointing_enable, _Model._set_gradient_checkpointing, _Model.enable_input_require_grads),
    )
}
_OF_DICTS = frozenset({"pop", "update", "setdefault", "clear"})
_OF_FILES = frozenset({"open", "write", "fsync", "mkdir", "rename", "replace", "posix_fallocate", "flock"})
# Methods of tensors that compute nothing and change nothing.
_READS = frozenset(
    {"data_ptr", "dim", "element_size", "is_contiguous", "is_floating_point", "is_inference", "numel", "size", "stride"}
) | {"storage_offset", "untyped_storage", "_free_weak_ref", "_is_view", "is_complex", "is_set_to"}


class Steps:
    """The steps of a call so far, and the last one."""

    def __init__(self) -> None:
        self.count = 0
        self.last = ""


Kind = Callable[[Any, str, Any], bool]
"""Whether an event of ``sys.settrace`` or ``sys.setprofile`` is a step."""


def line(frame: Any, event: str, _: object) -> bool:
    """A line of the package is to run.

    Lines of ``with`` and of ``try`` are passed over: CPython reports the first before it calls ``__exit__``, too, and
    the second is outside of the with-block around it. It looks for no signal there. So is a jump back within a line,
    as of a comprehension: from 3.12 on, what is raised there passes every ``except`` and ``__exit__`` of its function.
    """
    text = linecache.getline(frame.f_code.co_filename, frame.f_lineno)
    is_caught = sys.version_info < (3, 12) or frame.f_lasti in _starts_of_lines(frame.f_code)
    return event == "line" and is_caught and not text.lstrip().startswith(("with ", "try:"))


@functools.cache
def _starts_of_lines(code: types.CodeType) -> set[int]:
    return {offset for offset, _ in dis.findlinestarts(code)}


def primitive(frame: Any, event: str, function: Any) -> bool:
    """An attribute of a module or a hook is to be set, a tensor computed, checkpointing enabled, or a file changed.

    What C does without a call, as writing ``parameter.data``, is seen by the lines alone. Finalizers are passed over:
    Python drops what is raised in one.
    """
    if event == "call":
        return frame.f_code in _FUNCTIONS
    return (
        event == "c_call"
        and _is_primitive(function.__self__, function.__name__)
        and not frame.f_code.co_filename.startswith((_READERS, weakref.__file__))
    )


_known: dict[tuple[type, str], bool] = {}


def _is_primitive(owner: Any, name: str) -> bool:
    key = type(owner), name
    if key not in _known or key[0] is types.ModuleType:
        if isinstance(owner, types.ModuleType):
            return name in ("setattr", "delattr") or (name in _OF_FILES and owner.__name__ in ("posix", "io", "fcntl"))
        is_file, is_dict = isinstance(owner, io.IOBase), isinstance(owner, dict)
        is_tensor = owner is None or isinstance(owner, (torch.Tensor, torch.Generator))
        names = _OF_FILES if is_file else _OF_DICTS if is_dict else ()
        _known[key] = name in names or (is_tensor and name not in _READS)
    return _known[key]


@contextlib.contextmanager
def failing_at(number: int | None, error: BaseException | None = None, kind: Kind = line) -> Iterator[Steps]:
    """Raise an error, a KeyboardInterrupt by default, once, at the step of that number; count the steps."""
    steps = Steps()
    of_lines = kind is line
    switch, outer = (sys.settrace, sys.gettrace()) if of_lines else (sys.setprofile, sys.getprofile())

    def watch(frame: Any, event: str, argument: Any) -> Any:
        if of_lines and not frame.f_code.co_filename.startswith(PACKAGE):
            return None
        if kind(frame, event, argument):
            steps.count += 1
            if steps.count - 1 == number:
                switch(None)
                name = "" if of_lines else f" {frame.f_code.co_name if event == 'call' else argument.__name__}"
                steps.last = f"{frame.f_code.co_filename}:{frame.f_lineno}{name}"
                raise KeyboardInterrupt if error is None else error
        return watch

    switch(watch)
    try:
        yield steps
    finally:
        switch(outer)
