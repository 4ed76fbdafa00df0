"""The engine that replays known messages."""

import asyncio

import numpy as np
import pytest

from coevolve_jax.rollout.engine import Request, Sampling
from coevolve_jax.rollout.reference_engine import ReferenceEngine, solution
from coevolve_jax.types import Call, Task, Turn


def ask(engine, *requests, room=4):
    """The ids and the end of the answers to (conversation, seed) pairs."""
    made = [Request(c, np.zeros(2, np.int32), Sampling(max_new_tokens=room), seed) for c, seed in requests]
    answers = asyncio.run(engine.generate(made))
    for a in answers:
        assert (
            len(a.ids) == len(a.logprobs) == len(a.versions) and a.ids.dtype == a.versions.dtype == np.int32
        )
        assert a.logprobs.dtype == np.float32 and not a.logprobs.any()
    return [(a.ids.tolist(), a.finish) for a in answers]


def test_each_conversation_gets_the_messages_of_its_seed_in_order():
    engine = ReferenceEngine([[[1, 2], [3]], [[4], [5, 6]]])
    assert ask(engine, (7, 1), (8, 0)) == [([4], "stop"), ([1, 2], "stop")]
    assert ask(engine, (8, 0), (9, 1)) == [([3], "stop"), ([4], "stop")]
    assert ask(engine, (8, 0), (7, 1)) == [([], "abort"), ([5, 6], "stop")]
    engine.release([8])
    assert ask(engine, (8, 0)) == [([1, 2], "stop")]
    with pytest.raises(NotImplementedError):
        engine.update_weights({}, 1)


def test_a_message_that_is_too_long_is_cut():
    assert ask(ReferenceEngine([[[1, 2, 3]]]), (0, 0), room=2) == [([1, 2], "length")]
    assert ask(ReferenceEngine([[[1, 2, 3]]]), (0, 0), room=3) == [([1, 2, 3], "stop")]


def test_a_solution_is_one_message_per_call_and_one_to_end_each_turn():
    class Chat:
        def message(self, calls):
            return [[call.name for call in calls]]

    turns = (Turn("first", (Call("a", {}), Call("b", {}))), Turn("second"), Turn("third", (Call("c", {}),)))
    said = solution(Task("t", "bfcl", {}, turns), Chat(), (0,))
    assert list(said) == [[["a"]], [["b"]], [0], [0], [["c"]], [0]]
