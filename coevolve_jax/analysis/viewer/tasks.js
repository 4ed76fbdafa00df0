// The training set: a map, a list with filters, and the lineage of a task.

const TASK_ROW = 58; // pixels

const taskGain = (task) =>
  Number.isFinite(task.first_score) && Number.isFinite(task.last_score) ? task.last_score - task.first_score : null;

const inBrief = ({ reason, description }) => [spaced(reason ?? ""), description].filter(Boolean).join(": ");

const taskRow = (task) =>
  h(
    "a",
    { class: "row", href: address({ ...here(), view: "tasks", task: task.id, mode: "" }) },
    h(
      "span",
      { class: "line" },
      badge(task.origin),
      h("b", {}, task.id),
      h("span", { class: "right" }, task.origin === "evaluation" ? "" : `step ${task.step}`),
    ),
    h("span", { class: "line soft" }, task.turns[0]?.query ?? inBrief(task)),
  );

const tasksView = (host, run, store) => {
  const all = [...run.tasks, ...run.evaluation_tasks];
  const refused = run.refused.map((r) => ({ ...r, turns: [], lineage: { context: "" } }));
  const byId = new Map([...refused, ...all].map((t) => [t.id, t]));
  const children = new Map();
  run.tasks.forEach((t) => children.set(t.lineage.parent, [...(children.get(t.lineage.parent) ?? []), t]));
  const texts = new Map(
    [...all, ...refused].map((t) => [
      t,
      [t.id, t.reason, t.description, t.lineage.context, ...t.turns.flatMap((u) => [u.query, ...u.calls])]
        .join("\n")
        .toLowerCase(),
    ]),
  );
  const set = (change) => goTo({ view: "tasks", ...change });
  const origins = originsOf(all);
  const filter = choice(
    "origin",
    "Origin",
    [
      ["", "all tasks"],
      ["new", "new tasks"],
      ...origins.map((o) => [o, o]),
      ...(refused.length ? [["refused", "no task: refused"]] : []),
    ],
    (e) => set({ origin: e.target.value }),
  );
  const search = searchBox(
    "Search tasks  /",
    settled((e) => set({ q: e.target.value })),
  );
  const count = h("span", { class: "count" });
  const rows = h("div", { class: "rows" });
  const detail = h("article", { class: "detail", tabindex: "-1" });
  const map = h("div", { class: "map" });
  const key = h(
    "p",
    { class: "key" },
    origins.map(badge),
    h(
      "span",
      { class: "soft" },
      `Close points are similar tasks (the features that leak control compares); the two axes hold ${percent(run.map_share)} of all squared distances.`,
    ),
  );
  host.append(
    h("aside", { class: "side" }, h("div", { class: "filters" }, search, filter, count), rows),
    h("div", { class: "main" }, map, key, detail),
  );
  const points = taskMap(map, all, (task) => travel({ ...here(), view: "tasks", task: task.id, mode: "" }));
  const list = virtualList(rows, TASK_ROW, taskRow);
  let [shown, asked] = ["", 0];

  // The page of what was chosen; a part of the data may have to be read for it.
  const read = async (task, place) => {
    const turn = ++asked;
    const wanted = task.origin === "refused" || (place.mode === "llm_calls" && task.asked);
    const row = wanted ? await store.full(store.count + task.row).catch((error) => error) : null;
    if (turn !== asked) return;
    if (row instanceof Error) return void detail.replaceChildren(h("p", { class: "missing" }, row.message));
    const found = task.origin === "refused" ? refusal(task, row) : task;
    detail.replaceChildren(
      ...(place.mode === "llm_calls" ? llmCalls(found, row) : lineage(found, byId, children, store)),
    );
  };

  return {
    show: async (place) => {
      const words = (place.q ?? "").toLowerCase().split(/\s+/).filter(Boolean);
      const origin = place.origin ?? "";
      const fits = (t) =>
        (!origin || t.origin === origin || (origin === "new" && !["initial", "evaluation", "query"].includes(t.origin))) &&
        words.every((w) => texts.get(t).includes(w));
      if (shown !== JSON.stringify([origin, words])) {
        const among = origin === "refused" ? refused : all;
        const found = among.filter(fits);
        list.show(found);
        count.textContent = `${plain(found.length)} of ${plain(among.length)}`;
        shown = JSON.stringify([origin, words]);
      }
      if (document.activeElement !== search) search.value = place.q ?? "";
      filter.value = origin;
      const task = byId.get(place.task);
      list.select(task);
      points.mark(task?.x === undefined ? null : task, fits);
      host.classList.toggle("chosen", Boolean(place.task));
      host.classList.toggle("reading", Boolean(task) && place.mode === "llm_calls");
      if (task) return read(task, place);
      asked++;
      detail.replaceChildren(
        h(
          "p",
          { class: "missing" },
          place.task
            ? `This run has no task ${place.task}.`
            : all.length
              ? "Choose a task, in the list or on the map, to see where it comes from."
              : "tasks.jsonl is not there yet.",
        ),
      );
    },
    step: (by) => {
      const task = list.next(by);
      if (task) travel({ ...here(), view: "tasks", task: task.id, mode: "" });
    },
    search: () => search.focus(),
    redraw: points.redraw,
  };
};

const taskLink = (id, byId) => (byId.has(id) ? link({ view: "tasks", task: id }, id) : id);

const turnBlock = (turn) => [
  clipped(turn.query, 1500, (text) => h("div", { class: "user" }, text)),
  turn.calls.map((call) => clipped(call, 700, (text) => h("code", { class: "call" }, text))),
];

// What the reflector read from the trajectory: only what it said.
const reflection = (context) =>
  [
    ["", context.summary],
    ["Cause: ", context.failure_cause],
    ["Instability: ", context.instability_pattern],
    ["Explore: ", context.focus_pattern.join(" → ")],
    ["Avoid: ", context.avoid.join("; ")],
    ["Must call: ", context.must.join(", ")],
  ]
    .filter(([, text]) => text)
    .map(([name, text]) => h("p", { class: "note" }, `${name}${text}`));

// What became no task, in the form of one. row: what is behind it.
const refusal = (item, { exploration, llm_calls }) => {
  const proposal = item.proposal === null ? null : exploration.proposals[item.proposal];
  const context = exploration?.context;
  const triplets = proposal?.triplets ?? exploration?.triplets.map((t) => t.index) ?? [];
  return {
    ...item,
    asked: llm_calls.length,
    lineage: {
      signal: item.signal,
      parent: context?.task,
      context: context?.id,
      triplets,
      verdict: proposal ? proposal.verdict : spaced(item.reason),
      reason: proposal ? spaced(proposal.reason) : "",
      nearest: proposal?.near?.task,
      similarity: proposal?.near?.similarity,
      measure: proposal?.near?.measure,
    },
    reflection: context,
    explored: triplets.map((i) => ({ ...exploration.triplets[i], call: spoken(exploration.triplets[i].call) })),
  };
};

const headline = (task) =>
  h(
    "h2",
    {},
    badge(task.origin),
    " ",
    task.id,
    " ",
    h(
      "span",
      { class: "soft" },
      { evaluation: "never trained on", query: "learned from without its answer", refused: `at step ${task.step}` }[task.origin] ?? `born at step ${task.step}`,
    ),
  );

// What a model was asked on the way to a task. row: what is behind it.
const llmCalls = (task, row) => [
  h("a", { class: "up", href: address({ ...here(), mode: "" }) }, "← lineage"),
  headline(task),
  ...(task.asked
    ? llmCallsView(row, task.proposal === null ? null : task.lineage.triplets)
    : [h("p", { class: "missing" }, "No model was asked for it.")]),
];

// From the weakness that asked for a task to what became of it: the elements of its page.
const lineage = (task, byId, children, store) => {
  const { lineage: born, fired } = task;
  const parent = byId.get(born.parent);
  const trajectory = fired ? store.find(fired.step, fired.task_id, fired.rollout_index) : -1;
  const rollout = fired && `rollout ${fired.rollout_index} of step ${fired.step} on `;
  const own = Array.from({ length: store.count }, (_, i) => i).filter((i) => store.columns.task[i] === task.id);
  const gain = taskGain(task);
  const results =
    task.results &&
    ["before", "after"]
      .map((when) => `${when} ${task.results[when] ? task.results[when].join(" of ") : "—"}`)
      .join(", ");
  const stages = [
    [
      "Signal",
      born.signal && [
        badge(born.signal),
        ` in ${fired ? `rollout ${fired.rollout_index} of step ${fired.step}` : "a rollout"}`,
        fired?.pattern ? `: rare action ${fired.pattern}` : "",
      ],
    ],
    [
      "Trajectory",
      fired &&
        (trajectory >= 0
          ? link(trajectoryPlace(store, trajectory), `${rollout}${fired.task_id}`)
          : `${rollout}${fired.task_id} (not among the logged ones)`),
    ],
    [
      parent ? "Parent task" : "Scenario",
      born.parent && [
        taskLink(born.parent, byId),
        parent?.turns[0] ? `: “${parent.turns[0].query.slice(0, 160)}”` : "",
      ],
    ],
    ["Reflection", born.context && [born.context, task.reflection && reflection(task.reflection)]],
    [
      "Questions to a model",
      task.asked > 0 && link({ ...here(), mode: "llm_calls" }, "what it was asked, and what it answered"),
    ],
    [
      "Exploration",
      born.triplets.length && [
        `steps ${born.triplets.join(", ")}${born.explorer ? ` of the ${born.explorer} explorer` : ""}`,
        task.explored?.map((t) => [
          clipped(t.call, 700, (text) => h("code", { class: "call" }, text)),
          clipped(t.observation, 400, (text) => h("div", { class: t.error ? "answer error" : "answer" }, text)),
        ]),
      ],
    ],
    ["Task", task.turns.map(turnBlock)],
    ["Verdict", born.verdict && [born.verdict, born.reason].filter(Boolean).join(", ")],
    [
      "Nearest evaluation task",
      born.nearest && [
        taskLink(born.nearest, byId),
        `, cosine ${born.similarity.toFixed(2)} of ${born.measure ?? "features"}`,
      ],
    ],
    [
      "Visits",
      task.visits !== null &&
        task.visits !== undefined &&
        `${task.visits} ${task.visits === 1 ? "step" : "steps"} trained on it`,
    ],
    [
      "Gain",
      gain !== null &&
        `mean reward ${task.first_score.toFixed(2)} at the first visit, ${task.last_score.toFixed(2)} at the last: ${points(gain)} points`,
    ],
    ["Successes of samples", results],
    ["Logged trajectories", own.length && own.slice(0, 40).map((i) => [trajectoryLink(store, i), " "])],
    ["Led to", children.get(task.id)?.map((t) => [taskLink(t.id, byId), " "])],
  ].filter(([, content]) => content);
  return [
    h("a", { class: "back", href: address({ ...here(), task: "" }) }, "← all tasks"),
    headline(task),
    task.description && h("p", { class: "note" }, task.description),
    h(
      "ol",
      { class: "chain" },
      stages.map(([name, content]) => h("li", {}, h("h4", {}, name), h("div", {}, content))),
    ),
  ].filter(Boolean);
};
