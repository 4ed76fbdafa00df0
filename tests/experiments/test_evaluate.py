"""evaluate.py, synthesize.py, ask.py and show_prompt.py as a user starts them: refusals and prints."""

import json
import re
import shutil
import sys

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from coevolve_jax import config as configs
from tests.envs.test_env_tools import REWARDED
from tests.support import forked
from tests.support.paths import ROOT

pytestmark = pytest.mark.slow

TINY = ROOT / "models" / "tiny_qwen3"
SMALL = ("--category=live_parallel", "--max_length=1024", "--max_new_tokens=16")


def start(program, environ, *arguments):
    return forked.run([ROOT / "experiments" / f"{program}.py", *map(str, arguments)], environ)


def refused(done, why):
    assert done.returncode == 1 and done.stderr.splitlines()[-1].startswith("Error: "), done.stderr[-2000:]
    assert why in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize("program, more", [("evaluate", SMALL), ("ask", ("Hello?", "--max_new_tokens=4"))])
def test_a_model_that_is_not_finite_is_told_in_one_sentence(program, more, quick, tmp_path):
    shutil.copytree(TINY, tmp_path / "model")
    tensors = load_file(TINY / "model.safetensors")
    tensors["model.norm.weight"] = np.full_like(tensors["model.norm.weight"], np.nan)
    save_file(tensors, tmp_path / "model" / "model.safetensors", metadata={"format": "pt"})
    done = start(program, quick, f"--model={tmp_path / 'model'}", *more)
    refused(done, "log-probabilities are not finite")
    assert not done.stdout


def test_what_cannot_be_scored_is_refused_in_one_sentence(quick, tmp_path):
    output = f"--output={tmp_path / 'score.json'}"
    for arguments, why in (
        (("--max_length=8193",), "max_length is 8193, and models/tiny_qwen3 reads 8192 tokens"),
        (
            ("--max_length=64", output),
            "No prompt and message of --max_new_tokens=16 fit into",
        ),
        (("--output=models/tiny_qwen3/score.json",), "lies in the model's folder, whose content names the"),
        (("--tool_call_format=python",), "is 'python': environment bfcl offers no execute(code)"),
        (("--split=train", "--few_shot=1"), "--split=train has no tasks of --category=live_parallel"),
    ):
        refused(start("evaluate", quick, "--model=models/tiny_qwen3", *SMALL, *arguments), why)
    assert not list(tmp_path.iterdir())  # the same output serves the mended command
    held_out = ("--workdir=runs/one", "--benchmark=held_out", "--split=test")
    refused(start("evaluate", quick, *held_out), "--split are a benchmark's: leave them out")


ASKED = """
import contextlib, io
from coevolve_jax import build
from coevolve_jax.loop import evaluate
def asked(agent, tasks, *, num_rollouts, temperature, seed, log):
    raise ValueError(f"asked for {num_rollouts} at {temperature}, seed {seed}")
evaluate.evaluate = asked
build.policy = build.agent = lambda *given: None
build.engine = lambda *given: io.StringIO()
build.env_pool = lambda *given: contextlib.nullcontext()
"""


def test_a_model_is_asked_as_the_flags_say(quick, tmp_path):
    flags = ("--model=models/tiny_qwen3", *SMALL, "--num_rollouts=3", "--temperature=0.7", "--seed=5")
    done = forked.run_after(ASKED, "evaluate", tmp_path, quick, *flags)
    refused(done, "asked for 3 at 0.7, seed 5")


KILLED = """
import os, signal
from coevolve_jax.records import rollout_log
add = rollout_log.RolloutLog.add
def add_and_die(self, *given):
    add(self, *given)
    if self._path.read_text().count("\\n") == 4:
        os.kill(os.getpid(), signal.SIGKILL)
rollout_log.RolloutLog.add = add_and_die
"""


def test_a_killed_evaluation_goes_on_from_its_rollouts(quick, tmp_path):
    flags = ["--model=models/tiny_qwen3", *SMALL, "--max_concurrency=2", "--temperature=1.0"]
    output, kept = tmp_path / "score.json", tmp_path / "score.json.rollouts.jsonl"
    whole = start("evaluate", quick, *flags, f"--output={tmp_path / 'whole.json'}")
    assert whole.returncode == 0 and sorted(f.name for f in tmp_path.iterdir()) == ["whole.json"]
    killed = forked.run_after(KILLED, "evaluate", tmp_path, quick, *flags, f"--output={output}")
    assert killed.returncode == -9 and not output.exists()
    assert kept.read_text().count("\n") == 4
    other = start("evaluate", quick, *flags, "--seed=1", f"--output={output}")
    refused(other, "its.seed is 0 there and 1 here")
    resumed = start("evaluate", quick, *flags, f"--output={output}")
    assert resumed.returncode == 0 and not kept.exists()
    found, expected = (json.loads(path.read_text()) for path in (output, tmp_path / "whole.json"))
    assert found["protocol"].pop("interruptions") == 1 and found == expected
    told = [line for line in resumed.stdout.splitlines() if "interruptions" not in line]
    assert told == whole.stdout.splitlines()


HELD = """
from coevolve_jax import build
def held(config):
    e = config.environment
    raise ValueError(f"{e.call_timeout:g} s, {e.worker_memory:g} GiB, python {e.python!r}, {e.source!r}")
build.env_pool = held
build.engine = lambda *given: None
"""


def run_of(tmp_path, text, **environment):
    """Returns a folder that holds what is read of a finished run of a class, and the class's source."""
    (tmp_path / "guess.py").write_text(text)
    source, run = f"{tmp_path / 'guess.py'}:Guess", tmp_path / "run"
    config = configs.load_file(ROOT / "configs" / "tools.py", f"source={source}")
    config.environment.update(**environment)
    run.mkdir()
    (run / "config.json").write_text(configs.to_json(config))
    shutil.copytree(TINY, run / "policy")
    return run, source


def test_a_class_without_a_reward_has_no_tasks_of_its_own_to_play(quick, tmp_path):
    run, _ = run_of(tmp_path, REWARDED.replace("get_reward", "_get_reward"))
    done = start("evaluate", quick, f"--workdir={run}", "--benchmark=tools", "--split=test")
    why = "tools has no tasks of its own in --split=test: let its class define get_reward(self) and return"
    refused(done, f"Error: The environment {why}")


def test_a_prompt_is_shown_of_the_split_that_a_family_has(quick, tmp_path):
    (file := tmp_path / "guess.py").write_text(REWARDED)
    flags = (f"--config=configs/tools.py:source={file}:Guess", "--model=models/tiny_qwen3")
    unknown = start("show_prompt", quick, *flags, "--task=none")
    refused(unknown, "There is no task 'none' in the split development of tools: its")
    (task,) = re.findall(r"ids go from (\S+)", unknown.stderr)
    for given in ((), ("--split=development",)):
        done = start("show_prompt", quick, *flags, f"--task={task}", *given)
        assert done.returncode == 0 and "Guess a number from 0 to 49. Hint:" in done.stdout, done.stderr
        assert "system and 1 tools" in done.stdout
    file.write_text(REWARDED.replace("get_reward", "_get_reward"))
    for split in ("all", "train"):
        why = f"tools has no tasks of its own in --split={split}: let its class define get_reward(self)"
        refused(start("show_prompt", quick, *flags, "--task=none", f"--split={split}"), why)
    refused(start("show_prompt", quick, *flags, "--task=none"), "no tasks of its own in --split=all")


@pytest.mark.parametrize("flag, timeout", [((), 60), (("--call_timeout=7",), 7)])
def test_tasks_of_a_runs_own_family_are_played_in_the_runs_environment(quick, tmp_path, flag, timeout):
    more = {"call_timeout": 60.0, "worker_memory": 16.0, "python": sys.executable}
    run, source = run_of(tmp_path, REWARDED, **more)
    done = forked.run_after(HELD, "evaluate", tmp_path, quick, f"--workdir={run}", "--benchmark=tools", *flag)
    refused(done, f"Error: {timeout} s, 16 GiB, python {sys.executable!r}, {source!r}")


COPY = """
import dataclasses
from coevolve_jax import build
from coevolve_jax.loop import lab
def made(tasks, scenarios, synthesizer, *more):
    copies = (dataclasses.replace(task, id="copy") for task in build.benchmark_tasks(synthesizer.config)[:3])
    raise ValueError(f"copies are {[synthesizer.guard.check(copy) for copy in copies]}")
lab.Laboratory = made
"""


def test_tasks_that_are_made_without_training_copy_none_of_the_benchmark(quick, tmp_path):
    flags = ("--config=configs/bfcl_tiny.py", "--config.environment.workers=1")
    done = forked.run_after(COPY, "synthesize", tmp_path, quick, *flags)
    refused(done, f"copies are {['near_evaluation'] * 3}")


SAID = r"""
said = "\x1b]0;title\x07 do\x9b it\u202e\r\n\tnow"
from coevolve_jax.explorers.scripted import abstractor
from coevolve_jax.rollout.chat import Chat
abstractor.word = abstractor.describe = Chat.decode = lambda *given, **more: said
"""
SWITCHES = '''
class Switches:
    def reset(self, seed: int = 0) -> None:
        self.one = self.two = 0

    def set_one(self) -> str:
        """Sets the one."""
        self.one = 1
        return "one set"

    def set_two(self) -> str:
        """Sets the two."""
        self.two = 1
        return "two set"
'''


@pytest.fixture
def switches(tmp_path):
    """Flags of synthesize.py for tools that allow two tasks: both calls, in either order."""
    (tmp_path / "switches.py").write_text(SWITCHES)
    own = ("environment.workers", "data.max_turns", "evolution.rounds")
    source = f"--config=configs/tools.py:source={tmp_path / 'switches.py'}:Switches"
    return source, *(f"--config.{key}=1" for key in own)


def test_what_a_model_says_reaches_the_terminal_without_control_characters(quick, tmp_path, switches):
    for program, arguments, lines in (
        ("synthesize", (*switches, "--tasks=1"), ["  ]0;title do it now", "  user: ]0;title do it now"]),
        ("ask", ("--model=models/tiny_qwen3", "--max_new_tokens=2", "Hi?"),
            ["> Hi?", "]0;title do it", "        now"]),
    ):  # fmt: skip
        done = forked.run_after(SAID, program, tmp_path, quick, *arguments)
        assert done.returncode == 0, done.stderr[-2000:]
        assert all(c.isprintable() or c == "\n" for c in done.stdout), done.stdout
        assert set(lines) <= set(done.stdout.splitlines()), done.stdout


def test_the_summary_counts_a_first_batch_that_falls_short(quick, switches):
    done = start("synthesize", quick, *switches, "--tasks=4")
    refused(done, "Error: Unguided exploration found ")
    made, proposed, steps = re.search(
        r"^(\d+) tasks of (\d+) proposals, (\d+) steps in the environment$", done.stdout, re.MULTILINE
    ).groups()  # fmt: skip
    twice = re.search(r"^ +(\d+)  refused: duplicate$", done.stdout, re.MULTILINE)[1]
    assert made in ("1", "2") and int(proposed) == int(made) + int(twice) and int(steps) > 0
