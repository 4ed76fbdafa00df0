"""The benchmark's own arithmetic: its float64 reference, its operation counts, its talk with workers."""

import dataclasses
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
@pytest.mark.parametrize("tied", (False, True))
def test_reference_is_transformers_qwen3_in_float64(tmp_path, tied):
    import torch  # here, since test collection would wait two seconds for it
    import transformers

    case = tiny(tied=tied)
    cases.write(case, tmp_path)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "policy").double()
    ids = np.random.default_rng(0).integers(0, case.vocab_size, 12)
    with torch.no_grad():
        logits = theirs(input_ids=torch.tensor(ids)[None]).logits[0]
    expected = torch.log_softmax(logits, -1).numpy()
    # transformers keeps norms and softmax in float32 for a model of any type.
    np.testing.assert_allclose(reference.Model(tmp_path / "policy")(ids), expected, atol=2e-5)


@pytest.mark.parametrize("ragged, given", [(False, False), (True, False), (True, True)])
def test_reference_loss_is_the_mean_over_completion_tokens_of_the_clipped_objective(tmp_path, ragged, given):
    case = tiny(ragged=ragged, given=given)
    cases.write(case, tmp_path)
    case_read, data = cases.read(tmp_path)
    assert case_read == case
    policy, frozen = (reference.Model(tmp_path / name) for name in ("policy", "reference"))
    terms, clipped = [], 0
    for i in range(case.rows):
        ids = [*data["prompts"][i], *data["completions"][i][data["completions"][i] != cases.PAD]]
        for t in range(case.prompt, len(ids)):
            logp, ref = (m(np.array(ids[:t]))[-1][ids[t]] for m in (policy, frozen))
            ref = data["reference_logprobs"][i, t - case.prompt] if given else ref
            ratio = np.exp(logp - data["sampler_logprobs"][i, t - case.prompt])
            a = float(data["advantages"][i])
            plain, bounded = ratio * a, min(max(ratio, 0.8), 1.2) * a
            clipped += bounded < plain
            terms.append(-min(plain, bounded) + 0.001 * (np.exp(ref - logp) - (ref - logp) - 1))
    assert len(terms) == data["lengths"].sum() and 0 < clipped < len(terms)
    assert reference.loss(tmp_path, case, data) == pytest.approx(np.mean(terms), abs=1e-12)


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
    assert cases.useful_tokens(case, data) == 32 * 128 + inside.sum()


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
    assert cases.operations(tiny(kind="generate", rows=1, prompt=3, completion=2, layers=1), {}) == forward


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
