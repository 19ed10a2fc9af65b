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
        self._contents = contents
        manifest.refuse_other(contents, unknown=unknown)
        self._awaited: dict[str, nn.Module] = {}
        for path in contents.unread:
            layer = model.get_submodule(path)
            fqn = join(path, "weight")
            self._awaited[fqn] = layer
            when_quantized(layer, functools.partial(self._note, fqn))

    def _note(self, fqn: str, layer: nn.Module) -> None:
        del self._awaited[fqn]
        self._contents.tensors.update(records_of_layer(fqn, layer))

    def finish(self) -> None:
        """Compare the layers that are pending, those too that nobody has read.

        Raises:
            ManifestMismatchError: They are not those that were recorded.
        """
        if self._contents.unread:
            for layer in [*self._awaited.values()]:
                quantized_layer(layer)
            contents = self._contents._replace(unread=frozenset())
            self._manifest.refuse_other(contents, unknown=self._unknown)
