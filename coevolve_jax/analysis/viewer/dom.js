// Elements and numbers. What comes from data becomes text here, and never markup.

const h = (tag, attributes = {}, ...children) => {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name === "value") node.value = value;
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.flat(Infinity).filter((c) => c !== undefined && c !== null && c !== false));
  return node;
};

const percent = (x, digits = 0) => (x === null || x === undefined ? "—" : `${(100 * x).toFixed(digits)}%`);
const points = (x) => (x === null || x === undefined ? "—" : `${x < 0 ? "−" : "+"}${Math.abs(100 * x).toFixed(1)}`);
const plain = (x) => {
  if (x === null || x === undefined) return "—";
  if (Number.isInteger(x)) return x.toLocaleString("en-US");
  const size = Math.abs(x);
  return size !== 0 && (size < 1e-3 || size >= 1e6) ? x.toExponential(1) : String(Number(x.toPrecision(3)));
};
const clock = (seconds) => {
  if (seconds < 59.95) return `${seconds.toFixed(1)} s`;
  const whole = Math.round(seconds);
  const [hours, minutes, rest] = [Math.floor(whole / 3600), Math.floor(whole / 60) % 60, whole % 60];
  const two = (n) => String(n).padStart(2, "0");
  return hours ? `${hours} h ${two(minutes)} min` : `${minutes} min ${two(rest)} s`;
};

const spaced = (name) => name.replaceAll("_", " ");

// A place on this page: {view: "tasks", task: "initial-0-3", ...} as the part of an address after #.
const address = (place) => {
  const known = Object.entries(place).filter(([, v]) => v !== undefined && v !== null && v !== "");
  return `#${new URLSearchParams(known)}`;
};
const here = () => Object.fromEntries(new URLSearchParams(location.hash.slice(1)));
const link = (place, ...children) => h("a", { href: address(place) }, ...children);

const ORIGINS = ["initial", "random", "forgetting", "boundary", "rare", "evaluation"];
// All origins of tasks, the usual ones first: a strategy may name its own.
const originsOf = (tasks) => {
  const there = new Set(tasks.map((t) => t.origin));
  return [...ORIGINS.filter((o) => there.has(o)), ...[...there].filter((o) => !ORIGINS.includes(o)).sort()];
};
const colourOf = (origin) => (ORIGINS.includes(origin) ? `--${origin}` : "--other");
const badge = (origin) => {
  const node = h("span", { class: "badge" }, origin);
  node.style.setProperty("--hue", `var(${colourOf(origin)})`);
  return node;
};

// A few lines of text, and the rest on demand.
const clipped = (text, limit, make) => {
  const node = make(text.length <= limit ? text : text.slice(0, limit));
  if (text.length > limit) {
    const more = h(
      "button",
      { class: "more", type: "button" },
      ` … ${(text.length - limit).toLocaleString("en-US")} more characters`,
    );
    more.addEventListener("click", () => more.replaceWith(text.slice(limit)));
    node.append(more);
  }
  return node;
};

// heads: of the columns. rows: of texts or elements.
const table = (heads, rows) =>
  h(
    "div",
    { class: "scroll" },
    h(
      "table",
      {},
      h(
        "thead",
        {},
        h(
          "tr",
          {},
          heads.map((x) => h("th", {}, x)),
        ),
      ),
      h(
        "tbody",
        {},
        rows.map((row) =>
          h(
            "tr",
            {},
            row.map((x) => h("td", {}, x)),
          ),
        ),
      ),
    ),
  );
