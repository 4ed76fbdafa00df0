"""The client of a model against a server of the OpenAI protocol: faults, costs, the cache, who answers."""

import asyncio
import json
import sqlite3

import httpx2
import pytest
from aiohttp import web
from ml_collections import ConfigDict

from coevolve_jax.explorers.llm.explorer import Action
from coevolve_jax.llm import settings
from coevolve_jax.llm.answers import Fault, read
from coevolve_jax.llm.cache import Cache
from coevolve_jax.llm.client import Client
from tests.support.llm_cases import ASKED, EXPLORE, says, server, settings_of, who  # noqa: F401 (fixture)
from tests.support.openai_server import FAULTS, KEY, OpenAIServer, message, status

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("fault", FAULTS)
def test_what_goes_wrong_is_counted_under_its_name_and_ends_nothing(server, fault, capfd, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    kind, again, _ = FAULTS[fault]
    client = Client(settings_of(server, timeout=0.3 if kind == "deadline" else 60.0))
    server.faults = [fault] * 2
    answers = client.ask("explore", [ASKED], Action)
    if again or kind in ("no_json", "wrong_schema"):
        assert len(server.seen) == 2
    else:
        assert len(server.seen) == 1
    assert answers == [None]
    assert {k: v for k, v in client.costs.items() if k.startswith("llm_faults")} == {f"llm_faults/{kind}": 1}
    (llm_call,) = client.llm_calls
    assert llm_call.fault == kind and llm_call.user == EXPLORE and KEY not in repr(llm_call)
    server.faults = [fault] if again else []
    patient = {"timeout": 2.0, "attempts": 8} if kind == "deadline" else {}
    client = Client(settings_of(server, **patient))
    (healed,) = client.ask("explore", [ASKED._replace(user=EXPLORE, seed=2)], Action)
    assert healed is not None and healed.tool == "ls"
    printed = capfd.readouterr()
    assert kind in printed.err and KEY not in printed.err + printed.out
    assert server.keys == {f"Bearer {KEY}"}


def test_a_refused_connection_is_counted():
    with OpenAIServer() as gone:
        pass
    client = Client(settings_of(gone))
    assert client.ask("explore", [ASKED] * 3, Action) == [None] * 3
    assert client.costs["llm_faults/unreachable"] == 3


def test_an_answer_that_the_library_cannot_read_is_counted(server, monkeypatch, capfd):
    monkeypatch.setattr(httpx2.Response, "text", property(lambda self: {}["header"]))
    client = Client(settings_of(server, model="scripted-1"))
    assert client.ask("explore", [ASKED], Action) == [None] and client.costs["llm_faults/no_protocol"] == 1
    assert "such as a page of HTML; KeyError)" in capfd.readouterr().err


@pytest.fixture
def no_proxies(monkeypatch):
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)


def test_a_hosted_model_is_asked_through_the_environments_proxy(server, no_proxies, monkeypatch):
    """The server gets the requests for another host, as a proxy does."""
    monkeypatch.setenv("HTTP_PROXY", server.url.removesuffix("/v1"))
    client = Client(settings_of(server, base_url="http://model.invalid/v1"))
    assert who(client) == "Let me try." and len(server.seen) == 1
    for fault in ("10 MB", "10 MB, packed"):  # the bound holds here too
        server.faults = [fault]
        assert who(client, seed=2) is None
    assert client.costs["llm_faults/too_large"] == 2


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_a_server_on_this_machine_is_asked_without_a_proxy(server, no_proxies, monkeypatch, host):
    monkeypatch.setenv("ALL_PROXY", "socks5://127.0.0.1:9")
    base_url = server.url.replace("127.0.0.1", host)
    assert who(Client(settings_of(server, base_url=base_url))) == "Let me try."


def test_a_proxy_that_cannot_be_used_is_named_without_its_password(server, no_proxies, monkeypatch):
    monkeypatch.setenv("ALL_PROXY", "ftp://somebody:hunter2@127.0.0.1:9")
    client = Client(settings_of(server, base_url="http://model.invalid/v1"))
    with pytest.raises(ValueError, match="HTTPS_PROXY or ALL_PROXY .ValueError.: name one") as error:
        who(client)
    assert "hunter2" not in str(error.value) and "'http://model.invalid/v1'" in str(error.value)


def test_a_wrong_answer_is_asked_for_again_once_and_said_to_be_wrong(server):
    client = Client(settings_of(server))
    server.faults = ["wrong schema"]
    (answer,) = client.ask("explore", [ASKED], Action)
    assert answer == Action(thought="Let me try.", tool="ls", arguments={})
    first, second = server.seen
    assert second["messages"][:2] == first["messages"] and second["messages"][2]["content"] == '{"action": 7}'
    assert "tool: Field required" in second["messages"][3]["content"]
    assert client.costs["llm_repairs"] == 1 and client.costs["llm_requests/explore"] == 2
    (llm_call,) = client.llm_calls
    assert (
        llm_call.answers[0] == '{"action": 7}' and Action.model_validate_json(llm_call.answers[1]) == answer
    )
    assert llm_call.complaint == "tool: Field required" and not llm_call.fault
    assert (llm_call.tokens_in, llm_call.tokens_out) == (200, 40)


def test_books(server):
    client = Client(settings_of(server, price_in=2.0, price_out=10.0))
    client.ask("explore", [ASKED._replace(seed=i) for i in range(5)], Action)
    client.ask("judge", [ASKED._replace(seed=9)], Action)
    assert client.costs["llm_tokens_in/explore"] == 500 and client.costs["llm_tokens_out/judge"] == 20
    assert client.costs["llm_tokens"] == 6 * 120
    assert client.costs["money"] == pytest.approx(6 * (100 * 2.0 + 20 * 10.0) / 1e6)
    assert client.costs["money/judge"] == pytest.approx((100 * 2.0 + 20 * 10.0) / 1e6)


def test_a_budget_ends_asking(server, capfd):
    client = Client(settings_of(server, budget_tokens=300))
    assert None not in client.ask("explore", [ASKED._replace(seed=i) for i in range(3)], Action)
    assert client.ask("explore", [ASKED] * 2, Action) == [None, None]
    assert len(server.seen) == 3 and client.costs["llm_faults/budget"] == 2
    assert len(client.llm_calls) == 3  # no request was sent for the others
    assert "config.explorer.budget_tokens = 300 is spent: no more" in capfd.readouterr().err


@pytest.mark.parametrize("budget", [{"budget_money": 0.0004}, {"budget_tokens": 120}])
def test_what_reaches_a_budget_ends_asking(server, budget):
    """A question costs 120 tokens, and 0.0004 at these prices."""
    client = Client(settings_of(server, price_in=2.0, price_out=10.0, **budget))
    assert None not in client.ask("explore", [ASKED], Action)
    assert client.ask("explore", [ASKED._replace(seed=1)], Action) == [None] and len(server.seen) == 1


def test_no_more_than_so_many_at_once(server):
    server.delay = 0.05
    client = Client(settings_of(server, concurrency=3))
    assert None not in client.ask("explore", [ASKED._replace(seed=i) for i in range(10)], Action)
    assert server.most_under_way == 3


def test_more_questions_at_once_than_a_connection_pool_holds_by_default(server, monkeypatch):
    """The server answers none of them until all have come."""
    many, crowd = 120, asyncio.Barrier(120)

    async def together(request):
        await crowd.wait()
        return web.json_response(message('{"tool": "ls", "arguments": {}}'))

    monkeypatch.setitem(FAULTS, "together", ("", False, together))
    server.always = "together"
    client = Client(settings_of(server, concurrency=many, attempts=1))
    assert None not in client.ask("explore", [ASKED._replace(seed=i) for i in range(many)], Action)


@pytest.mark.parametrize("usage", [None, {}, {"prompt_tokens": 0, "completion_tokens": -5}])
def test_a_budget_ends_asking_where_the_server_counts_no_tokens(server, usage, monkeypatch, capfd):
    async def uncounted(request):
        return web.json_response({**message('{"tool": "ls", "arguments": {}}'), "usage": usage})

    monkeypatch.setitem(FAULTS, "uncounted", ("", False, uncounted))
    server.always = "uncounted"
    client = Client(settings_of(server, budget_tokens=2000))
    question = ASKED._replace(system="é" * 1500, user="")  # 3000 bytes
    assert None not in client.ask("explore", [question, question._replace(seed=2)], Action)
    assert client.costs["llm_tokens_in/explore"] == 2000 and client.costs["llm_tokens_out/explore"] == 2 * 11
    assert client.ask("explore", [question._replace(seed=3)], Action) == [None]
    assert client.costs["llm_faults/budget"] == 1
    assert capfd.readouterr().err.count("one for each 3 bytes of text is booked") == 1


def test_an_error_is_told_with_its_meaning_and_the_servers_words(server, monkeypatch, capfd):
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    words = f"Use 'max_completion_tokens' instead.\x1b[2J {KEY} " + "x" * 500
    monkeypatch.setitem(
        FAULTS, "words", ("bad_request", False, status(400, body={"error": {"message": words}}))
    )
    server.always = "words"
    client = Client(settings_of(server))
    assert client.ask("explore", [ASKED], Action) == [None]
    told = (
        "bad_request (the server refuses the model's name or a parameter; status 400: "
        "\"Use 'max_completion_tokens' instead.\\x1b[2J [key] xxx"
    )
    assert told in (said := capfd.readouterr().err) and KEY not in said and "x" * 200 not in said
    assert told.partition(" ")[2] in client.unanswered(client.costs)


def test_nothing_is_asked_twice(server, tmp_path, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    path = tmp_path / "folder" / "answers.sqlite"
    questions = [ASKED._replace(seed=i % 3) for i in range(6)]
    client = Client(settings_of(server, cache=str(path)))
    server.faults = ["wrong schema"]
    server.wrap = lambda text: text.replace("Let me try.", f"Bearer {KEY}")  # echoes the key that it was sent
    answers = client.ask("explore", questions, Action)
    assert answers[0].thought == "Bearer [key]" and KEY not in repr(client.llm_calls)
    asked = len(server.seen)
    assert asked == 4 and len(set(map(repr, answers))) <= 3  # three different ones, and a repair
    again = Client(settings_of(server, cache=str(path), offline=True, base_url="http://127.0.0.1:9/v1"))
    assert again.ask("explore", questions, Action) == answers and len(server.seen) == asked
    assert again.costs == client.costs  # each answer's cost is stored with it
    assert again.llm_calls == client.llm_calls
    assert again.ask("explore", [ASKED._replace(seed=77)], Action) == [None]
    assert again.costs["llm_faults/offline"] == 1
    content = b"".join(p.read_bytes() for p in path.parent.iterdir())
    assert KEY.encode() not in content and server.url.encode() not in content
    rows = sqlite3.connect(path).execute("SELECT request, reply FROM answers").fetchall()
    assert len(rows) == 4 and all(json.loads(request)["model"] == "scripted-1" for request, _ in rows)


# The answer in a text


@pytest.mark.parametrize(
    "text, tool",
    [
        ('<think>\nThe step {"tool": "ls"} worked.\n</think>\n\n{"tool": "cd"}', "cd"),
        ('The step {"tool": ...} failed: {"tool": "rm"}\n</think>\n{"tool": "cd"}', "cd"),
        ('I use {curly} words.\n```json\n{"tool": "cd"}\n```', "cd"),
        ('{"tool": "cd"}\nNote: {} is empty.', "cd"),
        ('{"tool": "cd"} once more {"tool":"cd"}', "cd"),
        ('{"thought": "it says </think>", "tool": "cd"}', "cd"),
        ('<think>{"tool": "rm"}</think> I stop.', "no_json"),
        ('{"tool": "rm"}</think> I stop.', "no_json"),
        ('I stop. <think>{"tool": "rm"}', "no_json"),
        ('{"tool": "cd", "arguments": {"a": {"tool": "rm"}', "no_json"),
        ('{"tool": "cd", "arguments": {a: {"tool": "rm"}}}', "no_json"),
        ('{"tool": "cd"} or {"tool": "rm"}', "wrong_schema"),
        ('{"a":' * 200_000, "no_json"),
        ('{"' * 200_000, "no_json"),
        ('{"</think>' * 100_000, "no_json"),
    ],
)  # fmt: skip
def test_the_answer_is_found_amid_words_and_never_in_a_thought(text, tool):
    try:
        assert read(text, Action).tool == tool
    except Fault as fault:
        assert fault.kind == tool


# The answering model


@pytest.mark.parametrize("serves", [{"scripted-1": "the/scripted-one"}, {"weak": "a/weak-one"}])
def test_no_answer_of_another_server_is_taken(server, tmp_path, serves):
    cache = str(tmp_path / "answers.sqlite")
    server.wrap = says("first")
    with OpenAIServer(serves=serves) as second:
        second.wrap = says("second")
        assert who(Client(settings_of(server, cache=cache))) == "first"
        assert who(Client(settings_of(second, cache=cache))) == "second" and len(second.seen) == 1
        server.url += "/"  # the same address
        assert who(Client(settings_of(server, cache=cache))) == "first" and len(server.seen) == 1


@pytest.mark.parametrize("serves", [{"scripted-2": "the/scripted-one"}, {"scripted-1": "other/weights"}])
def test_no_answer_of_a_model_that_was_served_there_before_is_taken(server, tmp_path, serves):
    cache = str(tmp_path / "answers.sqlite")
    server.wrap = says("before")
    assert who(Client(settings_of(server, cache=cache))) == "before"
    server.serves, server.wrap = serves, says("after")
    assert who(Client(settings_of(server, cache=cache))) == "after"
    assert server.seen[-1]["model"] == next(iter(serves))
    server.serves = {"scripted-1": "the/scripted-one"}
    assert who(Client(settings_of(server, cache=cache))) == "before" and len(server.seen) == 2


def test_a_run_that_goes_on_finds_its_own_answers_at_another_address_or_without_a_server(server, tmp_path):
    cache = str(tmp_path / "answers.sqlite")
    server.wrap = says("first")
    client = Client(settings_of(server, cache=cache))
    assert who(client) == "first"
    recorded = json.loads(json.dumps(client.served._asdict()))
    with OpenAIServer() as moved:
        assert who(Client(settings_of(moved, cache=cache), recorded)) == "first" and not moved.seen
        assert who(Client(settings_of(moved, cache=cache), recorded), seed=2) and len(moved.seen) == 1
    away = Client(settings_of(moved, cache=cache, attempts=1), recorded)
    assert who(away) == "first" and who(away, seed=2) and who(away, seed=3) is None
    assert away.costs["llm_faults/unreachable"] == 1 and away.served == client.served
    offline = Client(settings_of(moved, cache=cache, offline=True), recorded)
    assert who(offline) == "first" and offline.served == client.served


@pytest.mark.parametrize(
    "serves, told",
    [
        ({"weak": "w"}, "'weak' .'w'."),
        ({"scripted-1": "w\a"}, r"'scripted-1' .'w\\x07'."),
        (None, "'scripted-1'"),
    ],
)
def test_a_run_does_not_go_on_with_another_model(server, serves, told):
    """Nor with a model at another address that shares its name alone, as far as can be seen."""
    recorded = Client(settings_of(server)).served._asdict()
    with OpenAIServer(serves=serves) as other:
        sentence = (
            f"began with the answers of 'scripted-1' .'the/scripted-one'. at {server.url}, "
            f".*{other.url}' now serves {told}"
        )
        name = next(iter(serves or recorded["model"].split()))
        with pytest.raises(ValueError, match=sentence):
            who(Client(settings_of(other, model=name), recorded))


def test_offline_the_cache_says_whose_answers_are_meant(server, tmp_path):
    cache = str(tmp_path / "answers.sqlite")
    offline = lambda **how: Client(settings_of(server, cache=cache, offline=True, **how))
    with pytest.raises(
        ValueError, match="holds answers of no model called 'default' .none that this version wrote"
    ):
        who(offline())
    server.wrap = says("one")
    assert who(Client(settings_of(server, cache=cache)))
    elsewhere = {"base_url": "http://127.0.0.1:9/v1"}
    assert who(offline(**elsewhere)) == "one"
    server.serves, server.wrap = {"scripted-2": ""}, says("two")
    assert who(Client(settings_of(server, cache=cache)))
    with pytest.raises(
        ValueError, match="of 2 models or servers .'scripted-1', 'scripted-2'.: set config.explorer.model"
    ):
        who(offline(**elsewhere))
    assert who(offline(**elsewhere, model="scripted-1")) == "one"
    with pytest.raises(ValueError, match="of no model called 'x' .'scripted-1', 'scripted-2'.: name another"):
        who(offline(**elsewhere, model="x"))
    with OpenAIServer(serves={"scripted-2": ""}) as third:
        third.wrap = says("three")
        assert who(Client(settings_of(third, cache=cache))) == "three"
    with pytest.raises(ValueError, match="of 2 models or servers .'scripted-2', 'scripted-2'."):
        who(offline(**elsewhere, model="scripted-2"))
    assert who(offline(model="scripted-2")) == "two"  # the model at its address


# The file of answers


def test_two_runs_that_ask_at_once_read_the_answer_that_came_first(tmp_path):
    first, second = (Cache(str(tmp_path / "answers.sqlite"), "explorer") for _ in range(2))
    assert first.put("key", {}, {"text": "a"}) == second.put("key", {}, {"text": "b"}) == {"text": "a"}
    assert first.get("key") == second.get("key") == {"text": "a"}


def test_a_cache_that_fails_is_counted_and_ends_nothing(server, tmp_path, capfd):
    client = Client(settings_of(server, cache=str(tmp_path / "answers.sqlite")))
    assert who(client, seed=1)
    pages = client._cache._file.execute("PRAGMA page_count").fetchone()[0]
    client._cache._file.execute(f"PRAGMA max_page_count = {pages}")  # like a full disk
    answers = client.ask("explore", [ASKED._replace(seed=n) for n in range(2, 40)], Action)
    assert None not in answers and 0 < client.costs["llm_faults/cache"] <= 38
    assert "fails (database or disk is full)" in capfd.readouterr().err
    with sqlite3.connect(tmp_path / "answers.sqlite") as other:
        other.execute("DROP TABLE answers")
    before = client.costs["llm_faults/cache"]
    assert who(client, seed=1) and client.costs["llm_faults/cache"] == before + 2  # neither read nor written


def test_errors_name_the_section_of_the_config_that_asks(tmp_path):
    with OpenAIServer() as gone:
        pass
    with pytest.raises(ValueError, match="question to config.harness.llm.base_url.*, config.harness.llm.mod"):
        _ = Client(settings_of(gone, attempts=1), section="harness.llm").served
    offline = {"cache": str(tmp_path / "answers.sqlite"), "offline": True}
    with pytest.raises(ValueError, match="config.harness.llm.offline is True, and config.harness.llm.cache"):
        who(Client(settings_of(gone, **offline), section="harness.llm"))


def test_a_file_that_is_no_cache_is_refused(tmp_path):
    (tmp_path / "x").write_text("not a database, and long enough to be looked at" * 10)
    with pytest.raises(ValueError, match="config.explorer.cache is .*name another file"):
        Client(ConfigDict({**settings.DEFAULTS, "cache": str(tmp_path / "x")}))
