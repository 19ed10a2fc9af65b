"""One of PEFT's layers merged in float32, over a plain base.

The merge is PEFT's own, on a float32 copy of the layer. By whatever method, it must
compute what that copy computes: both are run on a probe, and a merge whose output is
another one is refused.

Where each row of the merged weight follows from that row of the base's, a few rows are
merged at a time. The copy of the layer is then left with what makes these rows, and is
over a base that has no others.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import ExportError
from ..model.bitsandbytes_layers import Rows
from ..model.quantization import is_quantized_layer
from ..model.tree import shallow_copy
from .adapters import ActiveLayer, is_tuner_layer
from .float32 import QUANTIZED_MODULES, float32_layer, probe_of

# The largest difference allowed between what a layer and its merge compute, relative to
# the largest output, adapted or not. Rounding in float32 stays below it; half a unit in
# the last place of float16, the finer half dtype, is 2**-12.
_TOLERANCE = 2.0**-15
# The methods and layers that merge row by row, with the containers whose tensors have
# the rows of the base's weight and the dimension of these. Merging takes 6 to 12 times
# the bytes that what is merged, a layer or a few rows, has in half.
_ROWS = {
    "adalora.SVDLinear": {"lora_B": 0},
    "hira.Linear": {"hira_B": 0},
    "ia3.Linear": {"ia3_l": 0},
    "loha.Linear": {"hada_w1_a": 0, "hada_w2_a": 0},
    "lora.Embedding": {"lora_embedding_A": 1},
    "lora.Linear": {"lora_B": 0, "lora_magnitude_vector": 0},
    "trainable_tokens.TrainableTokensLayer": {},
    "vera.Linear": {"vera_B": 0, "vera_lambda_b": 0},
}
_VARIANTS_WITH_ROWS = {"DoraLinearVariant"}  # of LoRA
_OF_STORAGE = (
    "PEFT computes with what a quantized layer stores as though it were its weight: "
    "train this method on a base that is not quantized"
)
_PLAIN_FORWARDS = (nn.Linear.forward, nn.Embedding.forward)


class Merger:
    """Merges the active adapters of a module's layers into float32 blocks of its base.

    Args:
        layers: The layers around the module, the innermost first.
    """

    def __init__(self, layers: Sequence[ActiveLayer]) -> None:
        self._layers = [_LayerMerge(one) for one in layers]
        # A parameter that is adapted by name is not that of a layer that could be run
        # by itself.
        self._is_compared = all(one.parameter is None for one in layers)

    def merge(self, plain: nn.Module, rows: Rows) -> nn.Module:
        """Merge into ``rows`` of a plain base, which may be changed.

        What is merged computes what the layers did, or it is refused.
        """
        # PEFT's methods may draw random numbers.
        with torch.random.fork_rng(devices=[]):
            if not self._is_compared:
                return self._merged(plain, rows)

            outermost = self._layers[-1]
            with outermost.refusing():
                probe = probe_of(plain)
                unadapted = plain(probe)
                if not isinstance(unadapted, Tensor):
                    raise TypeError(
                        f"{type(plain).__name__} returns no tensor that PEFT could add "
                        f"to, but a {type(unadapted).__name__}: leave it out of the "
                        "adapter (exclude_modules)"
                    )
                expected = self._adapted(plain, rows, probe, unadapted)

            merged = self._merged(plain, rows)
            with outermost.refusing():
                _compare(merged(probe), expected, unadapted)
            return merged

    def _adapted(
        self, plain: nn.Module, rows: Rows, probe: Tensor, unadapted: Tensor
    ) -> Tensor:
        """The output of the layers, one over the other, for a probe.

        Their base is known to give ``unadapted`` for it, and does not compute that
        again.
        """
        base = shallow_copy(plain)
        if self._layers[0].reads_storage:  # whoever does gets no numbers
            weight = plain.get_parameter("weight")
            unknown = weight.new_full((1,), math.nan).expand(weight.shape)
            base._parameters["weight"] = nn.Parameter(unknown, requires_grad=False)

        def forward(given: Tensor) -> Tensor:  # may be written to
            return unadapted.clone() if given is probe else plain(given)

        vars(base)["forward"] = forward
        for layer in self._layers:
            base = layer.over(base, rows)

        output: Tensor = base(probe)
        return output

    def _merged(self, plain: nn.Module, rows: Rows) -> nn.Module:
        """The base with the layers merged into it, one after the other.

        A layer that cannot be merged is named, not those around it.
        """
        for layer in self._layers:
            with layer.refusing():
                plain = layer.merge(plain, rows)
        return plain


def _dequantizes(layer: Any) -> bool:
    """Whether one of PEFT's layers computes the values of a quantized base.

    Some methods do it by a layer of their own for each library, others by a backend.
    """
    is_for_quantized = type(layer).__module__.endswith(QUANTIZED_MODULES)
    # not in every version of PEFT
    has_backend = getattr(layer, "quantization_backend", None) is not None
    return is_for_quantized or has_backend


def _compare(found: Tensor, expected: Tensor, unadapted: Tensor) -> None:
    """Raise unless two outputs are the same but for rounding.

    Others refuse weights that are not finite, which are let through here.
    """
    if not torch.isfinite(found).all():
        return

    if not torch.isfinite(expected).all():
        raise ValueError(_OF_STORAGE)

    difference = float((found - expected).abs().max())
    largest = float(max(unadapted.abs().max(), expected.abs().max()))
    if not difference <= _TOLERANCE * largest:
        raise ValueError(
            f"the merged layer computes another output (off by {difference:.1e}, the "
            f"largest is {largest:.1e})"
        )


class _LayerMerge:
    """Merges one layer's active adapters, by a copy of it that is made once.

    What makes some rows is cut from the copy's tensors for each block, and put in their
    place: so their whole values are held beside them.
    """

    def __init__(self, one: ActiveLayer) -> None:
        self._one = one
        # PEFT lets such a layer take the quantized storage for the weight's values.
        is_quantized = is_quantized_layer(one.layer.get_base_layer())
        self.reads_storage = is_quantized and not _dequantizes(one.layer)
        self._copy: Any = None  # of the layer, in float32
        self._wholes: dict[Tensor, Tensor] = {}  # the values of the copy's tensors

    @contextlib.contextmanager
    def refusing(self) -> Iterator[None]:
        """Turn errors into `ExportError`.

        It names the layer and its adapters, and the error is its cause. One that says
        itself what is in the way, such as a base that changed, stays as it is.
        """
        try:
            yield
        except ExportError:
            raise
        except Exception as error:
            why: object = error
            if self.reads_storage and type(error) is RuntimeError:  # torch's, of shapes
                why = f"{_OF_STORAGE} ({error})"
            raise self._one.refusal(why) from error

    def merge(self, plain: nn.Module, rows: Rows) -> nn.Module:
        """Merge into ``rows`` of a plain base, which may be changed.

        Returns:
            The base, or what the method made of it.
        """
        adapted = self.over(plain, rows)
        adapted.merge(safe_merge=False, adapter_names=adapted._active_adapter)
        merged: nn.Module = adapted.get_base_layer()
        return merged

    def over(self, plain: nn.Module, rows: Rows) -> Any:
        """The float32 copy of the layer, over some rows of a plain base.

        The base may be an adapted one: layers can lie over one another.
        """
        if self._copy is None:
            _refuse_base(plain, self._one)
            self._copy = float32_layer(self._one, plain)
            tensors = (*self._copy.parameters(), *self._copy.buffers())
            self._wholes = {tensor: tensor.data for tensor in tensors}

        # a merge may leave values of these rows on it
        adapted: Any = shallow_copy(self._copy)
        adapted._modules["base_layer"] = plain
        adapted._active_adapter = [*self._one.adapters]
        adapted._disable_adapters = False
        adapted.merged_adapters = []
        if rows is not ...:
            self._take_rows(adapted, rows)

        for magnitude in adapted._modules.get("lora_magnitude_vector", {}).values():
            vars(magnitude).get("_dora_cache", {}).clear()

        return adapted

    def _take_rows(self, adapted: Any, rows: slice) -> None:
        """Leave of an adapted layer what makes some rows.

        That can be told where ``merges_by_rows`` says so.
        """
        if self._one.parameter is not None:
            self._take_experts(adapted, rows)
            return

        for container, dim in _ROWS[self._one.kind].items():
            holder = getattr(adapted, container)
            for tensor in (*holder.parameters(), *holder.buffers()):
                whole = self._wholes[tensor]
                # One with a single row, as IA3's that scales the input, has it for all.
                if whole.shape[dim] > 1:
                    taken = whole.narrow(dim, rows.start, rows.stop - rows.start)
                    tensor.data = taken.clone()

        if "token_indices" in vars(adapted):
            self._take_tokens(adapted, rows)

    def _take_experts(self, adapted: Any, rows: slice) -> None:
        """Leave a few experts of a stack, whose factors PEFT holds side by side.

        Those of the first, ``(experts * rank, in)``, lie one after the other. In the
        second, ``(out, rank * experts)``, each rank has all experts.
        """
        num_experts = adapted.num_experts
        adapted.num_experts = rows.stop - rows.start
        # PEFT takes a single expert for a matrix, (out, in), which it transposes where
        # it is told to.
        is_swapped = getattr(adapted, "_did_swap_in_out_features", False)
        adapted.fan_in_fan_out = not is_swapped

        for name in self._one.adapters:
            a, b = adapted.lora_A[name].weight, adapted.lora_B[name].weight
            stack_a = self._wholes[a].unflatten(0, (num_experts, -1))
            stack_b = self._wholes[b].unflatten(1, (-1, num_experts))
            a.data = stack_a[rows].flatten(0, 1)
            b.data = stack_b[:, :, rows].flatten(1)

    def _take_tokens(self, adapted: Any, rows: slice) -> None:
        """Leave the trained rows in a block, counted from its first.

        Adapters without any there are not active.
        """
        taken: dict[str, list[int]] = {}
        for name, indices in adapted.token_indices.items():
            delta = adapted.trainable_tokens_delta[name]
            places = []
            taken[name] = []
            for place, index in enumerate(indices):
                if rows.start <= index < rows.stop:
                    places.append(place)
                    taken[name].append(index - rows.start)

            delta.data = self._wholes[delta][places]

        adapted.token_indices = taken
        adapted._active_adapter = [name for name in self._one.adapters if taken[name]]


def _refuse_base(plain: nn.Module, one: ActiveLayer) -> None:
    """Raise for a module whose weight alone does not say what it computes.

    One that holds others, as attention does, computes with the weights of these.
    """
    is_inner = is_tuner_layer(plain)
    if plain._modules and not is_inner and one.parameter is None:
        raise ValueError(f"it adapts several modules of {type(plain).__name__} at once")
    if vars(plain).get("max_norm") is not None:
        raise ValueError(
            "the embedding renormalizes the rows that it looks up (max_norm)"
        )


def merges_by_rows(one: ActiveLayer, module: nn.Module, num_rows: int) -> bool:
    """Whether each row of the merged weight depends on that row of the base's alone.

    Args:
        one: A layer, and its active adapters.
        module: The base's module, which may be quantized.
        num_rows: The rows of its weight, or the experts of a stack.
    """
    if one.parameter is not None:
        return one.kind == "lora.ParamWrapper" and one.layer.num_experts == num_rows

    forward = type(module).forward
    if not is_quantized_layer(module) and forward not in _PLAIN_FORWARDS:
        return False  # it may do anything with what it computes

    if one.kind not in _ROWS or one.variants - _VARIANTS_WITH_ROWS:
        return False

    # PEFT refuses other indices when it merges the whole.
    for indices in vars(one.layer).get("token_indices", {}).values():
        if not all(0 <= index < num_rows for index in indices):
            return False

    return True
