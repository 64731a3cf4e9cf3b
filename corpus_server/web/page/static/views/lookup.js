import { $, h, number, stepAddress, table, visible } from "../dom.js";
import { address, ask, fill, problem, Problem } from "../api.js";

const form = $("#lookup");
const query = new URLSearchParams(location.search);

async function start() {
  try {
    const [{ corpora }, { plans }] = await Promise.all([ask("/v1/corpora"), query.has("plan") ? { plans: [] } : ask("/v1/plans?limit=1").catch(() => ({ plans: [] }))]);
    form.elements.corpus.replaceChildren(...corpora.map((corpus) => h("option", {}, corpus.name)));
    if (plans.length) form.elements.plan.value = plans[0].id;
  } catch (error) {
    if (!(error instanceof Problem)) throw error;
    $("#found").replaceChildren(problem(error));
  }
  for (const [name, value] of query) if (form.elements[name]) form.elements[name].value = value;
  if (form.elements.plan.value && ["document", "token", "text"].some((name) => form.elements[name].value)) look();
}

async function look() {
  const given = Object.fromEntries(new FormData(form));
  history.replaceState(null, "", address(location.pathname, given));
  const { plan, corpus, epochs } = given;
  if (given.text) {
    return fill($("#found"), address(`/v1/corpora/${encodeURIComponent(corpus)}/search`, { text: given.text }), (response) => [
      h("p", {}, `${response.found.length} places in ${number(response.num_searched_tokens)} of ${number(response.num_tokens)} tokens:`),
      ...response.found.map((each) => h("p", { class: "found" },
        h("a", { href: address("/page/lookup", { plan, corpus, token: each.token, epochs }) }, `token ${number(each.token)}`),
        h("span", { class: "text" }, visible(each.before), h("mark", {}, visible(each.text)), visible(each.after)))),
    ]);
  }
  const target = address("/v1/lookup", { plan, corpus, document: given.document, token: given.document ? "" : given.token, epochs });
  return fill($("#found"), target, (response) => [
    h("p", {}, `Tokens ${number(response.start)} to ${number(response.stop)} are in ${number(response.num_found)} rows of the first ${epochs === "1" ? "epoch" : `${epochs} epochs`}${response.truncated ? "; the earliest are shown" : ""}.`),
    table(["epoch", "step", "row", "first token of the row"], response.rows.map((row) => [row.epoch,
      row.step === null ? "skipped" : h("a", { href: `${stepAddress(plan, row.step)}?row=${row.row}` }, number(row.step)), row.row, row.start])),
  ]);
}

form.addEventListener("submit", (event) => { event.preventDefault(); look(); });
start();
