// The current view as a PNG: what the page shows, at twice its size.

/** Draw the canvases and texts of a part of the page where they are.
 * @param {HTMLElement} section
 * @param {string} title
 * @param {number} scale
 * @returns {HTMLCanvasElement} */
export function pictureOf(section, title, scale) {
  const whole = section.getBoundingClientRect(), pad = 24, above = 34;
  const found = document.createElement("canvas"), context = found.getContext("2d");
  found.width = Math.round((whole.width + 2 * pad) * scale);
  found.height = Math.round((whole.height + 2 * pad + above) * scale);
  if (!context) throw new Error("this browser draws on no canvas");
  const style = getComputedStyle(document.body);
  context.scale(scale, scale);
  context.fillStyle = style.backgroundColor;
  context.fillRect(0, 0, found.width, found.height);
  context.fillStyle = style.color;
  context.font = `700 19px ${style.fontFamily}`;
  context.fillText(title, pad, pad + 14);
  context.translate(pad - whole.left, pad + above - whole.top);
  for (const canvas of section.querySelectorAll("canvas")) {
    const at = canvas.getBoundingClientRect();
    if (at.width && canvas.width) context.drawImage(canvas, at.left, at.top, at.width, at.height);
  }
  context.textBaseline = "top";
  const texts = document.createTreeWalker(section, NodeFilter.SHOW_TEXT);
  for (let node = texts.nextNode(); node; node = texts.nextNode()) writeText(context, node);
  return found;
}

/** A text where it is, line by line.
 * @param {CanvasRenderingContext2D} context
 * @param {Node} node */
function writeText(context, node) {
  const parent = node.parentElement, text = node.textContent ?? "";
  if (!parent || !text.trim() || parent.closest(".unseen, canvas")) return;
  const range = document.createRange(), style = getComputedStyle(parent);
  context.font = `${style.fontWeight} ${style.fontSize} ${style.fontFamily}`;
  context.fillStyle = style.color;
  let line = "", from = 0, y = -1, x = 0;
  const flush = () => { if (line.trim()) context.fillText(line, x, y + 2); };
  for (let i = 0; i < text.length; i++) {
    range.setStart(node, i);
    range.setEnd(node, i + 1);
    const box = range.getClientRects()[0];
    if (!box) continue;
    if (y < 0 || Math.abs(box.top - y) > 3) { flush(); line = ""; from = i; x = box.left; y = box.top; }
    line = text.slice(from, i + 1);
  }
  flush();
}
