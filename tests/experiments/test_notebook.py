"""The notebook, executed whole in a real kernel with small parameters, and the output of its cells.

Once in this environment, and once as on Colab: by Python 3.12, from the wheel that its first cell installs.
"""

import base64
import json
import re
from pathlib import Path

import nbformat
import pytest

from coevolve_jax import tfds_tasks
from coevolve_jax.comparison import differences, results
from coevolve_jax.config import check, load_file, override
from coevolve_jax.planning import plan
from coevolve_jax.types import Task
from tests.support import notebooks
from tests.support.notebooks import printed, shown
from tests.support.paths import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.nightly]

SMALL = {
    "CONFIG": "bfcl_tiny",
    "ARMS": ["random", "coevolve"],
    "SEEDS": 1,
    "JOBS": 2,
    "SIZES": {
        "steps": 2,
        "data.initial_tasks": 6,
        # Shapes of tests/loop/test_train.py: its compiled programs serve here too
        "rollout.tasks_per_step": 2,
        "rollout.group_size": 4,
        "evolution.every": 1,
        "evolution.freeze_last_steps": 1,
        "evolution.tasks": 2,
        "evolution.contexts": 4,
        "signals.rare_percent": 100.0,  # any action gives a signal
        "evaluation.tasks": 4,
        "evaluation.num_rollouts": 1,
        "environment.workers": 1,
        "engine.max_concurrency": 8,
        "learner.rows_per_microbatch": 2,
    },
}


def notebook():
    return notebooks.read("small_ablation.ipynb")


@pytest.fixture(scope="module", params=["here", "colab"])
def executed(request, tmp_path_factory, environ):
    """Its cells by id, and the folder of its comparison."""
    folder = tmp_path_factory.mktemp("notebook")
    workdir = folder / "ablation"
    parameters = {**SMALL, "WORKDIR": workdir}
    on_colab = request.param == "colab"
    return notebooks.executed("small_ablation.ipynb", parameters, folder, environ, on_colab), workdir


def lines_of(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_the_table_has_the_numbers_of_the_comparison(executed):
    cells, workdir = executed
    comparison = json.loads((workdir / "comparison.json").read_text())
    (text,) = shown(cells["differences"], "text/markdown")
    rows = [
        [part.strip() for part in line.strip("|").split("|")] for line in text.splitlines() if line[:1] == "|"
    ]
    assert [arm["arm"] for arm in comparison["arms"]] == SMALL["ARMS"]
    for arm in comparison["arms"]:
        (value,) = arm["values"].values()
        assert [arm["arm"], f"{100 * arm['mean']:.1f}", f"{100 * value:.1f}"] in rows
    (difference,) = comparison["planned"]
    assert ["coevolve - random", f"{100 * difference['difference']:+.1f}"] in rows
    assert "Without an interval over seeds nothing follows" in text
    assert all(f"* {note}" in text for note in comparison["notes"])


def test_the_curves_are_a_picture_and_every_step_was_counted(executed):
    cells, workdir = executed
    (picture,) = shown(cells["curves"], "image/png")
    data = base64.b64decode(picture)
    assert data.startswith(b"\x89PNG\r\n") and len(data) > 10_000
    counted = "".join(out.text for out in cells["run"].outputs if out.output_type == "stream")
    assert "4/4" in counted  # two arms, two steps
    assert len(list(workdir.glob("cells/*/seed_0/summary.json"))) == 2


def test_a_lineage_is_that_of_a_task_of_the_run(executed):
    cells, workdir = executed
    text = printed(cells["lineage"])
    tasks = {task["id"]: task for task in lines_of(workdir / "cells/coevolve/seed_0/tasks.jsonl")}
    born = [task for task in tasks.values() if task["lineage"]["kind"] == "signal"]
    assert text.startswith(f"{len(tasks)} tasks, {len(born)} of them new.") and born
    said = dict(re.findall(r"^([A-Z ]{8}) (.*)$", text, re.MULTILINE))
    task = tasks[said["NEW TASK"]]
    lineage, record = task["lineage"], task["record"]
    assert said["SIGNAL  "].startswith(f"{lineage['signal']}, on the parent's rollouts of step ")
    steps = {int(step) for step in said["SIGNAL  "].rpartition("step ")[2].split(", ")}
    signals = lines_of(workdir / "cells/coevolve/seed_0/signals.jsonl")
    assert steps <= {s["step"] + 1 for s in signals if s["task_id"] == lineage["parent"]}
    assert said["PARENT  "] == lineage["parent"] and said["FOCUS   "] == ", ".join(lineage["focus"])
    assert said["VISITS  "].split()[0] == str(record["trained"])
    assert str(record["first_score"]) in said["SCORES  "] and str(record["last_score"]) in said["SCORES  "]
    for turn in task["turns"]:
        assert turn["query"] in text and all(call["name"] in text for call in turn["calls"])


def test_the_report_is_linked_and_the_training_set_comes_back(executed):
    cells, workdir = executed
    (link,) = shown(cells["report"], "text/html")
    target = re.search(r'href="([^"]+)"', link)[1]
    assert target == "ablation/report.html"
    assert (workdir / "report.html").stat().st_size > 10_000
    tasks = lines_of(workdir / "cells/coevolve/seed_0/tasks.jsonl")
    assert printed(cells["tfds"]).startswith(f"{len(tasks)} tasks in ")
    read = tfds_tasks.read(workdir / "tfds")
    assert [tfds_tasks.task(row) for row in read] == [Task.from_json(task) for task in tasks]
    told = dict(re.findall(r"^  (\w+) +(\d+)", printed(cells["tfds"]), re.MULTILINE))
    assert sum(map(int, told.values())) == len(tasks) and told["initial"] == "6"


@pytest.mark.parametrize(
    "seeds, needed, nothing", [(2, (3, 3), True), (4, (3, 3), True), (6, (3, 5), False), (6, (3, 98), True)]
)
def test_few_seeds_are_said_to_prove_nothing(tmp_path, seeds, needed, nothing):
    """The table of differences, from the published comparison with other numbers of seeds."""
    comparison = json.loads((ROOT / "docs" / "notes" / "headroom" / "first" / "comparison.json").read_text())
    comparison["planned"] = comparison["planned"][:2]
    for row, number in zip(comparison["planned"], needed, strict=True):
        row |= {"n": seeds, "seeds_for_effect": number}
    (tmp_path / "comparison.json").write_text(json.dumps(comparison))
    (cell,) = [cell for cell in notebook().cells if cell.id == "differences"]
    texts = []
    scope = {
        "json": json,
        "results": results,
        "Path": Path,
        "WORKDIR": tmp_path,
        "EFFECT": differences.EFFECT,
    }
    exec(cell.source, scope | {"Markdown": str, "display": texts.append})
    assert (f"**{seeds} seeds prove nothing here**" in texts[0]) == nothing
    assert f"takes {min(needed)} to {max(needed)} seeds." in texts[0]
    assert f"| oracle - random | +1.8 | -24.2 to +27.8 | 0.79 | {needed[0]} |" in texts[0]


@pytest.mark.parametrize("name", [path.name for path in sorted(notebooks.FOLDER.glob("*.ipynb"))])
def test_it_is_committed_without_outputs(name):
    made = notebooks.read(name)
    nbformat.validate(made)
    for cell in made.cells:
        assert cell.id and (cell.cell_type != "code" or (not cell.outputs and cell.execution_count is None))


def test_the_settings_for_a_gpu_are_configs_that_can_be_run():
    """The cells cannot run here: the test checks their configs, and that they fit the stated GPU."""
    (cell,) = [cell for cell in notebook().cells if cell.id == "gpu-settings"]
    scope = {}
    exec(cell.source, scope)
    config = load_file(scope["GPU_CONFIG"])
    check(config)
    for sizes in (scope["L4"], scope["T4"]):
        check(override(config, sizes))
    model = plan.load_model(config.model)
    mesh = plan.make_mesh(plan.TOPOLOGIES["gpu-1x24"], config.mesh)
    need = plan.plan(model, config.learner, mesh, rows=1, length=config.learner.pack_length)
    numbers = 2 * model.num_hidden_layers * model.num_key_value_heads * model.head_dim
    assert 2 * numbers == 12_288
    cache = 2 * numbers * config.engine.max_concurrency * config.rollout.max_length
    assert need.total + cache <= plan.USABLE * plan.TOPOLOGIES["gpu-1x24"].memory
    assert need.total + cache > plan.USABLE * plan.TOPOLOGIES["gpu-1x16"].memory  # too much without adapters
    (text,) = [cell.source for cell in notebook().cells if cell.id == "gpu-text"]
    assert f"{need.total / plan.GB:.1f} GB" in text and f"{cache / plan.GB:.1f} GB" in text


def test_the_settings_for_smollm2_are_a_config_that_can_be_run_and_its_memory_is_counted():
    (cell,) = [cell for cell in notebook().cells if cell.id == "smollm2-settings"]
    scope = {}
    exec(cell.source, scope)
    config = load_file(scope["SMOLLM2_CONFIG"])
    check(config)
    assert config.learner.dtype == config.engine.dtype == "float32" and not config.learner.lora_rank
    width, layers, kv_heads, vocabulary, hidden = 576, 30, 3, 49152, 1536
    layer = width * (width + 2 * kv_heads * 64 + width) + 3 * width * hidden + 2 * width
    parameters = layers * layer + vocabulary * width + width
    cache = 2 * layers * kv_heads * 64 * 4
    size = cache * config.engine.max_concurrency * config.rollout.max_length
    (text,) = [cell.source for cell in notebook().cells if cell.id == "smollm2-text"]
    assert f"take {4 * 4 * parameters / 1e9:.1f} GB" in text
    assert f"{size / 1e9:.1f} GB ({cache:,} bytes per token for {config.engine.max_concurrency} conv" in text
