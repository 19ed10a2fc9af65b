"""The command line: every promise of the demonstration is checked, a broken one is noticed, bad input is one line."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import pytest
import torch
from rich.cells import cell_len
from safetensors.torch import save_file
from torch import nn
from transformers.utils import logging as transformers_logging

from kbitwrap import KbitPreparedModel, Precision, RestoreError, RestoreReport, UnsupportedModelError
from kbitwrap.cli import demo, demo_run, main
from kbitwrap.cli.base_state import BaseState
from kbitwrap.cli.console import InputError, quiet_libraries
from kbitwrap.cli.text import ByteTokens, read_blocks
from support.demos import save_llama


def run_json(capsys: pytest.CaptureFixture[str], *options: str) -> tuple[int, dict[str, Any]]:
    status = main(["demo", "--json", *options])
    return status, json.loads(capsys.readouterr().out)


def failed(result: dict[str, Any]) -> list[str]:
    return [check["name"] for check in result["checks"] if not check["passed"]]


def exit_status(*arguments: str) -> int:
    """The exit status, whether it is returned or raised as by the console script's ``sys.exit``."""
    with pytest.raises(SystemExit) as found:
        raise SystemExit(main(arguments))
    return found.value.code


@dataclass(frozen=True)
class Run:
    """What the demonstration measured and printed, and what it should leave in the process: before it, and after."""

    result: dict[str, Any]
    out: str
    err: str
    before: list[object]
    after: list[object]
    files: list[Path]


def process_state() -> list[object]:
    return [torch.get_num_threads(), torch.get_rng_state().tolist(), transformers_logging.get_verbosity()]


@pytest.fixture(scope="module")
def default_run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The demonstration as it is by default, on the CPU and a screen of 80 columns."""
    folder, results = tmp_path_factory.mktemp("temporary"), []
    run = demo_run.Demo.run

    def remember(self: demo_run.Demo) -> dict[str, Any]:
        results.append(run(self))
        return results[-1]

    before = process_state()
    out, err = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        patch.setattr(tempfile, "tempdir", str(folder))
        patch.setenv("COLUMNS", "80")
        patch.setattr(demo_run.Demo, "run", remember)
        assert main(["demo", "--device", "cpu"]) == 0
    files = list(folder.glob("kbitwrap-demo-*"))
    return Run(results[0], out.getvalue(), err.getvalue(), before, process_state(), files)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with a model that is smaller than the demonstration's own, of as many tokens as there are bytes."""
    return save_llama(tmp_path_factory.mktemp("small"), vocab_size=256)


def test_the_same_bytes_of_another_dtype_or_shape_are_noticed() -> None:
    module = nn.Module()
    module.register_buffer("table", torch.zeros(4))
    before = BaseState.of({"module": module})
    for other in (module.table.view(torch.int32), module.table.view(2, 2)):
        module.table = other
        assert before.differences(before.again(), "bytes") == ["module.table"]


class Remembers(ByteTokens):
    """Remembers the text."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def encode(self, text: str) -> list[int]:
        self.texts.append(text)
        return super().encode(text)


def test_no_topic_is_trained_on_and_held_out() -> None:
    tokens = Remembers()
    read_blocks(tokens, length=65, num_held_out=16, seed=0)
    found = [tuple(text in part for part in tokens.texts) for text in topics.values()]
    assert {(True, False), (False, True)} <= set(found) <= {(True, False), (False, True), (False, False)}


@pytest.mark.parametrize("error", [InputError, None])
def test_libraries_are_loud_again(error: type[Exception] | None) -> None:
    bitsandbytes, deepspeed = logging.getLogger("bitsandbytes"), logging.getLogger("DeepSpeed")
    before = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled(), bitsandbytes.level
    transformers_logging.set_verbosity_info()
    transformers_logging.enable_progress_bar()
    try:
        with contextlib.suppress(InputError), quiet_libraries():
            assert bitsandbytes.level == transformers_logging.get_verbosity() == logging.ERROR
            assert deepspeed.disabled
            assert not transformers_logging.is_progress_bar_enabled()
            if error is not None:
                raise error
        after = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
        assert (*after, bitsandbytes.level) == (logging.INFO, True, before[2])
        assert not deepspeed.disabled
    finally:
        transformers_logging.set_verbosity(before[0])
        if not before[1]:
            transformers_logging.disable_progress_bar()


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("quant", "precision"),
    [*(("nf4", precision.value) for precision in Precision), ("int8", "compute")],
)
def test_every_check_passes(capsys: pytest.CaptureFixture[str], quant: str, precision: str) -> None:
    status, result = run_json(capsys, "--quant", quant, "--precision", precision, "--steps", "2")
    assert failed(result) == []
    assert status == 0
    assert result["passed"] is True
    assert len(result["checks"]) > 20
    assert (result["quant"], result["precision"], result["steps"]) == (quant, precision, 2)
    assert len(result["loss"]["training"]) == 2
    assert result["loss"]["held_out_after"] < result["loss"]["held_out_before"]
    assert len(set(result["base_digest"].values())) == 1
    assert result["generation"]["prompt"]
    assert result["seconds"].keys() >= {"load", "prepare", "train", "suspend", "restore", "merge"}
    (undone,) = [check for check in result["checks"] if check["name"] == "restore() undid every edit"]
    assert "beside the base: PEFT's trained copy of lm_head.weight" in str(undone)
    assert (result["plan"]["added_bytes"] > 0) == (precision in ("full", "compute"))
    assert ("lm_head.weight" in result["restore_report"]["trained"]) == (precision in ("full", "compute"))


def assert_fits_a_screen(printed: str, columns: int) -> None:
    lines = printed.splitlines()
    assert max(map(cell_len, lines)) <= columns
    assert len(lines) < 28
    assert lines[0] == "built-in byte-level Llama, nf4: PEFT's way and ours"
    assert lines[2].split()[-4:] == ["cpu", "PEFT's", '"compute"', '"norms"']
    assert any(line.startswith("31 of 31 checks passed") for line in lines)


@pytest.mark.thorough
def test_the_demonstration_fits_a_wide_screen(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    assert main(["demo", "--steps", "3", "--device", "cpu"]) == 0
    assert_fits_a_screen(capsys.readouterr().out, 100)


@pytest.mark.thorough
def test_default_run_learns_and_prints_a_table_that_fits_a_screen(default_run: Run) -> None:
    assert "FAIL" not in default_run.out
    assert_fits_a_screen(default_run.out, 80)
    said = " ".join(default_run.out.split())
    assert "PEFT's way adds 267,776 bytes, leaves 19 things changed, and loses " in said
    assert (
        'Ours, with "norms", adds 0 bytes, leaves nothing changed, and loses < 0.01 % of the fine-tune in a merge.'
        in said
    )
    assert said.count("not a merge") == 1
    assert "% a merge, on the original weights kbitwrap's export < 0.01 % a merge, on the trained weights" in said
    before, after = map(float, re.findall(r"held-out loss ([\d.]+) -> ([\d.]+)", default_run.out)[0])
    assert before > 5
    assert after < 4.5
    assert "Traceback" not in default_run.err


@pytest.mark.thorough
def test_what_the_demonstration_needs_for_itself_it_leaves_as_it_found(default_run: Run) -> None:
    assert default_run.after == default_run.before
    assert default_run.files == []


@pytest.fixture(scope="module")
def small_run(small: str) -> dict[str, Any]:
    """What the demonstration says of one step of the small model, which has no tokenizer."""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        main(["demo", "--json", "--model", small, "--steps", "1", "--seed", "7"])
    return json.loads(printed.getvalue())


@pytest.mark.thorough
def test_the_same_seed_gives_the_same_figures(
    capsys: pytest.CaptureFixture[str], small: str, small_run: dict[str, Any]
) -> None:
    again, other = (run_json(capsys, "--model", small, "--steps", "1", "--seed", seed)[1] for seed in ("7", "8"))
    for name in ("loss", "generation"):
        assert small_run[name] == again[name] != other[name]
    assert small_run["base_digest"] == again["base_digest"]  # of the same checkpoint


@pytest.mark.thorough
def test_another_seed_makes_another_model(capsys: pytest.CaptureFixture[str]) -> None:
    one, other = (run_json(capsys, "--device", "cpu", "--steps", "1", "--seed", seed)[1] for seed in ("0", "8"))
    for name in ("loss", "generation", "base_digest"):
        assert one[name] != other[name]


def test_named_model_without_a_tokenizer_takes_bytes(small: str, small_run: dict[str, Any]) -> None:
    assert small_run["model"] == small
    assert [name for name in failed(small_run) if name != "the held-out loss fell"] == []


@pytest.mark.thorough
def test_a_restore_that_does_nothing_fails_a_check(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, small: str
) -> None:
    monkeypatch.setattr(KbitPreparedModel, "restore", lambda self, trained="keep": RestoreReport())
    status, result = run_json(capsys, "--model", small, "--precision", "full", "--steps", "1")
    assert status == 1
    assert result["passed"] is False
    assert {
        '"full", unloaded: nothing left',
        "restored: bytes and quantization state as loaded",
        "restored: dtypes as loaded",
        "restored: requires_grad as loaded",
        "restored: checkpointing flags and forwards as loaded",
        "merged: no float32 left behind",
        "merged: checkpointing flags and forwards as loaded",
    } <= set(failed(result))


@pytest.mark.thorough
def test_restore_that_raises_fails(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, small: str
) -> None:
    restore = KbitPreparedModel.restore

    def restore_and_complain(self: KbitPreparedModel) -> RestoreReport:
        restore(self)
        raise RestoreError("not restored: lm_head.weight", failures={})

    monkeypatch.setattr(KbitPreparedModel, "restore", restore_and_complain)
    status, result = run_json(capsys, "--model", small, "--steps", "1")
    assert status == 1
    assert "restore() undid every edit" in failed(result)


@pytest.mark.thorough
def test_training_without_effect_fails_a_check(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, small: str
) -> None:
    monkeypatch.setattr(torch.optim.AdamW, "step", lambda self: None)
    assert main(["demo", "--model", small, "--steps", "1"]) == 1
    lines = capsys.readouterr().out.splitlines()
    (number,) = [number for number, line in enumerate(lines) if line.startswith("FAIL")]
    assert lines[number].startswith("FAIL  trained: ")
    assert lines[number].endswith("(1 of 2 checks)")
    assert lines[number + 1].startswith("      the held-out loss fell: ")


SIDE = {"added_bytes": 267776, "merged_bytes": 1274834, "left": {"dtypes": 7, "hooks": 1, "flags": 11}}


@pytest.mark.thorough
def test_pefts_way_is_measured_beside_ours(default_run: Run) -> None:
    sides = default_run.result["sides"]
    assert list(sides) == ["peft", "compute", "norms"]
    # 259 rows of 256 in the embeddings and in the head, and five norms, in float32: twice two bytes.
    assert {name: sides["peft"][name] for name in SIDE} == SIDE
    assert sides["peft"]["added_bytes"] == (2 * 259 * 256 + 5 * 256) * 2
    assert sides["peft"]["merged_bytes"] - sides["norms"]["merged_bytes"] == sides["peft"]["added_bytes"]
    assert (sides["compute"]["added_bytes"], sides["norms"]["added_bytes"]) == (5 * 256 * 2, 0)
    assert sides["compute"]["difference_from_peft"] == {"loss": 0, "gradients": 0}
    assert 0 < sides["norms"]["difference_from_peft"]["gradients"] < 0.05
    assert [set(sides[name]["left"].values()) for name in ("compute", "norms")] == [{0}, {0}]
    assert sides["norms"]["peak_bytes"] < sides["peft"]["peak_bytes"]
    for side in sides.values():
        assert side["predicted_bytes"] == side["step_bytes"]
    assert sides["norms"]["step_bytes"] < sides["compute"]["step_bytes"] < sides["peft"]["step_bytes"]
    assert {check["group"] for check in default_run.result["checks"]} == {
        *("plan", "numbers", "training", "suspension", "restore", "merge")
    }


@pytest.mark.thorough
def test_the_merges_are_measured_by_their_logits_and_by_doctor(default_run: Run) -> None:
    in_place, reloaded, ours = default_run.result["merges"]
    # A merge into 4 bits rounds all weights anew; the others write them in bfloat16.
    assert in_place["faults"] == ["an adapter was merged into 4-bit weights"]
    assert reloaded["faults"] == ours["faults"] == []
    assert (reloaded["onto"], ours["onto"]) == ("original", "trained")
    assert 0 <= ours["lost"] < reloaded["lost"] / 100 < in_place["lost"] / 1000
    assert in_place["lost"] > 0.2
    assert in_place["num_bytes"] < ours["num_bytes"] == reloaded["num_bytes"]
    assert ours["kept"] == pytest.approx(1, abs=1e-3)  # it is rounded to bfloat16
    assert in_place["kept"] < 0.5


@pytest.mark.thorough
def test_an_export_that_is_no_merge_fails_a_check(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    export = KbitPreparedModel.export

    def export_the_base(self: KbitPreparedModel, path: Path, *, merge_adapters: bool, model: Any) -> Any:
        report = export(self, path, merge_adapters=merge_adapters, model=model)
        save_file(dict(self.merged_weights([])), path / "model.safetensors")
        return report

    monkeypatch.setattr(KbitPreparedModel, "export", export_the_base)
    status, result = run_json(capsys, "--steps", "2", "--device", "cpu")
    assert status == 1
    assert failed(result) == ["exported: a merge, says doctor"]
    assert "the trained copy was dropped" in result["merges"][-1]["faults"]


@pytest.mark.thorough
def test_a_number_that_is_not_pefts_fails_a_check(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, small: str
) -> None:
    measure = demo_run.measure

    def measured(name: str, subject: Any) -> Any:
        side = measure(name, subject)
        if name == "peft":
            side.loss += 1e-6
        return side

    monkeypatch.setattr(demo_run, "measure", measured)
    status, result = run_json(capsys, "--model", small, "--steps", "1")
    assert status == 1
    assert '"compute": PEFT\'s loss' in failed(result)


@pytest.mark.thorough
def test_all_checks_are_printed_where_that_is_asked_for(capsys: pytest.CaptureFixture[str], small: str) -> None:
    assert main(["demo", "--model", small, "--steps", "1", "--verbose"]) == 1  # it has learned too little
    lines = capsys.readouterr().out.splitlines()
    assert "precision 'norms', quantization bitsandbytes_4bit" in lines
    assert any(line.startswith("generated while suspended") for line in lines)
    assert sum(line.endswith("  pass") for line in lines) == 26
    assert sum(line.endswith("  FAIL") for line in lines) == 1
    (row,) = [line for line in lines if line.startswith("restore() undid every edit")]
    assert "0 failures" in row


def test_a_write_to_the_base_fails_a_check(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, small: str
) -> None:
    step = torch.optim.AdamW.step
    prepare = KbitPreparedModel.prepare
    models = []

    def remember(self: KbitPreparedModel) -> KbitPreparedModel:
        models.append(self.model)
        return prepare(self)

    def step_and_write(self: torch.optim.AdamW) -> None:
        step(self)
        with torch.no_grad():
            for model in models[-1:]:
                model.get_input_embeddings().weight[3, 3] += 1

    monkeypatch.setattr(KbitPreparedModel, "prepare", remember)
    monkeypatch.setattr(torch.optim.AdamW, "step", step_and_write)
    status, result = run_json(capsys, "--model", small, "--steps", "1")
    assert status == 1
    assert [name for name in failed(result) if name != "the held-out loss fell"] == [
        "training changed nothing of the base",
        "suspended: bytes and quantization state as loaded",
        "restored: bytes and quantization state as loaded",
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--quant", "int3"], "--quant: expected one of nf4, int8, found 'int3'"),
        (["--precision", "half"], "--precision: expected one of full, compute, norms, adapted, none, found 'half'"),
        (["--steps", "0"], "--steps: expected an integer of at least 1, found 0"),
        (["--steps", "many"], "--steps: expected an integer of at least 1, found 'many'"),
        (["--seed", "-1"], "--seed: expected an integer from 0"),
        (["--seed", str(2**63)], f"--seed: expected an integer from 0 to {2**63 - 1}, found {2**63}"),
        (["--frobnicate"], "no option '--frobnicate'"),
        (["--device", "nonsense"], "--device: expected one of cpu, cuda, "),
        (["--device", "cuda:99"], "device 'cuda:99' is not available"),
        (["--device", "meta"], "found 'meta'"),
        (["--model", "/no/such/model"], "there is no model at '/no/such/model'"),
    ],
)
def test_bad_usage_is_one_line(capsys: pytest.CaptureFixture[str], arguments: list[str], message: str) -> None:
    assert exit_status("demo", *arguments) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.err.count("\n") == 1
    assert captured.out == ""


@pytest.mark.parametrize("broken", ["empty", "config", "weights", "type", "vocabulary", "dtype"])
def test_unreadable_model_is_one_line(capsys: pytest.CaptureFixture[str], tmp_path: Path, broken: str) -> None:
    if broken in ("weights", "vocabulary", "dtype"):
        save_llama(tmp_path, vocab_size=100)
        capsys.readouterr()
    if broken == "dtype":
        config = json.loads((tmp_path / "config.json").read_text())
        (tmp_path / "config.json").write_text(json.dumps({**config, "dtype": "mine.Mine"}))
    if broken == "weights":
        (tmp_path / "model.safetensors").write_bytes(b"not a checkpoint")
    elif broken in ("config", "type"):
        (tmp_path / "config.json").write_text("{" if broken == "config" else '{"model_type": "nonsense"}')
    assert exit_status("demo", "--model", str(tmp_path)) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("kbitwrap: error: ")
    assert str(tmp_path) in captured.err
    assert captured.err.count("\n") == 1


def test_refusal_to_prepare_is_bad_input(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, small: str
) -> None:
    def refuse(self: KbitPreparedModel, *args: Any, **fields: Any) -> None:
        raise UnsupportedModelError("no checkpointing here")

    monkeypatch.setattr(KbitPreparedModel, "__init__", refuse)
    assert exit_status("demo", "--model", small) == 2
    assert "cannot be prepared: no checkpointing here\n" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "is_said"),
    [([], True), (["--device", "cpu"], True), (["--json"], False), (["--device", "cuda"], False), (["--model"], False)],
)
def test_the_title_comes_before_libraries_are_loaded_unless_an_option_may_be_refused_by_them(
    arguments: list[str], is_said: bool, small: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(demo, "working", interrupt)
    if arguments == ["--model"]:
        arguments = ["--model", small]
    assert exit_status("demo", *arguments) == 130
    title = "built-in byte-level Llama, nf4: PEFT's way and ours\n\n"
    assert capsys.readouterr().out == (title if is_said else "")


def test_interruption_is_one_line(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(demo, "expect_installed", lambda *_: interrupt())
    assert exit_status("demo") == 130
    assert capsys.readouterr().err == "kbitwrap: interrupted\n"


# An interpreter that has imported nothing, and writes to a pipe that nobody reads any more.
BARE = """
import sys
import kbitwrap.cli
kbitwrap.cli.build_command()
assert not {"torch", "transformers", "peft", "bitsandbytes"} & sys.modules.keys(), "importing is not light"
input()
sys.exit(kbitwrap.cli.main(sys.argv[1:]))
"""


def test_importing_is_light_and_a_closed_pipe_prints_no_traceback() -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", BARE, "--help"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=Path(__file__).parents[2],
    )
    assert process.stdout is not None
    process.stdout.close()
    _, err = process.communicate(b"\n")
    assert (process.returncode, err) == (141, b"")


@pytest.mark.parametrize("arguments", [["--help"], ["demo", "--help"]])
def test_help(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> None:
    assert exit_status(*arguments) == 0
    assert "Usage: kbitwrap" in capsys.readouterr().out


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_status("--version") == 0
    assert capsys.readouterr().out.startswith("kbitwrap ")


def test_without_a_command_prints_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_status() == 2
    captured = capsys.readouterr()
    assert "demo" in captured.err
    assert captured.out == ""
