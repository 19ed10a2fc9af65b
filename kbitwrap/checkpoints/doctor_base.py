"""The checks of a base, saved, live or recorded in a manifest; ``None`` says that there is nothing to look at."""

from __future__ import annotations

import contextlib
import re

from torch import nn

from ..errors import ConfigError, ManifestMismatchError
from ..model.pretrained import unexpected_names
from ..preparation.comparison import DECOMPRESSED
from ..reports import shown
from ..tensors.bits import content_digest
from ..tensors.devices import accelerator_type
from ..tensors.lazy import materialize
from .adapters import read_adapter
from .base import load_base
from .base_quantization import find_quantization
from .doctor_report import Finding, fault, fine, not_measured
from .doctor_subjects import Base, Folder, LiveModel

_EXPERTS = re.compile(r"(?:^|\.)experts?\.(?!.*bias)")
_THE_BASE = "whether the base is the manifest's, and unchanged"
_NO_MANIFEST = "no kbitwrap.json: KbitTrainerCallback writes one in training, and kbitwrap stamp after it"


# ----------------------------------------------------------------------------------------------------
# What a manifest or a preparation records.
# ----------------------------------------------------------------------------------------------------


def recorded_base(folder: Folder) -> Finding | None:
    """Check whether the base is the one that the manifest records, tensor by tensor.

    The base is what was given, or else the folder itself, where it holds what was
    prepared: a quantized and frozen base is neither merged nor trained.
    """
    manifest, options = folder.manifest, folder.options
    if manifest is None:
        if folder.adapters:
            return not_measured(_THE_BASE, _NO_MANIFEST)
        return None

    base = options.base
    own = folder.base
    is_quantized = own is not None and own.quantization.is_quantized
    if base is None and is_quantized and manifest.config.freeze:
        base = folder.path

    device = manifest.device_type  # others may quantize otherwise
    if base is None:
        return not_measured(_THE_BASE, "give base (--base)")
    if device not in ("cpu", accelerator_type()):
        return not_measured(_THE_BASE, f"examine it on a machine with {device}")

    try:
        if isinstance(base, nn.Module):
            manifest.check(base)
        else:
            trust = options.trust_remote_code
            quantization = find_quantization(base, None, manifest, None, trust)
            saved = None
            with contextlib.suppress(ConfigError):  # there may be none
                saved = read_adapter(folder.path)
            load_base(base, saved, manifest, quantization, None, device, trust)
    except ManifestMismatchError as error:
        name = manifest.model.name_or_path
        return fault(
            "the base is not the one in the manifest, or it drifted",
            str(error),
            f"load the base that was trained on, {name!r}, as it was",
        )

    return fine(f"its {len(manifest.rows)} tensors have the digests of the manifest")


def drift(live: LiveModel) -> Finding | None:
    """Check whether the base of a prepared model has the values that were prepared.

    A merge that is taken back leaves rounding; libraries replace weights to decompress
    them, which is no drift.
    """
    if live.preparation is None:
        if not live.adapters:
            return None
        return not_measured(
            "whether the base has the values that it was loaded with",
            "the model is not prepared by kbitwrap, which records them",
        )

    changes = live.preparation.changes(live.tree)
    found = changes.replaced.items()
    replaced = [fqn for fqn, what in found if what != DECOMPRESSED]
    if changes.drifted or replaced:
        return fault(
            "the base drifted since it was prepared",
            shown([*changes.drifted, *replaced]),
            "load the base again; merge by export(merge_adapters=True), which leaves the base as it is",
        )

    return fine("it has the values that were prepared")


# ----------------------------------------------------------------------------------------------------
# A base, saved or live.
# ----------------------------------------------------------------------------------------------------


def scales(base: Base) -> Finding | None:
    """Check whether the scales of 4-bit weights lie in the order of the weights."""
    if not base.sources:
        return None

    if base.transposed:
        return fault(
            "scales lie in another order than their 4-bit weights",
            f"{shown(base.transposed)}: two dimensions, as bitsandbytes saves them after a forward in eval mode on a "
            "CPU with AVX512-BF16; what is computed from them is wrong",
            "load the base again, and save it before it runs in eval mode there, or by export",
        )

    if base.transposed is None:
        return not_measured(
            "whether scales lie in the order of their 4-bit weights",
            "the weights are repacked for this CPU now, which hides it: examine a folder, or load the base again",
        )

    return fine("those of 4-bit weights lie in the order of the weights")


def dtypes(base: Base) -> Finding | None:
    """Check whether a preparation left float32 where the architecture loads half."""
    if base.left is None:
        return None

    if base.left:
        return fault(
            "float32 was left by a preparation",
            shown(base.left),
            "`kbitwrap convert` gives a checkpoint its dtypes back",
        )

    if not base.is_all_float32:
        return fine("no float32 that the architecture does not load")

    return not_measured(
        "whether a preparation left float32",
        "all is float32, and nothing says that the original was 16-bit; if it was: `kbitwrap convert --dtype bfloat16`",
    )


def ties(base: Base) -> Finding | None:
    """Check whether weights that the config ties have the same values: loading takes one of them for all."""
    ties = base.ties
    if not ties:
        return None

    apart = []
    for names in ties:
        found = [base.tensors[fqn] for fqn in names if fqn in base.tensors]
        contents = set()
        if any(tensor is not found[0] for tensor in found):  # one is not read
            for tensor in found:
                contents.add((tensor.dtype, content_digest(materialize(tensor))))
        if len(contents) > 1:
            apart.append(f"the config ties {shown(names)}, and they differ")

    if apart:
        return fault(
            "tied weights came apart",
            "; ".join(apart),
            "save one of them, or set tie_word_embeddings to false",
        )

    return fine("; ".join(" = ".join(names) for names in ties))


def layers(base: Base) -> Finding | None:
    """Check whether the layers and experts of a quantized model are quantized, or named by the skip list.

    transformers leaves the stacks of fused experts in half precision, and layers of a
    class that a model's authors derived, and says nothing. A plain layer that is not
    quantized is one that loading skips.
    """
    if not base.quantization.is_quantized or not base.quantization.casts:
        return None

    skip_list = base.meta.hf_quantizer.modules_to_not_convert or ()
    others = unexpected_names(base.meta, base.tensors, is_quantized=True)
    skipped = [f".{key}." for key in (*skip_list, *others)]
    are_experts_skipped = any("expert" in key for key in skip_list)
    derived = set()
    for fqn, module in base.meta.named_modules():
        is_torchs = type(module).__module__.startswith("torch.")
        if isinstance(module, nn.Linear) and not is_torchs:
            derived.add(f"{fqn}.weight")

    left_out = []
    for fqn, tensor in base.tensors.items():
        is_expert = _EXPERTS.search(fqn) and not are_experts_skipped
        is_matrix = tensor.is_floating_point() and tensor.dim() > 1
        is_skipped = any(key in f".{fqn}." for key in skipped)
        if is_matrix and (is_expert or fqn in derived) and not is_skipped:
            left_out.append(fqn)

    if left_out:
        return fault(
            "layers are not quantized",
            shown(left_out),
            "quantize them, or name them in llm_int8_skip_modules",
        )

    return fine("none is left out")
