"""A model with layers that are pending, compared with a manifest while others read them."""

from __future__ import annotations

import functools
from collections.abc import Collection

from torch import nn

from ..model.bitsandbytes_layers import quantized_layer, when_quantized
from ..model.tree import ModelTree, join
from .contents import read_contents, records_of_layer
from .manifest import Manifest


class BaseCheck:
    """A comparison of a base with a manifest that quantizes nothing for itself.

    Layers that are not pending are compared at once. A pending layer is digested when
    it is quantized for its first reader.

    Args:
        manifest: The manifest.
        model: The base, as it was loaded.
        unknown: The names of tensors that may be others.

    Raises:
        ManifestMismatchError: A layer that can be compared at once is not the recorded
            one.
    """

    def __init__(
        self, manifest: Manifest, model: nn.Module, unknown: Collection[str]
    ) -> None:
        self._manifest = manifest
        self._unknown = unknown
        contents = read_contents(ModelTree(model), None, reads_pending=False)
        manifest.refuse_other(contents, unknown=unknown)
        self._contents = contents
        self._layers = {}  # by the names of their weights
        for path in contents.unread:
            fqn, layer = join(path, "weight"), model.get_submodule(path)
            self._layers[fqn] = layer
            when_quantized(layer, functools.partial(self._note, fqn))

    def _note(self, fqn: str, layer: nn.Module) -> None:
        self._contents.tensors.update(records_of_layer(fqn, layer))

    def finish(self) -> None:
        """Compare the layers that are pending, those too that nobody has read.

        Raises:
            ManifestMismatchError: They are not those that were recorded.
        """
        for fqn, layer in self._layers.items():
            if fqn not in self._contents.tensors:
                quantized_layer(layer)
        if self._layers:
            contents = self._contents._replace(unread=frozenset())
            self._manifest.refuse_other(contents, unknown=self._unknown)
