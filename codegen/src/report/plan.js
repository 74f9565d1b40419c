"use strict";
// Draws the data of the report of a plan, but for its timeline.

const data = JSON.parse(document.querySelector("#data").textContent);

// ---- Answer

function answer() {
  heading({ ...data, notes: data.notes.length ? data.notes : ["none"] });
  const pairs = data.details.flatMap((one) => [element("dt", {}, one.name), element("dd", {}, one.value)]);
  at("#details").replaceChildren(...pairs);
}

// ---- Alternatives

function alternatives() {
  const { rows, too_large: tooLarge, refused, decodes, usable } = data.alternatives;
  const nRefused = d3.sum(refused, (one) => one.layouts.length);
  at("#alternatives-hint").textContent = `${counted(rows.length, "plan")} of ` +
    `${counted(rows.length + tooLarge.length + nRefused, "layout")} fit and are legal. A row is a distinct program.`;
  const rate = decodes ? (row) => row.rate.toFixed(1) : (row) => percent(row.rate);
  const columns = [
    { name: "Layout", long: true, text: (row) => row.layout, fill: (row) => [
      row.layout,
      ...badges(row, "plan"),
      row.flags ? element("small", {}, row.flags) : "",
      row.also.length ? element("small", {}, `the same program as ${row.also.join(", ")}`) : "",
    ] },
    { name: "Step", text: (row) => seconds(row.step), number: (row) => row.step },
    { name: "Tokens/s per GPU", text: (row) => digits(row.tokens), number: (row) => row.tokens },
    { name: decodes ? "Tokens/s per user" : "MFU", text: rate, number: (row) => row.rate },
    { name: "Exposed", text: (row) => seconds(row.exposed), number: (row) => row.exposed },
    { name: "Memory", text: (row) => bytes(row.memory), number: (row) => row.memory },
    { name: "Reason", text: (row) => row.reason, long: true },
  ];
  const [factor, unit] = unitOfTime(d3.max(rows, (row) => row.step));
  const gib = (size) => size / 2 ** 30;
  ranked({
    rows, columns, sorted: 1, caption: "Plans that fit", unit: "plan", title: "Time of a step against memory of a GPU",
    words: (row) => [row.layout, row.flags, row.reason, ...row.also],
    says: (row) => `${row.layout}${row.flags ? `\n${row.flags}` : ""}\nstep ${seconds(row.step)}, memory ${bytes(row.memory)}` +
      `\n${row.is_chosen ? "the plan" : row.is_frontier ? "on the frontier" : "slower or larger than another"}`,
    x: { of: (row) => row.step * factor, label: `Step (${unit}) →` },
    y: { of: (row) => gib(row.memory), label: "↑ Memory of a GPU (GiB)" },
    curve: "step-after",
    limit: d3.max(rows, (row) => row.memory) > 0.6 * usable ? [gib(usable), "usable"] : undefined,
  });

  at("#too-large").hidden = tooLarge.length === 0;
  at("#too-large summary").textContent = `${counted(tooLarge.length, "layout")} that ${tooLarge.length === 1 ? "does" : "do"} not fit`;
  if (tooLarge.length) {
    tableIn("#too-large div", [
      { name: "Layout", text: (row) => row.layout, long: true },
      { name: "Lacks", text: (row) => bytes(row.over), number: (row) => row.over },
      { name: "Memory", text: (row) => bytes(row.memory), number: (row) => row.memory },
      { name: "Step, if it did fit", text: (row) => seconds(row.step), number: (row) => row.step },
      { name: "Largest part", text: (row) => `${row.part[0]}, ${bytes(row.part[1])}` },
    ], tooLarge, { sorted: 1 });
  }
  at("#refused").hidden = nRefused === 0;
  at("#refused summary").textContent = `${counted(nRefused, "layout")} that ${nRefused === 1 ? "is" : "are"} refused, by reason`;
  at("#refused div").replaceChildren(...refused.map((one) => element("div", { class: "refusal" },
    element("p", {}, element("code", {}, one.code), ` ${one.message}`),
    one.helps.map((help) => element("p", {}, element("small", {}, help))),
    element("ul", {}, one.layouts.map(([layout, repairs]) =>
      element("li", {}, layout, repairs.length ? element("small", {}, ` (legal with ${repairs.join(" or ")})`) : ""))))));
}

// ---- Memory

const PARTS = ["product", "attention", "other", "copy", "good", "link"];

function memory() {
  const of = data.memory;
  at("#memory").hidden = !of;
  if (!of) return;
  const names = ["communication buffers", "activations saved for the backward pass", "other activations and outputs"];
  const lasting = of.lasting.map((part, i) => [part.name, part.bytes, PARTS[i % PARTS.length]]);
  const moving = [[names[1], 1, "comm"], [names[2], 2, "sun"], [names[0], 0, "exposed"]];
  const most = moving.map(([name, i, colour]) => [name, d3.max(of.moments, (moment) => moment[2 + i]) ?? 0, colour, i]);
  const used = most.filter(([, bytes]) => bytes > 0);
  at("#memory-hint").textContent = `${bytes(of.total)} of ${bytes(of.usable)} usable${of.place ? ` on the ranks of ${of.place}` : ""}: ` +
    `${bytes(of.total - of.arena)} for the whole step and an arena of ${bytes(of.arena)}, of which the picture has what is alive.`;
  legend("#memory-legend", [...lasting.map(([name, , colour]) => [name, colour]), ...used.map(([name, , colour]) => [name, colour])]);
  drawn(() => {
    const GIB = 2 ** 30;
    const end = d3.max(of.moments, (moment) => moment[1]) ?? data.timeline.seconds;
    const [factor, unit] = unitOfTime(end);
    const moments = of.moments.length ? of.moments : [[0, end, 0, 0, 0]];
    const boxes = [];
    const add = (name, from, to, low, high, fill) => high > low && boxes.push({ name, x1: from * factor, x2: to * factor, y1: low / GIB, y2: high / GIB, fill });
    let base = 0;
    for (const [name, size, fill] of lasting) { add(name, 0, end, base, base + size, fill); base += size; }
    moments.forEach(([from, to, ...parts], i) => {
      let low = base;
      const until = i + 1 < moments.length ? Math.max(to, moments[i + 1][0]) : to;
      for (const [name, , fill, part] of used) { add(name, from, until, low, low + parts[part], fill); low += parts[part]; }
    });
    const chart = Plot.plot({
      ...options("#memory-chart", isNarrow() ? 260 : 320, "Memory over the step"),
      x: { label: `Time (${unit}) →`, domain: [0, end * factor], ticks: isNarrow() ? 4 : 9 },
      y: { label: "↑ Memory (GiB)", domain: [0, 1.06 * Math.max(of.usable, of.total) / GIB], grid: true },
      color: { type: "identity" },
      marks: [
        Plot.rect(boxes, { x1: "x1", x2: "x2", y1: "y1", y2: "y2", fill: (box) => colour(box.fill), shapeRendering: "crispEdges", clip: true }),
        Plot.ruleY([of.usable / GIB], { stroke: colour("text"), strokeDasharray: "5 4" }),
        Plot.text([of.usable / GIB], { y: (d) => d, text: () => "usable", frameAnchor: "right", dy: -8, fill: colour("text") }),
        Plot.ruleY([0], { stroke: colour("soft") }),
      ],
    });
    at("#memory-chart").replaceChildren(chart);
    const texts = boxes.map((box) => `${box.name}\n${bytes((box.y2 - box.y1) * GIB)} from ${seconds(box.x1 / factor)} to ${seconds(box.x2 / factor)}`);
    tips([...chart.querySelectorAll("g[aria-label='rect'] > *")], texts, undefined, { focusable: false });
  });
  const rows = [...lasting.map(([name, size]) => [name, size, "whole step"]), ...used.map(([name, size]) => [name, size, "at most, in the arena"]),
    ["arena", of.arena, "whole step"], ["total", of.total, "parts of the whole step and the arena"]];
  tableIn("#memory-table", [
    { name: "Part", text: (row) => row[0] },
    { name: "Bytes", text: (row) => bytes(row[1]), number: (row) => row[1] },
    { name: "When", text: (row) => row[2] },
  ], rows);
  tableIn("#largest-table", [
    { name: "Tensor", text: (row) => row[0] },
    { name: "Layers", text: (row) => row[1], number: (row) => row[1] },
    { name: "Bytes", text: (row) => bytes(row[2]), number: (row) => row[2] },
  ], of.largest);
}

// ---- Messages

function traffic() {
  const { levels, flows, ranks, of, pairs, beyond } = data.traffic;
  const rate = ([name, devices, bandwidth]) => `${name} joins ${counted(devices, "GPU")} at ${si(bandwidth, "B/s")} each`;
  at("#traffic-hint").textContent = flows.length ? `${levels.map(rate).join("; ")}.` : "No rank sends anything.";
  for (const figure of document.querySelectorAll("#traffic .pair")) figure.hidden = flows.length === 0;
  const phases = new Set(flows.map((flow) => flow.phase)).size > 1;
  const name = (flow) => `${flow.kind}/${flow.axis}${phases ? `, ${flow.phase}` : ""}`;
  if (flows.length) drawn(() => {
    const cells = flows.flatMap((flow) => flow.by_level.map((sent, i) => ({ flow: name(flow), level: levels[i][0], sent })));
    const heat = d3.interpolateRgb(colour("heat-0"), colour("heat-1"));
    const most = d3.max(cells, (cell) => cell.sent) || 1;
    const part = (cell) => (cell.sent ? 0.12 + 0.88 * Math.sqrt(cell.sent / most) : 0);
    const width = widthOf("#levels");
    // Names that are too wide for the page are in three lines.
    const margin = (names) => 14 + 6.3 * d3.max(names, (name) => d3.max(name.split("\n"), (line) => line.length));
    const fits = margin(flows.map(name)) <= width * 0.55;
    const lines = (name) => (fits ? name : name.replace("/", "/\n").replace(", ", ",\n"));
    const chart = Plot.plot({
      ...options("#levels", 44 + (fits ? 34 : 48) * flows.length, "Bytes by collective and level of the topology"),
      marginLeft: Math.min(width * 0.55, margin(flows.map(name).map(lines))), marginTop: 34, marginBottom: 6, marginRight: 4,
      x: { domain: levels.map(([level]) => level), axis: "top", label: null, tickSize: 0 },
      y: { domain: flows.map(name), label: null, tickSize: 0, tickFormat: lines },
      color: { type: "identity" },
      marks: [
        Plot.cell(cells, { x: "level", y: "flow", inset: 1, fill: (cell) => heat(part(cell)) }),
        Plot.text(cells, { x: "level", y: "flow", text: (cell) => (cell.sent ? bytes(cell.sent) : "–"), fill: (cell) => (d3.lab(heat(part(cell))).l > 52 ? "#14171b" : "#ffffff") }),
      ],
    });
    at("#levels").replaceChildren(chart);
  });
  at("#pairs-caption").textContent = `Bytes that the rank of a row sends to the rank of a column${ranks < of ? `, of the first ${ranks} of ${of} ranks; the last column is what they send to all others` : ""}. Lines are nodes.`;
  if (flows.length) drawn(() => {
    const width = widthOf("#pairs");
    const heat = d3.interpolateRgb(colour("heat-0"), colour("heat-1"));
    const most = Math.max(d3.max(pairs, ([, , sent]) => sent) ?? 0, d3.max(beyond) ?? 0) || 1;
    const fill = (sent) => (sent ? heat(0.12 + 0.88 * Math.sqrt(sent / most)) : colour("panel"));
    const extra = ranks < of ? 2 : 0;
    const node = levels[0]?.[1] ?? ranks;
    const cells = pairs.map(([from, to, sent]) => ({ x: to, y: from, sent, text: `rank ${from} to rank ${to}\n${bytes(sent)}` }));
    const others = extra ? beyond.map((sent, from) => ({ x: ranks + 1, y: from, sent, text: `rank ${from} to the others\n${bytes(sent)}` })) : [];
    const shown = [...cells, ...others];
    const lines = d3.range(0, ranks + 1, node).filter((at) => at <= ranks);
    const side = Math.min(width - 58, 460);
    const every = Math.max(1, Math.ceil(ranks / (side / 26)));
    const ticks = d3.range(0, ranks, every);
    const chart = Plot.plot({
      ...options("#pairs", side + 58, "Bytes by rank"),
      width: side + 58, marginLeft: 50, marginTop: 40, marginBottom: 18, marginRight: 8,
      x: { domain: [0, ranks + extra], axis: "top", ticks: ticks.map((t) => t + 0.5), tickFormat: (t) => String(t - 0.5), tickSize: 0, label: "to rank →" },
      y: { domain: [0, ranks], reverse: true, ticks: ticks.map((t) => t + 0.5), tickFormat: (t) => String(t - 0.5), tickSize: 0, label: "↓ from rank" },
      color: { type: "identity" },
      marks: [
        Plot.rect([0], { x1: 0, x2: ranks, y1: 0, y2: ranks, fill: colour("panel") }),
        Plot.rect(shown, { className: "pair", x1: "x", x2: (d) => d.x + 1, y1: "y", y2: (d) => d.y + 1, inset: ranks > 24 ? 0 : 0.5, fill: (d) => fill(d.sent) }),
        Plot.ruleX(lines, { stroke: colour("soft"), strokeOpacity: 0.7, y1: 0, y2: ranks }),
        Plot.ruleY(lines, { stroke: colour("soft"), strokeOpacity: 0.7, x1: 0, x2: ranks }),
      ],
    });
    at("#pairs").replaceChildren(chart);
    tips([...chart.querySelectorAll("g[aria-label='rect']:nth-of-type(n) > *")].slice(-shown.length), shown.map((d) => d.text), undefined, { focusable: false });
  });
  const far = beyond.map((sent, from) => [from, undefined, sent]).filter(([, , sent]) => sent > 0);
  const sorted = [...pairs, ...far].sort((a, b) => b[2] - a[2]);
  at("#pair-details").hidden = sorted.length === 0;
  tableIn("#pair-table", [
    { name: "From rank", text: (row) => row[0], number: (row) => row[0], start: true },
    { name: "To rank", text: (row) => row[1] ?? "all others", number: (row) => row[1] ?? Infinity, start: true },
    { name: "Bytes", text: (row) => bytes(row[2]), number: (row) => row[2] },
  ], sorted.slice(0, 500), { caption: sorted.length > 500 ? "The 500 largest" : undefined });
  tableIn("#flow-table", [
    { name: "Collective", text: (row) => row.kind },
    { name: "Axis", text: (row) => row.axis },
    { name: "Phase", text: (row) => row.phase },
    { name: "Count", text: (row) => row.count, number: (row) => row.count },
    { name: "Bytes", text: (row) => bytes(row.bytes), number: (row) => row.bytes },
    ...levels.map(([level], i) => ({ name: level, text: (row) => bytes(row.by_level[i]), number: (row) => row.by_level[i] })),
    { name: "Time, all phases", text: (row) => seconds(row.seconds), number: (row) => row.seconds },
    { name: "Exposed", text: (row) => seconds(row.exposed), number: (row) => row.exposed },
  ], flows, { caption: "Of the busiest rank, in a step" });
}

// ---- Kernels

function kernels() {
  const { peak, dtype, bandwidth, rows } = data.kernels;
  at("#kernels-hint").textContent = `The GPU computes at most ${si(peak, "FLOP/s")} in ${dtype} and reads or writes ${si(bandwidth, "B/s")}; ` +
    "above the line no kernel can be. Rates are those that the plan assumes.";
  // What takes no time is in the table only.
  const sum = d3.sum(rows, (row) => row.seconds);
  const shown = rows.filter((row) => row.flops > 0 && row.bytes > 0 && row.seconds > 1e-4 * sum);
  const x = (row) => row.flops / row.bytes;
  const y = (row) => row.flops / row.seconds;
  drawn(() => {
    if (!shown.length) return;
    const ridge = peak / bandwidth;
    const low = Math.max(0.01, Math.min(0.1, d3.min(shown, x) / 2));
    const high = Math.max(4 * ridge, 4 * d3.max(shown, x));
    const bottom = Math.max(1e-5 * peak, Math.min(low * bandwidth, d3.min(shown, y) / 2)) / 1e12;
    const roof = [low, ridge, high].map((at) => [at, Math.min(peak, at * bandwidth) / 1e12]);
    const most = d3.max(shown, (row) => row.seconds);
    const units = { matmul: "product", attention: "attention", vector: "other" };
    const order = [...shown].sort((a, b) => b.seconds - a.seconds);
    const named = order.slice(0, 12);
    const chart = Plot.plot({
      ...options("#roofline", isNarrow() ? 300 : 380, "Rate of kernels against FLOPs per byte"),
      x: { type: "log", domain: [low, high], label: "FLOPs per byte →", tickFormat: "~g", ticks: isNarrow() ? 4 : 8 },
      y: { type: "log", domain: [bottom, 2 * peak / 1e12], label: "↑ TFLOP/s", grid: true, tickFormat: "~g", ticks: 6 },
      color: { type: "identity" },
      r: { type: "identity" },
      marks: [
        Plot.line(roof, { stroke: colour("text"), strokeWidth: 1.5, clip: true }),
        Plot.dot(order, { x, y: (row) => y(row) / 1e12, r: (row) => 3.5 + 13 * Math.sqrt(row.seconds / most), fill: (row) => colour(units[row.unit]), fillOpacity: 0.7, stroke: colour("back"), clip: true }),
        Plot.text(named, { x, y: (row) => y(row) / 1e12, text: (row) => row.name, lineAnchor: "bottom", dy: -17, fill: colour("text"), stroke: colour("back"), strokeWidth: 3 }),
      ],
    });
    at("#roofline").replaceChildren(chart);
    apart([...chart.querySelectorAll("g[aria-label='text'] text")], at("#roofline").getBoundingClientRect());
    const text = (row) => `${row.name} in @${row.function}\n${si(x(row), "FLOPs per byte")}, ${si(y(row), "FLOP/s")}\n${seconds(row.seconds)} in ${counted(row.runs, "run")}`;
    tips([...chart.querySelectorAll("g[aria-label='dot'] circle")], order.map(text));
  });
  tableIn("#kernel-table", [
    { name: "Kernel", text: (row) => row.name },
    { name: "Function", text: (row) => `@${row.function}` },
    { name: "Runs", text: (row) => row.runs, number: (row) => row.runs },
    { name: "Time", text: (row) => seconds(row.seconds), number: (row) => row.seconds },
    { name: "FLOPs", text: (row) => si(row.flops, "FLOP"), number: (row) => row.flops },
    { name: "Bytes", text: (row) => bytes(Math.round(row.bytes)), number: (row) => row.bytes },
    { name: "Of the limit", text: (row) => percent(Math.max(row.flops / peak, row.bytes / bandwidth) / row.seconds), number: (row) => Math.max(row.flops / peak, row.bytes / bandwidth) / row.seconds },
  ], rows, { caption: "Of the busiest rank, in a step" });
}

// Graphs that are a little wide are scaled; wider ones begin in their middle, where layers are.
function layouts() {
  for (const drawing of document.querySelectorAll(".drawing")) {
    const middle = () => {
      const of = drawing.querySelector(".scroll");
      const svg = of.querySelector("svg");
      svg.style.maxWidth = svg.getAttribute("width") < 1.5 * of.clientWidth ? "100%" : "none";
      of.scrollLeft = (of.scrollWidth - of.clientWidth) / 2;
    };
    drawing.addEventListener("toggle", middle);
    middle();
  }
}

answer();
layouts();
alternatives();
timeline();
memory();
traffic();
kernels();
