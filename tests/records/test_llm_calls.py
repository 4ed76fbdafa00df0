"""A model's calls as rows of a file: none is lost or written twice, and a resumed run appends."""

import json

import hypothesis.strategies as st
from hypothesis import given

from coevolve_jax.llm.calls import LLMCall
from coevolve_jax.records import logs
from coevolve_jax.records.llm_calls import Packer, all_lines, whole

LINES = st.sampled_from(["", "a tool", '{"step": 0}', "half a pair \ud800", "\u2028\r\x85", "[1]"]) | st.text(
    max_size=5
)
PROMPT = st.lists(LINES, max_size=6).map("\n".join)
LLM_CALL = st.builds(
    LLMCall,
    st.sampled_from(["explore", "judge"]),
    st.fixed_dictionaries(
        {"context": st.text(max_size=3), "triplets": st.lists(st.integers(0, 9), max_size=3)}
    ),
    PROMPT,
    PROMPT,
    st.lists(st.text(max_size=5), max_size=2),
)


@given(st.lists(LLM_CALL, max_size=8), st.integers(0, 8))
def test_llm_calls_come_back_as_they_were_from_a_file_that_is_gone_on_with(llm_calls, cut):
    packed = b"".join(map(logs.encode, Packer().pack(llm_calls)))
    first = b"".join(map(logs.encode, Packer().pack(llm_calls[:cut])))
    again = Packer(map(json.loads, first.split(b"\n")[:-1]))
    assert first + b"".join(map(logs.encode, again.pack(llm_calls[cut:]))) == packed
    rows = list(map(json.loads, packed.split(b"\n")[:-1]))
    lines = all_lines(rows)
    assert len(lines) == len(set(lines))
    assert [whole(row, lines) for row in rows] == [vars(llm_call) for llm_call in llm_calls]
    assert list(Packer().pack(whole(row, lines) for row in rows)) == rows
