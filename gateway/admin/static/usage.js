// Requests and tokens by key, model and day, from the usage store.

import { fetchJson, fetchText } from "./api.js";
import { chart } from "./chart.js";
import { choice, count, el, field, setText, table } from "./dom.js";

const REFRESH_INTERVAL = 15000;
const DAY = 86400;
const DAYS = [["1", "Today"], ["7", "7 days"], ["30", "30 days"], ["90", "90 days"]];
const GROUPS = [["key,model", "Key and model"], ["key", "Key"], ["model", "Model"], ["day", "Day"], ["day,key,model", "Day, key and model"]];
const NAMES = { day: "Day (UTC)", key: "Key", model: "Model" };
const NUMBERS = [
  ["requests", "Requests"], ["errors", "Errors"], ["cancelled", "Cancelled"],
  ["prompt_tokens", "Tokens in"], ["completion_tokens", "Tokens out"],
];
const EXAMPLE = "observe:\n  usage: /var/lib/interlingua/usage.sqlite   # or {postgres: \"${USAGE_DATABASE}\"}";

/** The view. */
export function usage() {
  const days = choice(DAYS);
  days.value = "30";
  const by = choice(GROUPS);
  const alert = el("p", { class: "bad", role: "alert" });
  const message = el("p", { role: "status" }, "Reading the usage rows …");
  const hint = el("pre", { hidden: true, tabindex: "0", "aria-label": "Configuration of a usage store" }, EXAMPLE);
  const download = el("button", { type: "button" }, "Download CSV");
  const daily = chart();
  const dailySection = el("section", { hidden: true }, el("h2", {}, "Tokens per day"), daily.element);
  const sums = el("section", { hidden: true });
  let next = 0;
  let shownGroups = "";
  let view = null;

  function path(groups, format = "json") {
    return `/-/usage?days=${days.value}&by=${groups}&format=${format}`;
  }
  async function update() {
    if (Date.now() < next) return;
    next = Date.now() + REFRESH_INTERVAL;
    try {
      const [grouped, perDay] = [await fetchJson(path(by.value)), await fetchJson(path("day"))];
      setText(alert, "");
      show(grouped, perDay);
    } catch (error) {
      if (error.status === 401) throw error;
      setText(alert, error.message);
    }
  }
  function show(grouped, perDay) {
    const hasRows = grouped.totals.length > 0;
    hint.hidden = !grouped.problem;
    setText(message, grouped.problem || (hasRows ? "" : "No requests in this time."));
    message.hidden = !message.textContent;
    download.disabled = !hasRows;
    sums.hidden = !hasRows;
    dailySection.hidden = !hasRows || perDay.totals.length < 2;
    if (shownGroups !== by.value) {
      shownGroups = by.value;
      view = sumTable(by.value.split(","));
      sums.replaceChildren(view.element);
    }
    view.show(hasRows ? [...grouped.totals, totalOf(grouped.totals)] : []);
    daily.draw(dailyFigure(perDay));
  }
  async function save() {
    try {
      const text = await fetchText(path(by.value, "csv"));
      const url = URL.createObjectURL(new Blob([text], { type: "text/csv" }));
      el("a", { href: url, download: `usage-${by.value.replaceAll(",", "-")}.csv` }).click();
      URL.revokeObjectURL(url);
    } catch (error) {
      setText(alert, error.message);
    }
  }
  function refresh() {
    next = 0;
    void update();
  }
  days.addEventListener("change", refresh);
  by.addEventListener("change", refresh);
  download.addEventListener("click", () => void save());
  const form = el("div", { class: "fields" }, field("Time", days), field("Group by", by), el("div", { class: "buttons end" }, download));
  return { element: el("div", {}, el("h2", {}, "Usage"), form, alert, message, hint, dailySection, sums), update };
}

function sumTable(groups) {
  const columns = [
    ...groups.map((name) => ({ label: NAMES[name], of: (row) => (name in row.by ? row.by[name] || "–" : "") })),
    ...NUMBERS.map(([name, label]) => ({ label, number: true, of: (row) => count(row[name]), bad: (row) => name === "errors" && row.errors > 0 })),
  ];
  return table("Requests that reached a model. Cancelled: the client disconnected", columns, (row) => JSON.stringify(row.by));
}

function totalOf(rows) {
  const numbers = NUMBERS.map(([name]) => [name, rows.reduce((sum, row) => sum + row[name], 0)]);
  const [first] = Object.keys(rows[0].by);
  return { by: { [first]: "all" }, ...Object.fromEntries(numbers) };
}

/** The tokens of each day since the first of the range, also of days without requests. */
function dailyFigure(perDay) {
  const tokens = new Map(perDay.totals.map((row) => [row.by.day, row.prompt_tokens + row.completion_tokens]));
  const first = perDay.since ?? 0;
  const number = Math.max(1, Math.ceil((Date.now() / 1000 - first) / DAY));
  const points = Array.from({ length: number }, (_, at) => {
    const x = first + at * DAY;
    return { x, y: tokens.get(new Date(x * 1000).toISOString().slice(0, 10)) ?? 0 };
  });
  return { label: "Tokens per day", from: first, to: first + number * DAY, points, describe: (value) => compact(value), bars: DAY };
}

function compact(value) {
  return value.toLocaleString("en", { notation: "compact", maximumFractionDigits: 1 });
}
