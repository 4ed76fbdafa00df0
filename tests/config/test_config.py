"""Config checks before any computation: mistyped values, idle settings, a training set that never grows."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ml_collections import ConfigDict

from coevolve_jax import config as configs
from coevolve_jax.comparison import plan, variations
from coevolve_jax.config import idle, keys, kinds, load_file, override, schedule
from coevolve_jax.records.workdir import claim, fork
from coevolve_jax.strategies.base import SHARED, evolves
from coevolve_jax.train import train
from tests.support.paths import ROOT

FILES = sorted((ROOT / "configs").glob("*.py"))
TINY = load_file(ROOT / "configs" / "bfcl_tiny.py")
LLM = load_file(ROOT / "configs" / "bfcl_tiny.py", "explorer=llm")
POLICY = load_file(ROOT / "configs" / "bfcl_tiny.py", "explorer=policy")
OURS = ("coevolve", "random", "static", "blame", "oracle")
NASTY = (
    float("nan"), float("inf"), -float("inf"), -1, 0, -0.5, 1e9, 10**30, "", "nasty", "\0", (), (0,), ("x",),
    [None],
    None, True, False, {}, {"a": 1}, b"x", 1j,
)  # fmt: skip


def value(config: ConfigDict, key: str):
    section, _, name = key.rpartition(".")
    return (config[section] if section else config)[name]


def with_any(config: ConfigDict, key: str, value) -> ConfigDict:
    """A copy with this value there, of any type, like a user's file might have it."""
    made = config.to_dict()
    section, _, name = key.rpartition(".")
    (made[section] if section else made)[name] = value
    return ConfigDict(made)


MADE = [
    *((TINY, key) for key in keys.names(TINY)),
    *((made, key) for made in (LLM, POLICY) for key in keys.names(made) if key.startswith("explorer.")),
]


@pytest.mark.slow
@pytest.mark.parametrize("config, key", MADE, ids=[f"{c.explorer.name}-{key}" for c, key in MADE])
def test_any_value_is_taken_or_refused_by_name(config, key):
    before, taken = value(config, key), []
    for nasty in NASTY:
        try:
            configs.check(with_any(config, key, nasty))
            taken.append(nasty)
        except ValueError as error:
            assert key in str(error), (key, nasty, str(error))
            assert "\n" not in str(error)
    kind = type(before)
    alike = (
        (int,)
        if kind is int
        else (int, float)
        if kind is float
        else (tuple, list)
        if kind is tuple
        else (kind,)
    )
    for nasty in taken:  # a taken value has the default's kind
        assert isinstance(nasty, alike) and (kind is bool or not isinstance(nasty, bool)), (key, nasty)


def test_a_section_that_is_none_is_named():
    with pytest.raises(
        ValueError, match="config.learner is 3: it must be a section, with the key learning_rate"
    ):
        configs.check(with_any(TINY, "learner", 3))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_key_of_a_config_file_has_a_kind(path):
    config = load_file(path)
    own = {f"{section}.{name}" for section in ("strategy", "explorer") for name in config[section]}
    assert keys.REQUIRED.keys() <= set(keys.names(config)) <= {*keys.REQUIRED, *keys.OPTIONAL, *own}
    configs.check(config)


# When D_t evolves


@given(
    st.integers(1, 40),
    st.integers(1, 12),
    st.integers(1, 15),
    st.integers(0, 12),
    st.integers(0, 3),
    st.integers(0, 40),
)
def test_a_run_that_never_evolves_is_refused(steps, every, settle, async_steps, ahead, first):
    config = override(
        TINY,
        {"steps": steps, "evolution.every": every, "evolution.freeze_last_steps": settle,
            "evolution.async_steps": min(async_steps, every),
         "rollout.max_staleness": ahead},
    )  # fmt: skip
    due = [
        s
        for s in range(first, steps)
        if (s + 1) % every == 0 and s + 1 + min(async_steps, every) <= steps - settle
    ]
    assert [s for s in range(first, steps) if evolves(config, s)] == due
    assert schedule.still_evolves(config, first) == bool(due)
    if settle > ahead and due:
        configs.check_evolution(config, first)
        # A step's batch is drawn max_staleness steps earlier: the last born tasks still join one.
        assert max(due) + 1 + min(async_steps, every) + ahead < steps
        return
    with pytest.raises(ValueError) as refused:
        configs.check_evolution(config, first)
    if settle <= ahead:
        assert (
            f"config.evolution.freeze_last_steps is {settle}: it must be above config.rollout.max_staleness "
            f"({ahead})" in str(refused.value)
        )
        return
    least = int(str(refused.value).partition("a run of ")[2].partition(" ")[0])
    configs.check_evolution(override(config, {"steps": least}), first)
    with pytest.raises(ValueError, match="or name the strategy static, which this run would be"):
        configs.check_evolution(override(config, {"steps": least - 1}), first)


def test_only_a_strategy_that_keeps_to_the_schedule_is_looked_at():
    never = {"steps": 1, "evolution.freeze_last_steps": 1, "rollout.max_staleness": 3}
    for name in ("static", "tests.support.strategies.memory"):  # the second does not say
        configs.check_evolution(override(TINY, {**never, "strategy.name": name}))
    for name in set(OURS) - {"static"}:
        with pytest.raises(ValueError, match="freeze_last_steps is 1: it must be above"):
            configs.check_evolution(override(TINY, {**never, "strategy.name": name}))


def test_train_refuses_before_anything_is_made(tmp_path):
    with pytest.raises(ValueError, match="config.steps is 19, .* strategy coevolve first .* a run of 20 "):
        train(override(TINY, {"steps": 19}), tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "changes, told",
    [
        ({"strategy.signals": "boundry"}, "config.strategy.signals is 'boundry': name one or more of forget"),
        ({"strategy.name": "random", "strategy.scenarios": "al"}, "config.strategy.scenarios is 'al'"),
        ({"environment.train_split": "trian"}, "config.environment.train_split: Unknown split 'trian'"),
        ({"environment.eval_split": "devel"}, "config.environment.eval_split: Unknown split 'devel'"),
        ({"data.leak_splits": ("tset",)}, "config.data.leak_splits: Unknown split 'tset'"),
        ({"environment.toolsets": ("Math",)}, "config.environment.toolsets: Unknown toolset 'Math'"),
        ({"environment.eval_split": "train"}, "config.environment.eval_split is 'train': every scenario of"),
        ({"data.initial_file": "/nonexistent"}, "data.initial_file is '/nonexistent', which is no file"),
        ({"data.initial_file": "/dev/null"}, "config.data.initial_file is '/dev/null', which is no file"),
        ({"data.leak_embedding": "os.path.join", "data.leak_embedding_threshold": 0.9},
            "The function of config.data.leak_embedding fails"),
        ({"rollout.tool_call_format": "python"},
            "is 'python': environment bfcl offers no execute.code.; use json or llama3"),
        ({"learner.attention": "flash"}, "is 'flash', a kernel for a gpu, and this computes on a cpu: use"),
    ],
)  # fmt: skip
def test_what_is_mistyped_is_told_before_anything_is_loaded(changes, told, tmp_path):
    with pytest.raises(ValueError, match=told):
        train(override(TINY, {"model": "nowhere", **changes}), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_weak_tool_that_there_is_not_and_a_file_without_tasks_are_told(tmp_path):
    testbed = {"weak_tools": ("ls", "lss"), "least": 0, "most": 1, "candidates": 100}
    config = ConfigDict({**TINY.to_dict(), "model": "nowhere", "testbed": testbed})
    with pytest.raises(ValueError, match="config.testbed.weak_tools names 'lss', which no scenario of split"):
        train(config, tmp_path / "run")
    for method, setting, value in (("weakest", "category", "calls,hard"), ("frontier", "level", "hard")):
        changes = {"model": "nowhere", "strategy.name": method, f"strategy.{setting}": value}
        told = f"config.strategy.{setting} names 'hard', which is no key of every scenario of split 'train'"
        with pytest.raises(ValueError, match=told):
            train(override(TINY, changes), tmp_path / "run")
    (tmp_path / "empty.jsonl").touch()
    config = override(TINY, {"model": "nowhere", "data.initial_file": str(tmp_path / "empty.jsonl")})
    with pytest.raises(ValueError, match="empty.jsonl', which holds no task: name a run's tasks.jsonl"):
        train(config, tmp_path / "run")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "held_out.jsonl").touch()  # a run that has begun no longer needs the file
    with pytest.raises(ValueError, match="nowhere"):
        train(config, tmp_path / "run")


def test_a_fork_with_another_strategy_must_come_to_evolve(tmp_path):
    folder = tmp_path / "run" / "checkpoints" / "step_00000050"
    folder.mkdir(parents=True)
    (folder / "manifest.json").write_text("{}")
    (tmp_path / "run" / "config.json").write_text(
        configs.to_json(override(TINY, {"strategy.name": "static"}))
    )
    with pytest.raises(ValueError, match="from step 50 on strategy random first .* a run of 70 "):
        fork(tmp_path / "run", 50, tmp_path / "fork", {"strategy.name": "random"})


# Settings that have no effect

# key, a value other than the default, settings that make it idle, and changes with which it acts.
IDLE = (
    ("learner.clip_low", 0.3, {"learner.tis_cap": 2.0}, [{}, {"learner.tis_cap": 2.0, "learner.epochs": 2}]),
    ("learner.clip_high", 0.28, {"learner.tis_cap": 2.0},
        [{"learner.tis_cap": 2.0, "rollout.max_staleness": 1}]),
    ("learner.surrogate", "cispo", {"learner.tis_cap": 2.0},
        [{}, {"learner.tis_cap": 2.0, "learner.epochs": 2}]),
    ("learner.constant_length", 9, {}, [{"learner.aggregate": "constant"}]),
    ("learner.kl_bound", 5.0, {"learner.kl": "none"}, [{}]),
    ("learner.kl_bound", 5.0, {"learner.kl_coef": 0.0}, [{}]),
    ("learner.kl_bound", 5.0, {"learner.kl": "k1"}, [{}]),
    ("learner.kl_coef", 0.5, {"learner.kl": "none"}, [{}]),
    ("learner.kl", "k1", {"learner.kl_coef": 0.0}, [{}]),
    ("learner.decay_steps", 9, {}, [{"learner.schedule": "linear"}]),
    ("learner.final_rate", 0.5, {}, [{"learner.schedule": "linear"}]),
    ("learner.decay_embeddings", True, {}, [{"learner.weight_decay": 0.1}]),
    ("learner.decay_embeddings", True, {"learner.weight_decay": 0.1, "learner.lora_rank": 2}, []),
    ("learner.skip_zero_variance_groups", False, {"learner.dynamic_sampling": 1}, [{}]),
    ("learner.skip_zero_variance_groups", False, {"learner.group_filter": True}, [{}]),
    *((f"learner.filter_{key}", value, {}, [{"learner.group_filter": True}]) for key, value in (
        ("side", "high"), ("z", 2.0), ("keep", 0.3), ("decay", 0.2), ("warmup", 5))),
    ("learner.lora_alpha", 8.0, {}, [{"learner.lora_rank": 2}]),
    ("learner.lora_targets", "layers/.*", {}, [{"learner.lora_rank": 2}]),
    ("learner.router_balance", 0.1, {"model": str(ROOT / "models" / "tiny_qwen3")}, [{"model": "nowhere"}]),
    ("data.sampling_floor", 0.2, {}, [{"data.sampling": "variance"}]),
    ("data.leak_embedding_threshold", 0.5, {}, [{"data.leak_embedding": "os.path.join"}]),
    ("data.initial_tasks", 50, {"data.initial_file": "tasks.jsonl"}, [{}]),
    ("data.initial_tasks", 50, {"data.own_tasks": True}, [{}]),
    ("data.max_tasks", 200, {"strategy.name": "static"},
        [{}, {"strategy.name": "static", "data.initial_file": "f"},
         {"strategy.name": "static", "data.own_tasks": True}]),
    ("data.min_evolved_share", 0.25, {"strategy.name": "static"}, [{}, {"strategy.name": "random"}]),
    ("data.min_evolved_share", 0.25, {"strategy.name": "eva"}, [{}]),
    ("data.sampling", "variance", {"strategy.name": "sec"},
        [{}, {"strategy.name": "frontier", "strategy.odds": False}]),
    ("data.sampling", "variance", {"strategy.name": "frontier"}, [{"strategy.name": "eva"}]),
    ("data.retire_after", 3, {"strategy.name": "weakest"}, [{}, {"strategy.name": "frontier"}]),
    ("evolution.every", 5, {"strategy.name": "static"},
        [{}, {"strategy.name": "tests.support.strategies.memory"}]),
    ("evolution.async_steps", 2, {"strategy.name": "static"}, [{}]),
    ("evolution.freeze_last_steps", 5, {"strategy.name": "static"}, [{"strategy.name": "blame"}]),
    ("evolution.tasks", 5, {"strategy.name": "static"}, [{"strategy.name": "random"}]),
    ("evolution.contexts", 5, {"strategy.name": "random"}, [{}]),
    ("evolution.executions", 2, {"evolution.validate": False}, [{}]),
    ("learner.schedule", "cosine", {"learner.decay_steps": 50, "learner.final_rate": 1.0}, []),
    ("learner.decay_steps", 50, {"learner.schedule": "cosine", "learner.final_rate": 1.0}, []),
    ("learner.group_filter", True, {"learner.filter_keep": 1.0},
        [{}, {"learner.filter_keep": 1.0, "learner.skip_zero_variance_groups": False}]),
    ("learner.group_filter", True, {"learner.filter_warmup": 960},
        [{"learner.filter_warmup": 959}, {"learner.filter_warmup": 960, "learner.dynamic_sampling": 1}]),
    ("evaluation.num_rollouts", 8, {"evaluation.temperature": 0.0}, [{}]),
    ("evaluation.last_rollouts", 8, {"evaluation.temperature": 0.0}, [{}]),
    ("evaluation.balanced_candidates", 9, {}, [{"evaluation.balanced_tasks": 3}]),
    ("logging.trajectories_every", 3, {"logging.trajectories": 0}, [{}]),
    *((f"warm_start.{key}", value, {},
        [{"warm_start.steps": 21, "warm_start.eval_tasks": 2}]) for key, value in (
        ("source", "runs/one"), ("tasks", 9), ("batch", 3), ("learning_rate", 1e-4), ("held_out", 0.2),
        ("eval_every", 3), ("patience", 2), ("eval_tasks", 2), ("success_every", 3),
        ("checkpoint_every", 3))),
    ("warm_start.tasks", 9, {"warm_start.steps": 5, "warm_start.source": "runs/one"}, []),
    ("warm_start.eval_every", 9, {"warm_start.steps": 5, "warm_start.held_out": 0.0}, []),
    ("warm_start.patience", 9, {"warm_start.steps": 5, "warm_start.held_out": 0.0}, []),
    ("warm_start.success_every", 9, {"warm_start.steps": 5}, []),
    ("engine.sharded", True, {}, [{"mesh.data": 2}]),
    ("engine.cache_tokens", 4096, {"engine.name": "sglang"}, [{}]),
    ("engine.matmul_dtype", "bfloat16", {"engine.name": "sglang"}, [{}]),
    ("engine.attempts", 3, {}, [{"engine.name": "sglang"}]),
    ("engine.arguments", "--dp-size=2", {}, [{"engine.name": "sglang"}]),
    ("engine.servers", 2, {"engine.name": "sglang", "engine.url": "http://host:1"},
        [{"engine.name": "sglang"}]),
    ("engine.push_folder", "here", {"engine.name": "sglang", "engine.push": "distributed"},
        [{"engine.name": "sglang"}]),
    ("environment.toolsets", ("MathAPI",), {"environment.name": "tau2"},
        [{}, {"environment.name": "my.own"}]),
)  # fmt: skip


@pytest.mark.parametrize("key, value, without, acting", IDLE)
def test_a_setting_without_effect_is_told_and_one_with_effect_is_not(key, value, without, acting):
    (told,) = [n for n in idle.notes(override(TINY, {**without, key: value})) if key in n.partition(" = ")[0]]
    assert told.startswith(f"config.{key} = {value!r} has no effect: ") and told.endswith(".")
    assert key in idle.idle(override(TINY, without))
    for changes in acting:
        made = override(TINY, {**changes, key: value})
        assert key not in idle.idle(made)
        assert not [n for n in idle.notes(made) if n.startswith(f"config.{key} ")]


@pytest.mark.parametrize(
    "key, value, changes, acting",
    [
        ("evaluation.every", 60, {}, {"steps": 61}),
        ("checkpoint.every", 61, {}, {"steps": 61}),
        ("warm_start.success_every", 6, {"warm_start.steps": 5, "warm_start.eval_tasks": 2},
            {"warm_start.steps": 6, "warm_start.eval_tasks": 2}),
        ("warm_start.patience", 3, {"warm_start.steps": 30}, {"warm_start.steps": 31}),
        *((f"health.{key}", 1.5, {}, {f"health.{key}": 1.0}) for key in (
            "zero_variance_groups", "truncated", "malformed", "invalid")),
    ],
)  # fmt: skip
def test_a_value_without_effect_is_told_but_its_key_may_vary(key, value, changes, acting):
    told = lambda made: [n for n in idle.notes(made) if n.startswith(f"config.{key} = ")]
    made = override(TINY, {key: value, **changes})
    assert [n.startswith(f"config.{key} = {value!r} has no effect: ") for n in told(made)] == [True]
    assert key in idle.VALUES and key not in idle.idle(made)
    assert not told(override(made, acting))


def test_a_kl_term_without_a_pull_is_told():
    told = lambda **changes: [
        n for n in idle.notes(override(TINY, {f"learner.{k}": v for k, v in changes.items()})) if "pulls" in n
    ]
    (note,) = told(kl="k1", kl_coef=0.5)
    assert note.startswith("config.learner.kl_coef = 0.5 weighs noise: ") and note.endswith("use k2 or k3.")
    assert told(kl="k1", kl_coef=0.0) == told(kl="k2") == told(kl="k3") == told(kl="none") == []


def test_adapters_that_bfloat16_rounds_away_are_told():
    """16 / sqrt(16) * 1e-6 * 60 updates is 0.00024 of a number. Half a step of bfloat16 is 0.002 to 0.004."""

    def told(dtype="bfloat16", engine="float32", **changes):
        own = {"lora_rank": 16, "lora_alpha": 16.0, "learning_rate": 1e-6, "dtype": dtype, **changes}
        made = override(TINY, {"engine.dtype": engine, **{f"learner.{k}": v for k, v in own.items()}})
        return [n for n in idle.notes(made) if "adapters" in n]

    (note,) = told()
    assert (
        note.startswith("config.learner.learning_rate = 1e-06 changes ")
        and "learner.dtype (bfloat16) or" in note
    )
    assert told("float32", "bfloat16") and told(learning_rate=1e-5) and told(epochs=10)
    assert told("float32", "float32") == told(lora_rank=0) == told(learning_rate=2e-5) == []
    assert told(learning_rate=1e-5, epochs=2) == []


def test_a_warm_start_has_remarks_of_its_own():
    """16 / sqrt(16) * 1e-5 * 40 updates is 0.0016 of a number, and * 400 is 0.016."""
    own = {"learner.lora_rank": 16, "learner.lora_alpha": 16.0, "learner.dtype": "bfloat16"}

    def told(steps, rate, rl, **changes):
        made = {**own, "warm_start.steps": steps, "warm_start.learning_rate": rate, **changes}
        found = [n for n in idle.notes(override(TINY, made), rl=rl) if "adapters" in n]
        return [n.split(" = ")[0].removeprefix("config.") for n in found]

    # The rate of RL, 1e-6 here, drowns too, and is told where RL follows.
    slow = {"learner.learning_rate": 1e-6}
    assert told(40, 1e-5, True, **slow) == ["warm_start.learning_rate", "learner.learning_rate"]
    assert told(40, 1e-5, False, **slow) == ["warm_start.learning_rate"]
    assert told(400, 1e-5, False, **slow) == told(0, 1e-5, False, **slow) == []
    changes = {"learner.param_dtype": "bfloat16", "learner.learning_rate": 1e-3}
    for steps, rate in ((0, 1e-5), (10, 1e-4)):
        configs.check(
            override(TINY, {**changes, "warm_start.steps": steps, "warm_start.learning_rate": rate})
        )
    with pytest.raises(ValueError, match="float32 with config.warm_start.learning_rate = 1e-05: "):
        configs.check(override(TINY, {**changes, "warm_start.steps": 10, "warm_start.learning_rate": 1e-5}))


def test_a_warm_up_longer_than_the_run_is_told_and_the_rate_still_counts():
    told = lambda steps: [
        n
        for n in idle.notes(override(TINY, {"learner.warmup_steps": steps, "learner.learning_rate": 1e-4}))
        if "learning_rate" in n
    ]
    assert told(60) == [] and "the rate ends below config.learner.learning_rate" in told(61)[0]


def test_a_setting_of_two_environments_has_an_effect_in_both():
    shop = load_file(ROOT / "configs" / "mcp_tiny.py")
    told = lambda name: {
        n.split()[0].removeprefix("config.environment.")
        for n in idle.notes(override(shop, {"environment.name": name}))
        if n.startswith("config.environment.")
    }
    assert told("mcp") == set() and told("folder_tools") == {"command"}
    assert told("textworld") == set(keys.FAMILIES["mcp"])


def test_settings_of_explorers_that_have_no_effect():
    told = lambda config, **changes: [
        n.split()[0] for n in idle.notes(override(config, {f"explorer.{k}": v for k, v in changes.items()}))
    ]
    assert told(LLM, budget_money=5.0) == ["config.explorer.budget_money"]
    assert told(LLM, budget_money=5.0, price_in=1.0) == []
    assert told(LLM, offline=True, timeout=5.0) == ["config.explorer.timeout"]
    for config in (LLM, POLICY):
        rules = dict.fromkeys(configs.PARTS, "scripted")
        assert told(config, **rules) == [] and told(config, temperature=0.1) == []
        assert told(config, **rules, solve=2) == ["config.explorer.solve"]
        assert told(config, **rules, temperature=0.1) == ["config.explorer.temperature"]
        # The rules read no user's words and have no opinion, and the other parts have neither setting.
        others = {part: "scripted" for part in configs.PARTS if part not in ("explorer", "validator")}
        assert told(config, **others, solve=2, calibration=9) == []
        assert told(config, explorer="scripted", solve=2) == ["config.explorer.solve"]
        assert told(config, validator="scripted", calibration=9) == ["config.explorer.calibration"]
        assert told(config, validator="scripted", solve=2, calibration=0) == []


def test_every_rule_is_tried_here_and_repeats_no_default():
    tried = {key for key, *_ in IDLE}
    for rule in idle.RULES:
        for key, silent in rule.keys.items():
            assert key in tried or key.split(".")[0] in ("engine", "explorer", "environment", "signals"), key
            default = keys.REQUIRED.get(key)
            assert not (silent and default) or default.default not in silent, key


def test_a_share_of_new_tasks_acts_where_a_fork_has_some():
    made = override(TINY, {"strategy.name": "static", "data.min_evolved_share": 0.25})
    assert idle.notes(made) and not idle.notes(made, fresh=False)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_no_config_file_has_a_setting_without_effect(path):
    config = load_file(path)
    configs.check_evolution(config)
    # The test's settings are frozen; another arm of it reads this one.
    frozen = ["config.evolution.contexts"] if path.stem == "bfcl_headroom_test" else []
    assert [note.split()[0] for note in idle.notes(config)] == frozen
    if path.stem not in ("bfcl_headroom", "bfcl_headroom_test"):  # for either engine
        assert not idle.notes(load_file(path, "engine=native"))


@pytest.mark.parametrize("name", OURS)
def test_our_strategies_name_keys_that_there_are(name):
    told = configs.reads(override(TINY, {"strategy.name": name}))
    assert told is not None and told <= set(SHARED) <= set(keys.names(TINY))


def test_a_run_says_it_and_keeps_it(tmp_path, capsys):
    """The notes come at the start, before the run looks for a model in the empty folder."""
    config = override(TINY, {"learner.tis_cap": 2.0, "learner.clip_high": 0.28, "model": str(tmp_path)})
    with pytest.raises(ValueError, match="config.json"):
        train(config, tmp_path / "run")
    assert "config.learner.clip_high = 0.28 has no effect: " in capsys.readouterr().err


@pytest.mark.parametrize(
    "arms, grid, given, why",
    [
        (["static"], ["evolution.every=5,10"], {},
            "config.evolution.every has no effect in any arm .the strategy static does"),
        # The arm `static` is what each setting is compared with
        (["static", "coevolve"], ["evolution.every=5,10"], {}, ""),
        (["static", "random"], ["evolution.contexts=5,10"], {},
            "config.evolution.contexts has no effect in any arm"),
        (["coevolve"], ["learner.clip_high=0.2,0.28", "learner.tis_cap=0,2"], {},
            "clip_high has no effect .* at learner.tis_cap=2"),
        (["coevolve"], ["learner.clip_high=0.2,0.28"], {}, ""),
        (["static", "prioritised"], ["data.sampling_floor=0.1,0.2"], {}, ""),
        (["coevolve"], [], {"learner.lora_alpha": 8.0},
            "config.learner.lora_alpha has no effect in any arm .config.learner.lora"),
        (["coevolve", "static"], ["evolution.every=10,60"], {},
            "coevolve.evolution.every=60 cannot run: config.steps is 60"),
        (["static"], ["steps=5"], {}, ""),  # no arm has the config's own strategy
        (["static", "random"], ["steps=5"], {}, "random.steps=5 cannot run: config.steps is 5"),
        *((["static"], [f"{key}={values}"], {}, f"config.{key} only serves or records a run.* --set")
            for key, values in (("logging.trajectories", "0,4"), ("checkpoint.every", "1,4"),
                ("health.patience", "1,2"), ("environment.workers", "1,4"), ("engine.attempts", "1,2"))),
        (["static"], [], {"logging.trajectories": 4}, ""),  # one value for all cells
        (["static", "oracle"], [], {}, "oracle cannot run: .*config.testbed.weak_tools names no tools"),
    ],
)  # fmt: skip
def test_a_comparison_of_equal_runs_is_refused(arms, grid, given, why):
    config = override(TINY, given)
    cells = plan.cells(arms, [0, 1], variations.grid(config, grid))
    if not why:
        return plan.check_configs(config, cells, given)
    with pytest.raises(ValueError, match=why):
        plan.check_configs(config, cells, given)


# Sameness of runs


def test_what_servers_are_told_is_part_of_the_digest():
    told = override(TINY, {"engine.arguments": "--quantization fp8"})
    assert configs.digest(told) != configs.digest(TINY)
    assert configs.digest(override(TINY, {"engine.url": "http://elsewhere"})) == configs.digest(TINY)


def test_a_message_of_an_evaluation_fits_its_conversation():
    configs.check(override(TINY, {"evaluation.max_length": 65}))
    for short in (
        {"evaluation.max_length": 64},  # the rollouts' 64 tokens of a message
        {"evaluation.max_new_tokens": 512},  # the rollouts' 512 tokens of a conversation
        {"evaluation.max_length": 100, "evaluation.max_new_tokens": 100},
    ):
        with pytest.raises(ValueError, match="config.evaluation.max_length is .* above config.evaluation.ma"):
            configs.check(override(TINY, short))


def test_the_threshold_of_features_is_never_off_and_a_section_is_no_none():
    for bad in (0.0, -1.0, 2.0):
        with pytest.raises(ValueError, match="config.data.leak_threshold is"):
            configs.check(override(TINY, {"data.leak_threshold": bad}))
    broken = ConfigDict(TINY.to_dict())
    with broken.ignore_type():
        broken.mesh = None
    with pytest.raises(ValueError, match="config.mesh is None: it must be a section"):
        configs.check(broken)


# Keys and their names


def test_every_key_is_specified_once_and_a_default_is_one_of_its_values():
    made = configs.defaults()
    own = {f"{part}.{name}" for part in ("strategy", "explorer") for name in made[part]}
    assert set(keys.names(made)) - own <= keys.REQUIRED.keys()
    configs.check(override(made, {"model": "somewhere"}))
    for name, key in keys.REQUIRED.items():
        assert kinds_of(key), name
        assert name.startswith(("strategy.", "explorer.")) or value(made, name) == key.default


def kinds_of(key: kinds.Key) -> str:
    return key.kind or kinds.kind_of(key.default)


def test_a_key_that_a_config_file_invents_or_forgets_is_refused_by_name():
    with pytest.raises(
        ValueError, match="no key 'learner.lerning_rate' .did you mean 'learner.learning_rate'"
    ):
        configs.check(with_any(TINY, "learner.lerning_rate", 1.0))
    with pytest.raises(ValueError, match="no key 'reward.scale'"):
        configs.check(ConfigDict({**TINY.to_dict(), "reward": {"scale": 1.0}}))
    made = TINY.to_dict()
    del made["rollout"]["group_size"]
    with pytest.raises(ValueError, match="lacks the key rollout.group_size: start a config file from"):
        configs.check(ConfigDict(made))
    own = override(TINY, {"environment.name": "my.own"}).to_dict()
    own["environment"]["shelves"] = 3  # a user's own family has settings of its own
    configs.check(ConfigDict(own))


def test_a_setting_that_a_strategy_or_explorer_of_ours_does_not_have_is_refused():
    for made, key, told in (
        (TINY, "strategy.prob", "no setting of the strategy coevolve .did you mean 'probe'"),
        (LLM, "explorer.budget_token", "no setting of the explorer llm .did you mean 'budget_tokens'"),
        (TINY, "explorer.budget_tokens", "no setting of the explorer scripted: leave it out"),
    ):
        with pytest.raises(ValueError, match=f"config.{key} is {told}"):
            configs.check(with_any(made, key, 8))
    left_over = TINY.copy_and_resolve_references()
    left_over.strategy.name = "static"
    with pytest.raises(ValueError, match="config.strategy.probe is no setting of the strategy static: leave"):
        configs.check(left_over)
    left_over.strategy.name = "tests.support.strategies.memory"  # of somebody else
    configs.check(left_over)


@pytest.mark.parametrize(
    "changes, told",
    [
        ({"strategy.probe": 1}, "strategy.probe is 1: it must be 0, or at least 2: one rollout cannot both"),
        ({"learner.adam_b1": 1.0}, "learner.adam_b1 is 1.0: it must be below 1"),
        ({"learner.adam_b1": -0.5}, "learner.adam_b1 is -0.5: it must be at least 0"),
        ({"data.max_calls": -5}, "data.max_calls is -5: it must be at least 1"),
        ({"rollout.max_length": -600}, "rollout.max_length is -600: it must be at least 1"),
        ({"environment.worker_memory": 0.0}, "environment.worker_memory is 0.0: it must be above 0"),
        ({"learner.pack_length": 0}, "learner.pack_length is 0: it must be at least 1"),
    ],
)
def test_the_key_that_is_wrong_is_the_one_that_is_named(changes, told):
    with pytest.raises(ValueError, match=f"config.{told}"):
        configs.check(override(TINY, changes))


def test_the_second_moment_may_move_faster_than_the_first_down_to_its_square():
    at = lambda b2: override(TINY, {"learner.adam_b1": 0.9, "learner.adam_b2": b2})
    configs.check(at(0.82))
    with pytest.raises(ValueError, match="config.learner.adam_b2 .*square"):
        configs.check(at(0.81))


def test_an_evolution_may_take_all_steps_until_the_next_one():
    at = lambda more: override(TINY, {"evolution.async_steps": TINY.evolution.every + more})
    configs.check(at(0))
    with pytest.raises(
        ValueError, match="config.evolution.async_steps .*between 0 and config.evolution.every"
    ):
        configs.check(at(1))


@pytest.mark.parametrize("name", ["slea_rl", "sage", "evolver"])
def test_hints_that_follow_from_a_batch_are_given_in_the_next_one(name):
    config = load_file(ROOT / "configs" / "bfcl_tiny.py", f"strategy={name}")
    told = "config.rollout.max_staleness is 1: it must be 0: strategy .* gives hints by"
    with pytest.raises(ValueError, match=told):
        configs.check(override(config, {"rollout.max_staleness": 1}))


def test_a_password_in_the_address_of_servers_is_refused_and_not_said():
    with pytest.raises(ValueError, match="config.engine.url holds a user or password") as told:
        configs.check(override(TINY, {"engine.name": "sglang", "engine.url": "http://me:secret@host:1"}))
    assert "secret" not in str(told.value)
    asked = ConfigDict({**TINY.to_dict(), "harness_model": configs.harness_model().to_dict()})
    asked.harness_model.base_url = "http://me:secret@host:1/v1"
    with pytest.raises(ValueError, match="config.harness_model.base_url holds .* put the key into") as told:
        configs.check(asked)
    assert "secret" not in str(told.value)


@pytest.mark.parametrize("name", ["agent0", "dr_zero", "frontier", "infuser", "panel", "seif", "socratic"])
def test_a_method_that_cannot_do_without_probes_is_refused_by_what_can_be_changed(name):
    config = load_file(ROOT / "configs" / "bfcl_tiny.py", f"strategy={name}")
    with pytest.raises(ValueError, match="^config.evolution.async_steps is 2: it must be 0: strategy"):
        configs.check(override(config, {"evolution.async_steps": 2}))


def test_a_probe_of_one_rollout_is_for_strategies_that_do_not_ask_for_both_outcomes():
    configs.check(override(TINY, {"strategy.name": "panel", "strategy.probe": 1}))


def test_a_training_set_without_room_does_not_evolve():
    full = {"data.max_tasks": TINY.data.initial_tasks}
    with pytest.raises(ValueError, match=r"data.max_tasks is 100: it must be 0, or above .*_tasks \(100\)"):
        configs.check_evolution(override(TINY, full))
    for fine in (
        {"data.max_tasks": 101},
        {**full, "strategy.name": "static"},
        {**full, "data.own_tasks": True},
    ):
        configs.check_evolution(override(TINY, fine))


def test_a_warm_start_of_a_testbed_has_its_tasks_from_a_file():
    testbed = {"weak_tools": ("ls",), "least": 0, "most": 1, "candidates": 100}
    config = configs.override(ConfigDict({**TINY.to_dict(), "testbed": testbed}), {"warm_start.steps": 5})
    with pytest.raises(ValueError, match="config.warm_start.source is '': it must be a file of tasks where"):
        configs.check(config)
    configs.check(configs.override(config, {"warm_start.source": "runs/one"}))
    configs.check(configs.override(config, {"warm_start.steps": 0}))
    configs.check(configs.override(TINY, {"warm_start.steps": 5}))


def test_a_testbed_has_all_its_keys_and_they_fit_together():
    def check(**values):
        configs.check(ConfigDict({**TINY.to_dict(), "testbed": {"weak_tools": ("ls",), **values}}))

    fine = {"least": 0, "most": 1, "candidates": 100}
    check(**fine)
    for values, told in (
        ({"least": 1, "most": 1}, "lacks the key testbed.candidates: its section testbed has all of weak_to"),
        ({**fine, "least": 2}, "config.testbed.most is 1: it must be at least config.testbed.least .2."),
        ({**fine, "least": -1}, "config.testbed.least is -1: it must be at least 0"),
        ({**fine, "candidates": 99}, "config.testbed.candidates is 99: .* config.data.initial_tasks .100."),
    ):
        with pytest.raises(ValueError, match=told):
            check(**values)


def test_a_key_that_this_config_lacks_is_told_from_one_that_no_config_has():
    for key, told in (
        ("environment.domains", "config.environment.domains is a setting of the environment tau2, not"),
        ("harness.versions", "config.harness.versions needs a section config.harness, which this config lac"),
    ):
        with pytest.raises(ValueError, match=told):
            override(TINY, {key: 3})


def test_a_run_without_a_newer_key_is_read_with_its_default_and_does_not_go_on(tmp_path):
    older = TINY.to_dict()
    del older["data"]["leak_call_threshold"], older["engine"]["sleep"]
    (tmp_path / "config.json").write_text(configs.to_json(ConfigDict(older)))
    (tmp_path / "metrics.jsonl").touch()
    found = configs.of_run(tmp_path)
    assert found.data.leak_call_threshold == 0.88 and found.engine.sleep is False
    configs.check(found)
    with pytest.raises(ValueError, match="config.data.leak_call_threshold is missing there and 0.88 here"):
        claim(tmp_path, found)


def test_a_run_that_differs_only_in_how_it_is_served_goes_on(tmp_path):
    older = TINY.to_dict()
    del older["engine"]["sleep"]
    (tmp_path / "config.json").write_text(configs.to_json(ConfigDict(older)))
    (tmp_path / "metrics.jsonl").touch()
    claim(tmp_path, override(TINY, {"engine.url": "http://elsewhere"}))


def test_a_run_with_a_name_that_no_key_has_is_refused(tmp_path):
    (tmp_path / "config.json").write_text(configs.to_json(with_any(TINY, "data.leak_thresold", 0.5)))
    for look in (configs.of_run, lambda workdir: claim(workdir, TINY)):
        with pytest.raises(
            ValueError, match="config.json is of another version. The config has no key 'data.lea"
        ):
            look(tmp_path)


def test_a_config_argument_is_what_it_says():
    for text, value in (("True", True), ("true", True), ("False", False), ("FALSE", False)):
        assert configs.parse_arg(f"fast={text}", fast=not value).fast is value
    for text in ("0", "no", ""):
        with pytest.raises(ValueError, match=f"Config argument fast='{text}' is not of type bool"):
            configs.parse_arg(f"fast={text}", fast=True)
    with pytest.raises(ValueError, match="Config argument 'seed' has no value: write seed=VALUE"):
        configs.parse_arg("seed", seed=0)


@pytest.mark.parametrize("old, new", keys.RENAMED.items(), ids=keys.RENAMED)
def test_an_old_name_is_refused_with_the_new_one(old, new, tmp_path):
    told = f"config.{old} is called config.{new} now"
    assert new in keys.REQUIRED and old not in keys.REQUIRED
    with pytest.raises(ValueError, match=told):
        override(TINY, {old: 1})
    with pytest.raises(ValueError, match=told):
        variations.parse_value(TINY, old, "1")
    with pytest.raises(ValueError, match=told):
        configs.check(with_any(TINY, old, 1))
    with pytest.raises(SystemExit, match=told):
        configs.parse_flags(["main.py", f"--config.{old}=1"])
    (tmp_path / "config.json").write_text(configs.to_json(with_any(TINY, old, 1)))
    with pytest.raises(ValueError, match=f"config.json is of another version. {told}"):
        configs.of_run(tmp_path)


def test_a_published_config_is_read_with_todays_names():
    published = with_any(TINY, "learner.kl_coef", 0.5).to_dict()
    for old, new in keys.RENAMED.items():
        (section, name), (there, called) = old.split("."), new.split(".")
        published[section][name] = published[there].pop(called)
    assert configs.renamed(published)["learner"]["kl_coef"] == 0.5
    assert set(keys.names(configs.renamed(published))) == set(keys.names(TINY))


def test_the_first_difference_is_told_whatever_the_order_of_the_keys():
    theirs, ours = {"a": {"x": 1, "y": 2}, "b": {"z": 1}}, {"b": {"z": 2}, "a": {"y": 2, "x": 1}}
    assert configs.difference(theirs, ours) == "config.b.z is 1 there and 2 here"
    assert configs.difference({"a": {}}, ours) == "config.a.x is missing there and 1 here"
    assert configs.difference({}, {"a": {"x": 1}}) == "config.a is missing there and {'x': 1} here"
    assert configs.difference(ours, dict(reversed(ours.items()))) == "equal"
