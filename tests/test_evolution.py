"""Reflection, exploration, abstraction and validation with the scripted explorer on BFCL's real tools."""

import dataclasses
import json
import subprocess
import sys

import numpy as np
import pytest

from coevolve_jax.envs import bfcl
from coevolve_jax.envs.worker_pool import ProcessPool
from coevolve_jax.explorers.scripted import arguments, scripted
from coevolve_jax.synthesis import abstract, explore, reflect, validate
from coevolve_jax.types import Call, Observation, Outcome, Signal, Step, Task, Trajectory, Triplet, Turn

CALLS = dict(rounds=2, steps=8)


@pytest.fixture(scope="module")
def pool():
    pool = ProcessPool("bfcl", workers=2, timeout=5.0)
    yield pool
    pool.shutdown()


@pytest.fixture(scope="module")
def explorer():
    return scripted.ScriptedExplorer(bfcl.tools)


@pytest.fixture(scope="module")
def contexts():
    scenarios = bfcl.scenarios("train")
    return [reflect.unguided(scenarios[i * 3], f"free-{i}") for i in range(30)]


@pytest.fixture(scope="module")
def triplets(explorer, pool, contexts):
    return explore.explore_all(explorer, pool, contexts, rng=np.random.default_rng(1), **CALLS)


@pytest.fixture(scope="module")
def proposals(explorer, pool, contexts, triplets):
    groups = abstract.abstract_all(explorer, pool, contexts, triplets, rng=np.random.default_rng(2), count=4)
    return [p for group in groups for p in group]


def trajectory(rollout_index, reward, *steps, valid=True):
    """steps: (tool, arguments, error text or None)."""
    rows = tuple(
        Step(0, name, Call(name, args), error or "{}", error is not None) for name, args, error in steps
    )
    none = np.zeros(0, np.int32)
    return Trajectory(
        "t",
        rollout_index,
        none,
        none.astype(bool),
        none.astype(np.float32),
        none,
        (0,),
        rows,
        "done",
        Outcome(reward, reward >= 0.5, valid),
    )


def file_task(*calls):
    """A small file system and the calls as the reference of one turn."""
    contents = {
        "a.txt": {"type": "file", "content": "one\ntwo"},
        "sub": {"type": "directory", "contents": {}},
    }
    state = {"GorillaFileSystem": {"root": {"home": {"type": "directory", "contents": contents}}}}
    return Task(
        "t", "bfcl", bfcl.scenario(["GorillaFileSystem"], state), (Turn("do it", calls),) if calls else ()
    )


def recorded(pool, task, calls):
    (run,) = pool.execute([(task, calls)])
    return [Triplet(i, 0, c, o) for i, (c, o) in enumerate(zip(calls, run.observations))]


# Reflection


def test_boundary_focus_is_where_successes_and_failures_part(explorer):
    ok = trajectory(0, 1.0, ("cd", {"folder": "x"}, None), ("mv", {"source": "a"}, None))
    bad = trajectory(1, 0.0, ("cd", {"folder": "x"}, None), ("cp", {"source": "a"}, '{"error": "no"}'))
    crashed = trajectory(2, 0.0, ("rm", {}, None), valid=False)
    signal = Signal("boundary", "t", 1, 5)
    context = explorer.reflect(signal, file_task(), bad, [ok, crashed])
    assert context.focus_pattern == ("mv", "cp")
    assert context.avoid == ('cp({"source": "a"}): {"error": "no"}',)
    assert "1 of 2" in context.instability_pattern
    assert context.signal == "boundary" and context.id == "boundary/5/t/1"


def test_rare_and_forgetting_focus(explorer):
    walk = trajectory(0, 0.0, ("ls", {}, None), ("diff", {}, None), ("pwd", {}, None))
    rare = explorer.reflect(Signal("rare", "t", 0, 1, "diff"), file_task(), walk, [])
    assert rare.focus_pattern == ("diff", "ls")
    task = file_task(Call("cd", {"folder": "sub"}), Call("touch", {"file_name": "b"}))
    lost = explorer.reflect(Signal("forgetting", "t", 0, 1), task, walk, [])
    assert lost.focus_pattern == ("cd", "touch")


# Exploration


def test_each_round_replays_from_the_initial_state(pool, contexts, triplets):
    jobs, want = [], []
    for context, steps in zip(contexts, triplets):
        assert [t.index for t in steps] == list(range(len(steps)))
        for round in range(CALLS["rounds"]):
            part = [t for t in steps if t.round == round]
            jobs.append((context.task, [t.call for t in part]))
            want.append(tuple(t.observation for t in part))
    assert [run.observations for run in pool.execute(jobs)] == want
    assert sum(map(len, want)) > 400


def test_exploration_often_succeeds_and_reaches_most_tools(triplets):
    steps = [t for group in triplets for t in group]
    assert np.mean([not t.observation.error for t in steps]) > 0.5
    assert len({t.call.name for t in steps if not t.observation.error}) > 70


@pytest.mark.parametrize("kind", ["forgetting", "boundary", "rare"])
def test_guided_exploration_turns_to_its_focus(explorer, pool, kind):
    task = file_task(Call("touch", {"file_name": "b.txt"}), Call("sort", {"file_name": "a.txt"}))
    focus = ("touch", "sort") if kind != "rare" else ("sort",)
    context = dataclasses.replace(reflect.unguided(task, kind), signal=kind, focus_pattern=focus)
    free = reflect.unguided(task, "free")
    guided, plain = (
        explore.explore_all(explorer, pool, [c] * 6, rng=np.random.default_rng(0), **CALLS)
        for c in (context, free)
    )

    def share(groups):
        return np.mean([t.call.name in focus for g in groups for t in g])

    assert share(guided) > 2 * share(plain)


def test_mistakes_to_avoid_are_not_repeated(explorer, pool):
    task = file_task(Call("touch", {"file_name": "b.txt"}))
    avoid = ('touch({"file_name": "b.txt"}): {"error": "x"}',)
    context = dataclasses.replace(reflect.unguided(task, "c"), signal="boundary", focus_pattern=("touch",))
    rng = np.random.default_rng(0)
    made = explore.explore_all(
        explorer, pool, [context, dataclasses.replace(context, avoid=avoid)], rounds=6, steps=3, rng=rng
    )
    lines = [[reflect.signature(t.call) for t in group] for group in made]
    assert 'touch({"file_name": "b.txt"})' in lines[0]
    assert 'touch({"file_name": "b.txt"})' not in lines[1]


def test_error_messages_point_to_tools(explorer):
    scenario = next(s for s in bfcl.scenarios("train") if s.scenario["toolsets"] == ["VehicleControlAPI"])
    box = scripted.toolbox(bfcl.tools(scenario))
    for text, tool in [
        ("All doors must be locked before starting the engine.", "lockDoors"),
        ("Brake pedal needs to be pressed when starting the engine.", "pressBrakePedal"),
    ]:
        failure = Triplet(0, 0, Call("startEngine", {"ignitionMode": "START"}), Observation(text, True))
        assert scripted.remedies(failure, box)[0].name == tool


def test_a_tool_that_is_not_offered_is_never_executed(explorer, pool):
    class Rogue(scripted.ScriptedExplorer):
        def act(self, *_):
            return Call("book_flight", {})

    context = reflect.unguided(file_task(), "c")
    assert explore.explore(Rogue(bfcl.tools), pool, context, rng=np.random.default_rng(0), **CALLS) == []


@pytest.mark.parametrize(
    "text, values",
    [
        ('The mode. [Enum]: ["engage", "release"]', ("engage", "release")),
        ("The base currency. [Enum]: USD, RMB, EUR", ("USD", "RMB", "EUR")),
        ("Options are: economy, business, first.", ("economy", "business", "first")),
        ("Type of the order (Buy/Sell).", ("Buy", "Sell")),
        ("Mode ('l' for lines, 'w' for words).", ("l", "w")),
        ("Start date (format: 'YYYY-MM-DD').", ()),
    ],
)
def test_allowed_values_are_read_from_descriptions(text, values):
    assert arguments.named_values(text) == values


# Abstraction


def test_shortening_drops_detours_and_keeps_prerequisites(pool):
    task = file_task()
    calls = [
        Call("cd", {"folder": "sub"}),
        Call("cd", {"folder": ".."}),
        Call("pwd", {}),
        Call("ls", {}),
        Call("cd", {"folder": "sub"}),
        Call("touch", {"file_name": "x"}),
        Call("ls", {}),
    ]
    steps = tuple(recorded(pool, task, calls))
    (draft,) = abstract.shorten(pool, [abstract.Draft(0, task, steps, frozenset([5, 6]))])
    assert [t.call.name for t in draft.kept] == ["cd", "touch", "ls"]
    assert draft.asked == {6}


def test_shortening_drops_pairs_that_undo_each_other(pool):
    task = file_task()
    calls = [
        Call("mkdir", {"dir_name": "d"}),
        Call("rmdir", {"dir_name": "d"}),
        Call("touch", {"file_name": "x"}),
    ]
    steps = tuple(recorded(pool, task, calls))
    (draft,) = abstract.shorten(pool, [abstract.Draft(0, task, steps, frozenset([0, 1, 2]))])
    assert [t.call.name for t in draft.kept] == ["touch"]


def test_no_call_of_a_proposal_can_go(pool, proposals):
    """Without any one call another answers differently, or the final state or an asked answer is missing."""
    assert len(proposals) > 60
    whole = pool.execute([(p.context.task, p.calls) for p in proposals])
    for p, run in zip(proposals, whole):
        assert run.observations == p.observations and not any(o.error for o in p.observations)
    cases = [(p, run, i) for p, run in zip(proposals, whole) for i in range(len(p.calls))]
    runs = pool.execute([(p.context.task, p.calls[:i] + p.calls[i + 1 :]) for p, _, i in cases])
    for (p, run, i), less in zip(cases, runs):
        asked = {p.observations[k].text for k in p.asked}
        same_answers = less.observations == p.observations[:i] + p.observations[i + 1 :]
        informed = asked <= {o.text for o in less.observations}
        assert not (same_answers and informed and less.fingerprints[-1] == run.fingerprints[-1]), (p.calls, i)


def test_proposals_have_the_wanted_shape(proposals):
    calls = [len(p.calls) for p in proposals]
    turns = [len(p.turns) for p in proposals]
    assert min(calls) >= 2 and max(calls) <= 6 and {2, 3, 4, 5} <= set(calls)
    assert set(turns) == {1, 2, 3} and 0.45 < turns.count(1) / len(turns) < 0.75
    assert all(turn.calls for p in proposals for turn in p.turns)


def test_every_argument_stands_in_its_query(proposals):
    for p in proposals:
        for turn in p.turns:
            for value in (v for c in turn.calls for v in c.arguments.values()):
                assert scripted.value_text(value) in turn.query
                assert value in turn.query if isinstance(value, str) else json.dumps(value) in turn.query
    words = [len(t.query.split()) / len(t.calls) for p in proposals for t in p.turns]
    assert np.mean(words) < 15


def test_instructions_are_short_imperatives():
    assert scripted.instruction("Starts the engine of the vehicle.") == "start the engine of the vehicle"
    assert scripted.instruction("Presses the brake pedal based on pedal position. Kept pressed.") == (
        "press the brake pedal based on pedal position"
    )
    assert scripted.value_text("it's") == '"it\'s"'
    long = "Find any file or directories under specific path that contain name in its file name. More."
    assert scripted.instruction(long) == "find any file or directories under specific path"


# Validation


def test_sound_proposals_are_accepted_with_their_lineage(explorer, pool, proposals):
    ids = [f"initial-0-{i}" for i in range(len(proposals))]
    verdicts = validate.validate(explorer, pool, proposals, ids=ids, kind="initial", step=0)
    accepted = [v.task for v in verdicts if v.verdict == "accept"]
    assert len(accepted) > 0.95 * len(proposals)
    for task, p, id in zip([v.task for v in verdicts], proposals, ids):
        if task is not None:
            line = task.lineage
            assert (task.id, line.parent, line.context) == (id, p.context.task.id, p.context.id)
            assert (line.kind, line.explorer) == ("initial", "scripted")
            assert (line.verdict, line.reason) == ("accept", "reproduced")
            assert line.triplets == p.triplets and len(line.triplets) == len(task.calls)
            assert Task.from_json(json.loads(json.dumps(task.to_json()))).calls == task.calls


def proposal(pool, turns, observations=None):
    task = file_task()
    calls = [c for turn in turns for c in turn]
    answers = observations or [t.observation for t in recorded(pool, task, calls)]
    return abstract.Proposal(
        reflect.unguided(task, "c"),
        "goal",
        tuple(Turn("q", tuple(t)) for t in turns),
        tuple(range(len(calls))),
        tuple(answers),
        (),
    )


def test_verdicts(explorer, pool):
    touch = [Call("touch", {"file_name": "x"}), Call("ls", {})]
    wrong = Call("cat", {"file_name": "nothing"})
    cases = [
        (proposal(pool, [touch]), ("accept", "reproduced", 2)),
        (proposal(pool, [touch, [wrong]]), ("retain", "step_failed", 2)),
        (proposal(pool, [touch[:1], [wrong]]), ("discard", "too_short", 0)),
        (proposal(pool, [[wrong], touch]), ("discard", "step_failed", 0)),
        (
            proposal(pool, [touch], [Observation("None"), Observation("other")]),
            ("discard", "result_differs", 0),
        ),
    ]
    ids = [str(i) for i in range(len(cases))]
    verdicts = validate.validate(explorer, pool, [p for p, _ in cases], ids=ids, kind="signal", step=3)
    got = [(v.verdict, v.reason, len(v.task.calls) if v.task else 0) for v in verdicts]
    assert got == [want for _, want in cases]
    assert verdicts[1].task.lineage.triplets == (0, 1)


def test_infrastructure_failures_are_no_verdict_on_the_proposal(explorer, pool):
    class Down:
        def __getattr__(self, name):
            return getattr(pool, name)

        def step(self, sessions, calls):
            return [[Observation("timeout", valid=False) for _ in c] for c in calls]

    p = proposal(pool, [[Call("ls", {}), Call("pwd", {})]])
    (verdict,) = validate.validate(explorer, Down(), [p], ids=["x"], kind="random", step=0)
    assert (verdict.verdict, verdict.reason, verdict.task) == ("discard", "environment", None)


def test_a_call_left_out_fails_the_task(explorer, pool, proposals):
    """The environment's own score agrees that every call is needed."""
    some = proposals[:25]
    verdicts = validate.validate(explorer, pool, some, ids=["x"] * len(some), kind="random", step=0)
    cases = [
        (v.task, t, i)
        for v in verdicts
        if v.task
        for t, turn in enumerate(v.task.turns)
        for i in range(len(turn.calls))
    ]
    sessions = pool.reset([task for task, _, _ in cases])
    for turn in range(3):
        live = [(s, task, t, i) for s, (task, t, i) in zip(sessions, cases) if turn < len(task.turns)]
        calls = [
            [c for k, c in enumerate(task.turns[turn].calls) if (turn, k) != (t, i)] for _, task, t, i in live
        ]
        pool.step([s for s, *_ in live], calls)
        pool.end_turn([s for s, *_ in live])
    outcomes = pool.score(sessions)
    pool.close(sessions)
    assert [o.success for o in outcomes] == [False] * len(cases)


# The whole layer

SCRIPT = """
import sys, hashlib, json
import numpy as np
from coevolve_jax.envs import bfcl
from coevolve_jax.envs.worker_pool import ProcessPool
from coevolve_jax.synthesis import reflect, validate
from coevolve_jax.explorers.scripted import scripted
if __name__ == "__main__":
    pool = ProcessPool("bfcl", workers=int(sys.argv[1]), timeout=5.0)
    scenarios = bfcl.scenarios("train")[::9]
    verdicts, explored = validate.synthesize(scripted.ScriptedExplorer(bfcl.tools), pool,
        [reflect.unguided(s, s.id) for s in scenarios], rounds=2, steps=6, per_context=2,
        rng=np.random.default_rng(7), kind="initial")
    pool.shutdown()
    tasks = [v.task for v in verdicts if v.task]
    text = json.dumps([[v.reason for v in verdicts], [t.to_json() for t in tasks], explored])
    print(len(tasks), hashlib.sha256(text.encode()).hexdigest())
    assert "jax" not in sys.modules
"""


def test_same_seed_same_tasks_in_fresh_processes(tmp_path):
    (tmp_path / "run.py").write_text(SCRIPT)
    lines = []
    for workers, seed in (("1", "1"), ("2", "2")):
        env = {"PYTHONHASHSEED": seed, "PYTHONPATH": ".", "PATH": "", "BFCL_PROJECT_ROOT": str(tmp_path)}
        command = [sys.executable, str(tmp_path / "run.py"), workers]
        run = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
        lines.append(run.stdout)
    assert lines[0] == lines[1] and int(lines[0].split()[0]) > 10
