"""Worker processes: a call that hangs, dies or tries to escape costs its own world and nothing else.

The caller answers for the effects of a call; faults of the machine or the environment are ours.
"""

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

from coevolve_jax.envs import bfcl, worker_process
from coevolve_jax.envs.base import LONG, allowance
from coevolve_jax.envs.bfcl import benchmark, toolsets
from coevolve_jax.envs.worker_pool import Closed, ProcessPool
from coevolve_jax.types import Call, Observation, Task, Turn
from tests.support.clock import cpu_seconds
from tests.support.families import fragile, treacherous

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
    """A pool with a limit of one second of processor time; these calls take a millisecond."""
    with ProcessPool("bfcl", workers=2, timeout=1.0) as pool:
        yield pool


def replay(pool, tasks, turns):
    """Outcomes of tasks[i] after the calls turns[i][turn]."""
    env_ids = pool.reset(tasks)
    for turn in range(max(map(len, turns))):
        on = [i for i, t in enumerate(turns) if turn < len(t)]
        pool.step([env_ids[i] for i in on], [turns[i][turn] for i in on])
        pool.end_turn([env_ids[i] for i in on])
    outcomes = pool.score(env_ids)
    pool.close(env_ids)
    return outcomes


@pytest.mark.slow
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


def test_a_hanging_call_costs_one_world(impatient):
    env_ids = impatient.reset([SUM] * 8)
    impatient.step(env_ids, [[ADD[0]]] * 8)
    impatient.end_turn(env_ids)
    calls = [[ADD[1]] for _ in env_ids]
    calls[2] = [ADD[2], HANG, ADD[1]]
    observations = impatient.step(env_ids, calls)
    assert all(o.valid for o in observations[2])
    assert [(o.fatal, o.error) for o in observations[2]] == [(False, False), (True, True), (True, True)]
    assert observations[2][0].text == '{"result": 3}'
    assert "timeout: more than 1 s of processor time" in json.loads(observations[2][1].text)["error"]
    assert all(o == Observation('{"result": 2}') for i in range(8) if i != 2 for o in observations[i])
    impatient.end_turn(env_ids)
    outcomes = impatient.score(env_ids)
    assert [o.reward for o in outcomes] == [1, 1, 0, 1, 1, 1, 1, 1]
    assert all(o.valid for o in outcomes)
    assert outcomes[2].reason.startswith("timeout: ") and "power" in outcomes[2].reason
    ((again,),) = impatient.step([env_ids[2]], [[ADD[0]]])
    assert again == observations[2][1] and impatient.options([env_ids[2]]) == [[]]
    assert impatient.restarts == 1  # no second try: it would hang again
    impatient.close(env_ids)


@pytest.mark.slow
def test_a_starved_worker_answers_rightly(impatient):
    """Two loops take the processors; each worker stops for longer than its calls may compute."""
    env_ids = impatient.reset([SUM] * 4)
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2)]
    try:
        for pid in impatient.pids:
            os.kill(pid, signal.SIGSTOP)
        wake = threading.Timer(2.5, lambda: [os.kill(pid, signal.SIGCONT) for pid in impatient.pids])
        wake.start()
        observations = impatient.step(env_ids, [[ADD[0], ADD[1]]] * 4)
        wake.join()
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()
    assert observations == [[Observation('{"result": 1}'), Observation('{"result": 2}')]] * 4
    assert impatient.restarts == 0
    impatient.close(env_ids)


def in_fragile(pool, operation, how, **more):
    """Runs two calls, the second fragile, and every other operation in one world.

    Returns (observations, options, outcome).
    """
    task = Task("t", "fragile", {"fails_in": operation, "how": how, **more}, (Turn("do it"),))
    env_ids = pool.reset([task])
    (observations,) = pool.step(env_ids, [[Call("safe", {}), fragile.FRAGILE]])
    options = pool.options(env_ids)
    pool.end_turn(env_ids)
    (outcome,) = pool.score(env_ids)
    pool.close(env_ids)
    return observations, options, outcome


@pytest.mark.parametrize(
    "op, seconds, times",
    [
        ("reset", 2.0, 20.0),
        ("end_turn", 5.0, 12.0),
        ("reset", 60.0, 1.0),
        ("reset", 90.0, 1.0),
        ("step", 2.0, 1.0),
    ],
)
def test_a_reset_may_take_20_times_as_long_as_a_call_up_to_a_minute(op, seconds, times):
    assert allowance(op, seconds) == times


@pytest.mark.slow
@pytest.mark.parametrize("operation", ["step", "reset", "options", "end_turn", "score"])
@pytest.mark.parametrize("how", ["crash", "spin"])
def test_a_call_that_loses_its_worker_is_the_callers_failure_and_all_else_is_ours(operation, how):
    timeout = 0.1 if operation in LONG else 0.5
    with ProcessPool("tests.support.families.fragile", workers=1, timeout=timeout) as pool:
        (first, second), options, outcome = in_fragile(pool, operation, how)
        # Grading that takes too long after a call is the call's: it may have made the state too large.
        by_call = operation == "step" or (how == "spin" and operation in ("end_turn", "score"))
        assert (outcome.valid, outcome.reward, outcome.success) == (by_call, 0.0, False)
        assert outcome.reason.startswith("timeout: " if how == "spin" else "crash: ")
        assert f'["{operation}"' in outcome.reason
        assert pool.restarts == (1 if how == "spin" else 2)  # the machine may be at fault: another try
        if operation == "step":
            assert first == Observation("safe") and options == [[]]
            assert second.valid and second.fatal and second.error
            assert json.loads(second.text)["error"] == f"{outcome.reason}: the world is gone"
        elif operation == "reset":
            assert [(o.valid, o.fatal) for o in (first, second)] == [(False, False)] * 2
        else:
            assert second == Observation("safe fragile")


@pytest.mark.slow
@pytest.mark.parametrize("how, calls, valid", [("spin", 1, True), ("spin", 0, False), ("crash", 1, False)])
def test_a_state_that_takes_too_long_to_digest_is_the_failure_of_a_call_before(how, calls, valid):
    task = Task("t", "fragile", {"fails_in": "fingerprint", "how": how}, (Turn("do it"),))
    with ProcessPool("tests.support.families.fragile", workers=1, timeout=0.1) as pool:
        env_ids = pool.reset([task])
        pool.step(env_ids, [[Call("safe", {})] * calls])
        assert pool.fingerprint(env_ids) == [""]
        pool.end_turn(env_ids)
        (outcome,) = pool.score(env_ids)
        assert (outcome.valid, outcome.reward, outcome.success) == (valid, 0.0, False)
        assert '["fingerprint"' in outcome.reason


@pytest.mark.parametrize(
    "how, by_call", [("spin", True), ("crash", True), ("fatal", True), ("broken", False)]
)
def test_what_is_executed_is_valid_where_a_call_fails_and_invalid_where_the_environment_does(how, by_call):
    task = Task("t", "fragile", {"fails_in": "step", "how": how})
    with ProcessPool("tests.support.families.fragile", workers=1, timeout=0.5) as pool:
        lost, whole = pool.execute(
            [(task, [Call("safe", {}), fragile.FRAGILE, Call("safe", {})]), (task, [Call("safe", {})])]
        )
        assert (lost.valid, whole.valid) == (by_call, True)
        assert [o.fatal for o in lost.observations] == [False, by_call, by_call]
        assert [o.valid for o in lost.observations] == [True, by_call, by_call]
        assert lost.fingerprints[:2] == whole.fingerprints and lost.fingerprints[2:] == ("", "")
        (dies,) = pool.execute([(Task("t", "fragile", {"fails_in": "fingerprint", "how": "crash"}), [])])
        assert not dies.valid


def test_an_environment_that_says_it_failed_costs_a_world_and_no_worker():
    with ProcessPool("tests.support.families.fragile", workers=1) as pool:
        (first, second), _, outcome = in_fragile(pool, "step", "broken")
        assert first == Observation("safe") and not second.valid and not second.fatal
        assert not outcome.valid and outcome.reason == "environment: The server of the world is down."
        assert pool.restarts == 0 and not pool._workers[0].live


def test_a_call_that_ended_its_world_fails_its_rollout_and_costs_no_worker():
    with ProcessPool("tests.support.families.fragile", workers=1) as pool:
        (first, second), _, outcome = in_fragile(pool, "step", "fatal")
        assert first == Observation("safe") and second.valid and second.fatal
        assert outcome.valid and not outcome.success
        assert outcome.reason == "environment: The call has ended the server."
        assert pool.restarts == 0 and not pool._workers[0].live


@pytest.mark.parametrize("operation", ["reset", "options", "end_turn", "score"])
def test_an_environment_that_fails_outside_of_a_call_is_our_failure_and_costs_no_worker(operation):
    with ProcessPool("tests.support.families.fragile", workers=1) as pool:
        _, _, outcome = in_fragile(pool, operation, "broken")
        assert not outcome.valid and outcome.reason == "environment: The server of the world is down."
        assert pool.restarts == 0


def test_a_call_that_dies_once_is_made_again(tmp_path):
    """The kernel kills a worker like this when memory is short."""
    with ProcessPool("tests.support.families.fragile", workers=1) as pool:
        observations, _, outcome = in_fragile(pool, "step", "once", mark=str(tmp_path / "mark"))
        assert observations == [Observation("safe"), Observation("safe fragile")]
        assert outcome.success and pool.restarts == 1 and (tmp_path / "mark").exists()


@pytest.mark.slow
def test_a_call_that_waits_for_ever_meets_the_clock_and_is_made_again(monkeypatch):
    with ProcessPool("tests.support.families.fragile", workers=1) as pool:
        monkeypatch.setattr(worker_process, "WALL_FACTOR", 0.0)
        monkeypatch.setattr(worker_process, "WALL_SECONDS", 4.0)
        _, _, outcome = in_fragile(pool, "step", "wait")
        assert outcome.valid and outcome.reason.startswith("timeout: no answer within 4 s by the clock")
        assert pool.restarts == 2


def test_a_worker_lost_in_the_replay_of_the_past_is_our_failure(impatient):
    (env_id,) = impatient.reset([SUM])
    log = impatient._worlds[env_id].log
    log.append(json.dumps(["step", HANG.to_json()]))  # pretends that this call was once quick
    for worker in impatient._workers:
        os.kill(worker.process.pid, signal.SIGKILL)
        worker.process.wait()
    ((answer,),) = impatient.step([env_id], [[ADD[0]]])
    assert not answer.valid and not answer.fatal
    (outcome,) = impatient.score([env_id])
    assert not outcome.valid and "power" in outcome.reason
    impatient.close([env_id])


def test_a_call_that_ends_its_world_in_the_replay_alone_is_our_failure():
    task = Task("t", "fragile", {"fails_in": "step", "how": "fatal"}, (Turn("do it"),))
    with ProcessPool("tests.support.families.fragile", workers=1) as pool:
        env_ids = pool.reset([task])
        # Pretends that this call once went well.
        pool._worlds[env_ids[0]].log.append(json.dumps(["step", fragile.FRAGILE.to_json()]))
        os.kill(pool.pids[0], signal.SIGKILL)
        pool._workers[0].process.wait()
        ((answer,),) = pool.step(env_ids, [[Call("safe", {})]])
        assert not answer.valid and not answer.fatal
        (outcome,) = pool.score(env_ids)
        assert not outcome.valid and outcome.reason == "environment: The call has ended the server."


def test_a_hang_in_execute_is_reported_and_harms_no_neighbour(impatient):
    good, bad, last = impatient.execute([(ALL, ADD[:2]), (ALL, [ADD[0], HANG, ADD[1]]), (ALL, [ADD[3]])])
    assert good.valid and last.valid and last.observations[0].text == '{"result": 4}'
    assert bad.valid and [o.fatal for o in bad.observations] == [False, True, True]
    assert len(bad.fingerprints) == 4 and bad.fingerprints[0] == bad.fingerprints[1] == good.fingerprints[0]


@pytest.mark.slow
def test_a_verdict_may_take_as_long_as_its_calls_together_and_one_that_never_ends_is_none():
    turns = [[[fragile.FRAGILE] * 5]]
    with ProcessPool("tests.support.families.fragile", workers=1, timeout=0.2) as pool:
        verdicts = pool.judge([("0.5", turns), ("inf", turns), ("0", turns)])
        assert [v["error_type"] for v in verdicts] == ["", "pool:timeout", ""]
        assert "more than 1.2 s of processor time" in verdicts[1]["error_message"]


def test_a_task_that_cannot_be_built_is_refused_and_costs_no_worker(pool):
    bad, restarts = dataclasses.replace(SUM, environment="mars"), pool.restarts
    for refused in (lambda: pool.reset([bad]), lambda: pool.execute([(bad, ADD), (SUM, ADD)])):
        with pytest.raises(ValueError, match="environment 'mars'"):
            refused()
    assert pool.restarts == restarts


def test_a_worker_killed_in_the_middle_of_a_batch_costs_nothing(pool):
    env_ids = pool.reset([SUM] * 8)
    pool.step(env_ids, [[ADD[0]]] * 8)
    pool.end_turn(env_ids)
    victim = pool.pids[0]
    before = cpu_seconds(victim)

    def kill_once_it_works():
        while cpu_seconds(victim) < before + 0.1:
            time.sleep(0.005)
        os.kill(victim, signal.SIGKILL)

    killer = threading.Thread(target=kill_once_it_works)
    killer.start()
    slow = [ADD[1], Call("power", {"base": 10, "exponent": 10**6})]  # 0.1 to 0.3 s, four times
    pool.step(env_ids, [slow] * 8)
    killer.join()
    pool.end_turn(env_ids)
    outcomes = pool.score(env_ids)
    assert pool.pids[0] != victim
    assert [o.reward for o in outcomes] == [1.0] * 8
    pool.close(env_ids)


def test_what_was_interrupted_answers_nobody_else(impatient):
    a, b = impatient.reset([ALL] * 3)[::2]  # on the same worker of two
    worker = impatient._worlds[a].worker
    request = worker.request

    def interrupted(*asked):
        yield next(request(*asked))
        raise KeyboardInterrupt

    worker.request = interrupted
    with pytest.raises(KeyboardInterrupt):
        impatient.step([a], [ADD])
    worker.request = request
    assert impatient._worlds[b].worker is worker
    (answers,) = impatient.step([b], [[Call("multiply", {"a": 6, "b": 7})]])
    assert json.loads(answers[0].text) == {"result": 42} and answers[0].valid
    (outcome,) = impatient.score([a])
    assert not outcome.valid and "interrupted" in outcome.reason


def test_a_worker_that_died_while_idle_costs_nothing(impatient):
    env_ids = impatient.reset([SUM] * 4)
    impatient.step(env_ids, [[ADD[0]]] * 4)
    impatient.end_turn(env_ids)
    for worker in impatient._workers:
        os.kill(worker.process.pid, signal.SIGKILL)
        worker.process.wait()
    impatient.step(env_ids, [[ADD[1]]] * 4)
    impatient.end_turn(env_ids)
    assert [o.reward for o in impatient.score(env_ids)] == [1.0] * 4


@pytest.mark.slow
def test_where_one_call_in_twenty_is_fatal_every_world_is_complete_or_a_failure():
    """The failures are exactly those that met a crash, a hang or a lack of memory. Nothing is left behind."""
    tasks = BASE[::5]
    met = [[treacherous.fault(t, n) for n in range(len(t.calls))] for t in tasks]
    assert {fault for each in met for fault in each} == {"", *treacherous.FAULTS}
    firsts = [next(filter(None, each), "") for each in met]
    with ProcessPool("tests.support.families.treacherous", workers=2, timeout=1.0) as pool:
        outcomes = replay(pool, tasks, [[t.calls for t in task.turns] for task in tasks])
        assert pool.restarts == sum({"": 0, "hang": 1}.get(first, 2) for first in firsts)
        pids = pool.pids
    assert all(o.valid for o in outcomes)
    assert [o.success for o in outcomes] == [not any(each) for each in met]
    for outcome, first in zip(outcomes, firsts):
        assert first == "" or ("timeout" if first == "hang" else "crash") in outcome.reason
    assert not any(map(alive, pids))


@pytest.mark.slow
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


def test_worlds_of_one_task_start_equal_and_stay_apart(pool):
    files = BASE[0]
    env_ids = pool.reset([files] * 8)
    touch, ls = Call("touch", {"file_name": "new.txt"}), Call("ls", {})
    pool.step(env_ids[:1], [[touch]])
    (first,), *others = pool.step(env_ids, [[ls]] * 8)
    assert "new.txt" in first.text and all("new.txt" not in o.text for (o,) in others)
    assert len({o.text for (o,) in others}) == 1
    pool.close(env_ids)


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
    (env_id,) = pool.reset([BASE[0]])
    (observations,) = pool.step([env_id], [calls])
    assert all(o.error and o.valid and json.loads(o.text)["error"] for o in observations)
    assert all(len(o.text) < 400 for o in observations)
    world = bfcl.make()
    world.reset(BASE[0])
    assert [world.step(c) for c in calls] == observations
    code = f"__import__('os').system('touch {trap}')"
    (said,) = pool.step([env_id], [[Call("echo", {"content": code})]])[0]
    assert json.loads(said.text) == {"terminal_output": code}
    pool.judge([("multi_turn_base_0", [[calls], [[Call("echo", {"content": code})]], [], []])])
    assert not os.path.exists(trap)
    pool.close([env_id])


def test_misuse_is_named(pool):
    (env_id,) = pool.reset([bfcl.scenarios("train")[0]])
    with pytest.raises(ValueError, match="bare scenario"):
        pool.score([env_id])
    with pytest.raises(ValueError, match="0 turns"):
        pool.end_turn([env_id])
    pool.close([env_id])
    with pytest.raises(ValueError, match=f"Environment {env_id} is not open"):
        pool.step([env_id], [[]])
    with pytest.raises(ValueError, match="Unknown toolset 'os'"):
        pool.reset([dataclasses.replace(ALL, scenario=bfcl.scenario(["os"]))])
    with pytest.raises(ValueError, match="BFCL has no task"):
        pool.judge([("multi_turn_base_999", [])])
    with pytest.raises(ValueError, match="must be positive"):
        ProcessPool("bfcl", workers=0)


def test_closed_worlds_leave_the_worker(pool):
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


@pytest.mark.slow
@pytest.mark.parametrize("busy", [False, True], ids=["idle", "hanging"])
def test_workers_end_when_the_parent_is_killed(busy, tmp_path):
    """The program runs in another folder and is killed by -9, also while a worker hangs in C code."""
    code = textwrap.dedent(f"""
        from coevolve_jax.envs import worker_process
        from coevolve_jax.envs.worker_pool import ProcessPool
        from coevolve_jax.types import Call, Task
        import time
        worker_process.WALL_FACTOR, worker_process.WALL_SECONDS = 0.0, 1.0
        pool = ProcessPool("bfcl", workers=1, timeout=1000.0)
        (env_id,) = pool.reset([Task("t", "bfcl", {{"toolsets": ["MathAPI"], "initial_state": {{}}, \
"excluded": []}})])
        print(pool.pids[0], flush=True)
        if {busy}:
            pool.step([env_id], [[Call("power", {{"base": 10, "exponent": 10**9}})]])
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


def test_a_pool_that_is_shut_down_in_the_middle_of_a_batch_starts_no_worker_again():
    waits = Task("t", "fragile", {"fails_in": "step", "how": "wait"}, (Turn("do it"),))
    pool, raised = ProcessPool("tests.support.families.fragile", workers=2), []
    env_ids = pool.reset([waits] * 6)

    def step():
        try:
            pool.step(env_ids, [[fragile.FRAGILE]] * 6)
        except Closed as closed:
            raised.append(closed)

    batch = threading.Thread(target=step)
    batch.start()
    while not all(worker.lock.locked() for worker in pool._workers):
        time.sleep(0.01)
    pool.shutdown()
    batch.join()
    assert len(raised) == 1 and pool.restarts == 0 and not any(map(alive, pool.pids))
    pool.close(env_ids[:1])
    with pytest.raises(Closed, match="is shut down"):
        pool.step(env_ids[1:], [[Call("safe", {})]] * 5)
    assert pool.restarts == 0


def test_a_worker_whose_owner_is_gone_ends_without_a_word():
    """Ctrl-C may end the owner while a worker has an answer for it."""
    command = [sys.executable, "-P", "-m", "coevolve_jax.envs.worker", "bfcl", "0"]
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    with subprocess.Popen(command, **pipes) as worker:
        assert worker.stdout.readline() == b'["ready"]\n'
        worker.stdout.close()
        worker.stdin.write(json.dumps([0, 60, 600, [["reset", ALL.to_json()], ["close"]]]).encode() + b"\n")
        worker.stdin.close()
        assert (worker.stderr.read(), worker.wait()) == (b"", 0)
