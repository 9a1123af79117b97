// What a mark says when it is pointed at, by mouse and keys.

import { byId } from "./elements.js";

const tip = byId("tip");

/** Show a text beside a place of the window.
 * @param {string} text
 * @param {number} x
 * @param {number} y */
export function showTip(text, x, y) {
  tip.textContent = text;
  tip.hidden = false;
  const box = tip.getBoundingClientRect();
  const left = Math.min(Math.max(x + 14, 6), window.innerWidth - box.width - 6);
  const above = y - box.height - 12;
  tip.style.left = left + "px";
  tip.style.top = (above > 6 ? above : y + 18) + "px";
}

export function hideTip() { tip.hidden = true; }

/** @param {Element} mark
 * @param {number} x
 * @param {number} y */
function show(mark, x, y) {
  showTip((mark.getAttribute("aria-label") || "").replaceAll("; ", "\n"), x, y);
}

/** @param {EventTarget | null} target */
const markOf = (target) => target instanceof Element ? target.closest(".mark") : null;

/** Let marks be pointed at. One stop of the tab key; arrows go on from there.
 * @param {SVGElement} svg
 * @param {SVGElement[]} marks
 * @param {(key: string, i: number) => number | undefined} move the place of the next mark */
export function pointable(svg, marks, move) {
  if (!marks.length) return;
  marks.forEach((mark) => mark.setAttribute("tabindex", "-1"));
  marks[0].setAttribute("tabindex", "0");
  /** @type {Map<EventTarget | null, number>} */
  const at = new Map(marks.map((mark, i) => [mark, i]));
  svg.addEventListener("pointermove", (e) => {
    const mark = markOf(e.target);
    if (mark) show(mark, e.clientX, e.clientY); else hideTip();
  });
  svg.addEventListener("pointerleave", hideTip);
  svg.addEventListener("click", (e) => {
    const mark = markOf(e.target);
    if (mark) show(mark, e.clientX, e.clientY);
  });
  svg.addEventListener("focusin", (e) => {
    const mark = markOf(e.target);
    if (!mark) return;
    const box = mark.getBoundingClientRect();
    show(mark, box.right, box.top);
  });
  svg.addEventListener("focusout", hideTip);
  svg.addEventListener("keydown", (e) => {
    const i = at.get(e.target);
    if (i === undefined) return;
    if (e.key === "Escape") { hideTip(); return; }
    const next = e.key === "Home" ? 0 : e.key === "End" ? marks.length - 1 : move(e.key, i);
    if (next === undefined || !marks[next]) return;
    e.preventDefault();
    marks[i].setAttribute("tabindex", "-1");
    marks[next].setAttribute("tabindex", "0");
    marks[next].focus();
  });
}

/** Make an element a mark that says a text; "; " ends its lines.
 * @param {Element} mark
 * @param {string} text */
export function label(mark, text) {
  mark.setAttribute("role", "img");
  mark.setAttribute("aria-label", text);
  mark.classList.add("mark");
}
