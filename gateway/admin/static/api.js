// The admin listener, asked with its key where it has one. The key is forgotten with the tab.

const KEPT = "admin-key";

/** What the listener refused, with its status. */
export class Refused extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

/** Remember the admin's key. */
export function remember(key) {
  sessionStorage.setItem(KEPT, key);
}

/** The headers of a request, with the key if there is one. */
export function headers(more = {}) {
  const key = sessionStorage.getItem(KEPT);
  return key ? { ...more, Authorization: `Bearer ${key}` } : more;
}

/** The answer's JSON. Throws Refused. */
export async function ask(path, method = "GET") {
  const answer = await fetch(path, { method, headers: headers(), cache: "no-store" });
  const text = await answer.text();
  if (answer.ok) return JSON.parse(text);
  throw Object.assign(new Refused(answer.status, messageOf(text)), { told: parsed(text) });
}

/** Do it, and let everybody who shows something look again. Throws Refused. */
export async function act(path, method) {
  try {
    return await ask(path, method);
  } finally {
    dispatchEvent(new Event("acted"));
  }
}

function parsed(text) {
  try {
    return JSON.parse(text);
  } catch {
    return null;
  }
}

function messageOf(text) {
  const error = parsed(text)?.error;
  return typeof error?.message === "string" ? error.message : text.slice(0, 200) || "it gave no reason";
}
