"""Measures the report of a long run: its size, and the time to write, open, search and scroll it.

    CHROMIUM=/usr/bin/chromium python benchmarks/viewer.py --run=runs/demo --trajectories=10000

It repeats a real run's logged trajectories under other numbers. Digits and log-probabilities are redrawn, so
that they compress like new ones. Chromium then scrolls through all of them, 600 pixels a frame, and times the
frames. The file docs/report.png shows the first screens of a run's report:

    python benchmarks/viewer.py --run=runs/demo --trajectories=0 --screenshot=docs/report.png
"""

import json
import os
import pathlib
import re
import shutil
import tempfile
import time

import numpy as np
from absl import app, flags
from playwright.sync_api import sync_playwright

from coevolve_jax.analysis import report

_RUN = flags.DEFINE_string("run", None, "Workdir of a finished run.", required=True)
_TRAJECTORIES = flags.DEFINE_integer("trajectories", 10_000, "Trajectories of the long run.")
_SCREENSHOT = flags.DEFINE_string("screenshot", "", "PNG to write of the run's own report.")
_BROWSER = flags.DEFINE_string("chromium", os.environ.get("CHROMIUM", "chromium"), "Path of a Chromium.")

SCROLL = """async () => {
  const list = document.querySelector("#trajectories .rows");
  const frame = () => new Promise(requestAnimationFrame);
  const times = [];
  let last = await frame();
  while (list.scrollTop + list.clientHeight < list.scrollHeight - 1) {
    list.scrollTop += 600;
    const now = await frame();
    times.push(now - last);
    last = now;
  }
  return times;
}"""


def lengthen(run: pathlib.Path, workdir: pathlib.Path, count: int) -> None:
    """Copies a run's logs, with `count` trajectories."""
    rng = np.random.default_rng(0)
    for path in [*run.glob("*.json"), *run.glob("*.jsonl")]:
        shutil.copy(path, workdir)
    rows = [json.loads(line) for f in sorted(run.glob("trajectories/*.jsonl")) for line in open(f)]
    redrawn = lambda digit: str(rng.integers(1, 10))
    (workdir / "trajectories").mkdir()
    with open(workdir / "trajectories" / "step_00000.jsonl", "w") as file:
        for n in range(count):
            row = {**rows[n % len(rows)], "rollout_index": n}
            row["steps"] = json.loads(re.sub(r"[1-9]", redrawn, json.dumps(row["steps"])))
            for segment in row["segments"]:
                if "logprobs" in segment:
                    segment["logprobs"] = (-rng.exponential(0.1, segment["tokens"])).round(4).tolist()
            file.write(json.dumps(row) + "\n")


def timed(name: str, act):
    start = time.perf_counter()
    result = act()
    print(f"{name:<44}{time.perf_counter() - start:8.2f} s", flush=True)
    return result


def measure(browser, run: pathlib.Path, workdir: pathlib.Path, count: int) -> None:
    lengthen(run, workdir, count)
    raw = sum(f.stat().st_size for f in workdir.rglob("*.json*")) / 1e6
    path = timed(f"write the report of {raw:.0f} MB of logs", lambda: report.write_report(workdir))
    beside = sum(f.stat().st_size for f in (workdir / "report_data").glob("*")) / 1e6
    print(f"report.html {path.stat().st_size / 1e6:.2f} MB, beside it {beside:.2f} MB")
    page = browser.new_page(viewport={"width": 1280, "height": 900})
    timed("open it, with all charts", lambda: open_report(page, path))
    page.keyboard.press("3")
    shown = page.locator("#trajectories .count")

    def search(text: str) -> None:
        before = shown.inner_text()
        page.fill("#trajectories input", text)
        while shown.inner_text() == before or not re.match(r"[\d,]+ of", shown.inner_text()):
            page.wait_for_timeout(5)

    timed("search all text the first time", lambda: search("error"))
    timed("search again (0.2 s of it waits for typing)", lambda: search("error ticket"))
    search("")
    times = np.array(page.evaluate(SCROLL))
    print(
        f"scroll through {shown.inner_text()} in {len(times)} frames: median {np.median(times):.1f} ms, "
        f"95% {np.quantile(times, 0.95):.1f} ms, longest {times.max():.1f} ms"
    )


def open_report(page, path: pathlib.Path) -> None:
    page.goto(f"file://{path.resolve()}")
    page.wait_for_selector("html[data-ready]")


def main(_) -> None:
    run = pathlib.Path(_RUN.value)
    arguments = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as p:
        browser = p.chromium.launch(executable_path=shutil.which(_BROWSER.value), args=arguments)
        if _TRAJECTORIES.value:
            measure(browser, run, pathlib.Path(folder), _TRAJECTORIES.value)
        if _SCREENSHOT.value:
            page = browser.new_page(viewport={"width": 1200, "height": 1440})
            open_report(page, report.write_report(run))
            page.screenshot(path=_SCREENSHOT.value)
        browser.close()


if __name__ == "__main__":
    app.run(main)
