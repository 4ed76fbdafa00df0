// The page: its views, the address that leads to each, keys, light and dark, and newer versions of itself.

const POLL = 3000; // ms between two questions for a newer version

const VIEWS = [
  ["overview", "Overview"],
  ["tasks", "Training set"],
  ["trajectories", "Trajectories"],
];
const KEYS = [
  ["1 2 3", "overview, training set, trajectories"],
  ["j k", "next and previous in the list"],
  ["/", "search"],
  ["t", "conversation or tokens"],
  ["← →", "token by token, where tokens are in focus"],
  ["Esc", "back"],
  ["d", "light or dark"],
  ["?", "these keys"],
];

let page = null; // {data, run, store, views}: what is shown now

// ---- Light and dark ---------------------------------------------------------------------------------

const dark = matchMedia("(prefers-color-scheme: dark)");
let chosenTheme = null;
const setTheme = () => {
  document.documentElement.dataset.theme = chosenTheme ?? (dark.matches ? "dark" : "light");
  redrawCharts();
  Object.values(page?.views ?? {}).forEach((view) => view.redraw());
};
const switchTheme = () => {
  chosenTheme = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
  setTheme();
};
dark.addEventListener("change", setTheme);

// ---- Where we are -----------------------------------------------------------------------------------

const currentView = () => (page.views[here().view] ? here().view : "overview");
const lastPlace = {}; // of each view: where a tab leads back to
const route = () => {
  const name = currentView();
  lastPlace[name] = { ...here(), view: name };
  for (const [view] of VIEWS) {
    const section = document.getElementById(view);
    if (section) section.hidden = view !== name;
    const tab = document.querySelector(`#bar [data-view="${view}"]`);
    tab?.setAttribute("aria-current", String(view === name));
    tab?.setAttribute("href", address(lastPlace[view] ?? { view }));
  }
  document.body.classList.toggle("panes", name !== "overview");
  return page.views[name].show(here());
};
addEventListener("hashchange", route);

// Another place, in the present entry of the browser's history: for what is typed and filtered.
const goTo = (change) => {
  history.replaceState(null, "", address({ ...here(), ...change }));
  return route();
};
const travel = (place) => {
  history.pushState(null, "", address(place));
  return route();
};

const goBack = () => {
  const place = here();
  if (place.view === "tasks" && place.mode !== undefined) travel({ ...place, mode: "" });
  else if (place.task !== undefined) travel({ ...place, task: "", step: "", rollout: "" });
  else if (place.q !== undefined) travel({ view: place.view });
  else travel({ view: "overview" });
};

const toView = (name) => page.views[name] && travel(lastPlace[name] ?? { view: name });

addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  const typing = event.target.matches?.("input, select, textarea");
  if (typing) {
    if (event.key === "Escape") event.target.blur();
    return;
  }
  const view = page.views[currentView()];
  const act = {
    1: () => toView("overview"),
    2: () => toView("tasks"),
    3: () => toView("trajectories"),
    j: () => view.step?.(1),
    k: () => view.step?.(-1),
    "/": () => view.search?.(),
    t: () => view.toggle?.(),
    d: switchTheme,
    "?": () => toggleHelp(),
    Escape: () => (helpShown() ? toggleHelp() : goBack()),
  }[event.key];
  if (!act) return;
  event.preventDefault();
  act();
});

const help = h(
  "dialog",
  { class: "help", "aria-label": "Keys" },
  h("h2", {}, "Keys"),
  h(
    "dl",
    {},
    KEYS.map(([key, what]) => [h("dt", {}, key), h("dd", {}, what)]),
  ),
);
const helpShown = () => help.open;
const toggleHelp = () => (help.open ? help.close() : help.show());
help.addEventListener("click", () => help.close());

// ---- The page and its data --------------------------------------------------------------------------

const section = (name) => {
  document.getElementById(name)?.remove();
  const node = h("section", { id: name, class: "panesview", hidden: true });
  document.querySelector("main").append(node);
  return node;
};

const packed = (from) => from.getElementById("data").textContent;

const build = async (from) => {
  const data = packed(from);
  const run = await unpack(data);
  const store = trajectoryStore(run, from);
  forgetCharts();
  const overview = { show: () => {}, redraw: () => {} };
  page = { data, run, store, views: { overview } };
  document.getElementById("overview").hidden = false; // charts are measured
  const panels = document.getElementById("panels");
  if (run.kind === "comparison") comparisonOverview(panels, run);
  else if (run.kind === "campaign") page.views.overview = campaignOverview(panels, run, store);
  else {
    runOverview(panels, run);
    page.views.tasks = tasksView(section("tasks"), run, store);
    page.views.trajectories = trajectoriesView(section("trajectories"), run, store);
  }
  bar(run, store);
  await route();
};

const bar = (run, store) => {
  const counts = { tasks: run.tasks?.length, trajectories: store.count };
  document
    .getElementById("bar")
    .replaceChildren(
      h("b", { class: "brand" }, run.name),
      ...VIEWS.filter(([view]) => page.views[view]).map(([view, label]) =>
        h(
          "a",
          { "data-view": view, href: address({ view }) },
          label,
          counts[view] !== undefined && h("span", { class: "soft" }, ` ${plain(counts[view])}`),
        ),
      ),
      h(
        "span",
        { class: "tools" },
        followed(run) && h("span", { class: "live", title: "This page follows the run" }, "live"),
        h(
          "button",
          { type: "button", title: "light or dark (d)", "aria-label": "light or dark", onclick: switchTheme },
          "◐",
        ),
        h("button", { type: "button", title: "keys (?)", "aria-label": "keys", onclick: toggleHelp }, "?"),
      ),
    );
};

// Whether a server is there to ask: a page that it wrote may also be opened from disk, later.
const followed = (run) => run.live && location.protocol.startsWith("http");

// What is scrolled stays where it is while `act` makes its elements anew.
const keepingScroll = async (act) => {
  const panes = () => [document.scrollingElement, ...document.querySelectorAll(".rows, .detail")];
  const places = panes().map((pane) => pane.scrollTop);
  await act();
  panes().forEach((pane, i) => (pane.scrollTop = places[i] ?? 0));
};

// Asks the server for a newer version of this page, and takes over its headline and its data.
const follow = async (version) => {
  let next = version;
  const typing = document.activeElement?.matches("input, select");
  try {
    const answer = typing
      ? {}
      : await fetch("/", { headers: version ? { "If-None-Match": version } : {}, cache: "no-store" });
    if (answer.status === 200) {
      next = answer.headers.get("ETag");
      const newer = new DOMParser().parseFromString(await answer.text(), "text/html");
      document.getElementById("headline").replaceWith(document.adoptNode(newer.getElementById("headline")));
      if (packed(newer) !== page.data) await keepingScroll(() => build(newer));
    }
    document.querySelector("#bar .live")?.classList.remove("lost");
  } catch (error) {
    document.querySelector("#bar .live")?.classList.add("lost"); // the server has gone; it may come back
  }
  setTimeout(follow, POLL, next);
};

setTheme();
document.body.append(help);
try {
  await build(document);
  document.documentElement.dataset.ready = "true";
  if (followed(page.run)) setTimeout(follow, POLL, null);
} catch (error) {
  document
    .getElementById("panels")
    .replaceChildren(
      h(
        "p",
        { class: "missing" },
        `This page cannot be shown (${error.message}). It needs a browser of 2023 or newer.`,
      ),
    );
  throw error;
}
