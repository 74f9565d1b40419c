"use strict";
// What pages share: the answer, a scatter of rows above their table, and charts that are drawn again when the width or the colour
// scheme changes.

const at = (id) => document.querySelector(id);
const drawings = [];
const widthOf = (id) => Math.max(260, Math.floor(at(id).getBoundingClientRect().width));
const isNarrow = () => innerWidth < 640;

/** Options of all charts. */
function options(id, height, label) {
  return {
    width: widthOf(id), height, ariaLabel: label,
    marginLeft: 58, marginRight: 18, marginTop: 22, marginBottom: 40,
    style: { fontSize: "12px", color: colour("text"), background: "transparent" },
  };
}

/** Draws now and again. */
function drawn(draw) {
  drawings.push(draw);
  draw();
}

/** Hides labels that would overlap earlier ones or leave the chart. */
function apart(labels, { left, right }) {
  const kept = [];
  for (const label of labels) {
    const box = label.getBoundingClientRect();
    const meets = (other) => box.left < other.right + 3 && other.left < box.right + 3 && box.top < other.bottom && other.top < box.bottom;
    const fits = box.left >= left && box.right <= right && !kept.some(meets);
    label.style.display = fits ? "" : "none";
    if (fits) kept.push(box);
  }
}

/** Ticks of seconds in one unit. */
function unitOfTime(most) {
  return most >= 1 ? [1, "s"] : most >= 1e-3 ? [1e3, "ms"] : [1e6, "µs"];
}

/** Fills the head of a page, and its notes. */
function heading({ model, request, answer, figures, notes }) {
  at("#model").textContent = model;
  at("#request").textContent = request;
  at("#answer-text").textContent = answer;
  at("#figures").replaceChildren(...figures.map((figure) => element("div", {},
    element("dt", {}, figure.name),
    element("dd", {}, figure.value),
    figure.detail ? element("dd", { class: "detail" }, figure.detail) : "")));
  at("#note-list").replaceChildren(...notes.map((note) => element("li", {}, note)));
}

/** The badges of a row that is chosen or on the frontier. */
const badges = (row, chosen) => [
  row.is_chosen ? element("span", { class: "badge" }, chosen) : "",
  row.is_frontier ? element("span", { class: "badge frontier" }, "frontier") : "",
];

/**
 * A table of rows with a filter, and above it a scatter of them. Choosing a point finds its row. `words` are the texts of a row that
 * the filter searches, `says` is the text of a point. An axis has `of`, the value of a row, and `label`.
 * `curve` joins the frontier, `limit` is a value of `y` with its name.
 */
function ranked({ rows, columns, sorted, caption, unit, words, says, title, x, y, curve, limit }) {
  const number = new Map(rows.map((row, i) => [row, i]));
  const name = (row) => ({ id: `row-${number.get(row)}`, class: row.is_chosen ? "chosen" : undefined });
  const shownRows = table(at("#plans"), columns, rows, { caption, sorted, name, most: 20, more: at("#more") });
  const filter = () => {
    const wanted = at("#filter").value.toLowerCase().split(/\s+/).filter(Boolean);
    const only = at("#frontier-only").checked;
    const text = (row) => words(row).join(" ").toLowerCase();
    const shown = shownRows.show((row) => (!only || row.is_frontier) && wanted.every((word) => text(row).includes(word)));
    at("#count").textContent = `${shown} of ${counted(rows.length, unit)}`;
  };
  at("#filter").addEventListener("input", filter);
  at("#frontier-only").addEventListener("change", filter);
  filter();

  const choose = (i) => {
    at("#filter").value = "";
    at("#frontier-only").checked = false;
    filter();
    shownRows.all();
    for (const row of document.querySelectorAll("tr.found")) row.classList.remove("found");
    const row = at(`#row-${i}`);
    row.classList.add("found");
    row.setAttribute("tabindex", "-1");
    row.scrollIntoView({ block: "center" });
    row.focus({ preventScroll: true });
    tip.hide();
  };
  drawn(() => {
    const frontier = rows.filter((row) => row.is_frontier).sort((a, b) => x.of(a) - x.of(b));
    const order = rows.map((_, i) => i).sort((a, b) => rows[a].is_chosen - rows[b].is_chosen);
    const [first, last] = d3.extent(rows, x.of);
    const isLong = last > 8 * first;
    const pad = Math.max(0.02 * first, 0.05 * (last - first));
    const limits = limit ? [limit] : [];
    const chart = Plot.plot({
      ...options("#scatter", isNarrow() ? 280 : 340, title),
      x: { label: x.label, type: isLong ? "log" : "linear", domain: isLong ? [first / 1.2, last * 1.2] : [first - pad, last + pad], ticks: isNarrow() ? 4 : 8, tickFormat: isLong ? "~g" : digits },
      y: { label: y.label, zero: true, nice: true, grid: true },
      marks: [
        Plot.ruleY(limits, { y: ([value]) => value, stroke: colour("bad"), strokeDasharray: "5 4" }),
        Plot.text(limits, { y: ([value]) => value, text: ([, of]) => of, frameAnchor: "right", dy: -8, fill: colour("bad") }),
        Plot.line(frontier, { x: x.of, y: y.of, curve, stroke: colour("link"), strokeWidth: 1.5 }),
        Plot.dot(order, { x: (i) => x.of(rows[i]), y: (i) => y.of(rows[i]), r: (i) => (rows[i].is_chosen ? 8 : 5), className: "plans",
          fill: (i) => (rows[i].is_chosen ? colour("good") : rows[i].is_frontier ? colour("link") : colour("soft")),
          fillOpacity: 0.85, stroke: colour("back"), symbol: (i) => (rows[i].is_chosen ? "star" : "circle") }),
      ],
      symbol: { type: "identity" },
      r: { type: "identity" },
      color: { type: "identity" },
    });
    at("#scatter").replaceChildren(chart);
    const marks = [...chart.querySelectorAll(".plans-0, g[aria-label='dot'] > *")];
    tips(marks, order.map((i) => says(rows[i])), (n) => choose(order[n]));
  });
}

let pending;
const again = () => { clearTimeout(pending); pending = setTimeout(() => drawings.forEach((draw) => draw()), 120); };
let width = innerWidth;
addEventListener("resize", () => { if (innerWidth !== width) { width = innerWidth; again(); } });
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", again);
