import { html } from "../../html/assets/elements.js";
import { curves, heat } from "../../html/assets/charts.js";

const data = JSON.parse(document.getElementById("data").textContent);

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
