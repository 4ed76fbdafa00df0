"""The benchmark's own arithmetic: its float64 reference, its operation counts, its talk with workers."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.support.paths import ROOT

BENCHMARKS = ROOT / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import cases
import protocol
import reference


def tiny(kind="update", **changes) -> cases.Case:
    return cases.Case(
        **{
            "name": "tiny",
            "kind": kind,
            "vocab_size": 64,
            "tied": False,
            "rows": 2,
            "prompt": 5,
            "completion": 16,
            "layers": 2,
            **changes,
        }
    )


@pytest.mark.slow
@pytest.mark.parametrize("tied, family", [(False, "qwen3"), (True, "qwen3"), (True, "llama")])
def test_reference_is_the_model_of_transformers_in_float64(tmp_path, tied, family):
    import torch  # here, since test collection would wait two seconds for it
    import transformers

    case = tiny(tied=tied, family=family)
    cases.write(case, tmp_path)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "policy").double()
    ids = np.random.default_rng(0).integers(0, case.vocab_size, 12)
    with torch.no_grad():
        logits = theirs(input_ids=torch.tensor(ids)[None]).logits[0]
    expected = torch.log_softmax(logits, -1).numpy()
    # transformers keeps norms and softmax in float32 for a model of any type.
    np.testing.assert_allclose(reference.Model(tmp_path / "policy")(ids), expected, atol=2e-5)


AGENT = {"ragged": True, "group": 2, "rows": 4, "kl": 0.0, "completion": 35}


@pytest.mark.parametrize(
    "changes",
    [{}, {"ragged": True}, {"ragged": True, "given": True}, AGENT, {**AGENT, "half": True}],
    ids=["even", "ragged", "given", "agent", "half"],
)
def test_reference_loss_is_the_mean_over_scored_tokens_of_the_clipped_objective(tmp_path, changes):
    case = tiny(**changes)
    cases.write(case, tmp_path)
    case_read, data = cases.read(tmp_path)
    assert case_read == case
    policy, terms, clipped = reference.Model(tmp_path / "policy"), [], 0
    assert (tmp_path / "reference").exists() == bool(case.kl)
    frozen = reference.Model(tmp_path / "reference") if case.kl else None
    for i in range(case.rows):
        a = float(data["advantages"][i])
        prompt, completion = (x[x != cases.PAD] for x in (data["prompts"][i], data["completions"][i]))
        ids = [*prompt, *completion]
        for t in range(len(prompt), len(ids)):
            column = t - len(prompt)
            if (case.half and a == 0) or not data["scored"][i, column]:
                continue
            logp = policy(np.array(ids[:t]))[-1][ids[t]]
            ref = frozen(np.array(ids[:t]))[-1][ids[t]] if frozen else logp
            ref = data["reference_logprobs"][i, column] if case.given else ref
            ratio = np.exp(logp - data["sampler_logprobs"][i, column])
            plain, bounded = ratio * a, min(max(ratio, 0.8), 1.2) * a
            clipped += bounded < plain
            terms.append(-min(plain, bounded) + case.kl * (np.exp(ref - logp) - (ref - logp) - 1))
    assert len(terms) == data["scored"][cases.learned(case, data)].sum() and 0 < clipped < len(terms)
    assert reference.loss(tmp_path, case, data) == pytest.approx(np.mean(terms), abs=1e-12)


@pytest.mark.slow
@pytest.mark.nightly
def test_ours_agrees_with_the_reference_on_the_shrunk_cases_of_smollm2(tmp_path):
    names = "smollm2-agent-half,generate-smollm2"
    flags = [f"--case={names}", "--shrink", "--peer=", "--repeats=1", f"--output={tmp_path / 'found.json'}"]
    run = subprocess.run(
        [sys.executable, BENCHMARKS / "compare.py", *flags], capture_output=True, text=True, cwd=ROOT
    )
    assert run.returncode == 0, run.stderr  # it raises where a loss is off
    update, generate = (
        entry["implementations"] for entry in json.loads((tmp_path / "found.json").read_text())
    )
    assert update.keys() == generate.keys() == {"ours", "ours reduced"}
    assert update["ours"]["loss_difference"] <= update["ours"]["tolerance"] == 1e-5
    rounded = update["ours reduced"]
    assert update["ours"]["loss_difference"] < rounded["loss_difference"] <= rounded["tolerance"] == 2e-3
    assert update["ours"]["updated_loss_difference"] == 0 < rounded["updated_loss_difference"] <= 2e-3
    assert generate["ours"]["greedy_share"] == 1 > generate["ours reduced"]["greedy_share"] > 0.8


@pytest.mark.slow
@pytest.mark.nightly
def test_one_copy_of_a_prompt_saves_tokens_and_operations():
    flags = ["--repeats=0", "--groups=1", "--group_size=2", "--pack_length=8192"]
    run = subprocess.run(
        [sys.executable, BENCHMARKS / "shared_prompts.py", *flags],
        capture_output=True, text=True, cwd=ROOT, env={**os.environ, "JAX_PLATFORMS": "cpu"},
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    cells = [line.split("|")[1:-1] for line in run.stdout.splitlines() if line.startswith("| ")]
    each, once = ([float(cell.replace(",", "")) for cell in row[1:4]] for row in cells[1:3])
    assert once[0] < each[0] and once[1] == each[1] == 1 and once[2] < each[2]


def test_an_implementation_that_makes_no_update_or_another_one_takes_no_part():
    losses = lambda **found: {name: {"loss": loss} for name, loss in found.items()}
    bounds = {"ours": 1e-5, "same": 1e-5, "still": 1e-5, "other": 1e-5, "rounded": 2e-3}
    first = losses(ours=-0.2, same=-0.2, still=-0.2, other=-0.2, rounded=-0.2001)
    second = losses(ours=-0.25, same=-0.250001, still=-0.2, other=-0.251, rounded=-0.2511)
    found = reference.updated(bounds, first, second)
    assert found.pop("still") == "an update moves the loss by 0, to 0.05 off ours, beyond 1e-05"
    assert found.pop("other").startswith("an update moves the loss by 0.051, to 0.001 off ours")
    assert found == pytest.approx({"ours": 0.0, "same": 1e-6, "rounded": 1.1e-3})
    with pytest.raises(ValueError, match="ours: an update moves the loss by 0, to 0 off ours"):
        reference.updated({"ours": 1e-5}, first, first)


def test_greedy_share_counts_the_likeliest_tokens(tmp_path):
    case = tiny(kind="generate", rows=2)
    cases.write(case, tmp_path)
    policy, prompts = reference.Model(tmp_path / "policy"), cases.random_data(case, 3)["prompts"]
    ids = prompts.copy()
    for _ in range(4):
        ids = np.concatenate([ids, [[np.argmax(policy(row)[-1])] for row in ids]], axis=1)
    greedy = ids[:, case.prompt :]
    assert reference.greedy_share(tmp_path, prompts, greedy) == 1.0
    greedy[1, -1] = (greedy[1, -1] + 1) % case.vocab_size
    assert reference.greedy_share(tmp_path, prompts, greedy) == 7 / 8


def test_data_is_padded_only_behind_its_lengths_and_ragged_lengths_cover_their_range():
    case = cases.CASES["small-ragged"]
    data = cases.random_data(case, seed=3)
    inside = np.arange(case.completion) < data["lengths"][:, None]
    np.testing.assert_array_equal(data["completions"] != cases.PAD, inside)
    assert (data["prompts"] > cases.EOS).all() and (data["completions"][inside] > cases.EOS).all()
    assert 8 <= data["lengths"].min() < 30 and 100 < data["lengths"].max() <= 128
    np.testing.assert_array_equal(data["scored"], inside)
    assert cases.useful_tokens(case, data) == 32 * 128 + inside.sum()


def test_an_agents_groups_have_one_prompt_and_half_of_what_follows_is_sampled():
    case = cases.CASES["smollm2-agent"]
    data = cases.random_data(case, seed=3)
    lengths, prompts = data["lengths"], data["prompts"].reshape(8, 8, 550)
    inside = np.arange(350) < lengths[:, None]
    assert (prompts == prompts[:, :1]).all() and len(np.unique(prompts[:, 0], axis=0)) == 8
    starts = (prompts[:, 0] != cases.PAD).argmax(axis=1)
    assert (prompts[:, 0][np.arange(550) >= starts[:, None]] > cases.EOS).all()
    assert starts.min() >= 0 and 250 <= (550 - starts).min() < 350 < 450 < (550 - starts).max() <= 550
    assert 150 <= lengths.min() < 200 and 300 < lengths.max() <= 350
    np.testing.assert_array_equal(data["completions"] != cases.PAD, inside)
    assert not data["scored"][~inside].any() and data["scored"][:, 0].all()
    assert 0.45 < data["scored"].sum() / lengths.sum() < 0.55
    assert ((data["sampler_logprobs"] != 0) == data["scored"]).all()
    edges = [np.flatnonzero(np.diff(row[:n])) for row, n in zip(data["scored"], lengths)]
    runs = [np.diff(edge, prepend=-1) for edge in edges]  # whole ones; sampled, observed, sampled ...
    sampled, observed = (np.concatenate([run[first::2] for run in runs]) for first in (0, 1))
    assert (20, 45) == (sampled.min(), sampled.max()) and (15, 60) == (observed.min(), observed.max())
    half = cases.random_data(cases.CASES["smollm2-agent-half"], seed=3)
    silent = np.arange(64) // 8 % 2 == 1
    assert (data["advantages"] != 0).all() and ((half["advantages"] == 0) == silent).all()
    for name, x in data.items():
        np.testing.assert_array_equal(x[~silent], half[name][~silent])


def test_operations_are_those_of_the_products_written_out():
    case = tiny(rows=1, prompt=3, completion=2, layers=1)
    tokens, q, kv, d, f = 5, 256, 128, 256, 768
    per_token = d * q + d * kv + d * kv + q * d + d * f + d * f + f * d
    attention = sum(2 * seen * q for seen in range(1, tokens + 1))
    forward = 2 * (tokens * per_token + 2 * d * case.vocab_size + attention)
    data = cases.random_data(case, 0)
    # the policy forward and backward, the reference forward
    assert cases.operations(case, data) == forward * (1 + 2 + 1)
    given = dataclasses.replace(case, given=True)
    assert cases.operations(given, cases.random_data(given, 0)) == forward * (1 + 2)
    assert {**data, **cases.random_data(given, 0)}.keys() - data.keys() == {"reference_logprobs"}
    for name, x in data.items():
        np.testing.assert_array_equal(x, cases.random_data(given, 0)[name])  # nothing else differs
    generate = tiny(kind="generate", rows=1, prompt=3, completion=2, layers=1)
    assert cases.operations(generate, cases.random_data(generate, 0)) == forward


@pytest.mark.parametrize("half", (False, True))
def test_a_groups_prompt_counts_once_and_only_scored_tokens_are_unembedded(half):
    case = tiny(**AGENT, half=half, family="llama")
    data = cases.random_data(case, 0)
    q, kv, d, f, products, tokens = 576, 192, 576, 1536, 0, 0
    for i in np.flatnonzero(data["advantages"]):
        prompt = np.count_nonzero(data["prompts"][i])
        start = 0 if i % case.group == 0 else prompt
        for at in range(start, prompt + data["lengths"][i]):
            tokens += 1
            products += case.layers * (2 * d * q + 2 * d * kv + 3 * d * f + 2 * (at + 1) * q)
        products += int(data["scored"][i].sum()) * case.vocab_size * d
    assert cases.operations(case, data) == 3 * 2 * products
    assert cases.useful_tokens(case, data) == tokens


WORKER = f"""
import sys
sys.path.insert(0, {str(BENCHMARKS)!r})
import protocol
def prepare(job):
    print("noise of a library")
    return {{"job": job["setting"]}}, {{"run": lambda: {{"answer": 42}}, "die": lambda: 1 / 0}}
protocol.serve(prepare)
"""


def test_a_worker_answers_is_stopped_in_between_and_its_death_is_told(tmp_path):
    (tmp_path / "worker.py").write_text(WORKER)
    job = {"setting": {"micro": 4}}
    with protocol.Worker(Path(sys.executable), tmp_path / "worker.py", job, tmp_path / "log", {}) as worker:
        assert worker.about == {"job": {"micro": 4}}
        for _ in range(2):
            answer = worker.ask("run")
            assert answer["answer"] == 42 and 0 <= answer["seconds"] < 5 and 2**20 < answer["peak"] < 2**31
            assert worker.state() == "T"
        with pytest.raises(RuntimeError, match="ZeroDivisionError"):
            worker.ask("die")
    assert "noise of a library" in (tmp_path / "log").read_text()
