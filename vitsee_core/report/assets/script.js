"use strict";
(() => {
  const NS = "http://www.w3.org/2000/svg";
  const data = JSON.parse(document.getElementById("data").textContent);
  const tip = document.getElementById("tip");

  function el(name, attributes, parent) {
    const node = document.createElementNS(NS, name);
    for (const [key, value] of Object.entries(attributes || {})) node.setAttribute(key, value);
    if (parent) parent.append(node);
    return node;
  }
  function html(name, text, parent, cls) {
    const node = document.createElement(name);
    if (text) node.textContent = text;
    if (cls) node.className = cls;
    if (parent) parent.append(node);
    return node;
  }
  const number = (v) => v === null ? "no value"
    : Math.abs(v) >= 1e5 || (v !== 0 && Math.abs(v) < 1e-3) ? v.toExponential(2) : String(+v.toPrecision(4));
  function values(value, low, high, n) {
    let text = number(value);
    if (low !== null && high !== null) text += " (95 %: " + number(low) + " to " + number(high) + ")";
    if (n !== null) text += "\nn = " + n.toLocaleString("en");
    return text;
  }

  // ---------------------------------------------------------------- pointing, by mouse and keys
  function show(mark, x, y) {
    tip.textContent = mark.getAttribute("aria-label").replaceAll("; ", "\n");
    tip.hidden = false;
    const box = tip.getBoundingClientRect();
    const left = Math.min(Math.max(x + 14, 6), window.innerWidth - box.width - 6);
    const above = y - box.height - 12;
    tip.style.left = left + "px";
    tip.style.top = (above > 6 ? above : y + 18) + "px";
  }
  function hide() { tip.hidden = true; }
  // move(key, i) -> the place of the next mark. One stop of the tab key; arrows go on from there.
  function pointable(svg, marks, move) {
    if (!marks.length) return;
    marks.forEach((mark) => mark.setAttribute("tabindex", "-1"));
    marks[0].setAttribute("tabindex", "0");
    const at = new Map(marks.map((mark, i) => [mark, i]));
    svg.addEventListener("pointermove", (e) => {
      const mark = e.target.closest(".mark");
      if (mark) show(mark, e.clientX, e.clientY); else hide();
    });
    svg.addEventListener("pointerleave", hide);
    svg.addEventListener("click", (e) => {
      const mark = e.target.closest(".mark");
      if (mark) show(mark, e.clientX, e.clientY);
    });
    svg.addEventListener("focusin", (e) => {
      const mark = e.target.closest(".mark");
      if (!mark) return;
      const box = mark.getBoundingClientRect();
      show(mark, box.right, box.top);
    });
    svg.addEventListener("focusout", hide);
    svg.addEventListener("keydown", (e) => {
      const i = at.get(e.target);
      if (i === undefined) return;
      if (e.key === "Escape") { hide(); return; }
      const next = { Home: 0, End: marks.length - 1 }[e.key] ?? move(e.key, i);
      if (next === undefined || !marks[next]) return;
      e.preventDefault();
      marks[i].setAttribute("tabindex", "-1");
      marks[next].setAttribute("tabindex", "0");
      marks[next].focus();
    });
  }
  function label(mark, text) {
    mark.setAttribute("role", "img");
    mark.setAttribute("aria-label", text);
    mark.classList.add("mark");
  }

  // ---------------------------------------------------------------- colours and scales
  const MAGMA = ["000004", "140e36", "3b0f70", "641a80", "8c2981", "b73779", "de4968", "f7705c", "fe9f6d", "fecf92", "fcfdbf"]
    .map((h) => [0, 2, 4].map((i) => parseInt(h.slice(i, i + 2), 16)));
  function magma(t) {
    const x = Math.min(Math.max(t, 0), 1) * (MAGMA.length - 1), i = Math.min(Math.floor(x), MAGMA.length - 2);
    return "rgb(" + MAGMA[i].map((c, k) => Math.round(c + (MAGMA[i + 1][k] - c) * (x - i))).join(",") + ")";
  }
  function ticks(low, high, most) {
    const raw = (high - low) / most || 1, power = 10 ** Math.floor(Math.log10(raw));
    const step = [1, 2, 5, 10].map((k) => k * power).find((s) => s >= raw * 0.999);
    const found = [];
    for (let v = Math.ceil(low / step - 1e-9) * step; v <= high + step * 1e-9; v += step) found.push(+v.toPrecision(10));
    return found;
  }
  const shorten = (text, most) => text.length <= most ? text : text.slice(0, Math.ceil(most / 2)) + "…" + text.slice(text.length - Math.floor(most / 2) + 1);

  // ---------------------------------------------------------------- heatmaps
  function heat(figure, chart, room) {
    const rows = chart.rows, cols = chart.cols, R = rows.length, C = cols.length;
    const most = Math.max(...rows.map((r) => Math.min(r.length, 16))), left = 8 + most * 6.2, below = 84;
    const side = Math.max(3, Math.min(34, (room - left - 6) / C, 340 / R));
    const W = left + C * side + 6, H = R * side + below + 6;
    const svg = el("svg", { viewBox: `0 0 ${W} ${H}`, role: "group", "aria-label": `${chart.title}: ${R} by ${C} sites, arrow keys move` }, figure);
    svg.style.maxWidth = W + "px";
    const [low, high] = chart.range, marks = [];
    for (let i = 0; i < R; i++) for (let j = 0; j < C; j++) {
      const cell = chart.cells[i][j], value = cell ? cell[0] : null;
      const box = el("rect", { x: left + j * side, y: (R - 1 - i) * side + 4, width: side + 0.3, height: side + 0.3 }, svg);
      if (value === null) box.setAttribute("class", "none"); else box.setAttribute("fill", magma((value - low) / (high - low)));
      label(box, `${chart.y} ${rows[i]} × ${chart.x} ${cols[j]}; ${chart.metric} ${cell ? values(...cell).replace("\n", "; ") : "no value"}`);
      marks.push(box);
    }
    const every = (n) => Math.max(1, Math.ceil(n * 13 / (n * side)));
    for (let i = 0; i < R; i += every(R)) el("text", { x: left - 5, y: (R - 0.5 - i) * side + 8, "text-anchor": "end" }, svg).textContent = shorten(rows[i], 16);
    for (let j = 0; j < C; j += every(C)) {
      const x = left + (j + 0.5) * side + 4, y = R * side + 11;
      el("text", { x, y, "text-anchor": "end", transform: `rotate(-60 ${x} ${y})` }, svg).textContent = shorten(cols[j], 15);
    }
    const ramp = html("div", "", figure, "ramp");
    html("span", number(low), ramp);
    const bar = el("svg", { viewBox: "0 0 100 10", preserveAspectRatio: "none", "aria-hidden": "true", "shape-rendering": "crispEdges" }, ramp);
    for (let k = 0; k < 50; k++) el("rect", { x: k * 2, y: 0, width: 3, height: 10, fill: magma(k / 49) }, bar);
    html("span", number(high) + " " + chart.metric, ramp);
    const step = { ArrowRight: [0, 1], ArrowLeft: [0, -1], ArrowUp: [1, 0], ArrowDown: [-1, 0] };
    pointable(svg, marks, (key, at) => {
      const d = step[key];
      if (!d) return undefined;
      const i = Math.floor(at / C) + d[0], j = at % C + d[1];
      return i < 0 || j < 0 || i >= R || j >= C ? undefined : i * C + j;
    });
  }

  // ---------------------------------------------------------------- curves
  const SHAPES = [
    (r) => `M0,${-r}A${r},${r} 0 1,1 0,${r}A${r},${r} 0 1,1 0,${-r}Z`,
    (r) => `M${-r},${-r}H${r}V${r}H${-r}Z`,
    (r) => `M0,${-r * 1.25}L${r * 1.15},${r * 0.9}H${-r * 1.15}Z`,
    (r) => `M0,${-r * 1.3}L${r * 1.3},0L0,${r * 1.3}L${-r * 1.3},0Z`,
    (r) => `M0,${r * 1.25}L${r * 1.15},${-r * 0.9}H${-r * 1.15}Z`,
  ];
  // still: a picture, whose marks nobody points at.
  function curves(figure, chart, room, still) {
    const W = room, H = Math.max(190, Math.round(room * 0.58)), L = 52, R = 12, T = 10, B = 36;
    const svg = el("svg", { viewBox: `0 0 ${W} ${H}` }, figure);
    if (!still) {
      svg.setAttribute("role", "group");
      svg.setAttribute("aria-label", `${chart.title} against relative depth: ${chart.lines.length} lines, arrow keys move`);
    }
    let low = Infinity, high = -Infinity;
    for (const line of chart.lines) for (const p of line.points) {
      low = Math.min(low, p[1], p[2] ?? p[1]); high = Math.max(high, p[1], p[3] ?? p[1]);
    }
    if (low > 0 && low < 0.6 * high) low = 0;
    if (high <= low) { low -= Math.abs(low) * 0.1 + 0.1; high += Math.abs(high) * 0.1 + 0.1; }
    const pad = (high - low) * 0.05;
    high += pad; if (low !== 0) low -= pad;
    const x = (v) => L + v * (W - L - R), y = (v) => T + (high - v) / (high - low) * (H - T - B);
    for (const t of ticks(low, high, 5)) {
      el("line", { x1: L, x2: W - R, y1: y(t), y2: y(t), class: "grid" }, svg);
      el("text", { x: L - 6, y: y(t) + 4, "text-anchor": "end" }, svg).textContent = number(t);
    }
    for (const t of [0, 0.25, 0.5, 0.75, 1]) el("text", { x: x(t), y: H - B + 16, "text-anchor": "middle" }, svg).textContent = t;
    el("line", { x1: L, x2: W - R, y1: H - B, y2: H - B, class: "axis" }, svg);
    el("text", { x: (L + W - R) / 2, y: H - 4, "text-anchor": "middle" }, svg).textContent = "relative depth";
    const marks = [], of = [];
    chart.lines.forEach((line, k) => {
      const group = el("g", { class: line.baseline ? "cb" : "c" + line.colour % 7 }, svg), ps = line.points;
      const dash = line.baseline ? "5 4" : line.colour >= 7 ? "2 3" : "none";
      if (!chart.heads) {
        const banded = ps.filter((p) => p[2] !== null && p[3] !== null);
        if (banded.length > 1 && !line.baseline) el("path", { class: "band", d: "M" + banded.map((p) => `${x(p[0])},${y(p[3])}`).join("L") + "L" + banded.slice().reverse().map((p) => `${x(p[0])},${y(p[2])}`).join("L") + "Z" }, group);
        el("path", { class: "line", "stroke-dasharray": dash, d: "M" + ps.map((p) => `${x(p[0])},${y(p[1])}`).join("L") }, group);
      }
      ps.forEach((p, i) => {
        const shift = chart.heads ? (k - (chart.lines.length - 1) / 2) * 6 : 0;
        const mark = el("path", { class: "dot", d: SHAPES[line.colour % SHAPES.length](line.baseline ? 2.4 : 3.8), transform: `translate(${x(p[0]) + shift},${y(p[1])})` }, group);
        if (still) return;
        label(mark, [line.name, p[5] + (p[6] ? ", " + p[6] : ""), chart.metric + " " + values(p[1], p[2], p[3], p[4]).replace("\n", "; ")].join("; "));
        marks.push(mark); of.push([k, i]);
      });
    });
    const starts = []; { let n = 0; for (const line of chart.lines) { starts.push(n); n += line.points.length; } }
    if (chart.lines.length > 1 || chart.lines[0].name) {
      const key = html("ul", "", figure, "key");
      chart.lines.forEach((line, k) => {
        if (still && line.baseline) return;
        const item = html("li", "", key, line.baseline ? "cb" : "c" + line.colour % 7), icon = el("svg", { viewBox: "0 0 22 10", "aria-hidden": "true" }, item);
        if (!chart.heads) el("path", { class: "line", "stroke-dasharray": line.baseline ? "5 4" : line.colour >= 7 ? "2 3" : "none", d: "M0,5H22" }, icon);
        el("path", { class: "dot", d: SHAPES[line.colour % SHAPES.length](3.6), transform: "translate(11,5)" }, icon);
        html("bdi", line.name, item);
      });
    }
    pointable(svg, marks, (key, at) => {
      const [k, i] = of[at];
      if (key === "ArrowRight") return i + 1 < chart.lines[k].points.length ? at + 1 : undefined;
      if (key === "ArrowLeft") return i > 0 ? at - 1 : undefined;
      const to = key === "ArrowDown" ? k + 1 : key === "ArrowUp" ? k - 1 : -1;
      return chart.lines[to] ? starts[to] + Math.min(i, chart.lines[to].points.length - 1) : undefined;
    });
  }

  const SHOWN = 4;
  function draw(place) {
    const charts = data[place.dataset.charts], room = Math.max(240, Math.min(460, place.clientWidth - 28));
    let parent = place;
    charts.forEach((chart, i) => {
      if (i === SHOWN && charts.length > SHOWN + 1) {
        const more = html("details", "", place, "more all");
        html("summary", `${charts.length - SHOWN} more charts`, more);
        parent = html("div", "", more, "charts");
      }
      const figure = html("figure", "", parent, "chart");
      if (charts.length > 1 || chart.kind !== "heat") html("bdi", chart.title, html("figcaption", "", figure));
      (chart.kind === "heat" ? heat : curves)(figure, chart, room);
    });
    if (!place.closest(".card").querySelector(".hint")) place.append(html("p", "Point at a mark, or reach it with the tab key and move with the arrows: site, value, 95 % interval.", null, "hint"));
  }

  // ---------------------------------------------------------------- tables, commands, contents
  for (const button of document.querySelectorAll("th button")) button.addEventListener("click", () => {
    const th = button.parentElement, body = th.closest("table").tBodies[0], column = th.cellIndex;
    const down = th.getAttribute("aria-sort") === "ascending", numeric = th.classList.contains("n");
    for (const other of th.parentElement.cells) other.removeAttribute("aria-sort");
    th.setAttribute("aria-sort", down ? "descending" : "ascending");
    const key = (row) => row.cells[column].textContent;
    const order = (a, b) => {
      const p = key(a), q = key(b);
      if (p === "" || q === "") return (p === "") - (q === "");
      const d = numeric ? +p - +q : p.localeCompare(q, "en", { numeric: true });
      return down ? -d : d;
    };
    body.append(...[...body.rows].sort(order));
  });
  for (const box of document.querySelectorAll(".command")) {
    if (!navigator.clipboard) break;
    const button = html("button", "Copy", box);
    button.type = "button";
    button.addEventListener("click", async () => {
      try { await navigator.clipboard.writeText(box.querySelector("code").textContent.trim()); button.textContent = "Copied"; }
      catch { button.textContent = "Select the text to copy"; }
      setTimeout(() => { button.textContent = "Copy"; }, 1500);
    });
  }

  // ---------------------------------------------------------------- charts, figures, tiles
  // A heatmap is drawn at once in place of its figure; curves beside a figure when they are asked for.
  for (const place of document.querySelectorAll("[data-charts]")) {
    const asked = place.closest("details");
    if (!asked) { draw(place); continue; }
    asked.hidden = false;
    asked.addEventListener("toggle", () => { if (asked.open && !place.firstChild) draw(place); });
  }
  for (const thumb of document.querySelectorAll("[data-curve]")) {
    const metric = thumb.dataset.curve, found = thumb.dataset.from.split(" ").flatMap((id) => data[id] || [])
      .filter((chart) => chart.kind === "curves" && chart.key === metric);
    const lines = found.flatMap((chart) => chart.lines).sort((a, b) => a.baseline - b.baseline);
    const place = html("span", "", thumb, "chart");
    html("b", found[0].title, place);
    curves(place, { ...found[0], lines }, 330, true);
  }
  const sheets = document.querySelectorAll(".sheets");
  sheets.forEach((figure) => { figure.open = false; });
  window.addEventListener("beforeprint", () => sheets.forEach((figure) => { figure.open = true; }));
  for (const thumb of document.querySelectorAll("[data-of]")) for (const id of thumb.dataset.of.split(" ")) {
    const shown = document.getElementById("i" + id);
    if (!shown) continue;
    const small = html("img", "", thumb);
    small.alt = "";
    small.src = shown.src;
  }
  for (const table of document.querySelectorAll("table")) table.closest("details").addEventListener("toggle", () => {
    const numbers = [...table.tHead.rows[0].cells].map((th) => th.classList.contains("n"));
    for (const row of table.tBodies[0].rows) numbers.forEach((n, i) => { if (n) row.cells[i].className = "n"; });
  }, { once: true });

  // ---------------------------------------------------------------- contents
  if (window.innerWidth < 1080) document.querySelectorAll(".side details").forEach((d) => { d.open = false; });
  const links = new Map([...document.querySelectorAll(".side a")].map((a) => [a.getAttribute("href").slice(1), a]));
  const seen = new IntersectionObserver((entries) => {
    for (const entry of entries) {
      const link = links.get(entry.target.getAttribute("aria-labelledby"));
      if (link) entry.isIntersecting ? link.setAttribute("aria-current", "true") : link.removeAttribute("aria-current");
    }
  }, { rootMargin: "-20% 0px -60% 0px" });
  document.querySelectorAll(".card, .result").forEach((card) => seen.observe(card));
})();
