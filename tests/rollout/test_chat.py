"""Chat formats of ChatML, Llama 3 and Qwen3, on small tokenizers with templates of their structure."""

import importlib.util
import json
import re
import shutil
import string
from pathlib import Path
from types import SimpleNamespace

import pytest
import transformers
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from coevolve_jax import build
from coevolve_jax.config import load_file, override
from coevolve_jax.envs import bfcl
from coevolve_jax.envs.worker_pool import ProcessPool
from coevolve_jax.rollout.agent import Agent
from coevolve_jax.rollout.chat import CHATML_TOOLS, Chat, load_tokenizer, tool_name
from coevolve_jax.rollout.limits import Limits
from coevolve_jax.rollout.tool_call_format import WRITINGS, parse_objects, render_object, render_short, spoken
from coevolve_jax.train import train
from coevolve_jax.types import Call
from tests.rollout.test_rollout import FOLDER, TASK, Script, json_values
from tests.support import forked
from tests.support.paths import ROOT

# ---- Tokenizers ----------------------------------------------------------------------------------------

LINES = [
    "Move the file 'notes.txt' to the folder 'archive', then list the current directory.",
    '<tool_call>{"name": "mkdir", "arguments": {"dir_name": "archive"}}</tool_call>',
    '{"name": "mv", "parameters": {"source": "notes.txt", "destination": "archive"}}',
    "system\nuser\nassistant\n\nThink about it.\n\n",
]
# How Llama 3 splits text before its merges.
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)

CHATML = """{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
# Tools stand in the first user message, texts are trimmed, and what a tool returns is written as JSON.
LLAMA = """{{- bos_token }}
{%- if date_string is not defined %}{% set date_string = DATE %}{% endif %}
{%- set system, rest = '', messages %}
{%- if messages[0].role == 'system' %}{% set system, rest = messages[0].content, messages[1:] %}{% endif %}
{{- '<|start_header_id|>system<|end_header_id|>\\n\\n' }}
{{- 'Environment: ipython\\n' if tools }}
{{- 'Date: ' + date_string + '\\n\\n' + system | trim + '<|eot_id|>' }}
{%- if tools %}
    {%- if not rest %}{{ raise_exception('Tools need a first user message.') }}{% endif %}
    {{- '<|start_header_id|>user<|end_header_id|>\\n\\n' }}
    {{- 'Call with {"name": a function, "parameters": its arguments}.\\n\\n' }}
    {%- for tool in tools %}{{ tool | tojson(indent=4) + '\\n\\n' }}{% endfor %}
    {{- rest[0].content | trim + '<|eot_id|>' }}
    {%- set rest = rest[1:] %}
{%- endif %}
{%- for m in rest %}
    {%- set role = 'ipython' if m.role == 'tool' else m.role %}
    {{- '<|start_header_id|>' + role + '<|end_header_id|>\\n\\n' }}
    {%- if m.tool_calls %}
        {%- set f = m.tool_calls[0].function %}
        {{- '{"name": "' + f.name + '", "parameters": ' + f.arguments | tojson + '}' }}
    {%- elif role == 'ipython' and m.content is iterable %}
        {{- RESULT | tojson }}
    {%- else %}
        {{- m.content | trim }}
    {%- endif %}
    {{- '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"""
NOW = "strftime_now('%d %b %Y') if strftime_now is defined else '26 Jul 2024'"
# An assistant's thoughts before the last query are left out; the last message has some, if empty ones.
HYBRID = """{%- if tools %}{{ '<|im_start|>system\\nUse <tool_call></tool_call>.' }}
{%- for tool in tools %}{{ '\\n' + tool | tojson }}{% endfor %}{{ '<|im_end|>\\n' }}{% endif %}
{%- set at = namespace(query=0) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set at.query = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}
    {%- if m.role == 'tool' %}
        {{- '<|im_start|>user' if messages[loop.index0 - 1].role != 'tool' }}
        {{- '\\n<tool_response>\\n' + m.content + '\\n</tool_response>' }}
        {{- '<|im_end|>\\n' if loop.last or messages[loop.index0 + 1].role != 'tool' }}
    {%- elif m.role == 'assistant' %}
        {%- set said = m.content.split('</think>')[-1].lstrip('\\n') %}
        {%- set thought = m.content.split('</think>')[0].split('<think>')[-1] if '</think>' in m.content %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if loop.index0 > at.query and (loop.last or thought) %}
            {{- '<think>\\n' + (thought or '').strip('\\n') + '\\n</think>\\n\\n' }}
        {%- endif %}
        {{- said + '<|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

# XML within the tags of Qwen's JSON. A message's opening depends on whether it is still to come.
XML = """{%- if tools %}{{ '<|im_start|>system\\nUse <tool_call></tool_call>.' }}
{%- for tool in tools %}{{ '\\n' + tool | tojson }}{% endfor %}{{ '<|im_end|>\\n' }}{% endif %}
{%- for m in messages %}
    {{- '<|im_start|>' + m.role + '\\n' + m.content }}
    {%- for call in m.tool_calls or [] %}
        {{- '<tool_call>\\n<function=' + call.function.name + '>\\n' }}
        {%- for name, value in call.function.arguments.items() %}
            {{- '<parameter=' + name + '>\\n' + value | string + '\\n</parameter>\\n' }}
        {%- endfor %}
        {{- '</function>\\n</tool_call>' }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n<think>\\n' }}{% endif %}"""

TAGS = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"]
CHATML_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
LLAMA_TOKENS = ["<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>"]
LLAMA_TOKENS += ["<|eom_id|>", "<|eot_id|>", "<|python_tag|>"]


def make(tokens, template, tags=(), split=None, **more):
    """A byte-level BPE with these control tokens. tags: added tokens that are not special, as in Qwen3."""
    core = Tokenizer(models.BPE())
    bytes_ = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split is None)
    first = [pre_tokenizers.Split(Regex(split), "isolated")] if split else []
    core.pre_tokenizer = pre_tokenizers.Sequence([*first, bytes_])
    core.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=500, special_tokens=list(tokens), initial_alphabet=alphabet)
    core.train_from_iterator(LINES * 4, trainer)
    core.add_tokens([AddedToken(tag, normalized=False, special=False) for tag in tags])
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=core, name_or_path="a/model", **more)
    tokenizer.chat_template = template
    return tokenizer


def llama(date="'26 Jul 2024'", result="m.content"):
    template = LLAMA.replace("DATE", date).replace("RESULT", result)
    more = dict(split=SPLIT, bos_token="<|begin_of_text|>", clean_up_tokenization_spaces=True)
    return make(LLAMA_TOKENS, template, **more)


MAKE = {
    "chatml": lambda: make(CHATML_TOKENS, CHATML),
    "chatml without a template": lambda: make(CHATML_TOKENS, None),
    "llama 3.1": llama,
    "llama 3.2": lambda: llama(date=NOW),
    "llama 3.1, results trimmed in an object": lambda: llama(result="{'output': m.content | trim}"),
    "hybrid": lambda: make(CHATML_TOKENS, HYBRID, TAGS),
    "thinking": lambda: make(
        CHATML_TOKENS, HYBRID.replace("assistant\\n' }}{% endif", "assistant\\n<think>\\n' }}{% endif")
    ),
}
EXACT = [name for name in MAKE if name not in ("hybrid", "thinking")]


@pytest.fixture(scope="module", params=MAKE)
def chat(request):
    return named(request.param)


@pytest.fixture(scope="module", params=EXACT)
def exact(request):
    return named(request.param)


def named(name: str) -> Chat:
    chat = Chat(MAKE[name]())
    writing = chat.writing("llama3" if "llama" in name else "json")
    assert writing.message(CALLS) == chat.message(CALLS)  # what the template asks for is the default
    return writing


def render(chat, messages, tools=None, **more) -> str:
    return chat._tokenizer.apply_chat_template(
        messages, tools=tools, tokenize=False, add_generation_prompt=True, **more
    )


def control(chat, ids) -> list[int]:
    """The control tokens in ids, and those that mark calls, results and thoughts."""
    added = set(chat._tokenizer.get_added_vocab().values())
    return [i for i in ids if i in added]


# ---- Tokens as the template has them -------------------------------------------------------------------

CALLS = [Call("mv", {"source": "notes.txt", "destination": "archive"}), Call("ls", {})]
texts = st.text(string.printable + 'é👋<|>{}"\\\x00\x01\x1f', max_size=30)


@given(texts, st.lists(texts, min_size=1, max_size=3), texts)
@example("a<tool_response>", ["<|im_end|>"], "<tool_response>")
def test_a_conversation_has_the_tokens_of_the_templates_own_rendering(exact, query, answers, later):
    tools, broken = bfcl.tools(TASK), exact._break_up  # text of control tokens, which may be drawn
    said = [exact.decode(m[:-1]) for m in (exact.message(CALLS), exact.message([]))]
    ids = exact.prompt(tools, query) + exact.message(CALLS) + exact.observations(answers)
    ids += exact.message([]) + exact.user(later)
    whole = [{"role": "user", "content": broken(query)}, {"role": "assistant", "content": said[0]}]
    whole += [{"role": "tool", "content": broken(answer)} for answer in answers]
    whole += [{"role": "assistant", "content": said[1]}, {"role": "user", "content": broken(later)}]
    text = render(exact, whole, tools, date_string="26 Jul 2024")
    assert ids == exact._tokenizer.encode(text, add_special_tokens=False)


@given(texts, texts)
@example("a<tool_response>", "<|im_end|>")
def test_a_question_has_the_tokens_of_the_templates_own_rendering(exact, system, user):
    broken = exact._break_up
    whole = [{"role": "system", "content": broken(system)}, {"role": "user", "content": broken(user)}]
    text = render(exact, whole, date_string="26 Jul 2024")
    assert exact.question(system, user) == exact._tokenizer.encode(text, add_special_tokens=False)


def test_a_call_has_the_tokens_that_the_template_writes_for_it(exact):
    made = [{"type": "function", "function": {"name": c.name, "arguments": c.arguments}} for c in CALLS[:1]]
    whole = [{"role": "user", "content": "Go."}, {"role": "assistant", "content": "", "tool_calls": made}]
    text = render(exact, whole, bfcl.tools(TASK), date_string="26 Jul 2024")
    encode = lambda text: exact._tokenizer.encode(text, add_special_tokens=False)
    ids = exact.prompt(bfcl.tools(TASK), "Go.") + exact.message(CALLS[:1])
    assert encode(text)[: len(ids)] == ids


@pytest.mark.parametrize(
    "name, calls",
    [
        ("qwen2_5", "json"),
        ("qwen3", "json"),
        ("qwen3_instruct_2507", "json"),
        ("llama3_1", "llama3"),
        ("llama3_2", "llama3"),
        ("qwen3_5_think", None),
        ("qwen3_6", None),
        ("lfm2_2_5", None),
    ],
)
def test_a_published_template_is_used_only_where_its_own_calls_read_back(name, calls):
    trl = importlib.util.find_spec("trl")
    if trl is None:
        pytest.skip("needs TRL, which holds the templates of published models")
    template = (Path(trl.origin).parent / "chat_templates" / f"{name}.jinja").read_text()
    llama = name.startswith("llama")
    chat = Chat(make(LLAMA_TOKENS if llama else CHATML_TOKENS, template, [] if llama else TAGS))
    made = [{"type": "function", "function": {"name": "mv", "arguments": CALLS[0].arguments}}]
    whole = [{"role": "user", "content": "Go."}, {"role": "assistant", "content": "", "tool_calls": made}]
    text = chat._tokenizer.apply_chat_template(whole, tools=bfcl.tools(TASK), tokenize=False)
    said = text.rpartition(f"assistant{'<|end_header_id|>' if llama else ''}\n")[2].lstrip("\n")
    ids = chat._tokenizer.encode(said.removesuffix("\n"), add_special_tokens=False)
    if calls:
        assert [p.call for p in chat.writing(calls).parse(ids)] == CALLS[:1]
        for other in {"json", "llama3"} - {calls}:
            with pytest.raises(ValueError, match=f"a/model asks for calls of the format '{calls}'"):
                chat.writing(other)
        return
    assert not any(p.call for written in WRITINGS.values() for p in written.parse(said))
    for written in ("json", "llama3"):
        with pytest.raises(ValueError, match="a/model writes a call as '.*probe.*, which is no format of"):
            chat.writing(written)
    assert chat.writing("python").message([Call("execute", {"code": "1"})])


def test_the_end_of_a_turn_is_the_templates(chat):
    end = "<|eot_id|>" if "<|eot_id|>" in chat._tokenizer.get_vocab() else "<|im_end|>"
    expected = [end, "<|eom_id|>"] if end == "<|eot_id|>" else [end]
    assert chat._tokenizer.convert_ids_to_tokens(chat.stop_ids) == expected
    assert chat.message([])[-1] == chat.stop_ids[0] and chat.stop_ids[0] not in chat.message(CALLS)[:-1]
    torn = chat.decode(chat.message([Call("echo", {"content": "a\ud83db"})]))
    assert "a\ufffdb" in torn  # a lone surrogate
    for stop in chat.stop_ids:
        assert [p.call for p in chat.parse([*chat.message(CALLS)[:-1], stop])] == CALLS


def test_only_the_forms_that_were_used_last_are_kept(monkeypatch):
    monkeypatch.setattr("coevolve_jax.rollout.chat.FORMS", 4)
    chat, rendered = named("chatml"), []
    real = chat._render
    monkeypatch.setattr(chat, "_render", lambda *asked, **more: rendered.append(1) or real(*asked, **more))
    ask = lambda n: chat.prompt([{"type": "function", "function": {"name": f"tool_{n}"}}], "q")
    first = ask(0)
    for n in range(1, 20):
        ask(n)
        assert ask(0) == first  # used again and again, so it stays
        assert len(chat._forms) <= 4
    assert len(rendered) == 20


def test_a_prompt_does_not_depend_on_the_day():
    tokenizer = llama(date=NOW)
    today = tokenizer.apply_chat_template([{"role": "user", "content": ""}], tokenize=False)
    assert "Date: 26 Jul 2024\n" not in today  # the template alone prints the day of this test
    chat = Chat(tokenizer)
    for ids in (chat.prompt([], "x"), chat.prompt(bfcl.tools(TASK), "x"), chat.question("s", "x")):
        assert "Date: 26 Jul 2024\n" in chat.decode(ids)
    tokenizer.chat_template = "\n {% set now = strftime_now('%B %Y') %}{{ now }}" + CHATML.replace(
        "im_end", "eot_id"
    )
    assert chat.decode(Chat(tokenizer).prompt([], "x")).startswith(
        "\n26 Jul 2024<|im_start|>user\nx<|eot_id|>"
    )
    tokenizer.chat_template = "{{ date_string }}" + CHATML.replace("im_end", "eot_id")
    assert chat.decode(Chat(tokenizer).prompt([], "x")).startswith("26 Jul 2024<|im_start|>")


def test_a_note_tells_that_a_templates_date_stands_still():
    for date, tokenizer in (
        (NOW, llama(date=NOW)),
        ("'1 May 2020'", llama(date="'1 May 2020'")),
        ("date_string", make(LLAMA_TOKENS, "{{ 'On ' + date_string }}" + CHATML.replace("im_end", "eot_id"))),
    ):
        (told,) = [note for note in Chat(tokenizer).notes if "date" in note]
        assert "a/model prints the date: here it is always 26 Jul 2024" in told, date
    for dateless in ("llama 3.1", "chatml", "hybrid"):
        assert not [note for note in named(dateless).notes if "date" in note], dateless


# ---- Contents that nobody vouches for ------------------------------------------------------------------

marks = st.sampled_from(
    [*CHATML_TOKENS, *LLAMA_TOKENS, *TAGS, "\x00", "\x1f", '"', "\\u0000", "\\", "\n", "; {"]
)
hostile = st.lists(marks | st.text(max_size=5), max_size=8).map("".join)


@pytest.mark.slow
@given(hostile, st.lists(hostile, min_size=1, max_size=3))
def test_no_content_holds_a_control_token(chat, query, answers):
    for fed, plain in (
        (chat.prompt(bfcl.tools(TASK), query), chat.prompt(bfcl.tools(TASK), "x")),
        (chat.user(query), chat.user("x")),
        (chat.question(query, query), chat.question("x", "x")),
        (chat.observations(answers), chat.observations(["x"] * len(answers))),
    ):
        assert control(chat, fed) == control(chat, plain)
        for tag in ("</tool_response>", "</think>", "<tool_call>"):  # also where it is no token
            assert chat.decode(fed).count(tag) == chat.decode(plain).count(tag) or tag not in chat._template


@pytest.mark.slow
@given(hostile, hostile, hostile)
def test_no_document_of_a_tool_holds_a_control_token(chat, name, description, parameter):
    def prompt(*texts):
        name, description, parameter = texts
        schema = {"type": "object", "properties": {parameter: {"type": "string", "enum": [description]}}}
        function = {"name": name, "description": description, "parameters": schema, "required": [parameter]}
        return chat.prompt([{"type": "function", "function": function}], "x")

    fed, plain = prompt(name, description, parameter), prompt("a", "b", "c")
    assert control(chat, fed) == control(chat, plain)
    for tag in ("</tool_response>", "</think>", "<tool_call>"):
        assert chat.decode(fed).count(tag) == chat.decode(plain).count(tag) or tag not in chat._template


hostile_values = st.recursive(
    hostile | json_values,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(hostile, inner, max_size=2),
)
calls = st.builds(Call, hostile, st.dictionaries(hostile, hostile_values, max_size=3))


@pytest.mark.slow
@given(st.lists(calls, max_size=3))
def test_calls_read_back_as_themselves(chat, made):
    made = [Call.from_json(json.loads(json.dumps(c.to_json()))) for c in made]
    ids = chat.message(made)
    assert [p.call for p in chat.parse(ids)] == made
    assert control(chat, ids[:-1]) == control(chat, chat.message([Call("x", {})] * len(made))[:-1])


@given(hostile)
def test_no_text_breaks_the_parser_of_objects(text):
    for parsed in parse_objects("{" + text) + parse_objects("<|python_tag|>" + text):
        assert (parsed.call is None) == bool(parsed.error)


# ---- Llama 3's calls -----------------------------------------------------------------------------------

LS, CD = render_object(Call("ls", {})), render_object(Call("cd", {"folder": "a; b"}))


@pytest.mark.parametrize("between", ["; ", "\n", " ;\n", "<|python_tag|>", ";<|python_tag|> "])
@pytest.mark.parametrize("before", ["", "<|python_tag|>", "\n\n"])
def test_several_objects_are_several_calls(before, between):
    assert CD == '{"name": "cd", "parameters": {"folder": "a; b"}}'
    found = parse_objects(before + between.join([LS, CD, LS]) + " ")
    assert [p.call for p in found] == [Call("ls", {}), Call("cd", {"folder": "a; b"}), Call("ls", {})]
    assert [p.text for p in found] == [LS, CD, LS]


@pytest.mark.parametrize("text", ["", "Done.", "I call " + LS, '"{}"', "[" + LS + "]"])
def test_a_message_that_begins_with_words_calls_nothing(text):
    assert parse_objects(text) == []


@pytest.mark.parametrize(
    "text, why",
    [
        ('{"name": "ls", "parameters": {}', "JSONDecodeError"),
        ("<|python_tag|>ls.call()", "JSONDecodeError"),
        ('{"result": 3}', "needs"),
        ('{"name": 3, "parameters": {}}', "needs"),
        ('{"name": "ls", "parameters": "{}"}', "parameters is not an object"),
        ('{"name": "ls", "parameters": {"a": NaN}}', "ValueError"),
        ('{"name": "ls", "parameters": {"a": 1e999}}', "ValueError"),
        ('{"name": "ls", "parameters": {"a": ' + "[" * 70 + "]" * 70 + "}}", "more than 64 levels"),
        ('{"a":' * 100_000, "RecursionError"),
    ],
)
def test_malformed_objects_say_why_and_the_calls_before_them_count(text, why):
    (parsed,) = parse_objects(text)
    assert parsed.call is None and why in parsed.error
    first, second = parse_objects(f"{LS}; {text}")
    assert first.call == Call("ls", {}) and second.error == parsed.error


# ---- Thoughts ------------------------------------------------------------------------------------------


def test_a_template_that_leaves_out_thoughts_is_used_append_only():
    chat = named("hybrid")
    assert chat.rewrites and "they stay as they were sampled" in chat.notes[0]
    assert not any(named(name).rewrites for name in EXACT)
    ids = chat.prompt([], "One.") + chat._tokenizer.encode("<think>\nHm.\n</think>\n\nTwo.<|im_end|>")
    ids += chat.user("Three.")
    tail = (
        "<|im_start|>user\nOne.<|im_end|>\n<|im_start|>assistant\n<think>\nHm.\n</think>\n\nTwo.<|im_end|>\n"
    )
    assert chat.decode(ids).endswith(tail + "<|im_start|>user\nThree.<|im_end|>\n<|im_start|>assistant\n")
    whole = [("user", "One."), ("assistant", "<think>\nHm.\n</think>\n\nTwo."), ("user", "Three.")]
    assert "Hm." not in render(chat, [{"role": role, "content": text} for role, text in whole])


def test_a_template_that_never_shows_thoughts_rewrites_too():
    tokenizer = make(
        CHATML_TOKENS, "{{ tools }}" + CHATML.replace("m.content", "m.content.split('</think>')[-1]")
    )
    assert Chat(tokenizer).rewrites


CALL = render_short(Call("ls", {}))


@pytest.mark.parametrize(
    "text, count",
    [
        (CALL, 1),
        (f"<think>{CALL}</think>{CALL}{CALL}", 2),
        (f"<think>{CALL}</think>", 0),
        (f"{CALL}</think>Done.", 0),
        (f"<think>{CALL}", 0),
        (f"{CALL}<think>{CALL}", 0),
        (f"<think>a</think>{CALL}<think>b</think>{CALL}", 1),
        (f"<think>a</think>{CALL}<think>b", 0),
        (f"<think>{CALL}<think>{CALL}</think>{CALL}</think>{CALL}", 1),
        (f"<tool_call>{{</think>{CALL}", None),
    ],
)
def test_thoughts_call_nothing(text, count):
    calls = [None] if count is None else [Call("ls", {})] * count  # None: a call that cannot be read
    assert [p.call for p in WRITINGS["json"].parse(spoken(text))] == calls
    chat = named("hybrid")
    ids = chat._tokenizer.encode(f"{text}<|im_end|>", add_special_tokens=False)
    assert [p.call for p in chat.parse(ids)] == calls


@pytest.mark.parametrize("tag", ["</think>", "<think>", "<think>a</think>"])
def test_a_tag_of_thoughts_within_a_call_is_text(tag):
    raw = json.dumps({"name": "post", "arguments": {"content": f"a {tag} b"}})
    call = Call("post", {"content": f"a {tag} b"})
    written = {
        "json": f"<tool_call>{raw}</tool_call>",
        "llama3": raw.replace("arguments", "parameters"),
        "python": f"```python\nprint('{tag}')\n```",
    }
    for name, text in written.items():
        wanted = Call("execute", {"code": f"print('{tag}')"}) if name == "python" else call
        writing = WRITINGS[name]
        assert [p.call for p in writing.parse(spoken(text, writing.block))] == [wanted]
        words = "" if name == "llama3" else "Yes: "  # Llama's calls begin the message
        for thoughts in ("<think>no</think>\n\n", "no</think>", "<think>a</think> <think>b</think>"):
            said = spoken(thoughts + words + text, writing.block)
            assert [p.call for p in writing.parse(said)] == [wanted]


@pytest.mark.parametrize("other", ["parameters", "args", "argument"])
def test_arguments_under_another_name_are_told_and_not_lost(other):
    (found,) = WRITINGS["json"].parse(f'<tool_call>{{"name": "ls", "{other}": {{"a": true}}}}</tool_call>')
    assert found.call is None and "arguments is not an object" in found.error
    bare = '<tool_call>{"type": "function", "name": "ls", "id": "1"}</tool_call>'
    assert [p.call for p in WRITINGS["json"].parse(bare)] == [Call("ls", {})]


def test_where_the_prompt_opens_a_thought_a_message_begins_in_it():
    chat = named("thinking")
    assert chat.decode(chat.prompt([], "x")).endswith("assistant\n<think>\n")
    encode = lambda text: chat._tokenizer.encode(f"{text}<|im_end|>", add_special_tokens=False)
    assert chat.parse(encode(CALL)) == [] and len(chat.parse(encode(f"{CALL}</think>{CALL}"))) == 1


# ---- The template of ours ------------------------------------------------------------------------------


def schema(name, description=None, required=(), **types):
    properties = {key: {"type": type} if type else {} for key, type in types.items()}
    parameters = {"type": "object", "properties": properties, "required": list(required)}
    return {
        "type": "function",
        "function": {"name": name, "description": description, "parameters": parameters},
    }


SHOWN = """<|im_start|>system
Use the tools below. Write each call on its own line, like this:
<tool_call>{"name": "tool", "arguments": {"parameter": "value"}}</tool_call>
The results follow. When nothing is left to do, answer without a call.
pay(amount: number, to, items?: array, note?) - Pay somebody
pwd()
sort(keys?) - Sort a file
old(unit: float) - Convert it
bare()<|im_end|>
<|im_start|>user
Go.<|im_end|>
<|im_start|>assistant
<tool_call>{"name": "pay", "arguments": {"to": "Ann"}}</tool_call>
<tool_call>{"name": "pwd", "arguments": {}}</tool_call><|im_end|>
<|im_start|>user
<tool_response>paid</tool_response>
<tool_response>/</tool_response><|im_end|>
<|im_start|>assistant
Done.<|im_end|>
<|im_start|>user
Thanks.<|im_end|>
<|im_start|>assistant
"""


def test_our_template_shows_one_line_per_tool():
    tools = [
        schema(
            "pay",
            "Pay somebody. Not often.",
            ("amount", "to"),
            amount="number",
            to="string",
            items="array",
            note="",
        ),
        schema("pwd"),
        schema("sort", "Sort a file\nby lines.", keys=["string", "null"]),
        schema(
            "old",
            "This tool belongs to a set. It is old. Tool description: Convert it.",
            ["unit"],
            unit="float",
        ),
        {"name": "bare"},
    ]
    chat = named("chatml")
    ids = chat.prompt(tools, "Go.") + chat.message([Call("pay", {"to": "Ann"}), Call("pwd", {})])
    ids += chat.observations(["paid", "/"]) + chat._tokenizer.encode("Done.<|im_end|>") + chat.user("Thanks.")
    assert chat.decode(ids) == SHOWN
    whole = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Go."}]
    begin = SHOWN.partition("assistant")[0].replace("system\n", "system\nBe brief.\n\n")
    assert render(chat, whole, tools) == begin + "assistant\n"


def test_without_tools_a_chatml_tokenizer_keeps_its_own_template():
    own = "\n{{ 'You are Smol. ' if messages[0].role != 'system' }}" + CHATML + "\n"
    chat, plain = Chat(make(CHATML_TOKENS, own)), make(CHATML_TOKENS, own)
    for roles in (["user"], ["system", "user"], ["user", "assistant", "user"]):
        whole = [{"role": role, "content": role} for role in roles]
        assert render(chat, whole) == plain.apply_chat_template(
            whole, tokenize=False, add_generation_prompt=True
        )
    assert chat.decode(chat.prompt([], "x")).startswith("\nYou are Smol. <|im_start|>user\nx<|im_end|>")


def test_our_template_costs_a_quarter_of_the_schemas():
    tokenizer = load_tokenizer(FOLDER)
    tools = {tool_name(t): t for task in bfcl.tasks("all") for t in bfcl.tools(task)}.values()
    tokenizer.chat_template = CHATML_TOOLS.read_text()
    length = lambda tools: len(Chat(tokenizer).prompt(tools, ""))
    ours = length(list(tools)) - length(list(tools)[:1])
    schemas = len(tokenizer.encode("\n".join(map(json.dumps, list(tools)[1:]))))
    assert len(tools) > 120 and ours < schemas / 4


def test_a_saved_tokenizer_carries_our_template(tmp_path):
    chat = named("chatml")
    assert "chatml_tools.jinja" in chat.notes[0]
    chat._tokenizer.save_pretrained(tmp_path)
    again = Chat(load_tokenizer(tmp_path))
    assert again.notes == () and again._tokenizer.chat_template == chat._tokenizer.chat_template
    tools = bfcl.tools(TASK)
    assert again.prompt(tools, "x") == chat.prompt(tools, "x") and again.message(CALLS) == chat.message(CALLS)


# ---- Refused -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "tokens, template, calls, why",
    [
        (LLAMA_TOKENS, None, "json", "has no chat template: use an instruct model"),
        (LLAMA_TOKENS, "{{ tools }}" + CHATML, "json", "ends an assistant's message with no control token"),
        (LLAMA_TOKENS, CHATML.replace("im_end", "eot_id"), "json", "shows a model no tools"),
        (
            LLAMA_TOKENS,
            LLAMA.replace("DATE", NOW).replace("RESULT", "m.content"),
            "json",
            "the format 'llama3': set",
        ),
        (CHATML_TOKENS, CHATML, "llama3", "the format 'json': set"),
        (CHATML_TOKENS, XML, "json", r"a call as '<tool_call>\\n<function=probe>.*: use a model whose"),
        (CHATML_TOKENS, XML, "llama3", "is no format of config.rollout.tool_call_format: use a model whose"),
        (
            [*CHATML_TOKENS, "[/INST]"],
            "{% for m in messages %}{{ m.content }}[/INST]{% endfor %}",
            "json",
            "no tools",
        ),
        (CHATML_TOKENS, "{{ tools }}{{ messages | length }}" + CHATML, "json", ""),
        (
            CHATML_TOKENS,
            "{{ tools }}" + CHATML.replace("{{ m.role", "{{ loop.index }}{{ m.role"),
            "json",
            "rewrites",
        ),
        (
            CHATML_TOKENS,
            "{{ tools }}" + CHATML.replace("in messages", "in messages[-1:]"),
            "json",
            "rewrites",
        ),
        (CHATML_TOKENS, "{{ tools }}" + CHATML.replace("m.content", "m.content * 2"), "json", "or not once"),
        (CHATML_TOKENS, "{{ tools }}" + CHATML.replace("m.content", "m.content.lstrip()"), "json", "changed"),
        (
            CHATML_TOKENS,
            "{{ tools }}"
            + CHATML.replace("<|im_start|>", "{{ raise_exception('No tool.') if m.role == 'tool' }}", 1),
            "json",
            "refuses a conversation of the roles user, assistant, tool: No tool.",
        ),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(tokens, template, calls, why):
    tokenizer = make(tokens, template)
    if not why:
        assert Chat(tokenizer).writing(calls).rewrites
        return
    with pytest.raises(ValueError, match=why) as refused:
        Chat(tokenizer).writing(calls)
    assert "a/model" in str(refused.value)


def test_code_needs_no_tools_in_the_template():
    chat = Chat(make(LLAMA_TOKENS, CHATML.replace("im_end", "eot_id"))).writing("python")
    (parsed,) = chat.parse(chat.message([Call("execute", {"code": "print(1)"})]))
    assert parsed.call == Call("execute", {"code": "print(1)"})
    assert "Output:\n```\n1\n```" in chat.decode(chat.observations(["1"]))


# ---- The agent -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def env_pool():
    with ProcessPool("bfcl", workers=1, timeout=60.0) as pool:
        yield pool


def test_two_turns_with_the_real_environment(chat, env_pool):
    policy = build.Policy(None, None, chat._tokenizer, chat)
    right = [chat.decode(chat.message(calls)[:-1]) for calls in ([TASK.calls[0]], [], [TASK.calls[1]], [])]
    if chat.rewrites and not chat._thinks:
        spoil = chat.decode(chat.message([Call("rm", {"file_name": "notes.txt"})])[:-1])
        right = [f"<think>\n{spoil}\n</think>\n\n{said}" for said in right]
    engine = Script(policy, right)
    agent = Agent(engine, chat, env_pool, bfcl.tools, Limits(10**5, 10**4), concurrency=1)
    (t,) = agent.rollout_groups([TASK], [[0]], 1.0)[0].trajectories
    assert t.stop == "done" and t.outcome.success and [s.call for s in t.steps] == list(TASK.calls)
    assert t.ids[t.mask].tolist() == sum(engine._lines, [])  # thoughts included
    assert f"Move it (source 'notes.txt', destination 'archive').{chat._end}" in chat.decode(t.ids)


@pytest.mark.parametrize(
    "own, base", [(None, 1), (7, [2, 1]), ((7, 8), [1]), (7, [])], ids=["base", "list", "both", "own"]
)
def test_other_programs_end_a_saved_policys_messages_where_training_and_the_base_did(
    chat, own, base, tmp_path
):
    settings = {"temperature": 0.6, **({"eos_token_id": base} if base else {})}
    config = SimpleNamespace(eos_token_id=own)
    policy = build.Policy(config, None, chat._tokenizer, chat, str(tmp_path), settings)
    policy.save_words(tmp_path / "policy")
    read = transformers.GenerationConfig.from_pretrained(tmp_path / "policy")
    owned = own if isinstance(own, tuple) else () if own is None else (own,)
    theirs = base if isinstance(base, list) else [base]
    assert (read.temperature, set(read.eos_token_id)) == (0.6, {*owned, *theirs, *chat.stop_ids})
    assert load_tokenizer(tmp_path / "policy").chat_template == chat._tokenizer.chat_template


@pytest.mark.parametrize("text", ["[1]", "{", "null", '{"eos_token_id": ["</s>"]}', '{"eos_token_id": {}}'])
def test_settings_that_a_saved_policy_cannot_carry_are_refused_when_the_model_is_read(text, tmp_path):
    model = folder_with(CHATML, tmp_path / "model")
    (model / "generation_config.json").write_text('{"temperature": 0.6, "eos_token_id": [1, 2]}')
    policy = build.policy(model)
    policy.save_words(tmp_path / "saved")
    saved = json.loads((tmp_path / "saved" / "generation_config.json").read_text())
    assert saved["temperature"] == 0.6 and {1, 2, *policy.chat.stop_ids} <= {*saved["eos_token_id"]}
    (model / "generation_config.json").write_text(text)
    with pytest.raises(ValueError, match="model/generation_config.json holds no JSON object .* restore it"):
        build.policy(model)


# ---- Commands ------------------------------------------------------------------------------------------


def folder_with(template, path):
    """The repository's tiny policy with another chat template."""
    shutil.copytree(FOLDER, path)
    (path / "chat_template.jinja").write_text(template)
    return path


@pytest.mark.nightly
@pytest.mark.slow
def test_a_run_says_which_template_it_uses_and_its_policy_carries_it(tmp_path, capsys):
    model, small = folder_with(CHATML, tmp_path / "model"), {"steps": 1, "model": str(tmp_path / "model")}
    small |= {"data.initial_tasks": 2, "rollout.tasks_per_step": 1, "rollout.group_size": 2}
    small |= {"evaluation.tasks": 2, "evaluation.num_rollouts": 1, "environment.workers": 1}
    config = override(load_file(ROOT / "configs" / "bfcl_tiny.py", "strategy=static"), small)
    train(config, tmp_path / "run")
    assert f"{model} has no chat template with tools: chatml_tools.jinja" in capsys.readouterr().err
    saved = load_tokenizer(tmp_path / "run" / "policy")
    assert CHATML_TOOLS.read_text().strip() in saved.chat_template and Chat(saved).notes == ()
    wrong = override(config, {"rollout.tool_call_format": "llama3"})
    with pytest.raises(ValueError, match="asks for calls of the format 'json': set it to that"):
        train(wrong, tmp_path / "wrong")
    assert not (tmp_path / "wrong").exists()


@pytest.mark.slow
def test_a_score_names_a_template_that_would_rewrite(tmp_path, quick):
    model, output = folder_with(HYBRID, tmp_path / "model"), tmp_path / "score.json"
    program = [ROOT / "experiments" / "evaluate.py", f"--model={model}", f"--output={output}"]
    small = ["--category=live_parallel", "--max_length=1024", "--max_new_tokens=8"]
    done = forked.run([*program, *small], quick)
    assert done.returncode == 0, done.stderr[-2000:]
    told = json.loads(output.read_text())["protocol"]["chat_template"]
    assert told in done.stdout and "they stay as they were sampled, thoughts included" in told


@pytest.mark.slow
def test_the_prompt_is_shown_in_the_format_of_calls(quick):
    """With code, the user's message documents the tools."""
    program = [ROOT / "experiments" / "show_prompt.py", "--task=multi_turn_base_3"]
    shown = {}
    for written in WRITINGS:
        done = forked.run(
            [*program, "--model=models/tiny_qwen3", "--benchmark=bfcl", f"--tool_call_format={written}"],
            quick,
        )
        assert done.returncode == 0, done.stderr[-2000:]
        shown[written] = done.stdout
    tokenizer = load_tokenizer(ROOT / "models" / "tiny_qwen3")
    task = next(t for t in bfcl.tasks("all", {}) if t.id == "multi_turn_base_3")
    for written, text in shown.items():
        chat = Chat(tokenizer).writing(written)
        assert text.startswith(chat.decode(chat.prompt(bfcl.tools(task), task.turns[0].query)) + "\n")
    assert "system and 18 tools" in shown["json"] and "user and 18 tools" in shown["python"]


@pytest.mark.slow
def test_the_prompt_of_llama_is_shown_with_its_parts(tmp_path, quick):
    tokenizer = llama(date=NOW)
    tokenizer.save_pretrained(tmp_path)
    program = [ROOT / "experiments" / "show_prompt.py", f"--model={tmp_path}", "--benchmark=bfcl"]
    done = forked.run([*program, "--task=multi_turn_base_3"], quick)
    assert done.returncode == 0, done.stderr[-2000:]
    opening = "<|start_header_id|>assistant<|end_header_id|>\n\n"
    length = len(tokenizer.encode(opening, add_special_tokens=False))
    assert "Date: 26 Jul 2024\n" in done.stdout and re.search(
        rf"assistant's turn opens +{length}\n", done.stdout
    )
    task = next(t for t in bfcl.tasks("all", {}) if t.id == "multi_turn_base_3")
    written = len(tokenizer.encode(json.dumps(bfcl.tools(task)), add_special_tokens=False))
    count = re.search(r"user and 18 tools +([\d,]+)\n", done.stdout)
    assert count and int(count[1].replace(",", "")) > written
