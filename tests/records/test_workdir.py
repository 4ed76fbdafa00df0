"""A fork says what it goes on from."""

import json

from coevolve_jax import config as configs
from coevolve_jax.analysis.loading import load_run
from coevolve_jax.records.workdir import fork
from tests.support.paths import ROOT

CONFIG = configs.load_file(ROOT / "configs" / "bfcl_tiny.py")


def test_a_fork_tells_the_run_the_step_and_the_strategy_that_it_goes_on_from(tmp_path):
    theirs = configs.override(CONFIG, {"strategy.name": "static"})
    folder = tmp_path / "run" / "checkpoints" / "step_00000010"
    folder.mkdir(parents=True)
    state = json.dumps({"state": {"digest": configs.digest(theirs)}})
    (folder / "manifest.json").write_text(json.dumps({"files": {}, "state": state}))
    (tmp_path / "run" / "config.json").write_text(configs.to_json(theirs))
    fork(tmp_path / "run", 10, tmp_path / "fork", {"strategy.name": "random"})
    told = {"step": 10, "config_digest": configs.digest(theirs), "strategy": "static"}
    assert json.loads((tmp_path / "fork" / "forked.json").read_text()) == {
        "run": str(tmp_path / "run"),
        **told,
    }
    assert load_run(tmp_path / "fork").forked["step"] == 10 and load_run(tmp_path / "run").forked == {}
