// A list of any length of which only the rows in sight are elements.

const BEYOND = 8; // rows drawn above and below what is in sight

// virtualList(host, rowHeight, draw): draw(item) gives the element of a row. show(items, key): key(item) tells rows
// apart; select(key) marks one and brings it into sight.
const virtualList = (host, rowHeight, draw) => {
  const canvas = h("div", { class: "canvas", role: "list" });
  host.append(canvas);
  const rows = new Map(); // place -> element
  let items = [];
  let chosen = -1;
  const paint = () => {
    const first = Math.max(0, Math.floor(host.scrollTop / rowHeight) - BEYOND);
    const last = Math.min(items.length, Math.ceil((host.scrollTop + host.clientHeight) / rowHeight) + BEYOND);
    for (const [place, row] of rows)
      if (place < first || place >= last) {
        row.remove();
        rows.delete(place);
      }
    const fresh = [];
    for (let place = first; place < last; place++)
      if (!rows.has(place)) {
        const row = draw(items[place]);
        row.style.transform = `translateY(${place * rowHeight}px)`;
        row.style.height = `${rowHeight}px`;
        row.setAttribute("role", "listitem");
        row.setAttribute("aria-current", place === chosen);
        rows.set(place, row);
        fresh.push(row);
      }
    if (fresh.length) canvas.append(...fresh);
  };
  host.addEventListener("scroll", paint, { passive: true });
  new ResizeObserver(paint).observe(host);
  return {
    show: (found) => {
      items = found;
      chosen = -1;
      rows.forEach((row) => row.remove());
      rows.clear();
      canvas.style.height = `${items.length * rowHeight}px`;
      if (host.scrollTop > items.length * rowHeight) host.scrollTop = 0;
      paint();
    },
    select: (item) => {
      chosen = items.indexOf(item);
      rows.forEach((row, place) => row.setAttribute("aria-current", place === chosen));
      if (chosen < 0) return;
      const top = chosen * rowHeight;
      if (top < host.scrollTop) host.scrollTop = top;
      else if (top + rowHeight > host.scrollTop + host.clientHeight)
        host.scrollTop = top + rowHeight - host.clientHeight;
    },
    // The item `by` places after the chosen one, within the list.
    next: (by) => items[Math.min(items.length - 1, Math.max(0, chosen < 0 ? 0 : chosen + by))],
  };
};

// A control of a list: a word and its choices, [[value, label]].
const choice = (name, label, options, onchange) => {
  const select = h(
    "select",
    { name, "aria-label": label, onchange },
    options.map(([value, text]) => h("option", { value }, text)),
  );
  return select;
};
const searchBox = (label, oninput) =>
  h("input", {
    type: "search",
    name: "q",
    placeholder: label,
    "aria-label": label,
    oninput,
    autocomplete: "off",
    spellcheck: "false",
  });

// Calls `act` once `ms` have gone without another call.
const settled = (act, ms = 120) => {
  let timer;
  return (...given) => {
    clearTimeout(timer);
    timer = setTimeout(() => act(...given), ms);
  };
};
