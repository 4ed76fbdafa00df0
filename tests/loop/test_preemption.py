"""A run that is asked to end saves, exits with its own status, and resumes to the same bits.

Run as a program, this file is experiments/main.py, which asks itself to end. Its first argument says when and
how often.
"""

import json
import os
import pkgutil
import runpy
import signal
import sys

import pytest

from coevolve_jax import preemption
from coevolve_jax.config import command_line
from coevolve_jax.loop.evolve import Evolver
from coevolve_jax.loop.run import Run
from coevolve_jax.records.workdir import fork
from coevolve_jax.train import train
from tests.loop.test_train import comparable
from tests.strategies.test_strategies import rows, settings
from tests.support import forked
from tests.support.checkpoints import latest_step
from tests.support.paths import ROOT

pytestmark = pytest.mark.slow

RARE = {"steps": 3, "checkpoint.every": 100}  # only a request to end saves before the end

# The call at that moment, the whole steps before it, and the step of the checkpoint that then exists.
D_0 = "coevolve_jax.envs.worker_pool:ProcessPool.step", 0, None
ROLLOUTS = "coevolve_jax.rollout.agent:Agent._act", 1, 1
UPDATE = "coevolve_jax.grpo.learner:Learner.update", 1, 2
EVOLUTION = "coevolve_jax.synthesis.pipeline:Synthesizer.reflect", 1, 2
AFTER_EVOLUTION = "coevolve_jax.rollout.agent:Agent._act", 2, 2
LAST_EVALUATION = "coevolve_jax.rollout.agent:Agent._act", 3, 3


def ask_at(patch: pytest.MonkeyPatch, function: str, steps: int, times: int = 1) -> None:
    """After so many steps, the function's next call first sends this process `times` SIGTERM."""
    owner, _, name = function.rpartition(".")
    original, begin, runs, left = pkgutil.resolve_name(function), Run.__init__, [], [None] * times

    def asking(*arguments, **named):
        while left and (runs[0].state.step if runs else 0) >= steps:
            left.pop()
            os.kill(os.getpid(), signal.SIGTERM)
        return original(*arguments, **named)

    def beginning(run, *arguments):
        runs.append(run)
        begin(run, *arguments)

    patch.setattr(pkgutil.resolve_name(owner), name, asking)
    patch.setattr(Run, "__init__", beginning)


def asked(config, workdir, moment) -> int | None:
    """Trains until asked to end at that moment. Returns the step of the newest checkpoint."""
    with pytest.MonkeyPatch.context() as patch:
        ask_at(patch, *moment[:2])
        with pytest.raises(preemption.Preempted), preemption.handle_signals():
            train(config, workdir)
    return latest_step(workdir / "checkpoints")


def saved_state(workdir) -> dict:
    """The state of the newest checkpoint."""
    newest = max((workdir / "checkpoints").glob("step_*"))
    text = json.loads((newest / "manifest.json").read_text()).get("state")
    return json.loads(text or (newest / "state.json").read_text())["state"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run that nobody asked to end."""
    workdir, config = tmp_path_factory.mktemp("preemption") / "whole", settings("coevolve", **RARE)
    train(config, workdir, until=0)  # leaves a checkpoint, for others to begin from
    train(config, workdir)
    return workdir


@pytest.mark.parametrize(
    "moments, offload",
    [
        ([D_0, ROLLOUTS, UPDATE, LAST_EVALUATION], False),
        pytest.param([EVOLUTION], True, marks=pytest.mark.nightly),
    ],
)
def test_asked_to_end_it_saves_and_goes_on_to_the_same_bits(whole, tmp_path, moments, offload):
    """Adam's moments may lie on the device or the host."""
    config, workdir = settings("coevolve", **RARE, **{"learner.optimizer_offload": offload}), tmp_path / "run"
    for moment in moments:
        assert asked(config, workdir, moment) == moment[-1]
    train(config, workdir)
    want, got = comparable(whole), comparable(workdir)
    assert want.keys() == got.keys()
    for name in want:
        assert got[name] == want[name], name


@pytest.mark.nightly
def test_an_evolution_that_was_given_up_is_made_up_once(whole, tmp_path, monkeypatch):
    """The explorer is taken for one that asks a model, whose evolution is not waited for."""
    begin, config, workdir = Evolver.__init__, settings("coevolve", **RARE), tmp_path / "run"

    def slow(evolver, *arguments):
        begin(evolver, *arguments)
        evolver._slow = True

    monkeypatch.setattr(Evolver, "__init__", slow)
    for moment, step in ((EVOLUTION, 1), (AFTER_EVOLUTION, 2)):
        assert asked(config, workdir, moment) == 2 and saved_state(workdir)["step"] == step
    train(config, workdir)
    want, got = comparable(whole), comparable(workdir)
    assert {name for name in want if got[name] != want[name]} == set()


@pytest.mark.nightly
def test_rollouts_that_run_ahead_are_given_up(tmp_path):
    config = settings("static", **RARE, **{"rollout.max_staleness": 1})
    # While step 1 waits for its rollouts, or while it learns
    saved = asked(config, tmp_path / "run", ROLLOUTS)
    assert saved in (1, 2) and len(rows(tmp_path / "run", "metrics.jsonl")) == saved


@pytest.mark.parametrize(
    "moment, times, status, said",
    [
        (ROLLOUTS, 1, 75, "Asked to end: every finished step is saved, and the same command goes on.\n"),
        # A phase that cannot be cancelled ends at the second request.
        pytest.param((UPDATE[0], 0), 2, -signal.SIGTERM, "", marks=pytest.mark.nightly),
    ],
)
def test_the_program_ends_with_a_status_of_its_own(whole, tmp_path, quick, moment, times, status, said):
    fork(whole, 0, tmp_path / "run")
    program = [__file__, f"{moment[0]} {moment[1]} {times}", f"--workdir={tmp_path / 'run'}"]
    path = os.pathsep.join((str(ROOT), quick["PYTHONPATH"]))
    done = forked.run(program, {**quick, "PYTHONPATH": path})
    assert done.returncode == status, done.stderr[-3000:]
    assert done.stderr.endswith(said) and "Traceback" not in done.stderr
    assert latest_step(tmp_path / "run" / "checkpoints") == (1 if times == 1 else 0)


def test_what_may_be_given_up_is_and_what_may_not_is_finished():
    done = []
    with preemption.handle_signals():
        with pytest.raises(preemption.Preempted), preemption.interruptible():
            os.kill(os.getpid(), signal.SIGUSR1)
            done.append("the rest of what may be given up")
        os.kill(os.getpid(), signal.SIGUSR1)  # a further request, from outside
        done.append("what is brought to its end")
        with pytest.raises(preemption.Preempted), preemption.interruptible():
            done.append("what has not begun")
        assert preemption.asked()
    assert not preemption.asked() and done == ["what is brought to its end"]
    with preemption.interruptible():
        done.append("another run")
    assert len(done) == 2


def test_a_part_of_what_may_be_given_up_is_brought_to_its_end_first():
    done = []
    with preemption.handle_signals():
        with pytest.raises(preemption.Preempted), preemption.interruptible():
            with preemption.whole():
                os.kill(os.getpid(), signal.SIGUSR1)
                done.append("the part")
            done.append("the rest")
        with preemption.whole():  # where nothing may be given up, a request waits
            done.append("another part")
    with preemption.handle_signals(), pytest.raises(KeyError), preemption.interruptible():
        with preemption.whole():
            os.kill(os.getpid(), signal.SIGUSR1)
            raise KeyError  # an error of the part's own comes first
    assert done == ["the part", "another part"]


@pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")
def test_a_request_that_python_drops_is_heeded_at_the_end_without_a_word():
    class Finalised:
        def __del__(self):
            signal.raise_signal(signal.SIGTERM)  # nobody hears what the handler raises here

    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(preemption.Preempted), preemption.handle_signals(), preemption.interruptible():
        Finalised()
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize(
    ("ended_by", "status", "said"),
    [
        (ValueError("config.steps is 0."), "Error: config.steps is 0.", ""),
        (OSError("a disk"), "Error: a disk", ""),
        (
            preemption.Preempted(),
            75,
            "Asked to end: every finished step is saved, and the same command goes on.",
        ),
        (KeyboardInterrupt(), 130, "Interrupted: nothing is written."),
    ],
)
def test_a_program_ends_in_one_sentence(ended_by, status, said, capsys):
    ends = command_line.exits(OSError, interrupted="nothing is written.")
    with pytest.raises(SystemExit) as ended, ends:
        raise ended_by
    assert ended.value.code == status and capsys.readouterr().err.strip() == said


def test_an_error_that_is_not_written_for_a_user_keeps_its_traceback():
    with pytest.raises(KeyError), command_line.exits(OSError):
        raise KeyError("a mistake of ours")


if __name__ == "__main__":
    moment, steps, times = sys.argv.pop(1).split()
    ask_at(pytest.MonkeyPatch(), moment, int(steps), int(times))
    sys.argv[0] = str(ROOT / "experiments" / "main.py")
    runpy.run_path(sys.argv[0], run_name="__main__")
