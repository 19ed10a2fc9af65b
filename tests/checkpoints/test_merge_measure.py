"""The measure of merges that any tool made: a right one has no finding, and a broken one has its cause."""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from peft import PeftModel
from safetensors.torch import save_file

from kbitwrap import DoctorReport, doctor, merge_checkpoint
from kbitwrap.checkpoints.causes import find_causes, is_right
from kbitwrap.checkpoints.figures import Figures, compare
from kbitwrap.model.quantization import bitsandbytes_config
from support import zoo
from support.files import tensors_of
from support.merges import Run, Tensors, change, copy_without_record, load, make_run, reload_and_merge
from support.thorough import few

NAMES = ("llama", "gemma2", "mixtral", "gpt2")

pytestmark = [
    pytest.mark.filterwarnings("ignore:Merge lora module to 4-bit:UserWarning"),
    pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to False but the target module is `Conv1D`:UserWarning"),
]


@pytest.fixture(scope="session")
def merges(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Run]:
    """Runs by architecture, each made once; they are not to be changed."""
    made: dict[str, Run] = {}

    def run(name: str) -> Run:
        if name not in made:
            made[name] = make_run(name, tmp_path_factory.mktemp(name))
        return made[name]

    return run


# ----------------------------------------------------------------------------------------------------
# Broken merges: each is made of the tensors of a right one.
# ----------------------------------------------------------------------------------------------------


def the_base(run: Run, tensors: Tensors) -> None:
    tensors |= {fqn: tensor for fqn, tensor in run.of("base").items() if fqn in tensors}


def without_one_delta(run: Run, tensors: Tensors) -> None:
    tensors[run.adapted[0]] = run.of("trained")[run.adapted[0]]


def without_experts(run: Run, tensors: Tensors) -> None:
    trained = run.of("trained")
    tensors |= {fqn: trained[fqn] for fqn in run.adapted if "experts" in fqn}


def scaled(scale: float) -> Callable[[Run, Tensors], None]:
    def broken(run: Run, tensors: Tensors) -> None:
        trained = run.of("trained")
        for fqn in run.adapted:
            tensors[fqn] = (trained[fqn].float() + scale * run.delta(fqn)).bfloat16()

    return broken


def of_another_adapter(run: Run, tensors: Tensors) -> None:
    tensors |= {fqn: tensor for fqn, tensor in run.of("other").items() if fqn in run.adapted}


def onto_another_base(run: Run, tensors: Tensors) -> None:
    generator = torch.Generator().manual_seed(1)
    for fqn, tensor in tensors.items():
        if tensor.dim() > 1:
            drawn = torch.randn(tensor.shape, generator=generator)
            tensors[fqn] = (drawn * tensor.float().std()).bfloat16()


def alike(run: Run, tensors: Tensors) -> tuple[str, str]:
    """The first two adapted tensors of one shape."""
    for first in run.adapted:
        for second in run.adapted:
            if first != second and tensors[first].shape == tensors[second].shape:
                return first, second
    raise AssertionError


def exchanged(run: Run, tensors: Tensors) -> None:
    first, second = alike(run, tensors)
    tensors[first], tensors[second] = tensors[second], tensors[first]


def exchanged_deltas(run: Run, tensors: Tensors) -> None:
    first, second = alike(run, tensors)
    trained = run.of("trained")
    tensors[first] = (trained[first].float() + run.delta(second)).bfloat16()
    tensors[second] = (trained[second].float() + run.delta(first)).bfloat16()


def transposed(run: Run, tensors: Tensors) -> None:
    tensors[run.adapted[0]] = tensors[run.adapted[0]].mT


def with_a_nan(run: Run, tensors: Tensors) -> None:
    tensors[run.adapted[0]].view(-1)[5] = float("nan")


def with_another_norm(run: Run, tensors: Tensors) -> None:
    fqn = next(fqn for fqn in tensors if "norm" in fqn or "ln_" in fqn)
    tensors[fqn] = tensors[fqn] * 1.125


def without_a_tensor(run: Run, tensors: Tensors) -> None:
    del tensors[run.adapted[0]]


def in_integers(run: Run, tensors: Tensors) -> None:
    tensors[run.adapted[0]] = tensors[run.adapted[0]].to(torch.int8)


def with_the_adapter_beside(run: Run, tensors: Tensors) -> None:
    tensors["base_model.model.lora_A.weight"] = torch.ones(4, 4)


BROKEN: dict[str, tuple[Callable[[Run, Tensors], None], str]] = {
    "the base, byte for byte": (the_base, "no delta: the base's bytes, unchanged"),
    "one layer without its delta": (without_one_delta, "no delta"),
    "doubled": (scaled(2), "the delta is doubled: merged twice, or by a wrong scale"),
    "halved": (scaled(0.5), "the delta is halved: a wrong scale"),
    "negated": (scaled(-1), "the delta is negated: a wrong scale"),
    "another scale": (scaled(3), "the delta has another scale"),
    "another adapter's": (of_another_adapter, "another adapter's delta"),
    "another base": (onto_another_base, "onto another base, or this one quantized otherwise"),
    "two exchanged": (exchanged, "two layers or experts were exchanged"),
    "two deltas exchanged": (exchanged_deltas, "two layers or experts were exchanged"),
    "transposed": (transposed, "transposed"),
    "not finite": (with_a_nan, "not finite"),
    "a norm changed": (with_another_norm, "changed, though no adapter touches it"),
    "a tensor missing": (without_a_tensor, "missing from the checkpoint"),
    "integers": (in_integers, "numbers of another kind than the base's"),
    "a tensor too many": (with_the_adapter_beside, "in neither the base nor the adapter"),
}


OF_EXPERTS = "two exchanged"
REMEDIES = {
    "no delta": "merge again, and see that the adapter is loaded",
    "no delta: the base's bytes, unchanged": "merge again, and see that the adapter is loaded",
    "the delta is doubled: merged twice, or by a wrong scale": "merge once, into the base",
    "another adapter's delta": "give the adapter that was merged",
    "missing from the checkpoint": "merge again, or restore the shard that holds it",
}


@pytest.mark.parametrize(
    ("name", "kind"),
    few(
        itertools.product(NAMES, BROKEN),
        [*itertools.product(["llama"], BROKEN), ("mixtral", OF_EXPERTS)],
    ),
)
def test_a_broken_merge_is_a_finding_with_its_cause(
    name: str, kind: str, merges: Callable[[str], Run], tmp_path: Path
) -> None:
    broken, cause = BROKEN[kind]
    run = merges(name)
    report = run.examine(change(run, tmp_path / "broken", broken))
    found = {finding.what: finding.evidence for finding in report.findings}
    (evidence,) = [text for what, text in found.items() if what.startswith(cause)]
    assert any(fqn in evidence for fqn in [*run.of("merged"), "lora_A"])
    assert report.merge is not None
    remedies = {finding.what: finding.remedy for finding in report.findings}
    for what, remedy in remedies.items():
        if what in REMEDIES:
            assert remedy.startswith(REMEDIES[what])
    called = "a merge with another base" if kind == "another base" else "not a merge"
    assert str(report.merge).startswith(f"{called}: ")


@pytest.mark.thorough
def test_experts_that_hold_the_base_are_named(merges: Callable[[str], Run], tmp_path: Path) -> None:
    run = merges("mixtral")
    report = run.examine(change(run, tmp_path / "broken", without_experts))
    (finding,) = report.findings
    assert finding.what == "no delta: the base's bytes, unchanged"
    assert "experts.0.w1.weight" in finding.evidence
    assert report.merge is not None
    assert report.merge.kept < 0.2


@pytest.mark.thorough
@pytest.mark.parametrize(("scale", "cause"), [(0.0, "no delta"), (2.0, "the delta is doubled")])
def test_one_expert_of_many_is_told(scale: float, cause: str) -> None:
    generator = torch.Generator().manual_seed(0)
    trained = torch.randn(128, 32, 48, generator=generator).bfloat16().float()
    delta = 0.01 * torch.randn(trained.shape, generator=generator)
    after = trained + delta
    found = after.bfloat16()

    def measured() -> Figures:
        return compare("experts", found, after, trained, None, dtype=found.dtype, stored=None, was_quantized=True)

    assert is_right(measured())
    found[77] = (trained[77] + scale * delta[77]).bfloat16()
    figures = measured()
    assert not is_right(figures)
    told, evidence = find_causes([figures], (), {})["experts"]
    assert told.startswith(cause)
    assert evidence == "in experts[77]"
    found[77] = after[5]
    told, evidence = find_causes([measured()], (), {})["experts"]
    assert told == "two layers or experts were exchanged"
    assert evidence == "in experts[77]: it holds the values of experts[5]"


def test_a_tensor_that_is_there_under_two_names_is_looked_at_twice(
    merges: Callable[[str], Run], tmp_path: Path
) -> None:
    run = merges("llama")

    def with_two(run: Run, tensors: Tensors) -> None:
        tensors[f"base_model.model.{run.adapted[0]}"] = run.of("base")[run.adapted[0]]

    findings = run.examine(change(run, tmp_path / "merged", with_two)).findings
    assert any(run.adapted[0] in finding.evidence for finding in findings)


def test_a_folder_without_a_merge_is_not_measured(merges: Callable[[str], Run]) -> None:
    run = merges("llama")
    report = run.examine(run.folder / "adapter")
    assert report.merge is None
    assert any("there are no weights of a model" in text for text in report.not_measured)


def test_a_fault_where_the_quantization_is_not_known_asks_for_it(merges: Callable[[str], Run], tmp_path: Path) -> None:
    run = merges("llama")
    shutil.copytree(run.folder / "adapter", tmp_path / "adapter")
    (tmp_path / "adapter" / "kbitwrap.json").unlink()
    report = doctor(run.folder / "merged", base=run.folder / "base", adapter=tmp_path / "adapter")
    assert all(finding.remedy.startswith("give the quantization") for finding in report.findings)


def test_a_trained_copy_that_was_dropped_is_named(tmp_path: Path) -> None:
    run = make_run("llama", tmp_path, modules_to_save=["lm_head"])

    def broken(run: Run, tensors: Tensors) -> None:
        tensors["lm_head.weight"] = run.of("base")["lm_head.weight"]

    report = run.examine(change(run, tmp_path / "broken", broken))
    (finding,) = report.findings
    assert finding.what == "the trained copy was dropped"
    assert "lm_head.weight" in finding.evidence


@pytest.mark.thorough
def test_a_trained_bias_that_was_dropped_is_named(tmp_path: Path) -> None:
    run = make_run("gpt2", tmp_path, bias="lora_only")
    fqn = "transformer.h.0.attn.c_attn.bias"

    def broken(run: Run, tensors: Tensors) -> None:
        tensors[fqn] = run.of("base")[fqn]

    assert run.examine(run.folder / "merged").findings == ()
    (finding,) = run.examine(change(run, tmp_path / "broken", broken)).findings
    assert finding.what == "the trained copy was dropped"
    assert fqn in finding.evidence


@pytest.mark.thorough
def test_a_head_of_a_model_inside_another_is_told_to_be_another(tmp_path: Path) -> None:
    run = make_run("llava", tmp_path, modules_to_save=["lm_head"])
    fqn = next(fqn for fqn in run.of("merged") if "lm_head" in fqn)

    def broken(run: Run, tensors: Tensors) -> None:
        tensors[fqn] = run.of("base")[fqn]

    (finding,) = run.examine(change(run, tmp_path / "broken", broken)).findings
    assert finding.what == "the trained copy was dropped"
    assert fqn in finding.evidence


@pytest.mark.filterwarnings("ignore:Model (has|with) `tie_word_embeddings=True`:UserWarning:peft")
def test_a_trained_head_that_a_tie_loses_is_named(tmp_path: Path) -> None:
    run = make_run("gemma2", tmp_path, modules_to_save=["lm_head"])

    def broken(run: Run, tensors: Tensors) -> None:
        del tensors["lm_head.weight"]

    merged = change(run, tmp_path / "broken", broken, tie_word_embeddings=True)
    (finding,) = run.examine(merged).findings
    assert finding.what == "a trained weight was lost: loading ties it to another"
    assert "lm_head.weight" in finding.evidence


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore:Model (has|with) `tie_word_embeddings=True`:UserWarning:peft")
def test_a_tied_head_that_holds_something_else_is_named(tmp_path: Path) -> None:
    run = make_run("gemma2", tmp_path, modules_to_save=["lm_head"])

    def broken(run: Run, tensors: Tensors) -> None:
        del tensors["lm_head.weight"]
        generator = torch.Generator().manual_seed(0)
        embeddings = tensors["model.embed_tokens.weight"]
        tensors["model.embed_tokens.weight"] = torch.randn(embeddings.shape, generator=generator).bfloat16()

    merged = change(run, tmp_path / "broken", broken, tie_word_embeddings=True)
    found = {finding.what for finding in run.examine(merged).findings}
    assert "a trained weight was lost: loading ties it to another" in found


def test_a_head_that_loading_would_make_anew_is_missing(merges: Callable[[str], Run], tmp_path: Path) -> None:
    run = merges("gemma2")
    merged = change(run, tmp_path / "merged", lambda run, tensors: None, tie_word_embeddings=False)
    (finding,) = run.examine(merged).findings
    assert finding.what == "missing from the checkpoint"
    assert "lm_head.weight" in finding.evidence


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["llama", "opt"])  # whose layers have biases
def test_requantized_weights_say_what_is_left(name: str, merges: Callable[[str], Run], tmp_path: Path) -> None:
    run = merges(name)
    PeftModel.from_pretrained(load(name), run.folder / "adapter").merge_and_unload().save_pretrained(tmp_path)
    report = run.examine(tmp_path)
    (finding,) = report.findings
    assert finding.what == "an adapter was merged into 4-bit weights"
    assert report.merge is not None
    assert report.merge.kept < 0.5
    assert f"{report.merge.kept:.0%} of the delta survived" in finding.evidence
    assert {one.bits for one in report.merge.tensors.values()} == {4}


@pytest.mark.parametrize(
    ("quant", "name", "stored"),
    few(
        [
            ("nf4", "llama", torch.bfloat16),
            ("nf4-double", "opt", torch.float16),
            ("fp4", "llama", torch.float32),
            ("int8", "llama", torch.bfloat16),
        ],
        [("nf4-double", "opt", torch.float16)],
    ),
)
def test_a_merge_in_quantized_weights_that_was_dequantized_is_told(
    quant: str, name: str, stored: torch.dtype, merges: Callable[[str], Run], tmp_path: Path
) -> None:
    run = merges(name)
    copy_without_record(run, tmp_path / "adapter")
    merged = PeftModel.from_pretrained(load(name, quant), tmp_path / "adapter").merge_and_unload().dequantize()
    merged.to(stored).save_pretrained(tmp_path / "merged")
    settings = bitsandbytes_config(quant, torch.bfloat16)
    report = doctor(tmp_path / "merged", base=run.folder / "base", adapter=tmp_path / "adapter", quant=settings)
    causes = {finding.what for finding in report.findings}
    assert causes == {f"an adapter was merged into {'quantized' if quant == 'int8' else '4-bit'} weights"}


@pytest.mark.parametrize(
    ("name", "merge_as"),
    few(itertools.product(["llama", "gpt2", "mixtral"], ["mixed", "quantized"]), [("llama", "mixed")]),
)
def test_merges_whose_layers_stay_quantized_are_right(
    name: str, merge_as: str, merges: Callable[[str], Run], tmp_path: Path
) -> None:
    run = merges(name)
    merge_checkpoint(run.folder / "base", run.folder / "adapter", tmp_path / "merged", merge_as=merge_as, check=True)
    report = run.examine(tmp_path / "merged")
    # bitsandbytes leaves stacks of experts as they are, in the base too
    assert {finding.what for finding in report.findings} <= {"experts are not quantized"}
    assert report.merge is not None
    assert (report.merge.onto, set(report.merge.tensors)) == ("trained", set(run.adapted))
    assert abs(report.merge.kept - 1) < (0.01 if merge_as == "mixed" else 0.2)


@pytest.mark.parametrize("scale", few([0.0, 2.0, -1.0], [2.0]))
def test_a_quantized_merge_of_another_multiple_of_the_delta_is_found(
    scale: float, merges: Callable[[str], Run], tmp_path: Path
) -> None:
    run = merges("llama")
    shutil.copytree(run.folder / "adapter", tmp_path / "adapter")
    path = tmp_path / "adapter" / "adapter_model.safetensors"
    tensors = tensors_of(tmp_path / "adapter")
    for fqn, tensor in tensors.items():
        if "lora_B" in fqn:
            tensors[fqn] = scale * tensor
    save_file(tensors, path, metadata={"format": "pt"})
    merge_checkpoint(run.folder / "base", tmp_path / "adapter", tmp_path / "merged", merge_as="quantized")
    report = run.examine(tmp_path / "merged")
    assert [finding.what for finding in report.findings] != []


def scale_statistics(merged: Path, fqn: str, scale: float) -> None:
    """Scale the statistics of a quantized weight, and leave its codes."""
    tensors = {name: tensor.clone() for name, tensor in tensors_of(merged).items()}
    for name in (f"{fqn}.absmax", f"{fqn}.nested_absmax", f"{fqn.removesuffix('weight')}SCB"):
        if name in tensors and tensors[name].is_floating_point():
            tensors[name] *= scale
    for name in tensors:
        if name.startswith(f"{fqn}.quant_state"):
            state = json.loads(bytes(tensors[name].tolist()))
            state |= {"nested_offset": state.get("nested_offset", 0.0) * scale}
            tensors[name] = torch.tensor([*json.dumps(state).encode()], dtype=torch.uint8)
    save_file(tensors, merged / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.thorough
@pytest.mark.parametrize("quant", ["nf4", "nf4-double", "int8"])
def test_a_quantized_layer_that_was_scaled_though_no_adapter_touches_it_is_found(
    quant: str, merges: Callable[[str], Run], tmp_path: Path
) -> None:
    run = merges("llama")
    base, adapter, fqn = tmp_path / "base", tmp_path / "adapter", "model.layers.0.mlp.up_proj.weight"
    load("llama", quant).save_pretrained(base)
    copy_without_record(run, adapter)
    half = reload_and_merge(run, torch.bfloat16, tmp_path / "half")
    quantized = tmp_path / "quantized"

    def named(merged: Path) -> bool:
        report = doctor(merged, base=base, adapter=adapter)
        return any(fqn in finding.evidence for finding in report.findings)

    right = tensors_of(half)
    for scale, num_rows in ((1.0, None), (1.1, None), (0.97, None), (1.1, 1)):
        broken = {name: tensor.clone() for name, tensor in right.items()}
        broken[fqn][:num_rows] *= scale
        save_file(broken, half / "model.safetensors", metadata={"format": "pt"})
        assert named(half) == (scale != 1)
    for scale in (1.0, 1.1, 0.97):
        merge_checkpoint(base, adapter, quantized, merge_as="quantized", overwrite=True)
        scale_statistics(quantized, fqn, scale)
        assert named(quantized) == (scale != 1)


@pytest.mark.parametrize("quant", few(["nf4", "int8"], ["nf4"]))
def test_scales_and_codes_of_an_adapted_layer_that_no_rounding_gives_are_found(
    quant: str, merges: Callable[[str], Run], tmp_path: Path
) -> None:
    run = merges("llama")
    base, adapter, fqn = tmp_path / "base", tmp_path / "adapter", "model.layers.0.self_attn.v_proj.weight"
    load("llama", quant).save_pretrained(base)
    copy_without_record(run, adapter)
    for scale in (1.0, 0.9, 1.02, 1.5, None):
        merged = tmp_path / str(scale)
        merge_checkpoint(base, adapter, merged, merge_as="quantized")
        scale_statistics(merged, fqn, scale or 1.0)
        if scale is None:
            tensors = {name: tensor.clone() for name, tensor in tensors_of(merged).items()}
            tensors[fqn] = tensors[fqn].flip(0)
            save_file(tensors, merged / "model.safetensors", metadata={"format": "pt"})
        told = [finding.what for finding in doctor(merged, base=base, adapter=adapter).findings]
        assert bool(told) == (scale != 1)
        if quant == "int8" and scale not in (1.0, None):
            assert told == ["its scales are neither the base's nor those of the merged weights"]


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_a_merge_that_was_quantized_to_8_bits_is_right_with_scales_of_its_own(
    name: str, merges: Callable[[str], Run], tmp_path: Path
) -> None:
    run = merges(name)
    copy_without_record(run, tmp_path / "adapter")
    model_class = getattr(transformers, zoo.ARCHITECTURES[name].model_class)
    int8 = bitsandbytes_config("int8", torch.bfloat16)
    half = reload_and_merge(run, torch.bfloat16, tmp_path / "half")
    quantized = model_class.from_pretrained(half, quantization_config=int8, device_map={"": "cpu"})
    quantized.save_pretrained(tmp_path / "merged")
    base, adapter = run.folder / "base", tmp_path / "adapter"
    report = doctor(tmp_path / "merged", base=base, adapter=adapter, quant=int8)
    assert report.findings == ()
    assert report.merge is not None
    assert abs(report.merge.kept - 1) < 0.05


def test_a_quantized_merge_that_cannot_be_loaded_is_a_finding(merges: Callable[[str], Run], tmp_path: Path) -> None:
    run = merges("llama")
    load("llama").save_pretrained(tmp_path / "merged")
    tensors = tensors_of(tmp_path / "merged")
    stored = {fqn: tensor for fqn, tensor in tensors.items() if not fqn.endswith("q_proj.weight.absmax")}
    save_file(stored, tmp_path / "merged" / "model.safetensors", metadata={"format": "pt"})
    report = run.examine(tmp_path / "merged")
    assert report.merge is None
    assert "the merged checkpoint cannot be loaded" in [finding.what for finding in report.findings]


# ----------------------------------------------------------------------------------------------------
# Right merges.
# ----------------------------------------------------------------------------------------------------


def assert_right(report: DoctorReport, onto: str) -> None:
    assert report.findings == ()
    assert report.merge is not None
    assert report.merge.onto == onto
    assert abs(report.merge.kept - 1) <= 0.01
    assert report.merge.tensors


DTYPES = (torch.bfloat16, torch.float16, torch.float32)
RIGHT = [("llama", DTYPES), ("mixtral", DTYPES[:1])]


@pytest.mark.parametrize(("name", "dtypes"), few([*itertools.product(NAMES, [DTYPES]), RIGHT[1]], RIGHT))
def test_a_right_merge_has_no_finding(
    name: str, dtypes: tuple[torch.dtype, ...], merges: Callable[[str], Run], tmp_path: Path
) -> None:
    run = merges(name)
    assert_right(run.examine(run.folder / "merged"), "trained")
    for dtype in dtypes:
        merged = reload_and_merge(run, dtype, tmp_path / str(dtype), max_shard_size="100KB")
        assert_right(run.examine(merged), "original")


@pytest.mark.parametrize("size", [0.01, 0.003, 0.0006])
@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16, torch.float32])
def test_a_merge_of_a_delta_near_rounding_is_right_in_a_finer_dtype(stored: torch.dtype, size: float) -> None:
    generator = torch.Generator().manual_seed(0)
    trained = torch.randn(256, 256, generator=generator).bfloat16()
    delta = size * torch.randn(256, 256, generator=generator)
    after = trained.float() + delta

    def measured(found: torch.Tensor) -> Figures:
        return compare("weight", found, after, trained, None, dtype=torch.bfloat16, stored=None, was_quantized=False)

    assert is_right(measured(after.to(stored)))
    assert not is_right(measured(trained.to(stored)))
    assert not is_right(measured((after + delta).to(stored)))


def test_a_part_that_depends_on_the_weights_is_right_on_the_original_ones(tmp_path: Path) -> None:
    run = make_run("llama", tmp_path / "run", use_dora=True)
    merged = reload_and_merge(run, torch.bfloat16, tmp_path / "merged")
    report = run.examine(merged)
    assert_right(report, "original")

    # each tensor counts in the whole by the delta that it was given, on the original weights
    assert report.merge is not None
    base, found = run.of("base"), tensors_of(merged)
    deltas, differences = [], []
    for fqn in report.merge.tensors:
        deltas.append(run.delta(fqn).flatten())
        differences.append((found[fqn].float() - base[fqn].float()).flatten() - deltas[-1])
    error = torch.cat(differences).norm() / torch.cat(deltas).norm()
    assert report.merge.error == pytest.approx(float(error), rel=1e-4)


@pytest.mark.parametrize("name", few(["llama", "gpt2", "llava"], ["gpt2"]))
def test_a_merge_onto_the_original_weights_is_told_where_only_4_bits_are_at_hand(
    name: str, merges: Callable[[str], Run], tmp_path: Path
) -> None:
    run = merges(name)
    merged = reload_and_merge(run, torch.bfloat16, tmp_path / "merged")
    load(name).save_pretrained(tmp_path / "base")
    report = doctor(merged, base=tmp_path / "base", adapter=run.folder / "adapter")
    assert report.findings == ()
    assert report.merge is not None
    assert report.merge.onto == "original"
    report = doctor(run.folder / "base", base=tmp_path / "base", adapter=run.folder / "adapter")
    (finding,) = report.findings
    assert finding.what == "no delta"


def test_a_delta_of_a_transposed_layer_in_8_bits_is_measured(merges: Callable[[str], Run], tmp_path: Path) -> None:
    run = merges("gpt2")
    zoo.load("gpt2", quant="int8").save_pretrained(tmp_path / "base")
    shutil.copytree(run.folder / "adapter", tmp_path / "adapter")
    (tmp_path / "adapter" / "kbitwrap.json").unlink()
    report = doctor(run.folder / "base", base=tmp_path / "base", adapter=tmp_path / "adapter")
    (finding,) = report.findings
    assert finding.what == "no delta"


def test_buffers_that_loading_computes_are_no_finding(merges: Callable[[str], Run], tmp_path: Path) -> None:
    run = merges("llama")

    def with_buffers(run: Run, tensors: Tensors) -> None:
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8, dtype=torch.bfloat16)

    assert_right(run.examine(change(run, tmp_path / "merged", with_buffers)), "trained")


def test_names_with_the_prefixes_of_wrappers_are_found(merges: Callable[[str], Run], tmp_path: Path) -> None:
    run = merges("llama")

    def renamed(run: Run, tensors: Tensors) -> None:
        for fqn in [*tensors]:
            tensors[f"base_model.model.{fqn}"] = tensors.pop(fqn)

    assert_right(run.examine(change(run, tmp_path / "merged", renamed)), "trained")


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["qwen2_vl", "deepseek_v3"])
def test_names_of_the_live_model_are_found(name: str, merges: Callable[[str], Run], tmp_path: Path) -> None:
    run = merges(name)
    reload_and_merge(run, torch.bfloat16, tmp_path / "merged")
    shutil.copytree(run.folder / "merged", tmp_path / "ours")
    for folder, onto in ((tmp_path / "ours", "trained"), (tmp_path / "merged", "original")):
        model_class = getattr(transformers, zoo.ARCHITECTURES[name].model_class)
        model = model_class.from_pretrained(folder, dtype=torch.bfloat16)
        stored = {fqn: tensor.clone() for fqn, tensor in model.state_dict().items()}
        save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
        assert_right(run.examine(folder), onto)


def test_progress_is_told_tensor_by_tensor(merges: Callable[[str], Run]) -> None:
    run = merges("llama")
    told: list[tuple[int, int]] = []
    options: dict[str, Any] = {"base": run.folder / "base", "adapter": run.folder / "adapter"}
    report = doctor(run.folder / "merged", **options, progress=lambda done, number: told.append((done, number)))
    assert report.merge is not None
    number = report.merge.num_compared
    assert told == [(done, number) for done in range(number)]


def test_a_live_model_is_measured_as_its_files_are(merges: Callable[[str], Run]) -> None:
    run = merges("llama")
    live = transformers.LlamaForCausalLM.from_pretrained(run.folder / "merged", dtype="auto")
    report = doctor(live, base=run.folder / "base", adapter=run.folder / "adapter")
    assert report.merge == run.examine(run.folder / "merged").merge
    with torch.no_grad():
        live.model.layers[0].self_attn.q_proj.weight.mul_(-1)
    report = doctor(live, base=run.folder / "base", adapter=run.folder / "adapter")
    assert any("layers.0.self_attn.q_proj.weight" in finding.evidence for finding in report.findings)


def test_a_tensor_without_elements_is_right() -> None:
    figures = compare("a", *[torch.empty(0, 4)] * 3, None, dtype=torch.float32, stored=None, was_quantized=False)
    assert is_right(figures)
