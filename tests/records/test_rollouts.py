"""Groups on disk: read back exactly, equal bytes for equal groups, and errors that name the file."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coevolve_jax.records import rollouts
from coevolve_jax.types import Call, Group, Outcome, Step, TrainingSample, Turn
from tests.support.step_cases import some_groups

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)
# A policy may write half of a surrogate pair, and a line separator that is none of JSON's.
TEXT = st.text(st.characters() | st.sampled_from("\ud800\u2028\n\x85"), max_size=20)


@st.composite
def groups(draw):
    """Groups with every field set to something, of any length, with and without recorded experts."""
    rng = np.random.default_rng(draw(st.integers(0, 10**6)))
    recorded, found = draw(st.booleans()), []
    for group in some_groups(rng) if draw(st.booleans()) else []:
        call = Call(draw(TEXT), draw(st.dictionaries(st.text(), JSON, max_size=3)))
        task = dataclasses.replace(
            group.task, scenario={"x": draw(JSON)}, turns=(Turn(draw(TEXT), (call,)),), system=draw(TEXT)
        )
        step = Step(1, draw(TEXT), call, draw(TEXT), draw(st.booleans()), draw(st.none() | TEXT), 2)
        trajectories = [
            dataclasses.replace(
                t,
                steps=(*t.steps, step),
                hints=((0, draw(TEXT)),) * draw(st.integers(0, 2)),
                ending=draw(TEXT),
                outcome=dataclasses.replace(t.outcome, progress=draw(st.floats(0, 1)), reason=draw(TEXT)),
                routing=rng.integers(-1, 9, (len(t.ids), 2, 3)).astype(np.int16)
                if recorded and draw(st.booleans())
                else None,
            )
            for t in group.trajectories
        ]
        found.append(Group(task, tuple(trajectories)))
    return found


def assert_same(found, wanted):
    assert type(found) is type(wanted)
    if isinstance(wanted, np.ndarray):
        assert found.dtype == wanted.dtype and found.shape == wanted.shape and (found == wanted).all()
    elif dataclasses.is_dataclass(wanted):
        for field in dataclasses.fields(wanted):
            assert_same(getattr(found, field.name), getattr(wanted, field.name))
    elif isinstance(wanted, list | tuple):
        assert len(found) == len(wanted)
        for one, other in zip(found, wanted):
            assert_same(one, other)
    else:
        assert found == wanted


def content(workdir):
    return {path.name: path.read_bytes() for path in workdir.rglob("step_*")}


@given(groups(), st.integers(0, 200_000))
def test_groups_come_back_as_they_were(tmp_path_factory, made, step):
    workdir = tmp_path_factory.mktemp("run")
    rollouts.write_rollouts(workdir, step, made)
    assert_same(rollouts.read_rollouts(workdir, step), made)
    assert rollouts.steps(workdir, rollouts.ROLLOUTS) == [step]
    before = content(workdir)
    rollouts.write_rollouts(workdir, step, made)
    assert content(workdir) == before and len(before) == 2
    rollouts.write_evaluation(workdir, step, sets := {"iid": made, "greedy": made[:1]})
    bare = lambda group: Group(group.task, tuple(t.without_tokens() for t in group.trajectories))
    wanted = {name: [bare(group) for group in own] for name, own in sets.items() if own}
    found = rollouts.read_evaluation(workdir, step)
    assert found.keys() == wanted.keys()
    for name, own in wanted.items():
        assert_same(found[name], own)


def test_what_was_learned_from_is_told_by_its_mean_advantage(tmp_path):
    group = next(g for g in some_groups(np.random.default_rng(3), most=1) if len(g.trajectories) == 4)
    first, second, third, _ = group.trajectories
    advantages = np.arange(len(first.ids), dtype=np.float32)
    samples = [
        TrainingSample(first, advantages),
        TrainingSample(second, np.full(len(second.ids), -0.5, np.float32)),
        TrainingSample(third, None, ce_weights=np.ones(len(third.ids), np.float32)),
    ]
    rollouts.write_rollouts(tmp_path, 7, [group], samples)
    assert rollouts.read_advantages(tmp_path, 7) == [[advantages[first.mask].mean(), -0.5, None, None]]


def test_a_kill_between_the_two_files_leaves_no_pair_that_does_not_match(tmp_path, monkeypatch):
    old, new = (some_groups(np.random.default_rng(seed)) for seed in (1, 2))
    rollouts.write_rollouts(tmp_path, 3, old)
    write, left = rollouts.write_bytes, [1]

    def killed(path, content):
        if not left:
            raise KeyboardInterrupt
        left.pop()
        write(path, content)

    monkeypatch.setattr(rollouts, "write_bytes", killed)
    with pytest.raises(KeyboardInterrupt):
        rollouts.write_rollouts(tmp_path, 3, new)
    with pytest.raises(ValueError, match="step_00003.jsonl.gz does not exist .there are those of steps none"):
        rollouts.read_rollouts(tmp_path, 3)


@pytest.mark.parametrize("name", ["step_00003.npz", "step_00003.jsonl.gz"])
@pytest.mark.parametrize("harm", [lambda b: b[: len(b) // 2], lambda b: b"", lambda b: b"\0" * 99], ids="abc")
def test_a_damaged_file_is_named(tmp_path, name, harm):
    rollouts.write_rollouts(tmp_path, 3, some_groups(np.random.default_rng(1)))
    path = tmp_path / "rollouts" / name
    path.write_bytes(harm(path.read_bytes()))
    with pytest.raises(ValueError, match=f"{name} cannot be read .*: restore it"):
        rollouts.read_rollouts(tmp_path, 3)


def test_arrays_of_other_trajectories_are_refused(tmp_path):
    for step in (1, 2):
        rollouts.write_rollouts(tmp_path, step, some_groups(np.random.default_rng(step)))
    folder = tmp_path / "rollouts"
    (folder / "step_00001.npz").rename(folder / "step_00002.npz")
    with pytest.raises(ValueError, match="step_00002.npz cannot be read .*step_00002.jsonl.gz has others"):
        rollouts.read_rollouts(tmp_path, 2)


def test_missing_steps_are_told_with_those_that_there_are(tmp_path):
    for step in (0, 10):
        rollouts.write_evaluation(tmp_path, step, {"iid": some_groups(np.random.default_rng(step))})
    with pytest.raises(ValueError, match="evaluations/step_00005.jsonl.gz .* steps 0, 10.: name one of"):
        rollouts.read_evaluation(tmp_path, 5)
    assert rollouts.from_step(10)(tmp_path, ["step_00009.npz", "step_00010.npz", "step_00009.npz.tmp"]) == [
        "step_00010.npz",
        "step_00009.npz.tmp",
    ]


def test_an_outcome_of_numpy_numbers_is_written(tmp_path):
    (group, *_) = some_groups(np.random.default_rng(1))
    odd = dataclasses.replace(group.trajectories[0], outcome=Outcome(np.float32(0.25), np.bool_(False)))
    rollouts.write_rollouts(tmp_path, 0, [Group(group.task, (odd,))])
    assert rollouts.read_rollouts(tmp_path, 0)[0].trajectories[0].outcome == Outcome(0.25, False)
