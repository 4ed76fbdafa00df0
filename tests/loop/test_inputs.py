"""A run names the files that its numbers depend on by digests of their content."""

import shutil

import pytest
from huggingface_hub import _local_folder

from coevolve_jax import config as configs
from coevolve_jax.loop import inputs
from tests.support.method_cases import TINY
from tests.support.paths import ROOT


def test_another_content_or_name_is_another_digest(tmp_path):
    found = set()
    for name, text in (("a", "1"), ("b", "1"), ("a", "2"), ("a", "1 ")):
        folder = tmp_path / str(len(found)) / "deep"
        folder.mkdir(parents=True)
        (folder / name).write_text(text)
        found.add(inputs.digest(folder.parent))
    assert len(found) == 4 and all(len(digest) == 16 for digest in found)


@pytest.fixture
def model(tmp_path):
    """A copy of a tiny policy's folder, of one's own."""
    return shutil.copytree(
        ROOT / "models" / "tiny_qwen3", tmp_path / ".hub" / "model", copy_function=shutil.copyfile
    )


def test_a_download_of_the_same_model_has_the_same_digest(model):
    config = configs.override(TINY, {"model": str(model)})
    before = inputs.digests(config)
    assert before["config.model"] == inputs.digest(model)  # a folder without anything else keeps its digest
    _local_folder.write_download_metadata(model, "model.safetensors", "0" * 40, "etag")
    (model / "README.md").write_text("A model.")
    (model / ".ipynb_checkpoints").mkdir()
    (model / ".ipynb_checkpoints" / "config.json").write_text("{}")
    assert inputs.digests(config) == before
    for name in ("model.safetensors", "chat_template.jinja", "tokenizer.json", "config.json"):
        content = (model / name).read_bytes()
        (model / name).write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        assert inputs.digests(config) != before
        (model / name).write_bytes(content)
    (model / "generation_config.json").write_text("{}")
    assert inputs.digests(config) != before


def test_a_run_goes_on_whose_digest_is_that_of_all_files_of_the_models_folder(model):
    (model / "README.md").write_text("A model.")
    config = configs.override(TINY, {"model": str(model)})
    old = {"config.model": inputs.digest(model)}
    assert inputs.digests(config) != old
    assert inputs.begun_with(config, inputs.digests(config), old) == old
    (model / "chat_template.jinja").write_text("another")
    with pytest.raises(ValueError, match=r"\(config.model\) has another content"):
        inputs.begun_with(config, inputs.digests(config), old)


def test_of_a_very_large_file_its_size_and_both_ends_count(tmp_path, monkeypatch):
    monkeypatch.setattr(inputs, "WHOLE", 9)
    monkeypatch.setattr(inputs, "END", 2)
    texts = [
        "aab" + "x" * 9 + "baa",
        "aab" + "y" * 9 + "baa",
        "cab" + "x" * 9 + "baa",
        "aab" + "x" * 10 + "baa",
    ]
    found = []
    for text in texts:
        (tmp_path / "file").write_text(text)
        found.append(inputs.digest(tmp_path / "file"))
    assert found[0] == found[1] and len(set(found)) == 3


def test_the_tools_the_template_and_the_model_are_named_where_they_are_here(tmp_path):
    (tmp_path / "mine.py").write_text("def look() -> int:\n    '''Looks.'''\n    return 1\n")
    (tmp_path / "world").mkdir()
    own = {"model": str(ROOT / "models" / "tiny_qwen3")}
    tools = configs.override(configs.load_file("tools", f"source={tmp_path / 'mine.py'}"), own)
    before = inputs.digests(tools)
    assert before.keys() == {"config.model", "config.environment.source"}
    (tmp_path / "mine.py").write_text("def look() -> int:\n    '''Looks.'''\n    return 2\n")
    after = inputs.digests(tools)
    assert [key for key in before if before[key] != after[key]] == ["config.environment.source"]
    assert inputs.digests(configs.override(TINY, {"model": "nobody/here"})) == {}


def test_a_run_goes_on_with_what_it_began_with_and_needs_the_file_of_its_first_tasks_no_more(tmp_path):
    (tmp_path / "mine.py").write_text("def look() -> int:\n    '''Looks.'''\n    return 1\n")
    (tmp_path / "tasks.jsonl").write_text("")
    changes = {"data.initial_file": str(tmp_path / "tasks.jsonl"), "model": "nobody/here"}
    config = configs.override(configs.load_file("tools", f"source={tmp_path / 'mine.py'}"), changes)
    today = lambda recorded: inputs.begun_with(config, inputs.digests(config), recorded)
    first = today({})
    assert first == inputs.digests(config) and len(first) == 2
    (tmp_path / "tasks.jsonl").write_text("other ones")
    assert today(first) == first != inputs.digests(config)
    (tmp_path / "tasks.jsonl").unlink()
    assert today(first) == first
    (tmp_path / "mine.py").write_text("def look() -> int:\n    '''Looks.'''\n    return 2\n")
    with pytest.raises(ValueError, match=r"mine.py \(config.environment.source\) has another content than"):
        today(first)


METHOD = {
    "mine/way.py": "from coevolve_jax.strategies.static import make as make",
    "mine/look/__init__.py": "from coevolve_jax.explorers.scripted import make as make",
    "mine/look/words.py": "",
    "mine/losses.py": "def flat(tokens, config):\n    return tokens.ratio, tokens.mask",
    "mine/notes.txt": "no code",
}


def test_the_modules_of_a_method_of_ones_own_are_named_and_are_not_changed_half_way(tmp_path, monkeypatch):
    for name, text in METHOD.items():
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / name).write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    changes = {"model": "nobody/here", "strategy.name": "mine.way", "explorer.name": "mine.look"}
    config = configs.override(TINY, {**changes, "learner.surrogate": "mine.losses.flat"})
    of = {
        "mine/way.py": "config.strategy.name",
        "mine/look/__init__.py": "config.explorer.name",
        "mine/look/words.py": "config.explorer.name",
        "mine/losses.py": "config.learner.surrogate",
        "mine/notes.txt": None,
    }
    began = inputs.digests(config)
    assert set(began) == set(of.values()) - {None}
    for name, key in of.items():
        (tmp_path / name).write_text(f"{METHOD[name]}  # another one")
        found = inputs.digests(config)
        assert [k for k in began if found[k] != began[k]] == ([key] if key else [])
        if key:
            with pytest.raises(ValueError, match=rf"\({key}\) has another content than when this run began"):
                inputs.begun_with(config, found, began)
        else:
            assert inputs.begun_with(config, found, began) == began
        (tmp_path / name).write_text(METHOD[name])
    assert inputs.begun_with(config, began, {}) == began  # a run from before they were named
    assert inputs.digests(configs.override(TINY, {"model": "nobody/here"})) == {}  # our own are not


@pytest.mark.parametrize("there", [True, False])
def test_a_template_is_named_where_it_is(tmp_path, there):
    server = configs.load_file("mcp_tiny")
    server.environment.template = str(tmp_path if there else tmp_path / "nowhere")
    (tmp_path / "stock.json").write_text("{}")
    assert ("config.environment.template" in inputs.digests(server)) == there
