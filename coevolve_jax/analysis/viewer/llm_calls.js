// What a model was asked for a task, role by role, and what it answered: text as it was written.

const LINES = 4000; // characters of a prompt or an answer, before the rest is asked for

// Rows of llm_calls.jsonl with their prompts as text (records/llm_calls.py).
const whole = (rows) => {
  const lines = rows.flatMap((row) => row.lines);
  const text = (numbers) => numbers.map((n) => lines[n]).join("\n");
  return rows.map((row) => ({ ...row, system: text(row.system), user: text(row.user) }));
};

// Whether a question belongs to a proposal, by its exploration steps: all do but those that name others. A task that was
// cut has fewer steps than the proposal that was judged.
const concerns = (triplets) => (row) => {
  const named = row.about.triplets;
  if (!named || !triplets) return true;
  return named.slice(0, triplets.length).every((n, i) => n === triplets[i]);
};

const ROLES = {
  reflect: () => "Reflect",
  explore: (about) => `Explore, round ${about.round + 1}`,
  abstract: () => "Abstract",
  judge: (about) => `Judge the proposal of steps ${about.triplets.join(", ")}`,
  word: (about) => `Say turn ${about.turn + 1} in other words`,
  solve: (about) => `Solve it from the words of turn ${about.turn + 1}`,
};
const titleOf = ({ role, about }) => (ROLES[role] ? ROLES[role](about) : role);
const spokenText = (name, text, kind = "") => [
  h("h5", {}, name),
  clipped(text, LINES, (part) => h("pre", { class: `said ${kind}` }, part)),
];

// The exploration step that an answer led to, where it did, by its number.
const ledTo = ({ role, about }, triplets) => {
  if (role !== "explore") return null;
  const index = triplets.filter((t) => t.round < about.round).length + about.step;
  return triplets[index]?.round === about.round && h("b", {}, `step ${index} `);
};

// One question: a line that says what came of it, and all of it once it is opened.
const questionBlock = (row, triplets) => {
  const body = h("div", { class: "asked" });
  const answer = row.answers.at(-1) ?? "";
  const fill = () =>
    body.childElementCount ||
    body.append(
      ...[
        h("details", { class: "system" }, h("summary", {}, "System prompt"), spokenText("", row.system)),
        spokenText("Prompt", row.user),
        row.answers.map((text, i) => [
          i > 0 && h("p", { class: "note" }, `Asked again: this was not what was asked for (${row.complaint}).`),
          spokenText(i ? "Second answer" : "Answer", text, "answered"),
        ]),
        row.fault && h("p", { class: "fault" }, `No answer: ${spaced(row.fault)}`),
        h("p", { class: "note" }, `${plain(row.tokens_in)} tokens in, ${plain(row.tokens_out)} out`),
      ]
        .flat(Infinity)
        .filter(Boolean),
    );
  const line = row.fault ? `no answer: ${spaced(row.fault)}` : answer.replace(/\s+/g, " ").slice(0, 200);
  return h(
    "details",
    { class: `question ${row.fault ? "failed" : ""}`, ontoggle: fill },
    h(
      "summary",
      {},
      ledTo(row, triplets),
      row.answers.length > 1 && h("b", { class: "again" }, "asked twice "),
      h("span", { class: "soft" }, line),
    ),
    body,
  );
};

// The elements of a page: all questions in their order, under a title for each role and round. row: what is behind a
// task; used: its exploration steps.
const llmCallsView = ({ llm_calls, exploration }, used) => {
  const shown = whole(llm_calls).filter(concerns(used));
  const triplets = exploration?.triplets ?? [];
  const sum = (name) => plain(shown.reduce((total, row) => total + row[name], 0));
  const groups = [];
  for (const row of shown) {
    const title = titleOf(row);
    if (groups.at(-1)?.title !== title) groups.push({ title, rows: [] });
    groups.at(-1).rows.push(row);
  }
  const facts = `${plain(shown.length)} questions, ${sum("tokens_in")} tokens in, ${sum("tokens_out")} out.`;
  const blocks = (rows) => rows.map((row) => questionBlock(row, triplets));
  return [
    h("p", { class: "note" }, facts),
    ...groups.map(({ title, rows }) => h("section", { class: "role" }, h("h3", {}, title), blocks(rows))),
  ];
};
