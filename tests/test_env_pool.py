"""Worker processes: what hangs, dies or tries to escape costs its own session and nothing else."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time

import pytest
from clock import Stopwatch, cpu_seconds
from families import treacherous

from coevolve_jax.envs import bfcl
from coevolve_jax.envs.bfcl import benchmark, toolsets
from coevolve_jax.envs.worker_pool import ProcessPool
from coevolve_jax.types import Call, Observation, Task, Turn

BASE = benchmark.load()
ALL = Task("all", "bfcl", bfcl.scenario(toolsets.TOOLSETS))
HANG = Call("power", {"base": 10, "exponent": 10**9})
ADD = [Call("add", {"a": i, "b": 1}) for i in range(8)]
SUM = dataclasses.replace(ALL, turns=(Turn("add", (ADD[0],)), Turn("and again", (ADD[1],))))


@pytest.fixture(scope="module")
def pool():
    with ProcessPool("bfcl", workers=2, timeout=60.0) as pool:
        yield pool


@pytest.fixture
def impatient():
    """A second is what an answer waits for on a busy machine at most: these take a millisecond."""
    with ProcessPool("bfcl", workers=2, timeout=1.0) as pool:
        yield pool


def replay(pool, tasks, turns):
    """Outcomes of tasks[i] after the calls turns[i][turn]."""
    sessions = pool.reset(tasks)
    for turn in range(max(map(len, turns))):
        on = [i for i, t in enumerate(turns) if turn < len(t)]
        pool.step([sessions[i] for i in on], [turns[i][turn] for i in on])
        pool.end_turn([sessions[i] for i in on])
    outcomes = pool.score(sessions)
    pool.close(sessions)
    return outcomes


def test_reference_passes_200_of_200_and_without_its_last_call_0_of_200(pool):
    turns = [[list(turn.calls) for turn in task.turns] for task in BASE]
    assert sum(o.reward for o in replay(pool, BASE, turns)) == 200
    checks = pool.judge([(task.id, [[calls] for calls in t]) for task, t in zip(BASE, turns)])
    assert sum(c["valid"] for c in checks) == 200
    for t in turns:
        [calls for calls in t if calls][-1].pop()
    damaged = replay(pool, BASE, turns)
    assert sum(o.reward for o in damaged) == 0 and all(o.valid for o in damaged)
    checks = pool.judge([(task.id, [[calls] for calls in t]) for task, t in zip(BASE, turns)])
    assert not any(c["valid"] for c in checks)
    assert all(c["error_type"].startswith("multi_turn:") for c in checks)


def test_a_hanging_call_costs_one_session(impatient):
    sessions = impatient.reset([SUM] * 8)
    impatient.step(sessions, [[ADD[0]]] * 8)
    impatient.end_turn(sessions)
    calls = [[ADD[1]] for _ in sessions]
    calls[2] = [ADD[2], HANG, ADD[1]]
    watch = Stopwatch()
    observations = impatient.step(sessions, calls)
    assert watch.seconds < 5
    assert [o.valid for o in observations[2]] == [True, False, False]
    assert observations[2][0].text == '{"result": 3}' and "timeout" in observations[2][1].text
    assert all(o == Observation('{"result": 2}') for i in range(8) if i != 2 for o in observations[i])
    impatient.end_turn(sessions)
    outcomes = impatient.score(sessions)
    assert [o.reward for o in outcomes] == [1, 1, 0, 1, 1, 1, 1, 1]
    assert [o.valid for o in outcomes] == [True, True, False, True, True, True, True, True]
    assert "power" in outcomes[2].reason
    assert not impatient.step([sessions[2]], [[ADD[0]]])[0][0].valid
    impatient.close(sessions)


def test_a_hang_in_execute_and_check_is_reported_and_harms_no_neighbour(impatient):
    good, bad, last = impatient.execute([(ALL, ADD[:2]), (ALL, [ADD[0], HANG, ADD[1]]), (ALL, [ADD[3]])])
    assert good.valid and last.valid and last.observations[0].text == '{"result": 4}'
    assert not bad.valid and [o.valid for o in bad.observations] == [True, False, False]
    assert len(bad.fingerprints) == 4 and bad.fingerprints[0] == bad.fingerprints[1] == good.fingerprints[0]
    task = next(t for t in BASE if "MathAPI" in t.scenario["toolsets"])
    reference = [[list(t.calls)] for t in task.turns]
    hanging = [[[HANG]], *reference[1:]]
    verdicts = impatient.judge([(task.id, reference), (task.id, hanging), (task.id, reference)])
    assert [v["error_type"] for v in verdicts] == ["", "pool:timeout", ""]
    assert [v["valid"] for v in verdicts] == [True, False, True]


def test_a_task_that_cannot_be_built_is_refused_and_costs_no_worker(pool):
    bad, restarts = dataclasses.replace(SUM, environment="mars"), pool.restarts
    for refused in (lambda: pool.reset([bad]), lambda: pool.execute([(bad, ADD), (SUM, ADD)])):
        with pytest.raises(ValueError, match="environment 'mars'"):
            refused()
    assert pool.restarts == restarts


def test_a_worker_killed_in_the_middle_of_a_batch_costs_one_session(pool):
    sessions = pool.reset([SUM] * 8)
    pool.step(sessions, [[ADD[0]]] * 8)
    pool.end_turn(sessions)
    victim = pool.pids[0]
    before = cpu_seconds(victim)

    def kill_once_it_works():
        while cpu_seconds(victim) < before + 0.1:
            time.sleep(0.005)
        os.kill(victim, signal.SIGKILL)

    killer = threading.Thread(target=kill_once_it_works)
    killer.start()
    slow = [ADD[1], Call("power", {"base": 10, "exponent": 10**6})]  # 0.1 to 0.3 s, four times
    pool.step(sessions, [slow] * 8)
    killer.join()
    pool.end_turn(sessions)
    outcomes = pool.score(sessions)
    assert pool.pids[0] != victim
    assert sum(not o.valid for o in outcomes) == 1
    assert all(o.reward == 1 for o in outcomes if o.valid)
    assert all("crash" in o.reason for o in outcomes if not o.valid)
    pool.close(sessions)


def test_what_was_interrupted_answers_nobody_else(impatient):
    a, b = impatient.reset([ALL] * 3)[::2]  # on the same worker of two
    worker = impatient._sessions[a].worker
    request = worker.request

    def interrupted(session, ops):
        yield next(request(session, ops))
        raise KeyboardInterrupt

    worker.request = interrupted
    with pytest.raises(KeyboardInterrupt):
        impatient.step([a], [ADD])
    worker.request = request
    assert impatient._sessions[b].worker is worker
    (answers,) = impatient.step([b], [[Call("multiply", {"a": 6, "b": 7})]])
    assert json.loads(answers[0].text) == {"result": 42} and answers[0].valid
    (outcome,) = impatient.score([a])
    assert not outcome.valid and "interrupted" in outcome.reason


def test_a_worker_that_died_while_idle_costs_nothing(impatient):
    sessions = impatient.reset([SUM] * 4)
    impatient.step(sessions, [[ADD[0]]] * 4)
    impatient.end_turn(sessions)
    for worker in impatient._workers:
        os.kill(worker.process.pid, signal.SIGKILL)
        worker.process.wait()
    impatient.step(sessions, [[ADD[1]]] * 4)
    impatient.end_turn(sessions)
    assert [o.reward for o in impatient.score(sessions)] == [1.0] * 4


def test_where_one_call_in_twenty_is_fatal_every_session_is_complete_or_invalid():
    """And it is known which: those that met a crash, a hang or a lack of memory. Nothing is left behind."""
    tasks = BASE[::5]
    met = [[treacherous.fault(t, n) for n in range(len(t.calls))] for t in tasks]
    assert {fault for each in met for fault in each} == {"", *treacherous.FAULTS}
    with ProcessPool("families.treacherous", workers=2, timeout=3.0) as pool:
        outcomes = replay(pool, tasks, [[t.calls for t in task.turns] for task in tasks])
        assert pool.restarts == sum(map(any, met))
        pids = pool.pids
    assert [o.valid for o in outcomes] == [not any(each) for each in met]
    assert [o.success for o in outcomes] == [not any(each) for each in met]
    for outcome, each in zip(outcomes, met):
        first = next(filter(None, each), "")
        assert first == "" or ("timeout" if first == "hang" else "crash") in outcome.reason
    assert not any(map(alive, pids))


def test_memory_is_bounded():
    with ProcessPool("bfcl", workers=1, timeout=60.0, memory_gib=0.25) as small:
        huge = [Call("power", {"base": 2, "exponent": 2**33}), ADD[0]]
        ((first, second),) = small.step(small.reset([ALL]), [huge])
    assert first.error and second.text == '{"result": 1}'


def test_observations_do_not_depend_on_the_number_of_workers(pool):
    jobs = [(task, task.calls) for task in BASE[::3]]
    unordered = Call("edit_ticket", {"ticket_id": 1, "updates": dict.fromkeys("abcdefgh", 1)})
    jobs.append(
        (
            ALL,
            [
                Call("ticket_login", {"username": "u", "password": "p"}),
                Call("create_ticket", {"title": "t"}),
                unordered,
                Call("get_current_speed", {}),
            ],
        )
    )
    together = pool.execute(jobs)
    with ProcessPool("bfcl", workers=3) as other:
        assert other.execute(jobs[::-1])[::-1] == together
    assert "Invalid fields" in together[-1].observations[2].text
    alone = bfcl.make()
    for (task, calls), execution in list(zip(jobs, together))[:-1]:
        alone.reset(task)
        assert alone.fingerprint() == execution.fingerprints[0]
        assert tuple(alone.step(call) for call in calls) == execution.observations
        assert alone.fingerprint() == execution.fingerprints[-1]


def test_sessions_of_one_task_start_equal_and_stay_apart(pool):
    files = BASE[0]
    sessions = pool.reset([files] * 8)
    touch, ls = Call("touch", {"file_name": "new.txt"}), Call("ls", {})
    pool.step(sessions[:1], [[touch]])
    (first,), *others = pool.step(sessions, [[ls]] * 8)
    assert "new.txt" in first.text and all("new.txt" not in o.text for (o,) in others)
    assert len({o.text for (o,) in others}) == 1
    pool.close(sessions)


ESCAPES = [
    Call("__import__('os').system('touch TRAP')", {}),
    Call("__class__", {}),
    Call("_load_scenario", {}),
    Call("cd.__globals__", {}),
    Call("ls()", {}),
    Call("ls (", {}),
    Call(None, {}),
    Call("x" * 50_000_000, {}),
    Call("ls", None),
    Call("ls", []),
    Call("ls", "a"),
    Call("echo", {"content": float("nan")}),
    Call("echo", {"content": float("-inf")}),
    Call("echo", {"content": 10**5000}),
    Call("echo", {"content": "x" * 50_000_000}),
    Call("echo", {"content": json}),
    Call("echo", {"content": "a", "__import__('os').system('touch TRAP')": 1}),
]


def test_escapes_run_nothing_and_come_back_as_errors(pool, tmp_path):
    trap = str(tmp_path / "trap")
    nested = []
    for _ in range(100_000):
        nested = [nested]
    calls = [Call(c.name and c.name.replace("TRAP", trap), c.arguments) for c in ESCAPES]
    calls.append(Call("echo", {"content": nested}))
    (session,) = pool.reset([BASE[0]])
    (observations,) = pool.step([session], [calls])
    assert all(o.error and o.valid and json.loads(o.text)["error"] for o in observations)
    assert all(len(o.text) < 400 for o in observations)
    world = bfcl.make()
    world.reset(BASE[0])
    assert [world.step(c) for c in calls] == observations
    code = f"__import__('os').system('touch {trap}')"
    (said,) = pool.step([session], [[Call("echo", {"content": code})]])[0]
    assert json.loads(said.text) == {"terminal_output": code}
    pool.judge([("multi_turn_base_0", [[calls], [[Call("echo", {"content": code})]], [], []])])
    assert not os.path.exists(trap)
    pool.close([session])


def test_misuse_is_named(pool):
    (session,) = pool.reset([bfcl.scenarios("train")[0]])
    with pytest.raises(ValueError, match="bare scenario"):
        pool.score([session])
    with pytest.raises(ValueError, match="0 turns"):
        pool.end_turn([session])
    pool.close([session])
    with pytest.raises(ValueError, match=f"Session {session} is not open"):
        pool.step([session], [[]])
    with pytest.raises(ValueError, match="Unknown toolset 'os'"):
        pool.reset([dataclasses.replace(ALL, scenario=bfcl.scenario(["os"]))])
    with pytest.raises(ValueError, match="BFCL has no task"):
        pool.judge([("multi_turn_base_999", [])])
    with pytest.raises(ValueError, match="must be positive"):
        ProcessPool("bfcl", workers=0)


def test_closed_sessions_leave_the_worker(pool):
    before = [set(w.live) for w in pool._workers]
    pool.close(pool.reset([ALL] * 4))
    pool.execute([(ALL, ADD)] * 4)
    assert [set(w.live) for w in pool._workers] == before


def alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize("busy", [False, True], ids=["idle", "hanging"])
def test_workers_end_when_the_parent_is_killed(busy, tmp_path):
    """From another folder, with the parent killed by -9, also while a worker hangs in C code."""
    code = textwrap.dedent(f"""
        from coevolve_jax.envs.worker_pool import ProcessPool
        from coevolve_jax.types import Call, Task
        import time
        pool = ProcessPool("bfcl", workers=1, timeout=1.0)
        (session,) = pool.reset([Task("t", "bfcl", {{"toolsets": ["MathAPI"], "initial_state": {{}}, "excluded": []}})])
        pool._workers[0].timeout = 1000
        print(pool.pids[0], flush=True)
        if {busy}:
            pool.step([session], [[Call("power", {{"base": 10, "exponent": 10**9}})]])
        time.sleep(1000)
    """)
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(os.path.abspath(p) for p in sys.path if p)}
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, cwd=tmp_path, env=env)
    child = int(parent.stdout.readline())
    time.sleep(0.3)
    assert alive(child)
    parent.kill()
    parent.wait()
    parent.stdout.close()
    deadline = time.monotonic() + 60
    while alive(child) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not alive(child)


def test_workers_end_with_the_interpreter_and_with_the_pool():
    pool = ProcessPool("bfcl", workers=1)
    pid = pool.pids[0]
    pool.shutdown()
    assert not alive(pid)
    code = (
        "from coevolve_jax.envs.worker_pool import ProcessPool; p = ProcessPool('bfcl', 1); print(p.pids[0])"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(os.path.abspath(p) for p in sys.path if p)}
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, timeout=600)
    assert out.returncode == 0 and out.stderr == "" and not alive(int(out.stdout))


def test_64_rollouts_of_8_calls_are_quick(pool):
    tasks = [task for task in BASE[:64:8] for _ in range(8)]
    best = float("inf")
    for _ in range(3):
        watch = Stopwatch()
        sessions = pool.reset(tasks)
        for _ in range(8):
            pool.step(sessions, [[Call("ls", {})]] * 64)
        pool.end_turn(sessions)
        pool.score(sessions)
        pool.close(sessions)
        best = min(best, watch.seconds)
    assert best < 1.0  # 0.1 s on an idle machine


def test_a_worker_whose_owner_is_gone_ends_without_a_word():
    """As where Ctrl-C ends the owner while a worker has an answer for it."""
    command = [sys.executable, "-P", "-m", "coevolve_jax.envs.worker", "bfcl", "60", "0"]
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    with subprocess.Popen(command, **pipes) as worker:
        assert worker.stdout.readline() == b'["ready"]\n'
        worker.stdout.close()
        worker.stdin.write(json.dumps([0, [["reset", ALL.to_json()], ["close"]]]).encode() + b"\n")
        worker.stdin.close()
        assert (worker.stderr.read(), worker.wait()) == (b"", 0)
