// Asks the server's public routes. The token, where one is needed, is kept in this tab.

import { $, h, copyButton } from "./dom.js";

const KEY = "corpus-server-token";

export class Problem extends Error {
  constructor(document) {
    super(document.detail ?? document.title ?? "the server failed");
    this.document = document;
  }
}

export function address(path, parameters = {}) {
  const given = Object.entries(parameters).filter(([, value]) => value !== null && value !== undefined && value !== "");
  return given.length ? `${path}?${new URLSearchParams(given)}` : path;
}

// A seed may have 64 bits, of which a number of JavaScript holds 53: it would become another seed, and another plan. So may
// a hash in the metadata of documents.
export const parse = (text) => JSON.parse(text, (_, value, context) => (
  Number.isInteger(value) && !Number.isSafeInteger(value) && /^-?\d+$/.test(context.source) ? BigInt(context.source) : value));
BigInt.prototype.toJSON = function toJSON() { return JSON.rawJSON(String(this)); };

async function responseTo(target, options = {}) {
  const headers = { Accept: "application/json", ...options.headers };
  const token = sessionStorage.getItem(KEY);
  if (token) headers.Authorization = `Bearer ${token}`;
  if (options.body !== undefined) headers["Content-Type"] = "application/json"; // else the server refuses it for its Origin
  let response;
  try {
    response = await fetch(target, { ...options, headers });
  } catch {
    throw new Problem({ detail: "no connection to the server; is it running?" });
  }
  if (response.ok) return response;
  const problem = await response.json().catch(() => ({ detail: `status ${response.status}` }));
  if (response.status === 401) $("#token-dialog").showModal();
  throw new Problem(problem);
}

export const ask = async (target, options) => parse(await (await responseTo(target, options)).text());

// Follows a route that sends events. EventSource could not send a token.
export async function follow(target, { onEvent, onEnd, onProblem }) {
  for (;;) {
    try {
      const response = await responseTo(target, { headers: { Accept: "text/event-stream" } });
      const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
      let text = "";
      let isFirst = true;
      for (let part = await reader.read(); !part.done; part = await reader.read()) {
        const events = (text + part.value).split("\n\n");
        text = events.pop();
        for (const event of events) {
          onEvent(JSON.parse(event.replace(/^data: /, "")), isFirst);
          isFirst = false;
        }
      }
    } catch (error) {
      if (error instanceof Problem && error.document.status < 500) { onProblem(error); return; }
    }
    onEnd();  // a server that restarts, or a connection that broke
    await new Promise((resolve) => { setTimeout(resolve, 2000); });
  }
}

export const quoted = (text) => `'${text.replaceAll("'", "'\\''")}'`;
export const curl = (target, document_ = null) => `curl ${target.includes("follow=") ? "-N " : ""}${quoted(location.origin + target)}${
  document_ ? ` -d ${quoted(JSON.stringify(document_))}` : ""}${
  sessionStorage.getItem(KEY) ? ' -H "Authorization: Bearer $CORPUS_TOKEN"' : ""}`;

// Shows an error instead of everything in the view but its name.
export const instead = (error, target) => $("#view").replaceChildren($("h1"), problem(error), request(target));

// Fills an element with what `show` makes of a route's response, with the curl line that fetches the same. `isAll`: without
// a response there is nothing else to see.
export async function fill(element, target, show, isAll = false) {
  const busy = setTimeout(() => element.replaceChildren(h("p", { class: "busy" }, "asking ...")), 150);
  try {
    const shown = await show(await ask(target));
    clearTimeout(busy);
    element.replaceChildren(...[shown].flat(), request(target));
  } catch (error) {
    clearTimeout(busy);
    if (!(error instanceof Problem)) throw error;
    if (isAll) instead(error, target);
    else element.replaceChildren(problem(error), request(target));
  }
}

export const copyable = (line) => h("p", { class: "request" }, h("code", { tabindex: "0" }, line), copyButton(line, "Copy curl"));
export const request = (target) => copyable(curl(target));

// What the server says of a plan that its author should know.
export const warnings = (response) => response.warnings.map((said) => h("p", { class: "warning" }, `${said}.`));

export const problem = (error) => h("p", { class: "problem", role: "alert" }, error.message,
  error.document.remedy ? ` (${error.document.remedy})` : "");

$("#token-button").addEventListener("click", () => $("#token-dialog").showModal());
$("#token-dialog").addEventListener("close", () => {
  const how = $("#token-dialog").returnValue;
  if (how === "save" && $("#token-input").value) sessionStorage.setItem(KEY, $("#token-input").value.trim());
  if (how === "forget") sessionStorage.removeItem(KEY);
  if (how) location.reload();
});
