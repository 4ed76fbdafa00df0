"""BFCL's official protocol: documents, user text, conversations and verdicts against bfcl_eval's own code."""

import ast
import copy
import dataclasses
import importlib.resources
import json
import re
import textwrap
from types import SimpleNamespace

import numpy as np
import pytest
from bfcl_eval.constants import default_prompts, executable_backend_config
from bfcl_eval.constants.enums import Language
from bfcl_eval.eval_checker.multi_turn_eval import multi_turn_utils

from coevolve_jax import build, envs
from coevolve_jax.envs import bfcl
from coevolve_jax.envs.bfcl import benchmark, environment, single_turn, toolsets
from coevolve_jax.envs.worker_pool import ProcessPool
from coevolve_jax.rollout.agent import Agent
from coevolve_jax.rollout.chat import Chat
from coevolve_jax.rollout.engine import Completion
from coevolve_jax.rollout.limits import Limits
from coevolve_jax.rollout.tool_call_format import render_call
from coevolve_jax.types import Call, Group, Outcome
from tests.support import forked
from tests.support.paths import ROOT

pytestmark = pytest.mark.slow

FOLDER = ROOT / "models" / "tiny_qwen3"
ALL = {name: benchmark.load(name, "official") for name in benchmark.CATEGORIES}
LATE = ALL["multi_turn_miss_func"]
HANDLERS = "model_handler/local_inference/"


# ---- The official harness, without the SDKs that it imports ------------------------------------------------


def functions_of(file: str, names: list[str], known: dict) -> dict:
    """Functions of a file of bfcl_eval, by name. known: the globals that they use."""
    source = importlib.resources.files("bfcl_eval").joinpath(file).read_text()
    wanted = [n for n in ast.walk(ast.parse(source)) if isinstance(n, ast.FunctionDef) and n.name in names]
    for function in wanted:
        function.returns = None
        for argument in function.args.args:
            argument.annotation = None
    found: dict = {}
    exec(compile(ast.Module(wanted, []), file, "exec"), known, found)
    return found


@pytest.fixture(scope="module")
def official(tmp_path_factory):
    """bfcl_eval.utils, with its folders kept away from the package."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BFCL_PROJECT_ROOT", str(tmp_path_factory.mktemp("bfcl")))
        from bfcl_eval import utils
    return utils


@pytest.fixture(scope="module")
def handler(official):
    """The Qwen handler and its inference loop. messages: its model's answers; prompts: its requests."""
    same = lambda f: f
    known = {
        **vars(default_prompts),
        **vars(executable_backend_config),
        **{name: getattr(official, name) for name in ("is_memory", "is_memory_prereq")},
        **{
            name: getattr(multi_turn_utils, name)
            for name in ("execute_multi_turn_func_call", "is_empty_execute_response")
        },
        **dict(json=json, deepcopy=copy.deepcopy, re=re, override=same, final=same),
        "print": lambda *text: None,
    }
    known |= functions_of("model_handler/utils.py", ["convert_to_function_call"], known)
    qwen = [
        "decode_ast",
        "decode_execute",
        "_format_prompt",
        "_extract_tool_calls",
        "_add_assistant_message_prompting",
    ]
    qwen += ["_pre_query_processing_prompting", "_parse_query_response_prompting"]
    local = [
        "add_first_turn_message_prompting",
        "_add_next_turn_user_message_prompting",
        "_add_execution_results_prompting",
    ]
    methods = functions_of("model_handler/base_handler.py", ["inference_multi_turn_prompting"], known)
    methods |= functions_of(HANDLERS + "base_oss_handler.py", local, known)
    methods |= functions_of(HANDLERS + "qwen_fc.py", qwen, known)

    def query(self, data):
        self.prompts.append(self._format_prompt(data["message"], data["function"]))
        return self.messages[len(self.prompts) - 1], 0.0

    def parse(self, text, whole=methods["_parse_query_response_prompting"]):
        counts = SimpleNamespace(prompt_tokens=0, completion_tokens=0)
        return whole(self, SimpleNamespace(choices=[SimpleNamespace(text=text)], usage=counts))

    methods |= {"_query_prompting": query, "_parse_query_response_prompting": parse}
    return type("Handler", (), {**methods, "model_name_underline_replaced": "handler"})


def official_conversation(handler, entry: dict, messages: list[str]):
    """The official loop's prompts and, by turn, the calls of each message that it could parse."""
    played = handler()
    played.messages, played.prompts = messages, []
    said, _ = played.inference_multi_turn_prompting(copy.deepcopy(entry), False, True)
    for name in [n for n in vars(multi_turn_utils) if n.startswith("handler_")]:
        delattr(multi_turn_utils, name)
    read = lambda text: [toolsets.parse(c) for c in played.decode_execute(text, False)]
    return played.prompts, [[read(text) for text in turn if read(text)] for turn in said]


# ---- What the model is shown -------------------------------------------------------------------------------


@pytest.mark.parametrize("category", benchmark.CATEGORIES)
def test_documents_and_user_text_are_those_of_the_official_loader(official, category):
    entries = official.load_dataset_entry(category)
    for entry, task in zip(entries, ALL[category], strict=True):
        assert json.dumps(bfcl.tools(task)) == json.dumps(entry["function"])
        for i, (said, turn) in enumerate(zip(entry["question"], task.turns, strict=True)):
            late = entry.get("missed_function", {}).get(str(i))
            text = default_prompts.DEFAULT_USER_PROMPT_FOR_ADDITIONAL_FUNCTION_PROMPTING
            assert turn.query == (text.format(functions=late) if late else said[0]["content"])


@pytest.fixture(scope="module")
def policy():
    return build.policy(FOLDER)


@pytest.fixture(scope="module")
def qwen(policy):
    """Qwen3's chat template from the official handler, without thoughts, as for the Instruct models."""
    source = importlib.resources.files("bfcl_eval").joinpath(HANDLERS + "qwen_fc.py").read_text()
    template = source.split('"chat_template":\n')[1].split('"""')[0]
    head, rest = template.split("{%- set reasoning_content = '' %}")
    tail = rest[rest.index("{%- if message.tool_calls %}") :]
    said = "{{- '<|im_start|>' + message.role + '\\n' + content }}"
    tokenizer = copy.deepcopy(policy.tokenizer)
    tokenizer.chat_template = textwrap.dedent(head + said + tail).strip()
    return Chat(tokenizer)


class Script:
    """An engine that gives scripted messages."""

    batches = True

    def __init__(self, chat, tokenizer, messages):
        self._lines = [tokenizer.encode(m, add_special_tokens=False) + list(chat.stop_ids) for m in messages]
        self.seen = []

    async def generate(self, requests):
        (request,) = requests
        self.seen.append(request.ids)
        ids = np.asarray(self._lines[len(self.seen) - 1], np.int32)
        return [Completion(ids, np.zeros(len(ids), np.float32), "stop", np.zeros(len(ids)))]

    def release(self, conversation_ids):
        pass


@pytest.fixture(scope="module")
def env_pool():
    with ProcessPool("bfcl", workers=1, timeout=60.0) as pool:
        yield pool


def play(chat, policy, env_pool, task, messages, protocol="official"):
    engine = Script(chat, policy.tokenizer, messages)
    limits = Limits(max_length=10**6, max_new_tokens=10, **bfcl.PROTOCOLS.get(protocol, {}))
    agent = Agent(engine, chat, env_pool, bfcl.tools, limits, concurrency=1)
    (trajectory,) = agent.rollout_groups([task], [[0]], 1.0)[0].trajectories
    return trajectory, [chat.decode(ids) for ids in engine.seen]


def as_messages(task) -> list[str]:
    """The reference as messages: all calls of a turn in one, then one that ends the turn."""
    return [
        m for t in task.turns for m in [*(["\n".join(map(render_call, t.calls))] if t.calls else []), "Done."]
    ]


def calls_by_turn(trajectory, turns: int) -> list[list[Call]]:
    return [[s.call for s in trajectory.steps if s.turn == i and s.call] for i in range(turns)]


@pytest.mark.parametrize("name", ["base_0", "base_160", "miss_func_0", "miss_param_3", "long_context_60"])
def test_a_conversation_is_that_of_the_official_harness(official, handler, policy, qwen, env_pool, name):
    category, _, index = f"multi_turn_{name}".rpartition("_")
    entry, task = official.load_dataset_entry(category)[int(index)], ALL[category][int(index)]
    messages = as_messages(task)
    prompts, turns = official_conversation(handler, entry, messages)
    trajectory, seen = play(qwen, policy, env_pool, task, messages)
    assert seen == prompts
    assert calls_by_turn(trajectory, len(turns)) == [[c for step in turn for c in step] for turn in turns]
    assert trajectory.stop == "done" and trajectory.outcome.success


GOOD = render_call(Call("pwd", {}))
# A block of JSON that is no call makes the official loop itself fail: there is nothing to compare.
MALFORMED = {
    "unclosed": GOOD.removesuffix("\n</tool_call>"),
    "not JSON": GOOD.replace("{", ""),
    "words": "pwd()",
    "one of two": GOOD.replace("{", "") + "\n" + GOOD,
    "one of two, the last unclosed": GOOD + "\n<tool_call>\n{",
}


@pytest.mark.parametrize("name", MALFORMED)
def test_what_cannot_be_read_ends_the_turn_as_in_the_official_harness(
    official, handler, policy, qwen, env_pool, name
):
    entry, task = official.load_dataset_entry("multi_turn_base")[0], ALL["multi_turn_base"][0]
    messages = [MALFORMED[name], *["Done."] * 9]
    prompts, turns = official_conversation(handler, entry, messages)
    trajectory, seen = play(qwen, policy, env_pool, task, messages)
    assert calls_by_turn(trajectory, len(turns)) == [[c for step in turn for c in step] for turn in turns]
    assert len(seen) == len(prompts) and seen[0] == prompts[0]
    assert trajectory.stop == "done"


def test_without_the_protocol_a_malformed_call_is_answered(policy, qwen, env_pool):
    task = ALL["multi_turn_base"][0]
    trajectory, seen = play(qwen, policy, env_pool, task, [MALFORMED["not JSON"], *["Done."] * 4], "")
    assert len(seen) == 5 and "malformed tool call" in seen[1]


def test_limits_of_the_two_protocols(official, handler, policy, qwen, env_pool):
    entry, task = official.load_dataset_entry("multi_turn_base")[0], ALL["multi_turn_base"][0]
    assert len(task.turns) == 4
    twenty = [*[GOOD] * 20, "Done."]
    prompts, turns = official_conversation(handler, entry, twenty * 4)
    trajectory, seen = play(qwen, policy, env_pool, task, twenty * 4)
    assert trajectory.stop == "done" and len(seen) == len(prompts) == 84 and len(turns) == 4
    prompts, turns = official_conversation(handler, entry, [GOOD] * 21)
    trajectory, seen = play(qwen, policy, env_pool, task, [GOOD] * 21)
    assert trajectory.stop == "step_limit" and len(seen) == len(prompts) == 21 and len(turns) == 1
    ends = ["Done."] * 3
    for calls, stop in (
        (26, "done"),
        (27, "step_limit"),
    ):  # with the four messages that end a turn: 30 and 31
        trajectory, seen = play(qwen, policy, env_pool, task, [*ends, *[GOOD] * calls, "Done."], "steps_30")
        assert trajectory.stop == stop and len(seen) == 30


# ---- Single turn -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("category", bfcl.SINGLE_TURN)
def test_a_single_turn_prompt_is_that_of_the_official_harness(official, handler, qwen, category):
    entries = official.load_dataset_entry(category)
    tasks = bfcl.tasks("all", {"categories": [category], "protocol": "official"})
    assert [task.id for task in tasks] == [entry["id"] for entry in entries]
    ascii = lambda entry: json.dumps(entry["function"], ensure_ascii=False).isascii()
    played = [
        (entry, task) for entry, task in zip(entries, tasks) if ascii(entry)
    ]  # there others are escaped
    assert len(played) > 0.9 * len(tasks)
    for entry, task in played[::20]:
        prompt = qwen.prompt(bfcl.tools(task), task.turns[0].query, task.system)
        assert qwen.decode(prompt) == handler()._format_prompt(entry["question"][0], entry["function"])


@pytest.mark.parametrize("name", ["right", "twice", "wrong", *MALFORMED])
def test_a_single_turn_verdict_is_the_official_one(official, handler, policy, qwen, env_pool, name):
    (task,) = [t for t in single_turn.load("parallel", documents="official") if t.id == "parallel_0"]
    right = "\n".join(map(render_call, task.calls))
    texts = {"right": right, "twice": f"{right}\n{right}", "wrong": right.replace("15", "16"), **MALFORMED}
    decoded = handler().decode_ast(texts[name], "python", False)
    assert official.is_function_calling_format_output(decoded)
    start = task.scenario
    verdict = single_turn.official_checker()(
        start["functions"], decoded, start["answers"], Language.PYTHON, "parallel", "Qwen/Qwen3-8B-FC"
    )
    trajectory, seen = play(qwen, policy, env_pool, task, [texts[name]])
    assert len(seen) == 1 and trajectory.stop == "done"
    assert trajectory.outcome.success == verdict["valid"] == (name == "right")
    assert trajectory.outcome.reason == verdict.get("error_type", "passed")


# ---- Functions that arrive later ---------------------------------------------------------------------------


def test_late_functions_are_not_offered_and_callable_as_in_the_official_executor():
    """The official executor has them from the start: one reference calls one before its announcement."""
    early = 0
    for task in LATE:
        late = task.scenario["announced"]
        assert late and not {d["name"] for d in bfcl.tools(task)} & set(late)
        told = next(
            i for i, turn in enumerate(task.turns) if "I have updated some more functions" in turn.query
        )
        assert not task.turns[told - 1].calls  # the request is impossible until the announcement
        assert all(f"'name': '{name}'" in task.turns[told].query for name in late)
        early += any(call.name in late for turn in task.turns[:told] for call in turn.calls)
        world = environment.Environment()
        world.reset(task)
        assert all("no tool named" not in world.step(Call(name, {})).text for name in late)
    assert early == 1


# ---- Ground truth ------------------------------------------------------------------------------------------


def replay(task, change=lambda world, turn: None):
    """The outcome of the reference calls. change: called before each turn ends."""
    world = environment.Environment()
    world.reset(task)
    for i, turn in enumerate(task.turns):
        for call in turn.calls:
            world.step(call)
        change(world, i)
        world.end_turn()
    return world.score()


@pytest.mark.parametrize("category", benchmark.CATEGORIES)
def test_the_reference_passes_and_any_other_state_fails(category):
    """Changes one random attribute of one instance before the last turn with calls ends."""
    rng = np.random.default_rng(0)
    spoiled = set()

    def spoil(world, turn):
        if turn != last:
            return
        public = [(i, k) for i in world._world.values() for k in vars(i) if not k.startswith("_")]
        instance, name = public[rng.integers(len(public))]
        setattr(instance, name, ("another", getattr(instance, name)))
        spoiled.add((type(instance).__name__, name))

    passed = failed = agreed = 0
    for task in benchmark.load(category):
        last = max(i for i, turn in enumerate(task.turns) if turn.calls)
        passed += replay(task).success
        outcome = replay(task, spoil)
        failed += outcome.reason == "multi_turn:instance_state_mismatch"
        verdict = benchmark.official_check(task.id, [[list(turn.calls)] for turn in task.turns])
        agreed += verdict["valid"]
    assert (passed, failed, agreed) == (200, 200, 200)
    assert len(spoiled) > 30


# ---- Scores ------------------------------------------------------------------------------------------------


def test_the_report_counts_the_official_verdicts_by_task(policy, qwen, env_pool):
    """Each category has the reference and a rollout without calls; one rollout is invalid, one too long."""
    tasks = [benchmark.load(f"multi_turn_{name}", "official")[7] for name in bfcl.MULTI_TURN]
    rolled = []
    for task in tasks:
        said = as_messages(task), ["Done."] * len(task.turns)
        rolled.append([play(qwen, policy, env_pool, task, messages)[0] for messages in said])
    lost = Outcome(0.0, False, valid=False)
    rolled[1][1] = dataclasses.replace(rolled[1][1], outcome=lost, stop="engine")
    rolled[2][0] = dataclasses.replace(rolled[2][0], stop="step_limit")
    groups = [Group(task, tuple(own)) for task, own in zip(tasks, rolled)]
    report = bfcl.report(groups, env_pool.judge)
    names = [task.id for task in tasks]
    assert report["by_task"] == dict(zip(names, ([1, 2], [1, 1], [0, 2], [1, 2])))
    assert report["success"] == 3 / 7
    assert report["failures"] == {"force_terminated": 1, "multi_turn:empty_turn_model_response": 3}
    assert report["categories"] == dict(zip(names, bfcl.MULTI_TURN))
    assert set(report["alike"].values()) == {"7"}


def test_tasks_of_several_categories_have_the_same_indices():
    family = envs.load("bfcl")
    settings = family.settings(["base", "miss_param"], "official")
    ids = [task.id for task in family.tasks("test", settings)]
    places = [name.rpartition("_")[::2] for name in ids]
    assert places == [
        (f"multi_turn_{category}", str(i))
        for category in ("base", "miss_param")
        for i in sorted(benchmark.split("test"))
    ]
    assert [t.id for t in family.tasks("all", family.settings())] == [
        f"multi_turn_base_{i}" for i in range(200)
    ]
    with pytest.raises(
        ValueError, match="bfcl has no category 'based': it has base, miss_func, miss_param, long_"
    ):
        family.settings(["base", "based"])
    with pytest.raises(ValueError, match="bfcl has no protocol 'steps': it has official, steps_30"):
        family.settings([], "steps")
    with pytest.raises(ValueError, match="textworld has no category 'base': it has none"):
        envs.load("textworld").settings(["base"])


def test_the_command_prints_and_writes_scores_under_the_protocol(tmp_path, quick):
    output = tmp_path / "score.json"
    command = ["experiments/evaluate.py", "--model=models/tiny_qwen3", "--protocol=steps_30"]
    fast = ["--split=test", "--category=base,miss_func", "--max_length=320", "--max_new_tokens=16"]
    run = lambda *more: forked.run([*command, *more], quick)
    done = run(*fast, "--max_concurrency=16", f"--output={output}")
    assert done.returncode == 0, done.stderr
    report = json.loads(output.read_text())
    assert [(row["category"], row["tasks"]) for row in report["scores"]] == [
        ("base", 50),
        ("miss_func", 50),
        ("all", 100),
    ]
    told = report["protocol"]
    assert (told["limits"], told["messages"], told["split"]) == ("steps_30", 30, "test")
    assert report["success"] == sum(s for s, _ in report["official"]["by_task"].values()) / 100
    assert (report["trials"], report["invalid"]) == (100, 0)
    assert " of 100 rollouts; 0 invalid ones left out\n" in done.stdout
    ends = report["environment"]["stops"]
    assert f"ended by  {', '.join(f'{stop} {n}' for stop, n in ends.items())}\n" in done.stdout
    (silent,) = re.findall(r"\n +(\d+) had no room for a message: raise --max_length or", done.stdout)
    assert 0 < int(silent) <= ends["context_limit"] <= 100
    assert re.search(r"bfcl-eval  2026\.3\.23\n", done.stdout) and "avg@1 (95% interval)" in done.stdout
    assert re.search(r"\n +miss_func +50  \d+\.\d% \(0\.0% to \d+\.\d%\)", done.stdout)
    refused = run("--max_steps=3")
    assert refused.stderr == "Error: --protocol=steps_30 fixes max_steps at 30: leave out --max_steps.\n"


# ---- The prompt, to look at --------------------------------------------------------------------------------


def test_the_prompt_is_shown_as_the_official_handler_formats_it(
    official, handler, policy, qwen, tmp_path, quick
):
    tokenizer = copy.deepcopy(policy.tokenizer)
    tokenizer.chat_template = qwen._tokenizer.chat_template
    tokenizer.save_pretrained(tmp_path)
    command = ["experiments/show_prompt.py", f"--model={tmp_path}", "--benchmark=bfcl"]
    run = lambda *more: forked.run([*command, *more], quick)
    done = run("--task=multi_turn_miss_func_0", "--protocol=official")
    assert done.returncode == 0, done.stderr
    entry, task = official.load_dataset_entry("multi_turn_miss_func")[0], LATE[0]
    prompt = handler()._format_prompt(entry["question"][0], entry["function"])
    assert done.stdout.startswith(prompt + "\n\n")
    for i, turn in enumerate(task.turns[1:], 1):
        later = f"<|im_start|>user\n{turn.query}<|im_end|>\n<|im_start|>assistant\n"
        assert re.search(rf"=+ after turn {i} of 5 =+\n\n?{re.escape(later)}", done.stdout)
    parts = dict(re.findall(r"\n +(\S.*?) +([\d,]+)(?=\n)", done.stdout.split(" tokens ")[1]))
    counts = [int(count.replace(",", "")) for count in parts.values()]
    assert list(parts)[0] == f"system and {len(entry['function'])} tools" and len(parts) == 4 + 4
    assert sum(counts[:3]) == counts[3] == len(qwen.prompt(bfcl.tools(task), task.turns[0].query))
    for folder, why in (("nowhere", "there is no such folder"), ("empty", ".*")):
        (tmp_path / "empty").mkdir(exist_ok=True)
        lacks = run("--task=multi_turn_base_3", f"--model={tmp_path / folder}")
        told = rf"Error: {tmp_path / folder} holds no tokenizer that .* \({why}\): copy it there\.\n"
        assert re.fullmatch(told, lacks.stderr), lacks.stderr
    unknown = run("--task=multi_turn_base_200")
    assert unknown.stderr == (
        "Error: There is no task 'multi_turn_base_200' in the split all of bfcl: "
        "its 3151 ids go from multi_turn_base_0 to live_parallel_multiple_23-20-0.\n"
    )
