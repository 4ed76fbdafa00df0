"""Methods that give hints: what they remember, whom they tell, and that it is the memory that does it."""

import dataclasses

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from coevolve_jax import build
from coevolve_jax.strategies import hints
from coevolve_jax.types import Group
from tests.support.method_cases import a_rollout, a_step, a_task, again, config_of

# The line, and what is alike


@given(st.lists(st.sampled_from("abcdef")), st.lists(st.sampled_from("defghi")), st.integers(0, 60))
def test_a_line_of_advice_is_short_and_says_no_action_twice(do, avoid, most):
    told = hints.line(do, avoid, most)
    assert len(told) <= most and "\n" not in told
    named = [name.strip(".,") for name in told.split()[1:] if name.strip(".,") not in ("Use", "Not")]
    assert len(set(named)) == len(named)
    wanted = [*dict.fromkeys(do), *(a for a in dict.fromkeys(avoid) if a not in do)]
    if most == 60:
        assert named == wanted and bool(told) == bool(wanted)
    # What is left out stood last in its list.
    first = list(dict.fromkeys(do))
    assert [a for a in first if a in named] == first[: len(set(do) & set(named))]


def test_words_leave_out_what_is_quoted():
    query = "Move 'my notes.txt' to \"old things\", then count its lines."
    assert hints.words(query) == {"move", "to", "then", "count", "its", "lines"}
    assert hints.overlap("ab", "bc") == 1 / 3 and hints.overlap("", "") == 0.0


# SLEA-RL's library


TASK = a_task("t", "ls", "mv")
STREAMS = ("ids", "logprobs", "versions")


def played(*names, won=True, index=0, bad=()):
    """A rollout with one call per message; "" is a message whose call is malformed."""
    steps = [dataclasses.replace(a_step(name, error=name in bad), message=i) for i, name in enumerate(names)]
    steps = [s if s.text else dataclasses.replace(s, call=None) for s in steps]
    made = a_rollout(TASK, index, won, steps)
    mask = np.array([False, *[True, False] * (len(names) + 1)])
    made = dataclasses.replace(made, **{k: np.zeros(len(mask), getattr(made, k).dtype) for k in STREAMS})
    return dataclasses.replace(made, mask=mask)


def library(*groups, **own):
    config = config_of("slea_rl", **{"warm_up": 0, **own})
    strategy = build.strategy(config)
    for step, rollouts in enumerate(groups):
        strategy.observe(step, [Group(TASK, tuple(rollouts))])
    return again(strategy, config)


def advice(strategy, *names, bad=()):
    hint = strategy.help(TASK.without_calls(), 0)
    return hint and hint.before_step([a_step(name, error=name in bad) for name in names])


def test_what_followed_in_successes_is_advised_and_what_failed_there_is_warned_of():
    rollouts = [played("ls", "mv"), played("ls", "cp", won=False, index=1, bad=("cp",))]
    strategy = library(rollouts)
    assert advice(strategy, "ls") == "Hint: Use mv. Not cp."
    assert advice(strategy, "mv") == "Hint: Use mv."  # from the widest zone: after a call that went well
    assert advice(strategy, "cd", bad=("cd",)) == ""  # nothing is known about what follows an error
    # Without the library, and before the end of the warm-up, nobody is told anything.
    assert library(rollouts, library=False).help(TASK, 0) is None
    assert library(rollouts, warm_up=2).help(TASK, 0) is None
    assert library(rollouts, rollouts, warm_up=2).help(TASK, 0) is not None


def test_a_full_zone_lets_a_better_lesson_in_and_drops_its_weakest():
    """Three ways on from ls; the fewer the messages that follow, the better."""
    ways = {name: [played("ls", name, *[""] * more)] for name, more in (("find", 3), ("cp", 2), ("mv", 1))}
    kept = lambda *names, **own: [
        action for _, action, _ in library(*map(ways.get, names), **own).to_json()["zones"]["turn"]
    ]
    assert kept("find", "cp", "mv") == ["mv", "cp", "find"]
    assert kept("find", "cp", "mv", capacity=2) == kept("mv", "cp", "find", capacity=2) == ["mv", "cp"]
    assert advice(library(*ways.values(), capacity=2), "ls") == "Hint: Use mv, cp."
    # Of two that are alike the better one stays, also where there is room.
    ways["mvs"] = [played("ls", "mvs")]
    assert kept("mv", "mvs", novelty=0.5) == ["mvs"] and kept("mv", "mvs") == ["mvs", "mv"]


def test_the_credit_and_the_library_are_two_settings():
    group = Group(TASK, (played("ls", "mv"), played("ls", "cp", won=False, index=1)))
    spread = lambda **own: [
        len(set(s.advantages[s.trajectory.mask].tolist()))
        for s in build.strategy(config_of("slea_rl", **own)).compute_advantages([group])
    ]
    assert min(spread()) > 1 and spread() == spread(library=False) and spread(step_credit=False) == [1, 1]
