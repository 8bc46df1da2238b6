// Elements from plain values. Text becomes text, never markup: there is no other way in here.

/** An element. `given` are its attributes; what begins with "on" listens. */
export function el(name, given = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(given)) {
    if (key.startsWith("on")) made.addEventListener(key.slice(2), value);
    else if (value !== null && value !== false) made.setAttribute(key, value === true ? "" : value);
  }
  made.append(...children.filter((child) => child !== null));
  return made;
}

/** Let it hold this text, and touch it only where it held another. */
export function say(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

/** A field with its name above it. */
export function field(label, control, more = "") {
  return el("label", { class: more || null }, label, control);
}

/** A choice. `options` are [value, text]. */
export function choice(options, given = {}) {
  return el("select", given, ...options.map(([value, text]) => el("option", { value }, text)));
}

/**
 * A table whose rows stay where they are while what they tell changes: so a button in one keeps the
 * focus. A column is { label, number, of(row), node(row), bad(row) }: a text, or an element made once.
 */
export function table(caption, columns, key) {
  const body = el("tbody");
  const rows = new Map();
  const head = columns.map((one) => el("th", { scope: "col", class: one.number ? "number" : null }, one.label));
  const whole = el("table", {}, el("caption", {}, caption), el("thead", {}, el("tr", {}, ...head)), body);
  function fresh(row) {
    const cells = columns.map((one) => {
      const cell = el("td", { class: one.number ? "number" : null, "data-label": one.label });
      if (one.node) cell.append(one.node(row));
      return cell;
    });
    return { line: el("tr", {}, ...cells), cells };
  }
  function show(told) {
    const left = new Set(rows.keys());
    told.forEach((row, at) => {
      const name = key(row);
      left.delete(name);
      if (!rows.has(name)) rows.set(name, fresh(row));
      const { line, cells } = rows.get(name);
      columns.forEach((one, n) => {
        if (one.of) say(cells[n], one.of(row));
        if (one.bad) cells[n].classList.toggle("bad", one.bad(row));
      });
      if (body.children[at] !== line) body.insertBefore(line, body.children[at] ?? null);
    });
    for (const name of left) {
      rows.get(name).line.remove();
      rows.delete(name);
    }
  }
  return { whole, show };
}

/** A number for people, or a dash where there is none. */
export function count(value, digits = 0) {
  if (value === null || value === undefined) return "–";
  return value.toLocaleString("en", { maximumFractionDigits: digits, minimumFractionDigits: digits });
}

/** Seconds for people. */
export function time(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  if (seconds < 1) return `${count(seconds * 1000)} ms`;
  if (seconds < 60) return `${count(seconds, 1)} s`;
  const minutes = Math.floor(seconds / 60);
  if (minutes < 60) return `${minutes} min ${Math.floor(seconds % 60)} s`;
  return `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
}
