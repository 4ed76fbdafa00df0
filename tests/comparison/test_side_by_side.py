"""Processes side by side: their cores, failures, second attempts, order, and an end on request."""

import functools
import os
import signal
import sys
import threading
import time

import pytest

from coevolve_jax import preemption
from coevolve_jax.comparison.side_by_side import Work, run_side_by_side


def work(folder, name, code, then=(), **how):
    """A work that runs Python code in which `here` is a folder of its own."""
    (folder / name).mkdir(parents=True)
    begin = "import pathlib, os, signal, sys, time; here = pathlib.Path(sys.argv[1])\n"
    command = [sys.executable, "-c", begin + code, str(folder / name)]
    return Work(name, command, folder / f"{name}.log", then=then, **how)


@pytest.mark.parametrize("end", [f"sys.exit({preemption.STATUS})", "os.kill(os.getpid(), signal.SIGKILL)"])
def test_what_was_killed_or_asked_to_end_goes_on_once(tmp_path, end):
    twice = f"n = len(list(here.iterdir())); (here / str(n)).touch()\nif n < MOST: {end}"
    assert run_side_by_side([work(tmp_path, "once", twice.replace("MOST", "1"))], 1) == []
    (failure,) = run_side_by_side([work(tmp_path, "twice", twice.replace("MOST", "2"))], 1)
    assert failure.name == "twice" and len(list((tmp_path / "twice").iterdir())) == 2


@pytest.mark.parametrize("says, told", [("print('first'); print('boom')", "boom"), ("", "its log is empty")])
def test_a_failure_is_named_with_the_last_line_of_its_log(tmp_path, says, told):
    (failure,) = run_side_by_side([work(tmp_path, "one", f"{says}\nsys.exit(3)")], 2)
    assert (failure.name, failure.why) == ("one", f"exit status 3: {told}")
    assert failure.log.read_text().splitlines() == (["first", "boom"] if says else [])


def test_what_follows_a_failure_is_told_and_not_run_and_the_rest_goes_on(tmp_path):
    ran = "(here / 'ran').touch()"
    refused = lambda: (_ for _ in ()).throw(ValueError("it does not fit"))
    last = work(tmp_path, "last", ran)
    works = [
        work(tmp_path, "broken", "sys.exit('Error: no')", [work(tmp_path, "lost", ran, [last])]),
        work(tmp_path, "whole", ran, [work(tmp_path, "next", ran)]),
        work(tmp_path, "refused", ran, prepare=refused),
        work(tmp_path, "undone", ran, done=lambda status: status == 0 and (tmp_path / "summary").exists()),
    ]
    told = []
    failures = run_side_by_side(works, 2, on_done=lambda work, failure: told.append((work.name, failure)))
    assert {f.name: f.why for f in failures} == {
        "broken": "exit status 1: Error: no",
        "refused": "it does not fit",
        "undone": "exit status 0: its log is empty",
    }
    by_name = dict(told)
    assert len(told) == len(by_name) == 7
    assert by_name["broken"] == by_name["lost"] == by_name["last"] is not None
    assert by_name["whole"] is by_name["next"] is None
    assert {path.parent.name for path in tmp_path.glob("*/ran")} == {"whole", "next", "undone"}


class Elsewhere:
    """Says that another process is at a work, as often as `looks`; then `ended` is called."""

    def __init__(self, looks, ended=lambda: None):
        self.looks, self.ended = looks, ended

    def __call__(self):
        self.looks -= 1
        if self.looks == 0:
            self.ended()
        return self.looks > 0


def test_what_another_process_is_at_is_waited_for_and_not_run(tmp_path, monkeypatch):
    monkeypatch.setattr("coevolve_jax.comparison.side_by_side.PAUSE", 0.01)
    summary = tmp_path / "summary"
    theirs = work(
        tmp_path, "theirs", "(here / 'ran').touch()", elsewhere=Elsewhere(4, summary.touch),
        done=lambda status: summary.exists(),
    )  # fmt: skip
    assert run_side_by_side([theirs], 1) == [] and not list(tmp_path.glob("*/ran"))


def test_what_another_process_left_undone_is_run_and_who_came_second_waits(tmp_path, monkeypatch):
    monkeypatch.setattr("coevolve_jax.comparison.side_by_side.PAUSE", 0.01)
    code = "n = len(list(here.iterdir())); (here / str(n)).touch()\nif n == 0: sys.exit('it is taken')"
    there = lambda name: (tmp_path / name / "1").exists()
    # The other one is at it only once ours has been refused, and gives up.
    looks = iter([False, True, True, True])
    second = work(
        tmp_path, "second", code, done=lambda status: there("second"), elsewhere=lambda: next(looks, False)
    )
    assert run_side_by_side([second], 1) == [] and there("second")
    left = work(tmp_path, "left", code, done=lambda status: there("left"), elsewhere=Elsewhere(3))
    (failure,) = run_side_by_side([left], 1)
    assert failure.why == "exit status 1: it is taken" and not there("left")


def test_each_process_has_its_share_of_the_cores_and_what_the_environment_says(tmp_path, monkeypatch):
    told = "print(len(os.sched_getaffinity(0)), os.environ['OURS'], os.environ['THEIRS'])"
    cores = len(os.sched_getaffinity(0))
    monkeypatch.setenv("THEIRS", "set")
    for jobs in (1, cores, 2 * cores):
        works = [work(tmp_path / str(jobs), f"w{i}", told) for i in range(2)]
        assert run_side_by_side(works, jobs, {"OURS": "default", "THEIRS": "default"}) == []
        share = cores // jobs or cores
        assert {w.log.read_text() for w in works} == {f"{share} default set\n"}
    assert len(os.sched_getaffinity(0)) == cores


@pytest.mark.parametrize(
    ("number", "raises"),
    [(signal.SIGTERM, preemption.Preempted), (signal.SIGINT, KeyboardInterrupt)],
    ids=["SIGTERM", "Ctrl-C"],
)
def test_asked_to_end_it_asks_its_processes_and_waits_for_them(number, raises, tmp_path, request):
    # A shell's background jobs, and so their tests, ignore Ctrl-C.
    request.addfinalizer(functools.partial(signal.signal, signal.SIGINT, signal.getsignal(signal.SIGINT)))
    signal.signal(signal.SIGINT, signal.default_int_handler)
    code = f"""
def end(*_):
    time.sleep(0.2); (here / "saved").touch(); sys.exit({preemption.STATUS})
signal.signal(signal.SIGUSR1, end)
(here / "running").touch()
time.sleep(60)
"""
    works = [work(tmp_path, f"w{i}", code) for i in range(4)]

    def ask():
        while len(list(tmp_path.glob("*/running"))) < 2:
            time.sleep(0.02)
        os.kill(os.getpid(), number)

    with preemption.handle_signals():
        asking = threading.Thread(target=ask, daemon=True)
        asking.start()
        with pytest.raises(raises):
            run_side_by_side(works, 2)
        asking.join()
    assert len(list(tmp_path.glob("*/running"))) == len(list(tmp_path.glob("*/saved"))) == 2


@pytest.mark.parametrize("jobs, share", [(1, None), (4, "0.225")])
def test_processes_at_once_share_a_gpus_memory_unless_the_user_said_how(tmp_path, monkeypatch, jobs, share):
    name = "XLA_PYTHON_CLIENT_MEM_FRACTION"
    asks = f"(here / 'share').write_text(str(os.environ.get({name!r})))"
    monkeypatch.delenv(name, raising=False)
    assert run_side_by_side([work(tmp_path, "own", asks)], jobs) == []
    monkeypatch.setenv(name, "0.5")
    assert run_side_by_side([work(tmp_path, "told", asks)], jobs) == []
    assert [(tmp_path / of / "share").read_text() for of in ("own", "told")] == [str(share), "0.5"]
