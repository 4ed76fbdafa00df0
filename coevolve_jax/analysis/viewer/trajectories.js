// The logged trajectories: a list with filters and full-text search, and a reader.

const TRAJECTORY_ROW = 58; // pixels

const trajectoryPlace = (store, i) => ({
  view: "trajectories",
  step: store.columns.step[i],
  task: store.columns.task[i],
  rollout: store.columns.rollout[i],
});
const outcomeOf = (store, i) =>
  !store.columns.valid[i]
    ? "invalid"
    : (new Map([
        [true, "success"],
        [false, "failure"],
      ]).get(store.columns.success[i]) ?? "not told"); // of a held-out query
const trajectoryLink = (store, i) =>
  link(trajectoryPlace(store, i), `step ${store.columns.step[i]}: ${outcomeOf(store, i)}`);

const trajectoryRow = (store) => (i) => {
  const c = store.columns;
  return h(
    "a",
    { class: "row", href: address({ ...here(), ...trajectoryPlace(store, i) }) },
    h(
      "span",
      { class: "line" },
      h("span", { class: `outcome ${outcomeOf(store, i)}` }, outcomeOf(store, i)),
      h("b", {}, c.task[i]),
      h("span", { class: "right" }, `step ${c.step[i]} · ${c.calls[i]} ${c.calls[i] === 1 ? "call" : "calls"}`),
    ),
    h("span", { class: "line soft" }, c.query[i]),
  );
};

const trajectoriesView = (host, run, store) => {
  const c = store.columns;
  const set = (change) => goTo({ view: "trajectories", ...change });
  const all = Array.from({ length: store.count }, (_, i) => i);
  const kinds = [...new Set(all.flatMap((i) => c.signals[i].map((s) => s.split(":")[0])))].sort();
  const steps = [...new Set(c.step ?? [])];
  const outcome = choice(
    "outcome",
    "Outcome",
    [
      ["", "all outcomes"],
      ["success", "success"],
      ["failure", "failure"],
      ["invalid", "invalid"],
      ...(all.some((i) => outcomeOf(store, i) === "not told") ? [["not told", "not told: a query"]] : []),
    ],
    (e) => set({ outcome: e.target.value }),
  );
  const at = choice("at", "Step", [["", "all steps"], ...steps.map((s) => [String(s), `step ${s}`])], (e) =>
    set({ at: e.target.value }),
  );
  const signal = choice("signal", "Signal", [["", "all signals"], ...kinds.map((k) => [k, k])], (e) =>
    set({ signal: e.target.value }),
  );
  const search = searchBox(
    "Search all text  /",
    settled((e) => set({ q: e.target.value }), 200),
  );
  const count = h("span", { class: "count", "aria-live": "polite" });
  const rows = h("div", { class: "rows" });
  const detail = h("article", { class: "detail main", tabindex: "-1" });
  host.append(
    h("aside", { class: "side" }, h("div", { class: "filters" }, search, outcome, at, signal, count), rows),
    detail,
  );
  const list = virtualList(rows, TRAJECTORY_ROW, trajectoryRow(store));
  let [shown, asked] = [null, 0];

  const found = async (place) => {
    const words = (place.q ?? "").toLowerCase().split(/\s+/).filter(Boolean);
    const texts = words.length
      ? await store.texts((done, of) => (count.textContent = `reading part ${done} of ${of}`))
      : [];
    return all.filter(
      (i) =>
        (!place.outcome || outcomeOf(store, i) === place.outcome) &&
        (!place.at || String(c.step[i]) === place.at) &&
        (!place.signal || c.signals[i].some((s) => s.split(":")[0] === place.signal)) &&
        words.every((w) => texts[i].includes(w)),
    );
  };

  const read = async (place) => {
    const i = place.task === undefined ? -1 : store.find(Number(place.step), place.task, Number(place.rollout));
    host.classList.toggle("chosen", place.task !== undefined);
    list.select(i);
    if (i < 0) {
      const why = store.count
        ? place.task === undefined
          ? "Choose a trajectory to read it."
          : `No trajectory of ${place.task} at step ${place.step} was logged.`
        : "trajectories/ holds no file yet.";
      detail.replaceChildren(h("p", { class: "missing" }, why));
      return;
    }
    const turn = ++asked;
    const row = await store.full(i).catch((error) => error);
    if (turn !== asked) return;
    detail.replaceChildren(
      ...(row instanceof Error ? [h("p", { class: "missing" }, row.message)] : reader(run, store, i, row, place)),
    );
    detail.scrollTop = 0;
  };

  return {
    show: async (place) => {
      for (const [box, name] of [
        [outcome, "outcome"],
        [at, "at"],
        [signal, "signal"],
      ])
        box.value = place[name] ?? "";
      if (document.activeElement !== search) search.value = place.q ?? "";
      const wanted = JSON.stringify([place.q ?? "", place.outcome ?? "", place.at ?? "", place.signal ?? ""]);
      if (shown !== wanted) {
        shown = wanted;
        const items = await found(place).catch((error) => error);
        if (shown !== wanted) return;
        if (items instanceof Error) return void (count.textContent = items.message);
        list.show(items);
        count.textContent = `${plain(items.length)} of ${plain(all.length)}`;
      }
      await read(here());
    },
    step: (by) => {
      const i = list.next(by);
      if (i !== undefined) travel({ ...here(), ...trajectoryPlace(store, i) });
    },
    search: () => search.focus(),
    toggle: () => here().task !== undefined && set({ mode: here().mode === "tokens" ? "" : "tokens" }),
    redraw: () => {},
  };
};

const reader = (run, store, i, row, place) => {
  const tokens = place.mode === "tokens";
  const mode = (name, label) =>
    h(
      "a",
      {
        class: "mode",
        role: "tab",
        "aria-selected": String((place.mode ?? "") === name),
        href: address({ ...place, mode: name }),
      },
      label,
    );
  const known = run.tasks.find((t) => t.id === row.task_id);
  const { reward, progress, reason } = { progress: null, reason: "", ...row.outcome, reward: row.reward };
  const told = store.columns.success[i] !== null;
  const facts = [
    ["reward", told ? (reward?.toFixed(2) ?? "—") : "not told"],
    row.advantage !== undefined && ["advantage", row.advantage?.toFixed(2) ?? "none: nothing was learned from it"],
    told && progress !== null && ["turns passed first", percent(progress)],
    ["stop", row.stop],
    ["sampled tokens", plain(row.policy_tokens)],
    store.columns.signals[i].length && ["signals", store.columns.signals[i].join(", ")],
    reason && ["reason", reason],
  ].filter(Boolean);
  return [
    h("a", { class: "back", href: address({ ...place, task: "", step: "", rollout: "" }) }, "← all trajectories"),
    h(
      "h2",
      {},
      h("span", { class: `outcome ${outcomeOf(store, i)}` }, outcomeOf(store, i)),
      " ",
      known ? link({ view: "tasks", task: row.task_id }, row.task_id) : row.task_id,
      " ",
      h("span", { class: "soft" }, `rollout ${row.rollout_index} of step ${store.columns.step[i]}`),
    ),
    h(
      "dl",
      { class: "facts" },
      facts.map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value))),
    ),
    h("div", { class: "modes", role: "tablist" }, mode("", "Conversation"), mode("tokens", "Tokens")),
    ...(tokens ? tokenView(row) : conversation(row, known)),
  ];
};

const spoken = (call) =>
  `${call.name}(${Object.entries(call.arguments)
    .map(([k, v]) => `${k}=${JSON.stringify(v)}`)
    .join(", ")})`;

// The hints before steps that fit.
const hints = (row, fits) =>
  (row.hints ?? []).filter(([before]) => fits(before)).map(([, text]) => h("div", { class: "hint" }, `hint: ${text}`));

// Query by query: what was called, what came back and, where there is one, the reference.
const conversation = (row, task) => [
  ...hints(row, (before) => before === 0),
  ...row.queries.flatMap((query, turn) =>
    [
      clipped(query, 1500, (text) => h("div", { class: "user" }, text)),
      ...row.steps
        .map((s, at) => [s, at])
        .filter(([s]) => s.turn === turn)
        .flatMap(([s, at]) => [
          ...hints(row, (before) => before === at && at > 0),
          clipped(s.call ? spoken(s.call) : `not a call: ${s.text}`, 700, (text) =>
            h("code", { class: `call ${s.call ? "" : "error"}` }, text),
          ),
          clipped(s.observation, 700, (text) => h("code", { class: `answer ${s.error ? "error" : ""}` }, text)),
        ]),
      task?.turns[turn]?.calls.length
        ? h(
            "details",
            { class: "reference" },
            h("summary", {}, "reference calls"),
            task.turns[turn].calls.map((call) => h("code", { class: "call" }, call)),
          )
        : [],
    ].flat(),
  ),
  ...hints(row, (before) => before > 0 && before >= row.steps.length),
];
