"use strict";
// Texts, numbers and tables of the report. Texts become text nodes, never markup.

/** An element with attributes and children; a child is a node or a text. */
function element(name, attributes = {}, ...children) {
  const one = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (value !== undefined && value !== false) one.setAttribute(key, value === true ? "" : value);
  }
  one.append(...children.flat().filter((child) => child !== undefined && child !== ""));
  return one;
}

/** Seconds in a unit that reads well. */
function seconds(s) {
  if (s === 0) return "0 s";
  const [factor, unit] = s >= 1 ? [1, "s"] : s >= 1e-3 ? [1e3, "ms"] : [1e6, "µs"];
  const x = s * factor;
  return `${x >= 1000 ? Math.round(x) : x.toPrecision(4)} ${unit}`;
}

/** Bytes in binary units. */
function bytes(n) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
  let at = 0;
  while (n >= 1024 && at + 1 < units.length) { n /= 1024; at += 1; }
  return `${at === 0 ? n : n.toFixed(2)} ${units[at]}`;
}

/** A number with at most four digits that matter. */
function digits(x) {
  return x >= 1000 ? Math.round(x).toString() : x.toPrecision(4).replace(/\.?0+$/, "");
}

/** A number with a prefix of the SI, as 1.2 T. */
function si(x, unit) {
  const steps = [[1e15, "P"], [1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]];
  const [factor, prefix] = steps.find(([factor]) => x >= factor) ?? [1, ""];
  return `${digits(x / factor)} ${prefix}${unit}`;
}

const percent = (part) => `${(100 * part).toFixed(1)} %`;
const counted = (n, unit) => `${n} ${unit}${n === 1 ? "" : "s"}`;

/** Numbers are at the right, unless a column says that it starts at the left. */
const kindOf = (column) => (column.number && !column.start ? "number" : column.long ? "text long" : "text");

/**
 * Fills a table. A column has a name, `text` and, where it sorts by a number, `number`; `fill` may append nodes in place of a text.
 * Heads are buttons that sort. Beyond `most` rows the button `more` shows the rest. Returns an object: `show` takes the rows that pass
 * a filter and returns their number, `all` shows every row.
 */
function table(of, columns, rows, { caption, sorted, name = () => undefined, most = Infinity, more } = {}) {
  const head = element("tr");
  const body = element("tbody");
  let by = sorted === undefined ? undefined : { column: columns[sorted], up: true };
  let passes = () => true;
  const draw = () => {
    const shown = rows.filter(passes);
    if (by) {
      const key = by.column.number ?? by.column.text;
      const order = (a, b) => (key(a) < key(b) ? -1 : key(a) > key(b) ? 1 : 0);
      shown.sort((a, b) => (by.up ? order(a, b) : order(b, a)));
    }
    const hidden = Math.max(0, shown.length - most);
    if (more) {
      more.hidden = hidden === 0;
      more.textContent = `Show ${hidden} more`;
    }
    body.replaceChildren(...shown.slice(0, most).map((row) => {
      const cells = columns.map((column) => {
        const kind = kindOf(column);
        const content = column.fill ? column.fill(row) : [column.text(row)];
        return element("td", { class: kind }, content);
      });
      return element("tr", name(row) ?? {}, cells);
    }));
    return shown.length;
  };
  for (const column of columns) {
    const button = element("button", { type: "button" }, column.name);
    const cell = element("th", { scope: "col", class: kindOf(column) }, button);
    cell.setAttribute("aria-sort", by?.column === column ? "ascending" : "none");
    button.addEventListener("click", () => {
      by = { column, up: by?.column === column ? !by.up : true };
      for (const other of head.children) other.setAttribute("aria-sort", "none");
      cell.setAttribute("aria-sort", by.up ? "ascending" : "descending");
      draw();
    });
    head.append(cell);
  }
  of.replaceChildren(
    ...(caption ? [element("caption", {}, caption)] : []),
    element("thead", {}, head),
    body,
  );
  draw();
  const all = () => { most = Infinity; return draw(); };
  more?.addEventListener("click", all);
  return { show: (filter) => { passes = filter; return draw(); }, all };
}

/** A table in an element of its own. */
function tableIn(id, columns, rows, options) {
  const of = element("table");
  document.querySelector(id).replaceChildren(of);
  return table(of, columns, rows, options);
}

/** A colour of the page. */
const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

function legend(id, entries) {
  const item = ([name, of]) => element("li", { style: `--swatch: var(--${of})` }, name);
  document.querySelector(id).replaceChildren(...entries.map(item));
}

/** The tooltip, beside the pointer or an element. */
const tip = {
  show(text, x, y) {
    const of = document.querySelector("#tip");
    of.textContent = text;
    of.hidden = false;
    const { width, height } = of.getBoundingClientRect();
    of.style.left = `${Math.max(4, Math.min(x + 12, innerWidth - width - 4))}px`;
    of.style.top = `${y + 16 + height > innerHeight ? y - height - 12 : y + 16}px`;
  },
  hide() { document.querySelector("#tip").hidden = true; },
};

/** Tooltips of marks, by pointer and by keyboard: each mark can be focused and says its text. */
function tips(marks, texts, choose, { focusable = true } = {}) {
  marks.forEach((mark, i) => {
    const text = texts[i];
    mark.setAttribute("aria-label", text.replaceAll("\n", ", "));
    mark.addEventListener("pointermove", (event) => tip.show(text, event.clientX, event.clientY));
    mark.addEventListener("pointerleave", tip.hide);
    if (!focusable) return;
    mark.setAttribute("tabindex", "0");
    mark.setAttribute("role", choose ? "button" : "img");
    mark.addEventListener("focus", () => {
      const { right, bottom } = mark.getBoundingClientRect();
      tip.show(text, right, bottom);
    });
    mark.addEventListener("blur", tip.hide);
    if (choose) {
      mark.style.cursor = "pointer";
      mark.addEventListener("click", () => choose(i));
      mark.addEventListener("keydown", (event) => {
        if (event.key === "Enter" || event.key === " ") { event.preventDefault(); choose(i); }
      });
    }
  });
}
