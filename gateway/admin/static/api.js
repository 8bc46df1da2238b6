// Requests to the admin listener, with its key if there is one. The key is kept for this tab only.

const KEY_ITEM = "admin-key";

/** An error response, with its status and JSON body. */
export class ApiError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

/** Store the admin key. */
export function storeKey(key) {
  sessionStorage.setItem(KEY_ITEM, key);
}

/** Store the key of a link such as ``#key=KEY``, and remove it from the address bar. */
export function storeLinkedKey() {
  const key = new URLSearchParams(location.hash.slice(1)).get("key");
  if (!key) return;
  storeKey(key);
  history.replaceState(null, "", location.pathname);
}

/** The headers of a request, with the key if there is one. */
export function headers(more = {}) {
  const key = sessionStorage.getItem(KEY_ITEM);
  return key ? { ...more, Authorization: `Bearer ${key}` } : more;
}

/** The response's JSON. Throws ApiError. */
export async function fetchJson(path, method = "GET") {
  return JSON.parse(await fetchText(path, method));
}

/** The response's text. Throws ApiError. */
export async function fetchText(path, method = "GET") {
  const response = await fetch(path, { method, headers: headers(), cache: "no-store" });
  const text = await response.text();
  if (response.ok) return text;
  throw Object.assign(new ApiError(response.status, messageOf(text)), { body: parseJson(text) });
}

/** Send a command and let the views refresh; without the key, ask for it. Throws ApiError. */
export async function sendCommand(path, method) {
  try {
    return await fetchJson(path, method);
  } catch (error) {
    if (error.status === 401) dispatchEvent(new Event("keyrequired"));
    throw error;
  } finally {
    dispatchEvent(new Event("changed"));
  }
}

/** The JSON of a text, or null. */
export function parseJson(text) {
  try {
    return JSON.parse(text);
  } catch {
    return null;
  }
}

function messageOf(text) {
  const error = parseJson(text)?.error;
  return typeof error?.message === "string" ? error.message : text.slice(0, 200) || "no error message";
}
