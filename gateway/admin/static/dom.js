// Creates elements from plain values. Text is never parsed as markup.

/** Create an element. Attributes whose names begin with "on" are event listeners. */
export function el(name, attributes = {}, ...children) {
  const element = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (key.startsWith("on")) element.addEventListener(key.slice(2), value);
    else if (value !== null && value !== false) element.setAttribute(key, value === true ? "" : value);
  }
  element.append(...children.filter((child) => child !== null).map((child) => (typeof child === "string" ? showControls(child) : child)));
  return element;
}

const CONTROLS = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]/g;

/** The text with escapes of controls and of changes of the direction, as the commands print them. */
function showControls(text) {
  return text.replace(CONTROLS, (one) => `\\u${one.charCodeAt(0).toString(16).padStart(4, "0")}`);
}

/** Set the text of an element, if it differs. */
export function setText(element, text) {
  const shown = showControls(String(text ?? ""));
  if (element.textContent !== shown) element.textContent = shown;
}

/** A form field with its label. */
export function field(label, control, className = "") {
  return el("label", { class: className || null }, label, control);
}

/** A select element. `options` are [value, text]. */
export function choice(options, attributes = {}) {
  return el("select", attributes, ...options.map(([value, text]) => el("option", { value }, text)));
}

/** Create an SVG element. */
export function svg(name, attributes = {}, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  element.append(...children);
  return element;
}

/** Keep the children of `element` unless `data` differs from the last call; else show `make()`. */
export function redraw(element, data, make) {
  const drawn = JSON.stringify(data);
  if (element.drawn === drawn) return;
  element.drawn = drawn;
  element.replaceChildren(...[make()].flat().filter((child) => child !== null));
}

/**
 * A table whose row elements are reused, so that a button in a row keeps the focus. A column is
 * { label, number, of(row), node(row), draw(row), bad(row) }: a text, an element that is created
 * once, or elements that are made of `of(row)` again when that changes.
 */
export function table(caption, columns, key) {
  const body = el("tbody");
  const rows = new Map();
  const head = columns.map((column) => el("th", { scope: "col", class: column.number ? "number" : null }, column.label));
  const whole = el("table", {}, el("caption", {}, caption), el("thead", {}, el("tr", {}, ...head)), body);
  const element = el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": caption }, whole);
  function createRow(row) {
    const cells = columns.map((column) => {
      const cell = el("td", { class: column.number ? "number" : null, "data-label": column.label });
      if (column.node) cell.append(column.node(row));
      return cell;
    });
    return { line: el("tr", {}, ...cells), cells };
  }
  function show(data) {
    const unused = new Set(rows.keys());
    data.forEach((row, at) => {
      const name = key(row);
      unused.delete(name);
      if (!rows.has(name)) rows.set(name, createRow(row));
      const { line, cells } = rows.get(name);
      columns.forEach((column, n) => {
        if (column.draw) redraw(cells[n], column.of(row), () => column.draw(row));
        else if (column.of) setText(cells[n], column.of(row));
        if (column.bad) cells[n].classList.toggle("bad", column.bad(row));
      });
      if (body.children[at] !== line) body.insertBefore(line, body.children[at] ?? null);
    });
    for (const name of unused) {
      rows.get(name).line.remove();
      rows.delete(name);
    }
  }
  return { element, show };
}

/** A text and a button that copies it, or selects it if copying is not allowed. */
export function copyable(text) {
  const button = el("button", { type: "button", class: "copy" }, "Copy");
  button.addEventListener("click", async () => {
    try {
      await navigator.clipboard.writeText(text.textContent);
      setText(button, "Copied");
    } catch {
      getSelection().selectAllChildren(text);
      setText(button, "Selected");
    }
    setTimeout(() => setText(button, "Copy"), 1500);
  });
  return el("div", { class: "copyable" }, button, text);
}

/** Ask before something is done; returns a promise of the answer. */
export function confirmed(question, detail, action) {
  const form = el(
    "form",
    { method: "dialog" },
    el("h2", {}, question),
    el("p", {}, detail),
    el("div", { class: "buttons" }, el("button", { class: "main", value: "yes" }, action), el("button", { value: "" }, "Cancel")),
  );
  const dialog = el("dialog", { class: "question", "aria-label": question }, form);
  document.body.append(dialog);
  dialog.showModal();
  return new Promise((resolve) => {
    dialog.addEventListener("close", () => {
      dialog.remove();
      resolve(dialog.returnValue === "yes");
    });
  });
}

/** Format a number; a dash if there is none. */
export function count(value, digits = 0) {
  if (value === null || value === undefined) return "–";
  return value.toLocaleString("en", { maximumFractionDigits: digits, minimumFractionDigits: digits });
}

/** Format a rate with three digits or so. */
export function rate(value) {
  if (value === 0) return "0";
  return count(value, value < 1 ? 2 : value < 100 ? 1 : 0);
}

/** Format seconds. */
export function time(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  if (seconds < 1) return `${count(seconds * 1000, seconds && seconds < 0.01 ? 1 : 0)} ms`;
  if (seconds < 60) return `${count(seconds, seconds < 10 ? 2 : 1)} s`;
  const minutes = Math.floor(seconds / 60);
  if (minutes < 60) return `${minutes} min ${Math.floor(seconds % 60)} s`;
  return `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
}
