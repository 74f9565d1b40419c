"use strict";
// Draws the data of the report of a plan.

const data = JSON.parse(document.querySelector("#data").textContent);

// ---- Answer

function answer() {
  heading(data);
  const pairs = data.details.flatMap((one) => [element("dt", {}, one.name), element("dd", {}, one.value)]);
  at("#details").replaceChildren(...pairs);
  const notes = data.notes.length ? data.notes : ["none"];
  at("#note-list").replaceChildren(...notes.map((note) => element("li", {}, note)));
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

// ---- One step

const KINDS = [["matrix product", "product"], ["attention", "attention"], ["other kernel", "other"], ["copy", "copy"], ["communication", "comm"]];

function timeline() {
  const { ranks, lanes, names, seconds: all, left_out: leftOut } = data.timeline;
  const listed = new Set(lanes.map((lane) => lane.rank));
  if (!ranks.length) {
    at("#timeline-hint").textContent = "Not simulated event by event: too many ranks differ.";
    for (const part of at("#timeline").querySelectorAll(":scope > :not(h2, #timeline-hint)")) part.hidden = true;
    return;
  }
  at("#timeline-hint").textContent = `${seconds(all)} by the simulation of events, stream by stream. ` +
    (leftOut ? `Listed: ${leftOut}.` : "Every run of every rank is listed.");
  legend("#timeline-legend", [...KINDS, ["folded runs", "idle"], ["exposed", "exposed"]]);
  const alike = (row) => (row.ranks > 1 ? ` and ${row.ranks - 1} like it` : "");
  const label = (row) => `rank ${row.rank}${alike(row)}${row.place ? ` (${row.place})` : ""}`;
  const choice = at("#kind-of-rank");
  const kinds = [...listed];
  if (kinds.length > 1) choice.append(element("option", { value: "all" }, `all ${kinds.length} kinds`));
  choice.append(...kinds.map((i) => element("option", { value: i }, label(ranks[i]))));
  if (kinds.length > 6) choice.value = String(kinds[0]);

  const state = { from: 0, to: all * 1e6, chosen: undefined };
  const end = all * 1e6;
  const canvas = element("canvas", { "aria-hidden": "true" });
  at("#runs").replaceChildren(canvas);
  const ROW = 26, HEAD = 20, GAP = 8, AXIS = 26;
  let places = [];
  const shownLanes = () => lanes.filter((lane) => choice.value === "all" || lane.rank === Number(choice.value));

  const draw = () => {
    const shown = shownLanes();
    const width = Math.max(260, at("#runs").clientWidth);
    const scale = devicePixelRatio || 1;
    let y = 4;
    let last;
    places = [];
    for (const lane of shown) {
      if (lane.rank !== last) { y += last === undefined ? 0 : GAP; places.push({ head: label(ranks[lane.rank]), y }); y += HEAD; last = lane.rank; }
      places.push({ lane, y });
      y += ROW;
    }
    const height = y + AXIS + 4;
    canvas.width = width * scale;
    canvas.height = height * scale;
    canvas.style.height = `${height}px`;
    const cx = canvas.getContext("2d");
    cx.scale(scale, scale);
    cx.clearRect(0, 0, width, height);
    cx.textBaseline = "middle";
    cx.font = "12px system-ui, sans-serif";
    const left = 18 + Math.max(40, ...shown.map((lane) => cx.measureText(lane.stream).width));
    const x = d3.scaleLinear([state.from, state.to], [left, width - 10]);
    const colours = KINDS.map(([, of]) => colour(of));
    const [text, soft, idle, exposed, line] = ["text", "soft", "idle", "exposed", "line"].map(colour);
    const font = "system-ui, sans-serif";
    const clipped = (name, room) => {
      if (room < 30) return "";
      const fits = Math.floor(room / 6.2);
      return name.length <= fits ? name : `${name.slice(0, fits - 1)}…`;
    };
    // Ticks.
    const [factor, unit] = unitOfTime((state.to - state.from) / 1e6);
    const us = factor / 1e6;
    const time = d3.scaleLinear([state.from * us, state.to * us], [left, width - 10]);
    cx.font = `12px ${font}`;
    for (const tick of time.ticks(isNarrow() ? 4 : 9)) {
      cx.fillStyle = line;
      cx.fillRect(time(tick), 0, 1, height - AXIS);
      cx.fillStyle = soft;
      cx.textAlign = "center";
      const name = time.tickFormat(isNarrow() ? 4 : 9)(tick);
      cx.fillText(name, Math.min(width - 16, Math.max(left + 6, time(tick))), height - AXIS + 10);
    }
    cx.textAlign = "left";
    cx.fillText(unit, 8, height - AXIS + 10);
    for (const place of places) {
      if (place.head) {
        cx.fillStyle = text;
        cx.font = `600 12px ${font}`;
        cx.textAlign = "left";
        cx.fillText(clipped(place.head, width - 16), 8, place.y + HEAD / 2);
        continue;
      }
      const { lane, y } = place;
      cx.font = `12px ${font}`;
      cx.fillStyle = soft;
      cx.textAlign = "left";
      cx.fillText(lane.stream, 8, y + ROW / 2);
      cx.save();
      cx.beginPath();
      cx.rect(left, y, width - 10 - left, ROW);
      cx.clip();
      for (const [start, length, name, count, busy] of lane.folds) {
        if (start + length < state.from || start > state.to) continue;
        const [a, b] = [x(start), x(start + length)];
        cx.fillStyle = idle;
        cx.fillRect(a, y + 3, Math.max(1, b - a), ROW - 8);
        cx.fillStyle = lane.stream === "compute" ? colours[2] : colours[4];
        cx.globalAlpha = 0.45;
        cx.fillRect(a, y + 3, Math.max(1, b - a), Math.max(2, (ROW - 8) * Math.min(1, busy / Math.max(length, 1e-9))));
        cx.globalAlpha = 1;
        cx.fillStyle = text;
        cx.font = `11px ${font}`;
        cx.fillText(clipped(count > 1 ? `${names[name]} (${count} runs)` : names[name], b - Math.max(a, left) - 8), Math.max(a, left) + 4, y + ROW / 2 - 1);
      }
      // Neighbours of one colour that are narrower than a pixel are one rectangle.
      let open;
      const flush = () => {
        if (!open) return;
        cx.fillStyle = colours[open.kind];
        cx.fillRect(open.a, y + 3, Math.max(0.6, open.b - open.a), ROW - 8);
        open = undefined;
      };
      for (const run of lane.runs) {
        const [start, length, name, layer, kind] = run;
        if (start + length < state.from || start > state.to) continue;
        const [a, b] = [x(start), x(start + length)];
        if (open && open.kind === kind && b - open.a < 1) { open.b = b; continue; }
        flush();
        open = { kind, a, b: b > a + 2 ? b - 0.5 : b };
        if (b - a > 34) {
          flush();
          cx.fillStyle = colour("back");
          cx.font = `11px ${font}`;
          const from = Math.max(a, left);
          cx.fillText(clipped(names[name], Math.min(b, width) - from - 6), from + 3, y + ROW / 2 - 1);
        }
      }
      flush();
      cx.fillStyle = exposed;
      for (const [start, length] of lane.exposed) {
        if (start + length < state.from || start > state.to) continue;
        cx.fillRect(x(start), y + ROW - 5, Math.max(0.6, x(start + length) - x(start)), 4);
      }
      cx.restore();
      if (state.chosen && state.chosen.lane === lane) {
        const [start, length] = state.chosen.run;
        cx.strokeStyle = text;
        cx.lineWidth = 2;
        cx.strokeRect(x(start), y + 2, Math.max(2, x(start + length) - x(start)), ROW - 6);
      }
    }
    at("#window").textContent = `${seconds(state.from / 1e6)} to ${seconds(state.to / 1e6)}`;
    state.x = x;
  };

  const clamp = () => {
    const length = Math.min(end, Math.max(end * 1e-6, state.to - state.from));
    state.from = Math.min(end - length, Math.max(0, state.from));
    state.to = state.from + length;
    draw();
  };
  const zoom = (by, around = (state.from + state.to) / 2) => {
    state.to = around + (state.to - around) * by;
    state.from = around + (state.from - around) * by;
    clamp();
  };
  const pan = (part) => {
    const move = (state.to - state.from) * part;
    state.from += move;
    state.to += move;
    clamp();
  };
  const whole = () => { [state.from, state.to] = [0, end]; clamp(); };
  at("#zoom-in").addEventListener("click", () => zoom(0.5));
  at("#zoom-out").addEventListener("click", () => zoom(2));
  at("#pan-left").addEventListener("click", () => pan(-0.4));
  at("#pan-right").addEventListener("click", () => pan(0.4));
  at("#zoom-all").addEventListener("click", whole);
  choice.addEventListener("change", () => { state.chosen = undefined; draw(); });

  const isFold = (lane, run) => lane.folds.includes(run);
  const said = (lane, run) => {
    const [start, length, name] = run;
    const when = `${seconds(length / 1e6)} from ${seconds(start / 1e6)}`;
    const what = isFold(lane, run)
      ? `${counted(run[3], "run")}, busy ${seconds(run[4] / 1e6)}${run[5] > 0 ? `, exposed ${seconds(run[5] / 1e6)}` : ""}`
      : `layer ${run[3]}, ${KINDS[run[4]][0]}`;
    const own = lane.exposed.filter(([s, l]) => s < start + length && s + l > start);
    const exposed = isFold(lane, run) ? 0 : d3.sum(own, ([s, l]) => Math.min(s + l, start + length) - Math.max(s, start));
    return `${names[name]}\n${lane.stream}, rank ${ranks[lane.rank].rank}: ${when}\n${what}${exposed > 0 ? `, exposed ${seconds(exposed / 1e6)}` : ""}`;
  };
  const all_of = (lane) => lane.all ??= [...lane.runs, ...lane.folds].sort((a, b) => a[0] - b[0]);
  const found = (event) => {
    const box = canvas.getBoundingClientRect();
    const place = places.find(({ lane, y }) => lane && event.clientY - box.top >= y && event.clientY - box.top < y + ROW);
    if (!place) return undefined;
    const t = state.x.invert(event.clientX - box.left);
    const slack = state.x.invert(1) - state.x.invert(0);
    const run = all_of(place.lane).find(([start, length]) => start - slack <= t && t <= start + length + slack);
    return run && { lane: place.lane, run };
  };
  let drag;
  const runs = at("#runs");
  runs.addEventListener("pointerdown", (event) => { drag = { x: event.clientX, from: state.from, to: state.to }; runs.setPointerCapture(event.pointerId); });
  runs.addEventListener("pointerup", () => { drag = undefined; });
  runs.addEventListener("pointermove", (event) => {
    if (drag) {
      const move = state.x.invert(0) - state.x.invert(event.clientX - drag.x);
      [state.from, state.to] = [drag.from + move, drag.to + move];
      clamp();
      return;
    }
    const one = found(event);
    if (one) tip.show(said(one.lane, one.run), event.clientX, event.clientY);
    else tip.hide();
  });
  runs.addEventListener("pointerleave", tip.hide);
  runs.addEventListener("wheel", (event) => {
    if (!event.ctrlKey) return;
    event.preventDefault();
    const around = state.x.invert(event.clientX - canvas.getBoundingClientRect().left);
    zoom(event.deltaY > 0 ? 1.25 : 0.8, around);
  }, { passive: false });
  const step = (by) => {
    const order = shownLanes().flatMap((lane) => all_of(lane).map((run) => ({ lane, run })));
    const now = state.chosen ? order.findIndex(({ run }) => run === state.chosen.run) : by > 0 ? -1 : order.length;
    state.chosen = order[Math.max(0, Math.min(order.length - 1, now + by))];
    const [start, length] = state.chosen.run;
    if (start < state.from || start + length > state.to) {
      const window = state.to - state.from;
      state.from = start + length / 2 - window / 2;
      state.to = state.from + window;
    }
    clamp();
    at("#run").textContent = said(state.chosen.lane, state.chosen.run).replaceAll("\n", "; ");
  };
  runs.addEventListener("keydown", (event) => {
    const keys = {
      ArrowLeft: () => pan(-0.2), ArrowRight: () => pan(0.2), "+": () => zoom(0.5), "=": () => zoom(0.5), "-": () => zoom(2),
      0: whole, Home: whole, PageDown: () => step(1), PageUp: () => step(-1),
    };
    const run = keys[event.key];
    if (run && !event.ctrlKey && !event.metaKey) { event.preventDefault(); run(); }
  });
  drawn(draw);

  at("#exposed").hidden = data.exposed.length === 0;
  if (data.exposed.length) {
    const listed = (items) => Object.entries(items).sort((a, b) => b[1] - a[1]).slice(0, 3).map(([name, s]) => `${name} ${seconds(s)}`).join(", ");
    const reasons = (items) => Object.entries(items).sort((a, b) => b[1] - a[1]).slice(0, 2).map(([name, s]) => `${name} (${seconds(s)})`).join("; ");
    tableIn("#exposed div", [
      { name: "Collective", text: (row) => `${row.collective} in @${row.frame}`, long: true },
      { name: "Runs", text: (row) => row.count, number: (row) => row.count },
      { name: "Time", text: (row) => seconds(row.seconds), number: (row) => row.seconds },
      { name: "Exposed", text: (row) => seconds(row.exposed), number: (row) => row.exposed },
      { name: "Beside it", text: (row) => listed(row.beside) || "nothing", long: true },
      { name: "Reason", text: (row) => reasons(row.reasons), long: true },
    ], data.exposed, { caption: "On the rank that ends last" });
  }
  tableIn("#rank-table div", [
    { name: "Rank", text: (row) => label(row), number: (row) => row.rank, start: true },
    { name: "Ends after", text: (row) => seconds(row.seconds), number: (row) => row.seconds },
    { name: "Kernels", text: (row) => seconds(row.compute), number: (row) => row.compute },
    { name: "Exposed", text: (row) => seconds(row.exposed), number: (row) => row.exposed },
    { name: "Other streams at work", text: (row) => row.streams.map(([name, part]) => `${name} ${percent(part)}`).join(", ") },
  ], ranks);
  const sums = new Map();
  for (const lane of lanes) {
    for (const [, length, name] of lane.runs) {
      const key = `${lane.stream} ${name}`;
      const sum = sums.get(key) ?? { stream: lane.stream, name: names[name], runs: 0, time: 0 };
      sum.runs += 1;
      sum.time += length / 1e6;
      sums.set(key, sum);
    }
  }
  const longest = [...sums.values()].sort((a, b) => b.time - a.time).slice(0, 200);
  tableIn("#run-table div", [
    { name: "Task", text: (row) => row.name },
    { name: "Stream", text: (row) => row.stream },
    { name: "Runs", text: (row) => row.runs, number: (row) => row.runs },
    { name: "Time", text: (row) => seconds(row.time), number: (row) => row.time },
  ], longest, { caption: `Of the listed ranks together${sums.size > 200 ? ", the 200 longest" : ""}` });
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
