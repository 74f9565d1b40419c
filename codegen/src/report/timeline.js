"use strict";
// The timeline of one step: the runs of each stream on a canvas, and tables of ranks, tasks and exposed collectives.

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
