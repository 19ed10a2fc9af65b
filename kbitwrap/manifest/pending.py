"""A model with layers that are pending, compared with a manifest while others read them."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Collection

from torch import nn

from ..model.bitsandbytes_layers import is_pending, quantized_layer, when_quantized
from ..model.tree import ModelTree, join
from .contents import records_of_layer
from .manifest import Manifest, read_found
from .schema import TensorRecord


class BaseCheck:
    """A comparison of a base with a manifest that quantizes nothing for itself.

    What is not pending is compared at once. Of a layer that is, a digest is taken when
    it is quantized for whoever reads it first.

    Args:
        manifest: The manifest.
        model: The base, as it was loaded.
        unknown: The names of tensors that may be others.

    Raises:
        ManifestMismatchError: What can be compared at once is not what was recorded.
    """

    def __init__(
        self, manifest: Manifest, model: nn.Module, unknown: Collection[str]
    ) -> None:
        self._manifest = manifest
        self._unknown = unknown
        self._contents = read_found(ModelTree(model), None, reads_pending=False)
        manifest.refuse_other(self._contents, unknown=unknown)
        self._found: dict[str, TensorRecord] = {}
        self._awaited: dict[str, nn.Module] = {}
        for path, module in model.named_modules():
            if is_pending(module):
                fqn = join(path, "weight")
                self._awaited[fqn] = module
                when_quantized(module, functools.partial(self._note, fqn))

    def _note(self, fqn: str, layer: nn.Module) -> None:
        del self._awaited[fqn]
        self._found |= records_of_layer(fqn, layer)

    def finish(self) -> None:
        """Compare the layers that are pending, those too that nobody has read.

        Raises:
            ManifestMismatchError: They are not those that were recorded.
        """
        if not self._contents.unread:
            return

        for module in [*self._awaited.values()]:
            quantized_layer(module)

        contents = dataclasses.replace(
            self._contents,
            tensors=self._contents.tensors | self._found,
            unread=frozenset(),
        )
        self._manifest.refuse_other(contents, unknown=self._unknown)
