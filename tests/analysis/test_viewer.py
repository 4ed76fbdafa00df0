"""The report in a real browser: views draw, links and keys work, runs are followed, no foreign code runs."""

import contextlib
import json
import re
import shutil
import threading
import urllib.error
import urllib.parse
import urllib.request

import pytest

from coevolve_jax.analysis import live, page, report
from coevolve_jax.comparison.plan import Cell
from tests.support.browsing import PATIENCE, PHONE, address, browser, needs_browser, visit  # noqa: F401
from tests.support.report_cases import fake_comparison, fake_with_queries, fake_workdir, poisoned

playwright = pytest.importorskip(
    "playwright.sync_api", reason="playwright drives the report: make test installs it"
)
expect = playwright.expect
expect.set_options(timeout=PATIENCE)
pytestmark = needs_browser
EVIL = '"><img src=x onerror="hacked=1;alert(1)"><script>hacked=1;alert(2)</script><svg onload=alert(3)>'


@pytest.fixture(scope="module")
def workdir(tmp_path_factory):
    path = fake_workdir(tmp_path_factory.mktemp("run") / "run")
    report.write_report(path)
    return path


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def where(found):
    return dict(part.split("=") for part in found.url.partition("#")[2].split("&"))


def pixels(found, selector):
    """Counts the painted pixels of a canvas."""
    return found.eval_on_selector(
        selector,
        "c => c.getContext('2d').getImageData(0, 0, c.width, c.height).data.filter((x, i) => i % 4 === 3 && "
        "x).length",
    )


def test_every_panel_of_a_finished_run_is_drawn(visit, workdir):
    found = visit(address(workdir))
    titles = found.locator("#panels h3").all_inner_texts()
    assert len(titles) == len(set(titles)) == 32 and found.locator(".missing:visible").count() == 0
    for said in ("a line through a point is its 95%", "the curve has a band", "weak tools have no interval"):
        assert found.locator("#panels .note", has_text=said).count() == 1
    charts = found.locator("#panels canvas").count()
    assert charts == 29  # the other three are bars
    for n in range(charts):
        assert pixels(found, f"#panels canvas >> nth={n}") > 100
    assert (
        "zero variance groups, 3 steps in a row, the last at step 6" in found.locator(".alerts").inner_text()
    )
    # The legend shows the point under the cursor, with its interval.
    plot = found.locator("figure", has_text="Held-out success by number of calls")
    plot.scroll_into_view_if_needed()
    box = plot.locator(".u-over").bounding_box()
    found.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    assert re.search(r"(before|after) \d+% \(\d+% to \d+%\)", plot.locator(".legend").inner_text())


def test_dragging_zooms_a_chart_and_a_double_click_zooms_out(visit, workdir):
    found = visit(address(workdir))
    for title in ("Success in training", "Weakness signals"):
        plot = found.locator("figure", has_text=title).first
        plot.scroll_into_view_if_needed()
        image = lambda: plot.locator("canvas").evaluate("c => c.toDataURL()")
        box, whole = plot.locator(".u-over").bounding_box(), image()
        found.mouse.move(box["x"] + 0.2 * box["width"], box["y"] + 20)
        found.mouse.down()
        found.mouse.move(box["x"] + 0.6 * box["width"], box["y"] + 20)
        found.mouse.up()
        assert image() != whole
        found.mouse.dblclick(box["x"] + 0.5 * box["width"], box["y"] + 20)
        assert image() == whole


def test_a_run_of_one_step_shows_it(visit, tmp_path):
    path = fake_workdir(tmp_path / "run", steps=1, every=1)
    report.write_report(path)
    found = visit(address(path))
    plots = found.locator("#panels canvas")
    assert plots.count() == 29
    blue = "c => { const d = c.getContext('2d').getImageData(0, 0, c.width, c.height).data;"
    blue += (
        " let n = 0; for (let i = 0; i < d.length; i += 4)"
        " n += d[i + 3] > 200 && d[i + 2] > d[i] + 60; return n; }"
    )
    assert found.locator("figure", has_text="Gradient norm").locator("canvas").evaluate(blue) > 10


def test_light_and_dark(visit, workdir):
    found = visit(address(workdir), color_scheme="dark")
    paper = lambda: found.evaluate("getComputedStyle(document.body).backgroundColor")
    chart = lambda: found.eval_on_selector("#panels canvas", "c => c.toDataURL()")
    dark = paper(), chart()
    found.keyboard.press("d")
    assert paper() != dark[0] and chart() != dark[1]
    found.get_by_label("light or dark").click()
    assert (paper(), chart()) == dark


@pytest.mark.parametrize(
    "place",
    [{}, {"view": "tasks"}, {"view": "trajectories"}, "a task", "the calls of a model", "a trajectory"],
)
def test_nothing_is_wider_than_a_phone(visit, workdir, place):
    row = lines(sorted((workdir / "trajectories").iterdir())[0])[0]
    one = {"step": row["step"], "task": row["task_id"], "rollout": row["rollout_index"], "mode": "tokens"}
    known = {
        "a task": {"view": "tasks", "task": row["task_id"]},
        "the calls of a model": {"view": "tasks", "task": row["task_id"], "mode": "llm_calls"},
        "a trajectory": {"view": "trajectories", **one},
    }
    found = visit(address(workdir, **known.get(str(place), place)), viewport=PHONE)
    assert found.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]
    assert found.locator("h1:visible, h2:visible, .row:visible").count()


def test_the_lineage_of_a_task_leads_to_its_trajectory_and_back(visit, workdir):
    tasks, signals = lines(workdir / "tasks.jsonl"), lines(workdir / "signals.jsonl")
    rows = [row for file in sorted((workdir / "trajectories").iterdir()) for row in lines(file)]
    task = next(t for t in tasks if t["lineage"]["signal"] == "rare")
    assert any(s["pattern"] == "mkdir" for s in signals if s["kind"] == "rare")
    found = visit(address(workdir, view="tasks", task=task["id"]))
    stages = dict(
        zip(found.locator(".chain h4").all_inner_texts(), found.locator(".chain h4 + div").all_inner_texts())
    )
    assert "rare action mkdir" in stages["Signal"] and "(not among the logged ones)" in stages["Trajectory"]
    assert stages["Parent task"].startswith(task["lineage"]["parent"])
    said = [
        task["lineage"]["context"],
        f"{task['id']} went wrong",
        "Cause: no such folder",
        "Explore: mkdir → cd",
    ]
    assert [line for line in stages["Reflection"].splitlines() if line] == said
    used = task["lineage"]["triplets"]
    assert "of the scripted explorer" in stages["Exploration"]
    assert [i for i in range(10) if f"answer {i}" in stages["Exploration"]] == used
    assert (
        stages["Verdict"] == "accept, ran in a fresh environment"
        and stages["Visits"] == "3 steps trained on it"
    )
    assert "0.25 at the first visit, 0.75 at the last: +50.0 points" in stages["Gain"]
    for turn in task["turns"]:
        assert turn["query"] in stages["Task"]
    shown = next(row for row in rows if row["task_id"] in {t["id"] for t in tasks})
    found = visit(address(workdir, view="tasks", task=shown["task_id"]))
    found.locator(".chain li", has_text="Logged trajectories").get_by_role("link").first.click()
    assert where(found)["view"] == "trajectories" and where(found)["task"] == shown["task_id"]
    found.locator(".detail:visible h2 a").click()
    assert (
        where(found)["view"] == "tasks"
        and shown["task_id"] in found.locator("#tasks .detail h2").inner_text()
    )


def test_what_a_model_was_asked_is_read_from_the_lineage_of_a_task(visit, workdir):
    task = next(t for t in lines(workdir / "tasks.jsonl") if t["lineage"]["signal"])
    found = visit(address(workdir, view="tasks", task=task["id"]))
    found.get_by_role("link", name="what it was asked").click()
    talk = found.locator("#tasks .detail")
    talk.locator(".question").first.wait_for()
    judged = f"Judge the proposal of steps {', '.join(map(str, task['lineage']['triplets']))}"
    roles = ["Reflect", "Explore, round 1", "Abstract", judged, "Solve it from the words of turn 1"]
    assert talk.locator("h3").all_inner_texts() == roles  # and no call of the other proposal
    assert "14 questions, 1,400 tokens in, 280 out" in talk.inner_text()
    assert talk.locator(".question summary").nth(3).inner_text() == 'step 2 {"tool": "mv"}'
    open_question(talk, "Explore", 2)
    expect(talk.locator(".question[open] .said").last).to_have_text('{"tool": "mv"}')
    assert "Steps so far: 2" in talk.inner_text()
    talk.locator(".question[open] .system summary").click()
    assert talk.locator(".question[open] .system pre").inner_text().splitlines()[0] == "You explore."
    open_question(talk, "Abstract", 0)
    expect(talk).to_contain_text("was not what was asked for (it holds no JSON object)")
    open_question(talk, "Solve", 0)
    expect(talk).to_contain_text("No answer: truncated")
    found.keyboard.press("Escape")
    expect(found.locator(".chain")).to_be_visible()
    assert where(found)["task"] == task["id"]


def open_question(talk, role, number):
    talk.locator("section.role", has_text=role).locator(".question > summary").nth(number).click()


def test_a_refused_proposal_has_a_lineage_and_its_questions(visit, workdir):
    found = visit(address(workdir, view="tasks"))
    found.select_option("#tasks select[name=origin]", "refused")
    assert found.locator("#tasks .count").inner_text() == "17 of 17"
    found.keyboard.press("j")
    chain = found.locator(".chain")
    chain.wait_for()
    assert "discard, too short" in chain.inner_text() and "no such folder" in chain.inner_text()
    assert "answer 0" in chain.inner_text() and "answer 1" not in chain.inner_text()
    chain.get_by_role("link", name="what it was asked").click()
    expect(found.locator("#tasks .detail")).to_contain_text("Judge the proposal of steps 0")
    titles = found.locator("#tasks h3").all_inner_texts()
    assert len([title for title in titles if title.startswith("Judge")]) == 1


def test_costs_stand_in_a_table_and_say_when_the_budget_was_spent(visit, workdir):
    found = visit(address(workdir))
    section = found.locator("section.group", has_text="What the explorer costs")
    assert "synthesis ended at step 11" in section.inner_text() and "of 30,000 tokens" in section.inner_text()
    row = section.get_by_role("row", name=re.compile("^step 5"))
    assert row.get_by_role("cell").all_inner_texts()[1:] == [
        "400 / 80", "4,000 / 800", "400 / 80", "800 / 160", "400 / 80", "7,200", "0.06", "0"
    ]  # fmt: skip


def test_a_point_of_the_map_is_a_task(visit, workdir):
    found = visit(address(workdir, view="tasks"))
    canvas = found.locator(".map canvas")
    box = canvas.bounding_box()
    before = pixels(found, ".map canvas")
    for x in range(5, int(box["width"]), 12):
        found.mouse.move(box["x"] + x, box["y"] + box["height"] / 2 - 40)
        if found.locator(".tip").is_visible():
            break
    name = found.locator(".tip b").inner_text()
    found.mouse.down()
    found.mouse.up()
    expect(found.locator("#tasks .detail h2")).to_contain_text(name)
    assert where(found)["task"] == name
    assert pixels(found, ".map canvas") != before


def test_the_tasks_of_a_strategys_own_name_have_a_filter_a_badge_and_a_gain(visit, workdir, tmp_path):
    shutil.copytree(workdir, tmp_path / "run")
    tasks = lines(tmp_path / "run" / "tasks.jsonl")
    new = [t for t in tasks if t["lineage"]["signal"]]
    for task in new[:3]:
        task["lineage"]["signal"] = "blame"
        task["record"].update(trained=2, first_score=0.25, last_score=0.75)
    tasks[0]["lineage"].update(kind="query", signal=None)
    (tmp_path / "run" / "tasks.jsonl").write_text("".join(json.dumps(t) + "\n" for t in tasks))
    report.write_report(tmp_path / "run")
    found = visit(address(tmp_path / "run", view="tasks"))
    count = found.locator("#tasks .count")
    found.select_option("#tasks select[name=origin]", "blame")
    assert count.inner_text() == "3 of 44"
    assert "blame" in found.locator("#tasks p.key").inner_text()
    found.select_option("#tasks select[name=origin]", "new")
    assert count.inner_text() == f"{len(new)} of 44"  # the query is none
    found = visit(address(tmp_path / "run", view="overview"))
    expect(found.locator("#overview")).to_contain_text("blame, 3 tasks")


def test_tasks_are_filtered_and_searched(visit, workdir):
    found = visit(address(workdir, view="tasks"))
    count = found.locator("#tasks .count")
    assert count.inner_text() == "44 of 44"  # 24 tasks of D_t and 20 evaluation tasks
    found.select_option("#tasks select[name=origin]", "new")
    assert count.inner_text() == "16 of 44"
    found.select_option("#tasks select[name=origin]", "evaluation")
    found.keyboard.press("/")
    found.keyboard.type("held_01 ")
    expect(found.locator("#tasks .count")).to_have_text("10 of 44")
    again = visit(found.url)  # the address holds the whole view
    assert again.locator("#tasks .count").inner_text() == "10 of 44"


def test_trajectories_by_keys_filters_and_full_text(visit, workdir):
    rows = [row for file in sorted((workdir / "trajectories").iterdir()) for row in lines(file)]
    found = visit(address(workdir))
    found.keyboard.press("3")
    found.keyboard.press("j")
    title = found.locator("#trajectories .detail h2")
    title.wait_for()
    assert rows[0]["task_id"] in title.inner_text()
    found.keyboard.press("j")
    expect(title).to_contain_text(rows[1]["task_id"])
    found.keyboard.press("k")
    expect(title).to_contain_text(rows[0]["task_id"])
    found.keyboard.press("t")
    found.locator(".token").first.wait_for()
    found.keyboard.press("Escape")
    assert "task" not in where(found)
    count = found.locator("#trajectories .count")
    found.select_option("select[name=outcome]", "failure")
    failures = [row for row in rows if not row["success"]]
    expect(found.locator("#trajectories .count")).to_have_text(f"{len(failures)} of {len(rows)}")
    found.select_option("select[name=at]", str(rows[-1]["step"]))
    found.keyboard.press("/")
    found.keyboard.type("NO SUCH file")  # an observation holds it, in other case
    late = [row for row in failures if row["step"] == rows[-1]["step"]]
    expect(found.locator("#trajectories .count")).to_have_text(f"{len(late)} of {len(rows)}")
    found.keyboard.type(" nowhere to be found")
    expect(count).to_have_text(re.compile("^0 of"))
    assert count.is_visible() and found.locator("#trajectories .row").count() == 0
    found.keyboard.press("Escape")  # leaves the search box
    found.keyboard.press("?")
    assert found.get_by_role("dialog").is_visible()


def test_a_trajectory_is_read_token_by_token(visit, workdir):
    row = lines(sorted((workdir / "trajectories").iterdir())[0])[0]
    place = {"step": row["step"], "task": row["task_id"], "rollout": row["rollout_index"]}
    found = visit(address(workdir, view="trajectories", **place))
    talk = found.locator("#trajectories .detail")
    talk.locator(".user").first.wait_for()
    for query in row["queries"]:
        assert query in talk.inner_text()
    assert talk.locator(".answer").count() == len(row["steps"])
    found.get_by_role("tab", name="Tokens").click()
    sampled = [s for s in row["segments"] if "logprobs" in s]
    pieces = [piece for s in sampled for piece in s["pieces"]]
    expect(found.locator(".token")).to_have_text(pieces)
    assert found.locator(".token").all_text_contents() == pieces  # spaces too
    assert (
        found.locator(".fed")
        .first.get_attribute("data-label")
        .startswith(f"fed · {row['segments'][0]['tokens']} tokens")
    )
    readout = found.locator(".readout")
    found.locator(".token").nth(3).hover()
    logprob = sampled[0]["logprobs"][3]
    assert f"log-probability {logprob:.4f} nats · version 2" in readout.inner_text()
    assert f"token {row['segments'][0]['tokens'] + 3}:" in readout.inner_text()
    found.locator(".tokens").focus()
    found.keyboard.press("ArrowRight")
    assert f"{sampled[0]['logprobs'][4]:.4f} nats" in readout.inner_text()
    lowest = min(range(len(pieces)), key=lambda i: [x for s in sampled for x in s["logprobs"]][i])
    shade = lambda i: float(
        found.locator(".token").nth(i).evaluate("n => parseFloat(n.style.getPropertyValue('--surprise'))")
    )
    assert shade(lowest) == max(map(shade, range(len(pieces)))) > 0


def test_what_models_tasks_and_tools_wrote_is_text_and_runs_nothing(visit, tmp_path):
    path = fake_workdir(tmp_path / "run", steps=6)
    (path / "evaluations.jsonl").write_text('{"step": 1, "set": "iid", "success": 0.5}\n')
    for file in path.rglob("*.json*"):
        rows = [poisoned(json.loads(line), EVIL) for line in file.read_text().splitlines()]
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    report.write_report(path)
    found = visit(address(path))
    assert EVIL in found.locator("#headline").inner_text() and EVIL in found.locator("#panels").inner_text()
    for key, name in (("2", "tasks"), ("3", "trajectories")):
        found.keyboard.press(key)
        for _ in range(6):
            found.keyboard.press("j")
            expect(found.locator(f"#{name} .detail")).to_contain_text(EVIL)
        for select in found.locator(f"#{name} select").all():
            select.select_option(index=select.locator("option").count() - 1)
            select.select_option(index=0)
    found.keyboard.press("t")
    expect(found.locator(".tokens")).to_contain_text(EVIL)
    found.keyboard.press("2")
    found.select_option("#tasks select[name=origin]", "refused")
    found.keyboard.press("j")
    found.get_by_role("link", name="what it was asked").click()
    talk = found.locator("#tasks .detail")
    for summary in talk.locator(".question > summary").all():
        summary.click()
    expect(talk.locator(".said.answered").last).to_contain_text(EVIL)
    found.keyboard.press("3")
    found.locator(".token").first.hover()
    strange = {"view": "trajectories", "step": EVIL, "task": EVIL, "q": EVIL, "mode": EVIL}
    found.goto(address(path) + urllib.parse.urlencode(strange))
    expect(found.locator("#trajectories .detail")).to_contain_text(EVIL)
    foreign = "img, iframe, object, embed, svg, link, script[src], main script, main style"
    assert found.locator(foreign).count() == 0 and found.evaluate("typeof hacked") == "undefined"


def test_a_comparison_of_hostile_names_is_text(visit, tmp_path):
    path = fake_comparison(tmp_path / "compare", seeds=(0, 1))
    for name in ("plan.json", "comparison.json"):
        (path / name).write_text(json.dumps(poisoned(json.loads((path / name).read_text()), EVIL)))
    report.write_report(path)
    found = visit(address(path))
    assert EVIL in found.locator("#headline").inner_text() and EVIL in found.locator("#panels").inner_text()
    assert (
        found.locator("img, svg, main script").count() == 0 and found.evaluate("typeof hacked") == "undefined"
    )


def test_markup_that_got_in_would_run_nothing(browser, workdir, tmp_path):
    """The page's own policy is a second barrier: this test injects markup into the page."""
    text = (workdir / "report.html").read_text()
    markup = "<script>hacked = 1</script><b onclick='hacked = 1'>b</b><img src='x' onerror='hacked = 1'>"
    (tmp_path / "report.html").write_text(text.replace("<main>", f"<main>{markup}"))
    said = []
    with contextlib.closing(browser.new_page()) as found:
        found.on("console", lambda m: said.append(m.text))
        found.goto(address(tmp_path))
        found.wait_for_selector("html[data-ready]")
        found.locator("main > b").click()
        assert found.evaluate("typeof hacked") == "undefined"
    assert sum("Content Security Policy" in text for text in said) >= 3


def test_a_large_run_reads_what_lies_beside_its_page(visit, tmp_path, monkeypatch):
    path = fake_workdir(tmp_path / "run")
    monkeypatch.setattr(page, "LARGEST", 1000)
    monkeypatch.setattr(page, "PART", 4000)
    report.write_report(path)
    rows = [row for file in sorted((path / "trajectories").iterdir()) for row in lines(file)]
    last = rows[-1]
    found = visit(
        address(
            path, view="trajectories", step=last["step"], task=last["task_id"], rollout=last["rollout_index"]
        )
    )
    found.locator("#trajectories .user").first.wait_for()
    assert last["queries"][0] in found.locator("#trajectories .detail").inner_text()
    task = next(t for t in lines(path / "tasks.jsonl") if t["lineage"]["signal"])
    other = visit(address(path, view="tasks", task=task["id"], mode="llm_calls"))
    expect(other.locator("#tasks .question")).to_have_count(14)
    found.keyboard.press("/")
    found.keyboard.type("no such file")
    failures = sum(not row["success"] for row in rows)
    expect(found.locator("#trajectories .count")).to_have_text(f"{failures} of {len(rows)}")


def test_a_large_page_of_another_name_reads_what_lies_beside_it(visit, tmp_path, monkeypatch):
    path = fake_workdir(tmp_path / "run")
    monkeypatch.setattr(page, "LARGEST", 1000)
    (tmp_path / "share").mkdir()
    out = report.write_report(path, out=tmp_path / "share" / "demo #1.html")
    row = lines(sorted((path / "trajectories").iterdir())[0])[0]
    place = {"step": row["step"], "task": row["task_id"], "rollout": row["rollout_index"]}
    found = visit(f"{out.as_uri()}#view=trajectories&{urllib.parse.urlencode(place)}")
    found.locator("#trajectories .user").first.wait_for()
    assert row["queries"][0] in found.locator("#trajectories .detail").inner_text()


def test_a_trajectory_whose_reward_is_no_number_is_read(visit, tmp_path):
    path = fake_workdir(tmp_path / "run")
    file = sorted((path / "trajectories").iterdir())[0]
    row, *others = file.read_text().splitlines()
    row = json.loads(row) | {"reward": float("nan")}
    file.write_text("\n".join([json.dumps(row), *others, ""]))
    report.write_report(path)
    place = {"step": row["step"], "task": row["task_id"], "rollout": row["rollout_index"]}
    found = visit(address(path, view="trajectories", **place))
    assert found.locator("#trajectories .facts div").first.inner_text().split() == ["reward", "—"]


def test_a_page_without_its_data_says_so(browser, tmp_path, monkeypatch):
    path = fake_workdir(tmp_path / "run")
    monkeypatch.setattr(page, "LARGEST", 1000)
    report.write_report(path)
    shutil.rmtree(path / "report_data")
    found = browser.new_page()
    found.goto(address(path))
    found.wait_for_selector("html[data-ready]")
    found.keyboard.press("3")
    found.keyboard.press("j")
    found.get_by_text("report_data/part_000.js is not beside this page: it must travel with it.").wait_for()
    found.close()


def test_ten_thousand_trajectories_are_a_list_of_a_screenful(visit, tmp_path):
    path = fake_workdir(tmp_path / "run")
    row = lines(sorted((path / "trajectories").iterdir())[0])[0]
    many = (path / "trajectories" / "step_00011.jsonl").open("a")
    with many as file:
        for n in range(10_000):
            file.write(json.dumps({**row, "rollout_index": n + 100}) + "\n")
    report.write_report(path)
    found = visit(address(path, view="trajectories"))
    count = lambda: found.locator("#trajectories .row").count()
    assert "10,0" in found.locator("#trajectories .count").inner_text() and 0 < count() < 60
    found.eval_on_selector("#trajectories .rows", "n => n.scrollTop = n.scrollHeight")
    found.get_by_role("listitem").last.wait_for()
    expect(found.locator("#trajectories .row[href*='rollout=10099']")).to_be_visible()
    assert 0 < count() < 60
    found.keyboard.press("/")
    found.keyboard.type("budget")
    expect(found.locator("#trajectories .count")).to_have_text(re.compile("^10,0.. of"))


@contextlib.contextmanager
def served(path):
    with live.server(path, lambda: report.write_report(path, live=True), 0) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}/"
        finally:
            server.shutdown()
            thread.join()


def test_a_live_page_follows_the_run_and_stays_where_one_reads(visit, tmp_path):
    path = fake_workdir(tmp_path / "run", steps=6, finished=False)
    (path / "config.json").write_text(json.dumps({"steps": 8}))
    with served(path) as url:
        found = visit(url)
        assert (
            "6 of 8 steps" in found.locator("#headline").inner_text() and found.locator(".live").is_visible()
        )
        found.keyboard.press("2")
        found.keyboard.press("j")
        found.locator("#tasks .detail h2").wait_for()
        before = found.url
        row = json.loads((path / "metrics.jsonl").read_text().splitlines()[-1])
        with open(path / "metrics.jsonl", "a") as file:
            file.write(json.dumps({**row, "step": 6}) + "\n")
        expect(found.locator("#headline")).to_contain_text("7 of 8 steps", timeout=30_000)
        assert found.url == before and found.locator("#tasks .detail h2").is_visible()
        found.goto("about:blank")
    found = visit(address(path))  # from disk, after the server has gone
    assert found.locator(".live").count() == 0


def test_the_live_server_answers_this_machine_and_nothing_else(tmp_path):
    path = fake_workdir(tmp_path / "run", steps=3)
    (tmp_path / "secret.json").write_text("{}")
    with served(path) as url:
        first = urllib.request.urlopen(url)
        tag = first.headers["ETag"]

        def status(place, **headers):
            try:
                return urllib.request.urlopen(urllib.request.Request(url + place, headers=headers)).status
            except urllib.error.HTTPError as error:
                return error.code

        assert status("", **{"If-None-Match": tag}) == 304 and status("", **{"If-None-Match": "x"}) == 200
        assert status("report.html") == 200
        for place in (
            "config.json",
            "../secret.json",
            "..%2fsecret.json",
            "cells/../seed_0/report.html",
            "report_data/part_000.js",
        ):
            assert status(place) == 404, place
        assert status("", Host="evil.example") == 403
        (path / "metrics.jsonl").write_text("oops\n")
        assert status("") == 503
        (path / "metrics.jsonl").write_text("")
        assert status("", **{"If-None-Match": tag}) == 200


@pytest.mark.parametrize(
    "setting",
    [
        ("evolution.every", 5),
        ("reward.terms", ("length:0.1", "calls:0.2")),
        ("learner.lora_targets", r"layers/.*_proj|(a b)?[#%&'\"\\]é"),
    ],
)
def test_the_live_server_has_the_page_of_every_cell(setting, tmp_path):
    cell = Cell("random", 3, (setting,)).workdir(tmp_path)
    for folder in (cell, tmp_path / "cells", tmp_path / "cells" / "x" / "y" / "seed_0", tmp_path / "seed_0"):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "report.html").write_text("here")
    with served(tmp_path) as url:
        path = "/".join(urllib.parse.quote(part, safe="!'()*~") for part in cell.relative_to(tmp_path).parts)
        assert urllib.request.urlopen(f"{url}{path}/report.html").read() == b"here"
        for place in ("cells/report.html", "cells/x/y/seed_0/report.html", "cells/../seed_0/report.html",
                      "cells/%2e%2e/seed_0/report.html", "cells/./seed_0/report.html", "seed_0/report.html",
                      "cells//seed_0/report.html"):  # fmt: skip
            with pytest.raises(urllib.error.HTTPError, match="404"):
                urllib.request.urlopen(url + place)


def test_a_comparison_shows_differences_curves_and_the_way_to_each_run(visit, tmp_path):
    path = fake_comparison(tmp_path / "compare", seeds=(0, 1))
    report.write_report(path / "cells/random/seed_1")
    report.write_report(path)
    found = visit(address(path))
    text = found.locator("#panels").inner_text()
    for expected in (
        "coevolve − static",
        "+20.0",
        "+14.0 to +26.0",
        "0.024",
        "78%",
        "One arm had a longer warm-up.",
        "7,680",
    ):
        assert expected in text, expected
    assert found.locator("#panels canvas").count() == 2 and pixels(found, "#panels canvas >> nth=1") > 100
    assert found.locator("table").last.get_by_role("link").count() == 1  # the others have no report
    found.locator("table").last.get_by_role("link").click()
    found.wait_for_selector("html[data-ready]")
    assert (
        found.url.endswith("cells/random/seed_1/report.html")
        and "seed 1" in found.locator("#headline").inner_text()
    )
    elsewhere = visit(report.write_report(path, out=tmp_path / "shared.html").as_uri())
    elsewhere.locator("table").last.get_by_role("link").click()
    elsewhere.wait_for_selector("html[data-ready]")
    assert elsewhere.url == found.url


def test_lost_trials_and_diverged_seeds_stand_in_a_comparison(visit, tmp_path):
    path = fake_comparison(tmp_path / "compare", seeds=(0, 1))
    result = json.loads((path / "comparison.json").read_text())
    arm, _, static = result["arms"]
    arm |= {"lost": 96, "lost_share": 0.12, "diverged": [7], "low": None, "high": None}
    arm["if_lost_failed"] = {"n": 2, "mean": 0.123, "low": 0.1, "high": 0.146, "iqm": 0.12, "values": {}}
    arm["if_diverged_failed"] = {"n": 3, "mean": 0.456, "iqm": 0.45, "values": {}}
    static |= {"lost": 0, "lost_share": 0.0}
    first, last = result["planned"]
    first |= {"p": None, "p_holm": None, "low": None, "high": None, "lost": 97, "lost_share": 0.06}
    last |= {"planned_later": "2026-11-24", "if_lost_failed": {**last, "difference": -0.031}}
    result["curves"]["iid"][arm["arm"]]["if_lost_failed"] = [None, 0.2, 0.3]
    (path / "comparison.json").write_text(json.dumps(result))
    (path / "cells/random/seed_1/summary.json").unlink()
    (path / "cells/random/seed_1/failure.json").write_text('{"step": 5, "why": "not finite"}')
    report.write_report(path)
    found = visit(address(path))
    planned, arms = (found.locator("section.group").nth(1).locator("table").nth(k) for k in (0, 1))
    rows = [row.locator("td").all_inner_texts() for row in planned.locator("tbody tr").all()]
    assert [row[0] for row in rows] == [
        "coevolve − random", "coevolve − static (planned on 2026-11-24)", "lost trials as failures",
    ]  # fmt: skip
    assert rows[0][2] == "no interval" and rows[0][4:6] == ["not testable"] * 2 and rows[0][-1] == "97 (6.0%)"
    assert rows[2][1] == "−3.1"
    rows = [row.locator("td").all_inner_texts() for row in arms.locator("tbody tr").all()]
    assert rows[0][:6] == ["coevolve", "2", "96 (12.0%)", "7", "80.0%", "no interval"]
    assert rows[1][:6] == ["lost trials as failures", "2", "", "", "12.3%", "10.0% to 14.6%"]
    assert rows[2][:6] == ["diverged seeds as 0", "3", "", "", "45.6%", "—"]
    assert [row[2] for row in rows[3:]] == ["—", "0"]
    assert "coevolve, lost trials as failures" in found.locator("#panels").inner_text()
    runs = found.locator("table").last.get_by_role("row", name=re.compile("^random"))
    assert "diverged at step 5" in runs.inner_text()


def swatches(plot):
    """The label and the swatch of each line of a legend."""
    return plot.locator(".entry").evaluate_all(
        "all => all.map(e => [e.textContent, e.querySelector('i').style.background])"
    )


def test_lines_that_share_a_colour_are_told_apart_by_their_dashes(visit, tmp_path):
    path = fake_workdir(tmp_path / "run", steps=3)
    row = {"step": 0, "split": "dev", "success": 0.5, "samples": 4, "macro_weak": 0.2}
    rows = [
        {**row, "set": name + more, "by_task": {"a": [2, 4], "b": [1, 3]}}
        for name in ("iid", "balanced", "queries")
        for more in ("", "+help")
    ]
    (path / "evaluations.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    report.write_report(path)
    shown = dict(swatches(visit(address(path)).locator("figure", has_text="Held-out success").first))
    assert len(shown) == len(set(shown.values())) == 18
    hue = lambda name: re.search(r"--\w+", shown[name])[0]
    assert hue("iid, dev") == hue("iid+help, dev: weak tools") != hue("balanced, dev")

    path = fake_comparison(tmp_path / "compare", arms=[f"arm_{k}" for k in range(26)], seeds=(0,))
    result = json.loads((path / "comparison.json").read_text())
    for arm in result["curves"]["iid"].values():
        arm["if_lost_failed"] = [None, 0.2, 0.3]
    (path / "comparison.json").write_text(json.dumps(result))
    report.write_report(path)
    shown = swatches(visit(address(path)).locator("figure").first)
    assert len(shown) == len({background for _, background in shown}) == 52


def test_a_query_is_learned_from_and_its_success_is_not_told(visit, tmp_path):
    path, query = fake_with_queries(tmp_path / "run")
    report.write_report(path)
    found = visit(address(path, view="tasks", task=query.id))
    detail = found.locator("#tasks .detail")
    expect(detail.locator("h2")).to_contain_text("learned from without its answer")
    expect(detail).to_contain_text("before 0 of 4, after 4 of 4")
    detail.get_by_role("link", name="step 11: not told").click()
    shown = found.locator("#trajectories .detail")
    expect(shown.locator("h2")).to_contain_text("not told")
    assert "0.00" not in shown.locator("dl").inner_text() and shown.locator(".failure").count() == 0
    found.select_option("select[name=outcome]", "not told")
    expect(found.locator("#trajectories .count")).to_have_text("1 of 13")
    found.keyboard.press("1")
    expect(found.locator("#panels")).to_contain_text("The queries are learned from without their answers.")
    assert "Tasks never trained on" not in found.locator("#panels").inner_text()
    assert "query," not in found.locator("figure", has_text="Gain by what asked").inner_text()


def test_signals_and_growth_count_what_they_name(visit, tmp_path):
    path = fake_workdir(tmp_path / "run", steps=4, every=1)
    rows = lines(path / "metrics.jsonl")
    for row in rows:
        row["signals"]["skills"] = 100
    (path / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    report.write_report(path)
    found = visit(address(path))
    signals = found.locator("figure", has_text="Weakness signals")
    assert {label.split()[0] for label, _ in swatches(signals)} == {"forgetting", "boundary", "rare"}
    growth = found.locator("figure", has_text="Growth of the training set")
    growth.scroll_into_view_if_needed()
    box = growth.locator(".u-over").bounding_box()
    for place, total in ((0.01, 8), (0.21, 12), (0.99, 24)):
        found.mouse.move(box["x"] + place * box["width"], box["y"] + 40)
        counts = re.findall(r"[a-z] (\d+)", " ".join(growth.locator(".entry").all_inner_texts()))
        assert sum(map(int, counts)) == total, (place, counts)


def test_hints_stand_where_they_were_given_and_tokens_say_whether_they_were_learned_from(visit, tmp_path):
    path = fake_workdir(tmp_path / "run", steps=3)
    file = sorted((path / "trajectories").iterdir())[0]
    row, *others = lines(file)
    last = len(row["steps"])
    row |= {"hints": [[0, "first"], [1, "second"], [last, "last"]], "advantage": 0.5}
    others[0]["advantage"] = None
    file.write_text("".join(json.dumps(r) + "\n" for r in (row, *others)))
    report.write_report(path)

    def detail(row, **more):
        place = {"step": row["step"], "task": row["task_id"], "rollout": row["rollout_index"], **more}
        found = visit(address(path, view="trajectories", **place)).locator("#trajectories .detail")
        found.locator(".fed, .user").first.wait_for()
        return found

    talk = detail(row)
    texts = talk.locator(".hint, .user, .call").all_inner_texts()
    assert texts[0] == "hint: first" and texts[1] == row["queries"][0] and texts[-1] == "hint: last"
    assert [text for text in texts if text.startswith("hint")] == [
        "hint: first",
        "hint: second",
        "hint: last",
    ]
    assert "which the learner learns from" in detail(row, mode="tokens").inner_text()
    assert "learns from" not in detail(others[0], mode="tokens").inner_text()


def test_a_divergence_and_a_report_of_a_cell_are_followed(tmp_path):
    path, states = fake_comparison(tmp_path / "compare", seeds=(0,), finished=False), []
    for name in ("config.json", "failure.json", "report.html"):
        (path / "cells/random/seed_0" / name).write_text('{"step": 3}')
        states.append(live._state(path))
    assert len(set(states)) == 3


def test_lost_trials_of_a_run_stand_under_its_curves(visit, tmp_path):
    path = fake_workdir(tmp_path / "run", steps=3)
    row = {"set": "iid", "split": "test", "success": 0.5, "samples": 2}
    rows = [
        {**row, "step": 0, "by_task": {"a": [1, 2], "b": [1, 2]}},
        {**row, "step": 2, "by_task": {"a": [1, 2], "b": [0, 0]}},
    ]
    (path / "evaluations.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    report.write_report(path)
    plot = visit(address(path)).locator("figure", has_text="Held-out success").first
    told = "Lost trials, neither success nor failure: iid, test, step 2: 2 of 4."
    expect(plot).to_contain_text(told)
    expect(plot).to_contain_text("iid, test: lost trials as failures")
