"""AppWorld: parsing code, real worlds in their own virtual environment, code that tries to escape."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from coevolve_jax import build, envs
from coevolve_jax import config as configs
from coevolve_jax.envs import appworld
from coevolve_jax.envs.appworld import calls, data, environment
from coevolve_jax.envs.family import ask_here
from coevolve_jax.envs.worker_pool import ProcessPool
from coevolve_jax.explorers import scripted
from coevolve_jax.explorers.base import Limits as Sizes
from coevolve_jax.rollout.agent import Agent
from coevolve_jax.rollout.chat import Chat
from coevolve_jax.rollout.limits import Limits
from coevolve_jax.synthesis.explore import unguided
from coevolve_jax.synthesis.leakage import LeakGuard
from coevolve_jax.synthesis.lineage import Birth
from coevolve_jax.synthesis.pipeline import run_pipeline
from coevolve_jax.synthesis.settings import Settings
from coevolve_jax.testing.environment import check_environment
from coevolve_jax.testing.explorer import check_explorer
from coevolve_jax.types import Call, Group, Outcome, Task, Trajectory, Turn
from experiments import appworld_tasks
from tests.rollout.test_rollout import Script
from tests.support.openai_server import OpenAIServer
from tests.support.paths import ROOT

pytestmark = pytest.mark.slow

PYTHON = str(ROOT / ".appworld" / "bin" / "python")
SETTINGS = {"train_split": "own_train", "eval_split": "own_development"}
SECRET = "f7a1c0ffee"  # in the environment variables of the process that starts the workers
NOTES = (
    "words = {a['account_name']: a['password'] for a in apis.supervisor.show_account_passwords()}\n"
    "token = apis.simple_note.login(username='ada@example.com', "
    "password=words['simple_note'])['access_token']"
)
ADD = "print(apis.simple_note.create_note(access_token=token, title={0!r}, content='Rest.'))"
installed = pytest.mark.skipif(
    not Path(PYTHON).exists(), reason="AppWorld is not set up: make appworld does it"
)


def code(*pieces):
    return [Call("execute", {"code": piece}) for piece in pieces]


# --- Code -----------------------------------------------------------------------------------------


def test_code_is_read_and_never_run():
    (call,) = code(
        "x = apis.spotify.login(username='a', password='b')\nfor s in x: apis.phone.show_alarms(page=s)"
    )
    assert [a.name for a in calls.api_calls(call)] == ["spotify.login", "phone.show_alarms"]
    assert calls.api_calls(call)[0].arguments == {"username": "a", "password": "b"}
    assert calls.action_pattern(call) == "spotify.login" and calls.wording(call) == ""
    (note,) = code("print(apis.simple_note.show_note(note_id=3, access_token=token))")
    assert calls.wording(note) == "in Simple Note, show note with note id 3"
    (liked,) = code("apis.spotify.rate(song_ids=[7, 8], by=-1, access_token=token, phone_access_token=t)")
    assert calls.wording(liked) == "in Spotify, rate with song ids [7, 8], by -1"
    for partly in ("song_ids=ids, by=1", "song_ids=[7, n]", "by={1, 2}", "7", "**more", "by=1, **{'a': 2}"):
        assert calls.wording(*code(f"apis.spotify.rate({partly})")) == "", partly
    for wrong, why in [
        ({"code": 7}, "must be text"),
        ({"code": "x" * 20_001}, "at most 20000"),
        ({}, "code"),
    ]:
        with pytest.raises(ValueError, match=why):
            calls.read(Call("execute", wrong))


@settings(max_examples=50, deadline=None)
@given(st.one_of(st.text(), st.text(alphabet="apis.x()=\n'[ ", max_size=60)))
def test_any_text_has_a_pattern(text):
    (call,) = code(text)
    assert calls.action_pattern(call) and isinstance(calls.wording(call), str)


def test_an_api_that_is_not_documented_is_no_action(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    monkeypatch.delenv("APPWORLD_ROOT", raising=False)
    for folder, app, apis in ((tmp_path / "own", "phone", ["login"]), (tmp_path, "spotify", ["like_song"])):
        path = folder / "data" / "api_docs" / "standard" / f"{app}.json"
        path.parent.mkdir(parents=True)
        path.write_text(json.dumps({api: {"app_name": app} for api in apis}))
    assert data.apis() == ["phone.login", "spotify.like_song"]
    assert ask_here(appworld, "actions") == ["execute", "python", *data.apis()]  # in AppWorld's interpreter
    pattern = envs.load.__wrapped__("appworld").action_pattern
    for text, action in (
        ("apis.spotify.like_song(song_id=1)", "spotify.like_song"),
        ("apis.spotify.adore_song(song_id=1)", ""),
        ("apis.phone.like_song(song_id=1)", ""),
        ("print(1)", "python"),
    ):
        assert pattern(*code(text)) == action
    assert pattern(Call("execute", {})) == "execute"


class Notebook:
    """A made-up world of AppWorld: code is what it prints, "!" is an error, and nothing changes."""

    def __init__(self, task):
        pass

    def ask(self, what, *arguments):
        if what == "execute":
            return arguments[0].removeprefix("!"), arguments[0].startswith("!"), False
        return {"changes": {}, "fingerprint": ""}.get(what)

    def close(self):
        pass


@pytest.mark.parametrize(
    "said, passes",
    [
        (["3"], True),
        (["There are 3."], True),
        (["[13, 3]"], True),
        (["[13, 27]"], False),
        (["3.5 and -3"], False),
        (["x3"], False),
        (["!3"], False),
        (["!3", "It is 3"], True),
        (["There are 3 songs in your library."], True),
        (["One, two, 3, or Anna, Ben, Cleo, Dan, Eva."], False),
        ([" ".join(map(str, range(1000)))], False),
        (["\n".join(map(str, range(9, 0, -1)))], False),
    ],
)
def test_an_answer_is_told_whole_and_by_code_that_worked(said, passes, monkeypatch):
    monkeypatch.setattr(environment, "World", Notebook)
    world = environment.Environment()
    world.reset(Task("t", "appworld", {"task": "own1_1"}, (Turn("How many?", tuple(code("3"))),)))
    for call in code(*said):
        world.step(call)
    world.end_turn()
    assert world.score().reason == ("passed" if passes else "answer_missing")


@pytest.mark.parametrize(
    "said, missing",
    [
        ("3\n['Anna', 'Ben']\n", []),
        ("songs: 3\nfriends: ['Anna', 'Ben']", []),
        ("['Anna', 'Ben'] and 3", []),
        ("['Anna', 'Ben']\nof 12 people", ["3"]),  # shorter than what it follows
        ("3 4 5\n['Anna', 'Ben']", ["3"]),
        ("3\n['Anna', 'Cleo']", ["['Anna', 'Ben']"]),
    ],
)
def test_answers_may_be_told_together_and_not_among_others(said, missing):
    told = ["3", "['Anna', 'Ben']"]
    assert [out for out in told if not environment.tells(said, out, told)] == missing


def test_what_code_calls_is_compared_by_leak_control():
    one, other = (
        Task("t", "appworld", {"task": "own1_1"}, (Turn("Do it.", tuple(code(c))),))
        for c in ("apis.phone.show_alarms(page_limit=5)", "print(apis.phone.show_alarms(page_limit=5))")
    )
    assert calls.features(one) == calls.features(other)
    assert {"tool phone.show_alarms", "value phone.show_alarms page_limit=5"} <= calls.features(one).keys()
    assert LeakGuard([one], features=calls.features).check(other) == "near_evaluation"


def test_tasks_and_scenarios_are_counted_as_the_benchmark_does():
    tasks = [Task(id, "appworld", {"task": id}, (Turn("?"),)) for id in ("a1_1", "a1_2", "b2_1", "b2_2")]
    won = dict(zip([t.id for t in tasks], ([True, True], [True, False], [True, True], [False, None])))

    def played(task, n):
        passed = won[task.id][n]
        outcome = Outcome(float(bool(passed)), bool(passed), valid=passed is not None)
        return dataclasses.replace(EMPTY, task_id=task.id, rollout_index=n, outcome=outcome)

    found = appworld.report([Group(t, (played(t, 0), played(t, 1))) for t in tasks], None)
    assert found["task_goal_completion"] == found["success"] == 5 / 7
    assert found["scenario_goal_completion"] == 1 / 3  # a1: both, then one; b2: one, then an invalid one
    assert (found["scenario_trials"], found["scenario_trials_invalid"]) == (3, 1)
    assert (found["trials"], found["invalid"], found["success_if_invalid_failed"]) == (7, 1, 5 / 8)
    assert (found["tasks"], found["scenarios"], found["benchmark"]) == (4, 2, "AppWorld")


EMPTY = Trajectory.from_json(
    {"task_id": "", "rollout_index": 0, "stop": "done", "steps": [], "hints": [],
     "outcome": dataclasses.asdict(Outcome(0.0, False))}
)  # fmt: skip

# --- Worlds ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def family():
    return envs.load("appworld", PYTHON)


@pytest.fixture(scope="module")
def pool():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COEVOLVE_TEST_SECRET", SECRET)
        with ProcessPool("appworld", workers=1, timeout=120.0, python=PYTHON) as pool:
            yield pool


def play(pool, task, *turns):
    """Observations and outcome of turns[turn][call] in a fresh world."""
    env_ids, answers = pool.reset([task]), []
    for turn in turns:
        answers += pool.step(env_ids, [turn])[0]
        pool.end_turn(env_ids)
    (outcome,) = pool.score(env_ids)
    pool.close(env_ids)
    return answers, outcome


@installed
def test_it_conforms():
    tried = code("print(apis.supervisor.show_profile())", NOTES, ADD.format("Plan"))
    check_environment("appworld", PYTHON, SETTINGS, calls=tried, timeout=30.0)


@installed
def test_data_that_is_not_there_is_missed_in_one_sentence(family, tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="make appworld downloads it"):
        family.tasks("test_normal", SETTINGS)
    with pytest.raises(ValueError, match="no split 'dev2': use one of train, dev, test_normal"):
        family.scenarios("dev2", SETTINGS)
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    with pytest.raises(ValueError, match=r"own_train.txt is missing\): run .*/experiments/appworld_tasks.py"):
        data.ids("own_train")


@installed
def test_the_benchmarks_own_evaluation_grades_its_tasks(family, pool):
    """Completing the task ends the turn; a wrong answer or a stray database change fails."""
    tasks = {t.id: t for s in ("own_train", "own_development") for t in family.tasks(s, SETTINGS)}
    assert len(tasks) == 6 and not any(t.calls for t in tasks.values())
    for id, task in tasks.items():
        answers, outcome = play(pool, task, code(appworld_tasks.solution(id)))
        assert outcome.success and answers[-1].ends and not answers[-1].error, (id, outcome, answers)
    wrong = appworld_tasks.solution("own1_1").replace("len(songs)", "len(songs) + 1")
    _, outcome = play(pool, tasks["own1_1"], code(wrong))
    assert not outcome.success and outcome.reason == "1_of_2_tests"
    _, outcome = play(
        pool, tasks["own1_1"], code(NOTES, ADD.format("Mine"), appworld_tasks.solution("own1_1"))
    )
    assert not outcome.success


@installed
def test_a_turn_is_passed_by_what_it_changes_and_tells(family, pool):
    (scenario, *_) = family.scenarios("own_train", SETTINGS)
    reference = (
        Turn("Add a note.", tuple(code(NOTES, ADD.format("Plan")))),
        Turn("Who am I?", tuple(code("print(apis.supervisor.show_profile())"))),
    )
    task = dataclasses.replace(scenario, turns=reference)
    other_words = code(
        "print('hm')", NOTES + "\nr = " + ADD.format("Plan") + "\napis.supervisor.complete_task()"
    )
    look = code("p = apis.supervisor.show_profile()\nprint('You are:')\nprint(p)")
    answers, outcome = play(pool, task, other_words, look)
    assert outcome.success and [a.ends for a in answers] == [False, True, False]
    _, outcome = play(pool, task, code(NOTES, ADD.format("Plans")), look)
    assert (outcome.progress, outcome.reason) == (0, "databases_differ")
    _, outcome = play(pool, task, other_words, code("print('Ada')"))
    assert (outcome.progress, outcome.reason) == (0.5, "answer_missing")
    asked, _ = play(pool, task, code("print(apis.supervisor.show_active_task()['instruction'])"), ())
    assert asked[0].text.strip() == "Add a note."  # not the task that the scenario comes from


@installed
def test_code_keeps_its_variables_and_is_told_of_its_errors(family, pool):
    (scenario, *_) = family.scenarios("own_train", SETTINGS)
    (run,) = pool.execute(
        [(scenario, code("x = 2", "print(x, datetime.datetime.now())", "f(", "1 / 0", "import os, shutil"))]
    )
    said = [o.text for o in run.observations]
    assert said[:2] == ["Execution successful.", "2 2023-05-18 12:00:00\n"]
    assert said[2].endswith("Message: '(' was never closed")
    assert (
        said[3]
        == 'Execution failed. Traceback:\nFile "<python-input>", line 1, in <module>\n    1 / 0\n    ~~^~~\n'
        "ZeroDivisionError: division by zero"
    )
    assert said[4].endswith("Usage of the following module is not allowed: shutil.")
    assert [o.error for o in run.observations] == [False, False, True, True, True]
    assert run.valid and len(set(run.fingerprints)) == 1


@installed
def test_code_is_judged_by_the_processor_time_that_it_takes(tmp_path):
    """Its limit is one second. A pause of two costs nothing; an endless loop ends."""
    script = f"""
import os, signal, socket, subprocess, sys, threading
from coevolve_jax.envs.appworld import interpreter
interpreter.CODE_SECONDS = 1.0
launcher, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
command = [sys.executable, "-P", "-m", "coevolve_jax.envs.appworld.sandbox", {str(tmp_path / "none")!r}]
subprocess.Popen(command, stdin=theirs.fileno())
theirs.close()
code = interpreter.Interpreter(launcher, "2023-05-18T12:00:00", [("app", "api")])
os.kill(code._pid, signal.SIGSTOP)
wake = threading.Timer(2, os.kill, (code._pid, signal.SIGCONT))
wake.start()
print(code.run("print(apis.app.api(x=1))", lambda app, name, arguments: {{"value": [app, name, arguments]}}))
wake.join()
try:
    code.run("while True: pass", None)
except interpreter.Ended as end:
    print(end)
"""
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([PYTHON, "-P", "-c", script], capture_output=True, text=True, env=environ)
    right, ended = done.stdout.splitlines()
    assert "app" in right and right.endswith("False)"), done.stderr
    assert ended == "Execution timed out after 1 seconds. All variables are lost."


@installed
def test_the_scripted_explorer_makes_tasks_of_what_it_finds(family, pool):
    scenarios = family.scenarios("own_train", SETTINGS)[:1]
    contexts = [unguided(s, f"free{n}") for n, s in enumerate(scenarios)]
    made = run_pipeline(
        scripted.make(None, family), family.tools, pool, contexts,
        Settings(Sizes(1, max_calls=3), rounds=1, steps=8), Birth("initial"), np.random.default_rng(0),
    )  # fmt: skip
    actions = {family.action_pattern(t.call) for e in made.explorations for t in e.triplets}
    assert len(actions) > 4
    assert made.verdicts and all(v.verdict == "accept" for v in made.verdicts)
    for verdict in made.verdicts:
        assert (task := verdict.task) is not None
        _, outcome = play(pool, task, *[t.calls[:-1] for t in task.turns])
        assert not outcome.success


@installed
def test_a_language_model_works_in_all_four_roles_here(family, pool):
    scenarios = family.scenarios("own_train", SETTINGS)[:1]
    with OpenAIServer() as server:
        config = configs.load_file(ROOT / "configs" / "appworld_smoke.py", "explorer=llm")
        config.environment.python = PYTHON
        config.explorer.update(base_url=server.url, cache="", timeout=60.0)
        roles = build.explorer(config)
        check_explorer(
            roles,
            family.tools,
            pool,
            scenarios * 2,
            deterministic=False,
            limits=Sizes(1, max_calls=3),
            rounds=1,
            steps=8,
        )
    asked = {name.partition("/")[2] for name in roles.costs if name.startswith("llm_requests")}
    assert asked == {"reflect", "explore", "abstract", "judge"}
    assert not any(name.startswith("llm_faults") for name in roles.costs)


@installed
def test_the_first_python_block_of_a_message_is_run_and_the_end_of_the_task_ends_the_rollout(family, pool):
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "models" / "tiny_qwen3")
    chat = Chat(tokenizer).writing("python")
    solved = appworld_tasks.solution("own1_1")
    said = [
        "I look first.\n```python\nprint(6 * 7)\n```\nor\n```python\nprint(8)\n```",
        f"```python\n{solved}",
        "Never said.",
    ]
    engine = Script(SimpleNamespace(tokenizer=tokenizer, chat=chat), said)
    (task, *_) = family.tasks("own_train", SETTINGS)
    agent = Agent(
        engine, chat, pool, family.tools, Limits(4000, 600, 30), 1, action_pattern=family.action_pattern
    )
    (t,) = agent.rollout_groups([task], [[0]], 1.0)[0].trajectories
    agent.close()
    assert t.stop == "done" and t.outcome.success and len(engine.seen) == 2
    assert [s.action for s in t.steps] == ["python", "supervisor.show_profile"]
    text = chat.decode(t.ids)
    assert "<tools>" not in text and text.count("Output:\n```\n42\n\n```") == 1 and "Never" not in text
    assert chat.message(code(solved)) == [
        *chat.message([])[:-1],
        *tokenizer.encode(f"```python\n{solved}\n```"),
        *chat.stop_ids,
    ]


# --- Escapes --------------------------------------------------------------------------------------

OUT = "print('ESCA' + 'PED', {})"
LIBC = "import sys\nlibc = __import__('ctypes').CDLL(None, use_errno=True)\n"
SEEK = (
    "import sys\nneedles = [''.join(reversed(n)) for n in {needles!r}]\n"
    "def texts(o, deep=2):\n"
    "    if isinstance(o, str): yield o\n"
    "    elif deep and isinstance(o, dict):\n"
    "        for k, v in list(o.items()): yield from texts(k, 0); yield from texts(v, deep - 1)\n"
    "    elif deep and isinstance(o, (list, tuple, set)):\n"
    "        for v in list(o): yield from texts(v, deep - 1)\n"
    "for t in texts({where}, 3):\n"
    "    if any(n in t for n in needles): print('ESCA' + 'PED', t[:50])"
)
HIDDEN = [s[::-1] for s in (SECRET, "assert the answer is", "ground_truth/", "own_develop")]
CHANNEL = (
    "channel = [c.cell_contents for c in apis.phone.login.__closure__ if callable(c.cell_contents)]"
    "[0].__closure__[0].cell_contents\n"
)
FILE = "/etc/passwd"
ESCAPES = {
    "open": OUT.format(f"open({FILE!r}).read()"),
    "open to write": OUT.format("open('/tmp/coevolve_escape', 'w')"),
    "io.open": OUT.format(f"__import__('io').open({FILE!r})"),
    "FileIO": OUT.format(f"__import__('_io').FileIO({FILE!r})"),
    "Path": "import pathlib\n" + OUT.format(f"pathlib.Path({FILE!r}).read_text()"),
    "Path.exists": "import pathlib\n" + OUT.format(f"pathlib.Path({FILE!r}).stat()"),
    "os.open": "import os\n" + OUT.format(f"os.open({FILE!r}, 0)"),
    "os.listdir": "import os\n" + OUT.format("os.listdir('/')"),
    "os.scandir": "import os\n" + OUT.format("list(os.scandir('.'))"),
    "os.mkdir": "import os\n" + OUT.format("os.mkdir('/tmp/coevolve_escape')"),
    "os.remove": "import os\n"
    + OUT.format("os.remove('/tmp/coevolve_nothing_there')").replace(
        "print", "try: os.remove('/tmp/x')\nexcept FileNotFoundError: print"),
    "shutil.rmtree": "import os\n" + OUT.format("__import__('shutil').rmtree('/tmp/coevolve_none')"),
    "tempfile": OUT.format("__import__('tempfile').mkdtemp()"),
    "chdir": "import os\n" + OUT.format("os.chdir('/')"),
    "ground truth by path": "import pathlib\n"
    + OUT.format(f"list(pathlib.Path({str(ROOT)!r}).glob('.appworld/own/data/tasks/*/*'))[0]"),
    "Task of AppWorld": "from appworld.task import Task\n" + OUT.format("Task.load('own1_1').ground_truth"),
    "import by name": OUT.format("__import__('appworld')"),
    "importlib": OUT.format("__import__('importlib').import_module('appworld.task')"),
    "sys.modules": "import re\n" + OUT.format("re.__builtins__['__import__']('sys').modules['appworld']"),
    "os.system": "import os\n" + OUT.format("1 / (os.system('true') == 0)"),
    "os.popen": "import os\n" + OUT.format("os.popen('id').read()"),
    "os.fork": "import os\n" + OUT.format("os.fork()"),
    "os.execv": "import os\nos.execv('/bin/echo', ['echo'])\n" + OUT.format("1"),
    "posix_spawn": "import os\n" + OUT.format("os.posix_spawn('/bin/true', ['true'], {})"),
    "subprocess": OUT.format("__import__('subprocess').run(['id'])"),
    "multiprocessing": OUT.format("__import__('multiprocessing').Process(target=print).start()"),
    "thread": OUT.format("__import__('_thread').start_new_thread(print, ())"),
    "socket": OUT.format("__import__('_socket').socket()"),
    "socketpair": OUT.format("__import__('_socket').socketpair()"),
    "urlopen": OUT.format("__import__('urllib.request').request.urlopen('http://127.0.0.1:1').read()"),
    "the socket it has": OUT.format(
        "__import__('_socket').socket(fileno=0).sendmsg([b'x'], [], 0, '/tmp/x')"
    ),
    "other descriptors": "import os\nfor n in range(1, 300):\n    try: "
    + OUT.format("os.read(n, 1)") + "\n    except OSError: pass",
    "dup": "import os\n" + OUT.format("os.dup(0)"),
    "pipe": "import os\n" + OUT.format("os.pipe()"),
    "kill the parent": "import os\nos.kill(os.getppid(), 9)\n" + OUT.format("1"),
    "kill all": "import os\nos.kill(-1, 9)\n" + OUT.format("1"),
    "alarm": OUT.format("1 / (__import__('signal').alarm(1) == 0)"),
    "itimer": OUT.format("__import__('signal').setitimer(0, 1)"),
    "chroot": "import os\n" + OUT.format("os.chroot('/')"),
    "setuid": "import os\n" + OUT.format("os.setuid(0)"),
    "rlimit": OUT.format("__import__('resource').setrlimit(9, (-1, -1))"),
    "libc.open": LIBC + OUT.format(f"1 / (libc.open({FILE.encode()!r}, 0) >= 0)"),
    "libc.system": LIBC + OUT.format("1 / (libc.system(b'true') == 0)"),
    "libc.fork": LIBC + OUT.format("1 / (libc.fork() >= 0)"),
    "ptrace": LIBC + OUT.format("1 / (libc.ptrace(16, 1, 0, 0) >= 0)"),
    "process_vm_readv": LIBC + OUT.format("1 / (libc.process_vm_readv(1, 0, 0, 0, 0, 0) >= 0)"),
    "memfd": LIBC + OUT.format("1 / (libc.memfd_create(b'x', 0) >= 0)"),
    "io_uring": LIBC + OUT.format("1 / (libc.syscall(425, 1, bytes(120)) >= 0)"),
    "taking the filter off": LIBC + OUT.format("1 / (libc.prctl(22, 0, 0, 0, 0) >= 0)"),
    "user namespace": LIBC + OUT.format("1 / (libc.unshare(0x10000000) >= 0)"),
    "subclasses": "found = [c for c in ().__class__.__base__.__subclasses__() "
    "if c.__name__ == '_RawIOBase'][0].__subclasses__()\n"
    + OUT.format(f"[c for c in found if c.__name__ == 'FileIO'][0]({FILE!r})"),
    "builtins by a frame": OUT.format(f"(lambda: 0).__globals__['__builtins__']['open']({FILE!r})"),
    "frames": "import sys\nf = sys._getframe()\nstack = []\n"
    "while f: stack += [f.f_globals, f.f_locals]; f = f.f_back\n"
    + SEEK.format(needles=HIDDEN, where="[dict(s) for s in stack]").removeprefix("import sys\n"),
    "memory": SEEK.format(needles=HIDDEN, where="__import__('gc').get_objects()"),
    "environment variables": SEEK.format(needles=HIDDEN[:1], where="dict(__import__('os').environ)"),
    "/proc": OUT.format("open('/proc/1/environ').read()"),
    "sqlite file": OUT.format(
        "__import__('sqlite3').connect('/tmp/coevolve.db').execute('create table t (x)')"
    ),
    "sqlite attach": OUT.format(
        "__import__('sqlite3').connect(':memory:').execute(\"attach '/tmp/coevolve.db' as a\")"
    ),
    "another database in memory": OUT.format(
        "__import__('sqlite3').connect('file:task_output-own1_1/spotify.db?mode=memory&cache=shared', "
        "uri=True).execute('select * from users')"
    ),
    "yaml": "import yaml\n"
    + OUT.format("1 / (yaml.unsafe_load(\"!!python/object/apply:os.system ['true']\") == 0)"),
    "pickle": OUT.format("1 / (__import__('pickle').loads(b'cposix\\nsystem\\n(Vtrue\\ntR.') == 0)"),
    "breakpoint": "breakpoint()",
    "input": OUT.format("input()"),
    "standard output": "import sys\nsys.__stdout__.write('x' * 9999)\nsys.__stdout__.flush()\n"
    + OUT.format("1"),
    "admin's APIs": OUT.format("apis.admin.show_main_users()"),
    "the requester": OUT.format("requester.post('/dbs', data={'to_db_home_path': '/tmp'})"),
    "a path out of an API": NOTES + "\n"
    + OUT.format("apis.simple_note.show_note(access_token=token, note_id='../../admin/users')"),
    "a path with a query": NOTES + "\n"
    + OUT.format("apis.simple_note.show_note(access_token=token, note_id='1?x=1')"),
    "a request for a private API": CHANNEL
    + "channel.write({'call': ['admin', 'show_main_user', {}]})\nr = channel.read()\n1 / ('value' in r)\n"
    + OUT.format("r"),
    "an argument of the engine's": CHANNEL
    + "channel.write({'call': ['supervisor', 'show_profile', "
    "{'_system_datetime': 1, 'client': 1, 'track': False}]})\nr = channel.read()['value']['email']\n"
    + "1 / (r != 'ada@example.com')\n" + OUT.format("r"),
    "a method of the engine's": CHANNEL + "channel.write(['evaluate'])\n" + OUT.format("channel.read()"),
    "what is no JSON": "import os\nos.write(0, b'{]\\n')\nos.read(0, 9)\n" + OUT.format("1"),
    "a message without end": "import os\nfor _ in range(99): os.write(0, b'[' * 65536)\n" + OUT.format("1"),
    "a message too deep": "import os\nos.write(0, b'[' * 65536 + b'\\n')\nos.read(0, 9)\n" + OUT.format("1"),
    "exit": "exit()",
    "os._exit": "import os\nos._exit(0)",
    "abort": "import os\nos.abort()",
    "a null pointer": LIBC + "libc.memset(0, 0, 1)",
    "memory without end": "x = 'x' * 10**10",
    "recursion without end": "f = lambda: f()\nf()",
    "a nest too deep": "x = " + "(" * 5000 + ")" * 5000,
    "a cell for the next code": "class X(str):\n    def __contains__(s, o): return True\n"
    "__builtins__['print'] = None\napis.supervisor.show_profile()",
}  # fmt: skip


@pytest.fixture(scope="module")
def world(family, pool):
    (scenario, *_) = family.scenarios("own_train", SETTINGS)
    (env_id,) = pool.reset([scenario])
    yield env_id
    pool.close([env_id])


@installed
@pytest.mark.parametrize("attempt", ESCAPES)
def test_code_does_not_get_out(attempt, pool, world):
    """The attempt learns and changes nothing; its world goes on, with a new interpreter if need be."""
    ((answer, after),) = pool.step(
        [world], [code(ESCAPES[attempt], "apis.supervisor.show_profile()['email'] + 1")]
    )
    assert answer.valid and not answer.ends and "ESCAPED" not in answer.text, answer.text[:500]
    assert after.valid and "TypeError" in after.text, after.text[:500]
    assert pool.restarts == 0 and not list(Path("/tmp").glob("coevolve_escape*"))


def test_the_configs_are_sound():
    for name in ("smoke", "qwen2_5_7b", "qwen3_4b", "qwen3_30b_a3b"):
        config = configs.load_file(ROOT / "configs" / f"appworld_{name}.py")
        configs.check(config)
        assert config.environment.name == "appworld" and config.rollout.max_steps == 30
