"""A model with layers that are pending, compared with a manifest while others read them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection

from torch import nn

from ..model.bitsandbytes_layers import quantized_layer, when_quantized
from ..model.tree import ModelTree, join
from .contents import read_contents, records_of_layer
from .manifest import Manifest


def begin_check(
    manifest: Manifest, model: nn.Module, unknown: Collection[str]
) -> Callable[[], None]:
    """Begin to compare a base with a manifest, and quantize nothing for that.

    Layers that are not pending are compared at once. A pending layer is digested when
    it is quantized for its first reader.

    Args:
        manifest: The manifest.
        model: The base, as it was loaded.
        unknown: The names of tensors that may be others.

    Returns:
        The call that compares the layers that are pending, those too that nobody has
            read.

    Raises:
        ManifestMismatchError: A layer is not the recorded one: at once, or by the call.
    """
    contents = read_contents(ModelTree(model), None, reads_pending=False)
    manifest.refuse_other(contents, unknown=unknown)

    def note(fqn: str, layer: nn.Module) -> None:
        contents.tensors.update(records_of_layer(fqn, layer))

    layers = {}  # by the names of their weights
    for path in contents.unread:
        fqn, layer = join(path, "weight"), model.get_submodule(path)
        layers[fqn] = layer
        when_quantized(layer, functools.partial(note, fqn))

    def finish() -> None:
        for fqn, layer in layers.items():
            if fqn not in contents.tensors:
                quantized_layer(layer)
        if layers:
            read = contents._replace(unread=frozenset())
            manifest.refuse_other(read, unknown=unknown)

    return finish
