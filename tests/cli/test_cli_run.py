"""`kbitwrap run`: a script runs as by Python itself, and what it gets from PEFT is the drop-in."""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
import sys
from pathlib import Path

import peft
import pytest

from kbitwrap import Manifest
from kbitwrap.cli import main
from support import forks
from support.thorough import few
from support.trainers import load_base

ROOT = Path(__file__).parents[2]

FACTS = """\
from __future__ import annotations
import inspect, json, multiprocessing.spawn, os, pickle, sys
import beside

class Made: pass

main = sys.modules["__main__"]
assert pickle.loads(pickle.dumps(Made())).__class__ is main.Made is Made
assert "annotations" in globals()
print(json.dumps({
    "argv": sys.argv[1:], "path": sys.path, "names": sorted({*globals()} - {"__annotations__"}),
    "is main": vars(main) is globals(),
    "own": [str(globals()[name]) for name in ("__name__", "__file__", "__spec__")],
    "source": inspect.getsource(Made), "beside": beside.__file__, "heavy": sorted({"torch", "peft"} & {*sys.modules}),
    "for a child": multiprocessing.spawn.get_preparation_data("child").get("init_main_from_path"),
}))
"""
NOTHING = "kbitwrap: PEFT's function was not called: nothing was prepared; adapters saved, with kbitwrap.json: none\n"
# `__annotations__` is there from the start, or made with the first annotation: that depends on the version of Python.
SCRIPTS = {
    "ends": "print('done')",
    "exits": "import sys; sys.exit(3)",
    "exits with a text": "raise SystemExit('stopped')",
    "exits with nothing": "raise SystemExit",
    "raises": "def inner():\n    raise ValueError('bad') from KeyError('worse')\n\ninner()",
    "raises what main knows": "raise BrokenPipeError('gone')",
    "has its own hook": "import sys\nsys.excepthook = lambda *found: print(found[:2], 'seen')\nraise ValueError(1)",
    "is no Python": "x = 1\ny = = 2",
}


def run(*arguments: str, folder: Path) -> tuple[int, str, str]:
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}"}
    result = subprocess.run([sys.executable, *arguments], cwd=folder, capture_output=True, text=True, env=environment)
    return result.returncode, result.stdout, result.stderr


def with_last_line(found: tuple[int, str, str]) -> tuple[int, str, str, str]:
    """Take kbitwrap's own line off what was printed; Python prints why a script exits after it."""
    status, out, err = found
    lines = err.splitlines(keepends=True)
    own = [line for line in lines if line.startswith("kbitwrap: ")]
    return status, out, "".join(line for line in lines if line not in own), "".join(own)


def test_a_script_finds_what_it_would_find_without(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "script.py").write_text(FACTS)
    (tmp_path / "real" / "beside.py").touch()
    (tmp_path / "link.py").symlink_to(tmp_path / "real" / "script.py")
    arguments = ["link.py", "a", "--precision", "x", "--help", "--", "-m", "b"]
    expected = run(*arguments, folder=tmp_path)
    assert expected[0] == 0, expected
    status, out, err = run("-m", "kbitwrap", "run", "--precision", "norms", *arguments, folder=tmp_path)
    assert (status, out) == expected[:2]
    assert err == NOTHING


@pytest.mark.parametrize("kind", few(SCRIPTS, ["exits with a text", "has its own hook"]))
def test_status_output_and_traceback_are_the_scripts(kind: str, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPTS[kind])
    status, out, err = run("script.py", folder=tmp_path)
    assert with_last_line(run("-m", "kbitwrap", "run", "script.py", folder=tmp_path)) == (status, out, err, NOTHING)


def test_an_interrupt_has_the_scripts_traceback(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("raise KeyboardInterrupt")
    _, out, err = run("script.py", folder=tmp_path)
    found = with_last_line(run("-m", "kbitwrap", "run", "script.py", folder=tmp_path))
    assert found == (130, out, err, NOTHING)


def run_without_peft(arguments: list[str], folder: Path) -> tuple[int, str, str]:
    """What a command returns and prints, in a process of its own that has not imported PEFT."""
    os.chdir(folder)
    for name in [name for name in sys.modules if name.partition(".")[0] == "peft"]:
        del sys.modules[name]
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
        status = main(arguments)
    return status, out.getvalue(), err.getvalue()


@pytest.fixture(scope="module")
def patched(tmp_path_factory: pytest.TempPathFactory) -> tuple[int, str, str]:
    """A script that prepares, and runs a model that computes in another dtype than its input has."""
    folder = tmp_path_factory.mktemp("patched")
    (folder / "script.py").write_text(
        "import importlib.util, sys\n"
        "assert importlib.util.find_spec('peft').name == 'peft'\n"
        "assert 'peft' not in sys.modules\n"
        "from peft import prepare_model_for_kbit_training as prepare\n"
        "import inspect, peft, torch, warnings\n"
        "warnings.simplefilter('ignore')\n"
        "assert 'class LoraConfig' in inspect.getsource(peft.LoraConfig)\n"
        "import kbitwrap\n"
        "print(kbitwrap.prepared_of(prepare(torch.nn.LayerNorm(2).half())).config.precision)\n"
    )
    return forks.run(run_without_peft, ["run", "--precision", "norms", "script.py"], folder)


def test_peft_is_patched_when_the_script_imports_it(patched: tuple[int, str, str]) -> None:
    _, out, err = patched
    assert out == "norms\n", err
    assert "PEFT's function was called once: LayerNorm prepared with norms" in err


def test_the_process_is_afterwards_as_it_was(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import sys\nfrom peft import prepare_model_for_kbit_training as p\n"
        "sys.path.append('mine')\nprint(p.__kwdefaults__['precision'], sys.argv[1:])\n"
    )
    before = peft.prepare_model_for_kbit_training, sys.argv, [*sys.path], [*sys.meta_path], sys.modules["__main__"]
    assert main(["run", "--precision", "compute", str(script), "x"]) == 0
    printed = capsys.readouterr()
    assert printed.out == "compute ['x']\n"
    assert printed.err == NOTHING  # it is imported, which is not enough
    after = peft.prepare_model_for_kbit_training, sys.argv, [*sys.path], [*sys.meta_path], sys.modules["__main__"]
    assert after == before


@pytest.mark.parametrize(
    ("arguments", "text", "is_refused"),
    [
        (["SCRIPT", "--plan"], "", True),
        (["SCRIPT", "x", "--plan"], "# --plan", True),  # to pass it on would be to train
        (["--precision", "norms", "SCRIPT", "--budget=8GiB"], "", True),
        (["SCRIPT", "--precision", "norms"], "", True),
        (["SCRIPT", "--precision", "bf16"], "", False),
        (["SCRIPT", "--precision", "full"], "'precision'", False),
        (["SCRIPT", "--device-memory", "8"], "device_memory = 8", False),
        (["SCRIPT", "--", "--plan"], "", False),
        (["--", "SCRIPT", "--plan"], "", False),
        (["--precision", "norms", "--", "SCRIPT", "--plan"], "", False),
    ],
)
def test_an_option_of_run_after_the_script_is_refused_unless_it_may_be_the_scripts(
    arguments: list[str], text: str, is_refused: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "script.py"
    script.write_text(f"import sys\nprint(sys.argv[1:])\n{text}\n")
    status = main(["run", *(str(script) if word == "SCRIPT" else word for word in arguments)])
    out, err = capsys.readouterr()
    if is_refused:
        said = " stands after SCRIPT, so the script would get it: put it before SCRIPT, or -- before SCRIPT if it is "
        assert (status, out, err.count("\n"), said in err) == (2, "", 1, True)
    else:
        assert (status, out) == (0, f"{arguments[arguments.index('SCRIPT') + 1 :]}\n")


@pytest.mark.parametrize("arguments", [["/no/such/script.py"], ["."], [], ["--precision", "double", "script.py"]])
def test_a_script_that_is_not_there_and_bad_usage_are_one_line(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as found:
        raise SystemExit(main(["run", *arguments]))
    assert found.value.code == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1


TRAINS = """\
import sys
from pathlib import Path
from peft import prepare_model_for_kbit_training
from support.trainers import EVERY_STEP, adapt, load_base, trainer_for

model = load_base()
if sys.argv[1] == "prepared":
    model = prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
peft_model = adapt(model)
peft_model.add_adapter("other", peft_model.peft_config["default"])
trainer = trainer_for(peft_model, Path("run"), **EVERY_STEP)
trainer.train()
peft_model.save_pretrained("saved")
print(trainer.losses)
"""


@pytest.mark.parametrize("way", few(["prepared", "not prepared"], ["prepared"]))
def test_a_script_has_its_own_numbers_and_a_record_beside_every_adapter_that_it_saves(way: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAINS)
    alone = run("train.py", way, folder=tmp_path)
    status, out, err = run("-m", "kbitwrap", "run", "train.py", way, folder=tmp_path)
    assert status == 0, err
    assert out.splitlines()[-1] == alone[1].splitlines()[-1]
    last = err.splitlines()[-1]
    is_prepared = way == "prepared"
    said = "was called once: LlamaForCausalLM prepared with compute" if is_prepared else "was not called: nothing"
    assert said in last
    assert last.endswith("with kbitwrap.json: run/checkpoint-1, run/checkpoint-1/other, run/checkpoint-2 and 5 more")
    for folder in ("run/checkpoint-3", "saved", "saved/other"):
        manifest = Manifest.load(tmp_path / folder)
        assert manifest.unknown == (() if is_prepared else ("not prepared",))
        manifest.check(load_base())


SAVES = """\
import peft, pytest, torch
from support import settings, zoo
from support.trainers import adapt, load_base

settings.repack(pytest.MonkeyPatch())
peft_model = adapt(load_base())
peft_model.add_adapter("other", peft_model.peft_config["default"])
peft_model.save_pretrained(save_directory="before")
with torch.no_grad():
    peft_model.eval()(**zoo.inputs("llama", peft_model))
peft_model.save_pretrained("after", selected_adapters=["other"])
peft_model.save_pretrained("after", selected_adapters=["default"])
peft_model.save_pretrained("one", selected_adapters=["default"])
peft_model.save_pretrained("one/other/default", selected_adapters=["default"])
native = load_base()
native.add_adapter(zoo.lora_config("llama"))
native.save_pretrained("native")
for method in ("pissa", "olora"):
    adapt(load_base(None), init_lora_weights=method).save_pretrained(method)
load_base(None).save_pretrained("one/whole")
"""


@pytest.mark.thorough
def test_a_record_is_of_the_base_as_it_was_loaded_however_an_adapter_is_saved(tmp_path: Path) -> None:
    (tmp_path / "save.py").write_text(SAVES)
    status, _, err = run("-m", "kbitwrap", "run", "save.py", folder=tmp_path)
    assert status == 0, err
    expected = ["before", "before/other", "after", "after/other", "one", "one/other/default"]
    expected += ["native", "pissa", "olora"]
    found = [path.parent.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("kbitwrap.json")]
    assert sorted(found) == sorted(expected)
    for folder in expected:
        Manifest.load(tmp_path / folder).check(load_base(None if folder in ("pissa", "olora") else "nf4"))


@pytest.mark.parametrize(
    ("text", "arguments", "variable", "expected"),
    [
        ("", [], {}, "compute"),
        ("", ["--fsdp", "full_shard"], {}, "full"),
        ("# from torch.distributed.fsdp import fully_shard", [], {}, "full"),
        ("", [], {"ACCELERATE_USE_FSDP": "true"}, "full"),
    ],
)
def test_a_script_that_shards_its_model_gets_full_and_is_told(
    text: str,
    arguments: list[str],
    variable: dict[str, str],
    expected: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        f"{text}\nimport peft, torch, warnings\nwarnings.simplefilter('ignore')\n"
        "peft.prepare_model_for_kbit_training(torch.nn.LayerNorm(2).half())\n"
    )
    for name, value in variable.items():
        monkeypatch.setenv(name, value)
    assert main(["run", str(script), *arguments]) == 0
    err = capsys.readouterr().err
    assert f"LayerNorm prepared with {expected}" in err
    assert ("because FSDP is named in the script, its arguments or the environment" in err) == (expected == "full")
