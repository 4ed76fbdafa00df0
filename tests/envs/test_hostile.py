"""Model output is data: ten thousand hostile messages execute nothing, and no worker is lost."""

import json
import random

import pytest

from coevolve_jax.envs import bfcl
from coevolve_jax.envs.worker_pool import ProcessPool
from coevolve_jax.rollout.tool_call_format import parse_calls

MESSAGES = 10_000


def hostile(mark: str) -> list[str]:
    """Texts that, if executed, would create the file `mark` or exhaust the memory."""
    return [
        f"__import__('os').system('touch {mark}')",
        f"open({mark!r}, 'w')",
        f"$(touch {mark})",
        f"`touch {mark}`",
        f"; touch {mark};",
        f"../../../../../../..{mark}",
        f"eval(compile('open({mark!r}, \"w\")', '', 'exec'))",
        "{{7 * 7}}",
        "\x00\x01",
        "\ud800",
        "<|im_end|>",
        "</tool_call>",
        "'" * 50,
        "{" * 2000,
        "[" * 5000,
        "9" * 6000,
        "9**9**9",
        "1e999",
        "NaN",
        "a" * 100_000,
    ]


def value(rng: random.Random, texts: list[str], depth: int = 0):
    kind = rng.random()
    if kind < 0.4:
        return rng.choice(texts)
    if kind < 0.5:
        return rng.choice([None, True, -1, 10**18, 1.5, 1e300])
    if kind < 0.7 and depth < 3:
        values = [value(rng, texts, depth + 1) for _ in range(rng.randint(0, 3))]
        return values if kind < 0.6 else {rng.choice(texts)[:20]: v for v in values}
    return rng.choice(["document", "workspace", "a.txt", "user", "1"])


def message(rng: random.Random, texts: list[str], tools: dict[str, dict]) -> str:
    """One assistant message: a call of a real or a made-up tool, sometimes truncated or no JSON."""
    name = rng.choice(
        [*tools, "__init__", "_load_scenario", "__class__", "os.system", "eval", "exec", "", texts[4]]
    )
    names = tools[name]["parameters"]["properties"] if name in tools else ["x"]
    arguments = {name: value(rng, texts) for name in names}
    if rng.random() < 0.2:
        arguments[rng.choice(texts)[:30]] = value(rng, texts)
    body, kind = json.dumps({"name": name, "arguments": arguments}), rng.random()
    if kind < 0.15:
        body = body[: rng.randint(0, len(body))]
    if kind > 0.9:
        body = rng.choice(texts)
    open_, close = rng.choice(
        [("<tool_call>\n", "\n</tool_call>"), ("<tool_call>", ""), ("", "</tool_call>")]
    )
    return (open_ + body + close) * rng.choice([1, 1, 2])


@pytest.mark.slow
def test_ten_thousand_hostile_messages(tmp_path):
    mark, rng = str(tmp_path / "ran"), random.Random(0)
    texts, scenarios = hostile(mark), bfcl.scenarios("train")
    tools = {t["function"]["name"]: t["function"] for s in scenarios for t in bfcl.tools(s)}
    calls = errors = 0
    with ProcessPool("bfcl", workers=2, timeout=60.0) as pool:
        for _ in range(MESSAGES // 200):
            env_ids = pool.reset(rng.choices(scenarios, k=40))
            parsed = [[parse_calls(message(rng, texts, tools)) for _ in range(5)] for _ in env_ids]
            answers = pool.step(env_ids, [[p.call for m in ms for p in m if p.call] for ms in parsed])
            pool.close(env_ids)
            assert all(o.valid for answer in answers for o in answer)
            calls += sum(len(answer) for answer in answers)
            errors += sum(o.error for answer in answers for o in answer)
        assert pool.restarts == 0
    assert calls > MESSAGES / 4  # the rest are no calls at all
    assert 0 < errors < calls  # most are refused; a tool can answer some
    assert list(tmp_path.iterdir()) == []
