"""The command coevolve: its table, its help, names of configs, and set-up where something is missing."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from coevolve_jax import cli, config, shipped
from tests.support import forked
from tests.support.paths import ROOT

# Programs without a command: set_up.py runs the first, campaigns the fifth; the others measure campaigns.
INNER = {
    "appworld_tasks", "calibrate_harness", "check_backtests", "check_verdicts", "compare_gradients",
    "harness_bench",
}  # fmt: skip


def coevolve(*arguments: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    program = [sys.executable, "-m", "coevolve_jax", *arguments]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(program, cwd=cwd, env=env, capture_output=True, text=True)


def test_every_program_has_a_command():
    there = {p for p in (ROOT / "experiments").glob("*.py") if p.stem not in INNER}
    assert there == {path for path in cli.PROGRAMS.values() if path.parent == ROOT / "experiments"}
    assert all(path.is_file() for path in cli.PROGRAMS.values())


@pytest.mark.parametrize("in_wheel", [False, True])
def test_every_command_that_a_message_names_is_there(in_wheel, monkeypatch):
    monkeypatch.setattr(shipped, "IN_WHEEL", in_wheel)
    for name, path in cli.PROGRAMS.items():
        start, _, word = shipped.command(name).partition(" ")
        assert (start, word) == ("coevolve", name) if in_wheel else (start, ROOT / word) == ("python", path)
    sources = [path for folder in ("coevolve_jax", "experiments") for path in (ROOT / folder).rglob("*.py")]
    found = [re.findall(r"shipped\.command\((.*?)\)", path.read_text()) for path in sources]
    named = {name.strip("\"'") for names in found for name in names}
    assert {"check-tools", "serve", "train"} <= named <= cli.PROGRAMS.keys()


def test_one_help_names_every_command_with_a_sentence():
    lines = cli.overview().splitlines()
    for name, path in cli.PROGRAMS.items():
        (line,) = [line for line in lines if line.startswith(f"    {name} ")]
        assert line.endswith(".") and line.split(maxsplit=1)[1] in path.read_text()


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize("command", cli.PROGRAMS)
def test_a_commands_help_is_its_programs_in_words_of_commands(command):
    done = coevolve(command, "--help")
    assert done.returncode == 0, done.stderr
    assert "experiments/" not in done.stdout and f"{cli.PROGRAMS[command].name}" not in done.stdout
    assert f"coevolve {command}" in done.stdout


def test_a_help_that_is_not_read_to_its_end_is_no_error():
    read, write = os.pipe()
    os.close(read)
    program = [sys.executable, ROOT / "experiments" / "compare.py", "--help"]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    with os.fdopen(write) as unread:
        done = subprocess.run(program, stdout=unread, stderr=subprocess.PIPE, env=env, text=True)
    assert done.returncode == 1 and done.stderr == ""


def test_arguments_after_two_dashes_are_not_asked_for_help(monkeypatch, capsys):
    started = []
    monkeypatch.setattr(cli, "start", lambda command, arguments: started.append((command, arguments)))
    monkeypatch.setattr(sys, "argv", ["coevolve", "serve", "--words", "--", "--help"])
    cli.main()
    assert started == [("serve", ["--words", "--", "--help"])] and not capsys.readouterr().out


def test_a_wrong_command_is_answered_with_those_there_are():
    done = coevolve("trian")
    assert done.returncode == 1 and done.stderr.startswith(
        "Error: coevolve has no command 'trian': use one of"
    )
    assert coevolve("--version").stdout == f"{cli.coevolve_jax.__version__}\n"


def test_a_program_gets_its_arguments_and_its_own_exit_status(tmp_path):
    done = coevolve("train", "--config=bfcl_tiny", "--workdir=x", "--config.stepz=3", cwd=tmp_path)
    assert done.returncode == 1 and "stepz" in done.stderr and "steps" in done.stderr


def test_shipped_files_are_found_from_everywhere_and_ones_own_come_first(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    same = config.load_file(ROOT / "configs" / "bfcl_tiny.py", "seed=3").to_dict()
    for name in ("bfcl_tiny", "configs/bfcl_tiny.py"):
        assert config.load_file(name, "seed=3").to_dict() == same
    assert shipped.folder("models/tiny_qwen3") == ROOT / "models" / "tiny_qwen3"
    (tmp_path / "configs").mkdir()
    own = tmp_path / "configs" / "bfcl_tiny.py"
    own.write_text("from ml_collections import ConfigDict\ndef get_config(arg): return ConfigDict({'a': 7})")
    assert config.load_file("configs/bfcl_tiny.py").a == 7
    (tmp_path / "models" / "tiny_qwen3").mkdir(parents=True)
    assert shipped.folder("models/tiny_qwen3") == Path("models/tiny_qwen3")
    with pytest.raises(ValueError, match="configs/none.py is no Python file"):
        config.load_file("configs/none.py")


FAULTY = {
    "x = {1:": "cannot be loaded ('{' was never closed",
    "import not_there": "cannot be loaded (No module named 'not_there')",
    "def get_config(arg=''): pass": "returns a value of type NoneType, not a ConfigDict: let it return",
    "def get_config(arg=''): return {'steps': 3}": "returns a value of type dict, not a ConfigDict",
    "steps = 3": "defines no function get_config",
    "def get_config(arg=''):\n    return {'small': 3}['large']": "mine.py:2: KeyError: 'large'",
    "from coevolve_jax import config\ndef get_config(arg=''):\n    config.defaults().learnr.epsilon = 1": (
        "mine.py:3: AttributeError: 'learnr' Did you mean \"learner\""
    ),
    "def get_config(arg=''):\n    return int('many')": "mine.py:2: invalid literal for int()",
    "from coevolve_jax import config\ndef get_config(arg=''):\n    config.parse_arg('a=1', b=2)": (
        "Config argument 'a' is unknown: use b."
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("text", FAULTY)
def test_a_config_file_at_fault_is_named(text, tmp_path, quick):
    (file := tmp_path / "mine.py").write_text(text)
    for program, *flags in (("main.py",), ("main.py", "--config.steps=3"), ("compare.py", "--arms=static")):
        command = [f"experiments/{program}", f"--config={file}", f"--workdir={tmp_path / 'run'}", *flags]
        done = forked.run(command, quick)
        told = done.stderr.splitlines()[-1]
        assert done.returncode == 1 and told.startswith("Error: "), done.stderr
        assert FAULTY[text] in told and "Traceback" not in done.stderr
        assert f"{file}" in told or "Config argument" in told
    with pytest.raises(ValueError, match=re.escape(FAULTY[text])):
        config.load_file(file)
    assert not (tmp_path / "run").exists()


def test_a_config_file_whose_function_takes_no_argument_is_given_none(tmp_path):
    inherits = "from coevolve_jax import config\ndef get_config(): return config.load_file('bfcl_tiny')"
    (file := tmp_path / "mine.py").write_text(inherits)
    assert config.load_file(file).to_dict() == config.load_file("bfcl_tiny").to_dict()
    with pytest.raises(
        ValueError, match="mine.py cannot be called with 'seed=3': let get_config take an arg"
    ):
        config.load_file(file, "seed=3")
    file.write_text(
        "from ml_collections import ConfigDict\ndef get_config(arg='b'): return ConfigDict({arg: 7})"
    )
    assert "b" in config.load_file(file) and "c" in config.load_file(file, "c")


@pytest.mark.slow
@pytest.mark.parametrize("program", ["main.py", "sft.py"])
def test_a_config_that_is_not_returned_resumes_no_run(program, tmp_path, quick):
    (file := tmp_path / "mine.py").write_text("def get_config(arg=''): pass")
    (run := tmp_path / "run").mkdir()
    there = config.override(config.load_file("bfcl_tiny"), {"model": "nowhere", "warm_start.steps": 1})
    (run / "config.json").write_text(config.to_json(there))
    done = forked.run([f"experiments/{program}", f"--config={file}", f"--workdir={run}"], quick)
    assert done.returncode == 1 and f"Error: get_config of {file} returns a value of type" in done.stderr
    assert [path.name for path in run.iterdir()] == ["config.json"]
    done = forked.run([f"experiments/{program}", f"--workdir={run}"], quick)
    assert done.returncode == 1 and "Error: nowhere is not a Hugging Face model folder" in done.stderr


INTERRUPTED = {
    "leaderboard": ("comparison.testbed", "load", ["--testbed=a=x"], "out"),
    "export": ("exports.parquet", "write", ["--to=parquet", "--run=x"], "output"),
    "plan": ("planning.plan", "table", ["--config=configs/bfcl_tiny.py"], None),
    "show_prompt": ("envs", "load", ["--model=x", "--benchmark=bfcl", "--task=x"], None),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["compare", "evaluate"])
def test_a_stray_word_ends_a_command_in_one_sentence(name, quick):
    done = forked.run([f"experiments/{name}.py", "stray"], quick)
    told = "Error: unexpected argument 'stray': options begin with --, see --help.\n"
    assert (done.returncode, done.stdout, done.stderr) == (1, "", told)


@pytest.mark.slow
@pytest.mark.parametrize("name", INTERRUPTED)
def test_an_interrupt_ends_a_command_without_a_traceback(name, tmp_path, quick):
    module, function, flags, out = INTERRUPTED[name]
    statements = (
        f"import coevolve_jax.{module} as m\ndef stop(*_): raise KeyboardInterrupt\nm.{function} = stop"
    )
    if out:
        flags = [*flags, f"--{out}={tmp_path / 'out'}"]
    done = forked.run_after(statements, name, tmp_path, quick, *flags)
    assert done.returncode == 130 and done.stderr.startswith("\nInterrupted"), done.stderr
    assert done.stderr.count("\n") == 2


def test_a_page_that_cannot_be_written_is_told_before_the_tools_are_explored(tmp_path):
    (file := tmp_path / "file").write_text("mine")
    done = coevolve("check-tools", "examples/shop.py:Shop", f"--out={file / 'page.html'}")
    assert done.returncode == 1 and not done.stdout
    assert (
        done.stderr
        == f"Error: --out={file / 'page.html'} lies below {file}, which is a file: choose another.\n"
    )
    for path, folder, why in ((file, True, "is a file"), (tmp_path, False, "is a folder")):
        with pytest.raises(ValueError, match=f"--out={path} {why}: choose another"):
            config.check_output("out", path, folder=folder)
    for path, folder in ((file, False), (tmp_path, True), (tmp_path / "new" / "page.html", False)):
        config.check_output("out", path, folder=folder)
    assert [path.name for path in tmp_path.iterdir()] == ["file"] and file.read_text() == "mine"


def test_what_shipped_configs_name_and_is_not_there_says_what_makes_it(tmp_path):
    told = coevolve("train", "--config=bfcl_tin", f"--workdir={tmp_path / 'x'}")
    assert told.returncode == 1 and "did you mean bfcl_tiny" in told.stderr
    told = coevolve("train", "--config=nothing_like_it", f"--workdir={tmp_path / 'x'}")
    assert "give one of configs/, or your own." in told.stderr
    told = coevolve("ask", "--model=nowhere/smollm2-135m-instruct", "Who?")
    assert told.returncode == 1 and "; `make smollm2` makes it." in told.stderr
    told = coevolve("synthesize", "--config=mcp_tiny", "--tasks=1", cwd=tmp_path)
    assert told.returncode == 1 and "; `python experiments/set_up.py mcp` makes it." in told.stderr
    (tmp_path / "runs" / "mcp_shop").mkdir(parents=True)
    told = coevolve("synthesize", "--config=mcp_tiny", "--tasks=1", cwd=tmp_path)
    assert (
        told.returncode == 1 and "give its path; `python experiments/set_up.py mcp` makes it." in told.stderr
    )
    assert shipped.made_by("models/other") == ""


def test_an_example_is_found_from_everywhere(tmp_path):
    told = coevolve("check-tools", "examples/shop.py:Stop", f"--out={tmp_path / 'page.html'}", cwd=tmp_path)
    assert told.returncode == 1 and f"{ROOT / 'examples' / 'shop.py'} has no class Stop" in told.stderr
    assert "it has Shop." in told.stderr


def test_a_set_up_without_pip_says_what_to_run(tmp_path):
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "bare"], check=True)
    command = [tmp_path / "bare" / "bin" / "python", ROOT / "experiments" / "set_up.py", "bfcl"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1
    assert "has no pip: run `uv pip install --no-deps -r" in done.stderr and "bfcl.txt" in done.stderr


@pytest.mark.parametrize("family", ["textworld", "tau2", "appworld", "mcp"])
def test_a_set_up_deletes_no_folder_but_an_environment(tmp_path, family):
    (tmp_path / "own" / "lib").mkdir(parents=True)
    (tmp_path / "own" / "lib" / "thesis.txt").write_text("years of work")
    (tmp_path / "file").write_text("more work")
    for name in ("own", "file"):
        command = [sys.executable, ROOT / "experiments" / "set_up.py", family, f"--folder={tmp_path / name}"]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 1 and "is no virtual environment, and what it holds would" in done.stderr
    assert (tmp_path / "own" / "lib" / "thesis.txt").read_text() == "years of work"
    assert (tmp_path / "file").read_text() == "more work"


def test_the_demo_installs_nothing_outside_a_virtual_environment(tmp_path):
    python = Path(sys.base_prefix) / "bin" / "python3"
    command = [python, "-I", "-S", ROOT / "experiments" / "demo.py"]  # -S: without what this interpreter has
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 1 and "is in no virtual environment: run `coevolve setup bfcl`" in done.stderr
    assert not list(tmp_path.iterdir())
