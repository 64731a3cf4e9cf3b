import { $, h, number, plural, searched, stepAddress, table, visible } from "../dom.js";
import { address, ask, fill, problem, Problem } from "../api.js";

const form = $("#lookup");
const query = new URLSearchParams(location.search);

// Only what the plan reads can be looked up in it.
async function listSources(wanted) {
  const { plan, corpus } = form.elements;
  if (!/^[0-9a-f]{8,64}$/.test(plan.value)) return;
  const { id, sources } = await ask(`/v1/plans/${plan.value}`);
  plan.value = id;
  corpus.replaceChildren(...Object.keys(sources).map((name) => h("option", {}, name)));
  if (wanted in sources) corpus.value = wanted;
}

// The newest plan that reads a corpus, if one is named.
async function newest(corpus) {
  const { plans } = await ask("/v1/plans");
  return plans.find(({ plan }) => !corpus || plan.stages.some((stage) => corpus in stage.mixture));
}

async function start() {
  for (const [name, value] of query) if (form.elements[name]) form.elements[name].value = value;
  try {
    if (!query.has("plan")) {
      const found = await newest(query.get("corpus")).catch(() => undefined);
      form.elements.plan.value = found?.head ?? found?.id ?? "";
      if (!found && query.has("corpus")) $("#found").replaceChildren(h("p", {}, `None of the last plans reads the corpus ${query.get("corpus")}.`));
    }
    const wanted = query.get("corpus");
    await listSources(wanted);
    if (wanted && form.elements.corpus.value && form.elements.corpus.value !== wanted) { // no other is looked up in its place
      $("#found").replaceChildren(h("p", {}, `This plan does not read the corpus ${wanted}.`));
      return;
    }
  } catch (error) {
    if (!(error instanceof Problem)) throw error;
    $("#found").replaceChildren(problem(error));
    return;
  }
  if (form.elements.plan.value && ["document", "token", "text"].some((name) => form.elements[name].value)) look();
}

const rowLink = (plan, row) => (row.step === null ? "skipped" : h("a", { href: `${stepAddress(plan, row.step)}?row=${row.row}` }, `step ${number(row.step)}, row ${row.row}`));
const passes = (epochs) => (epochs === "1" ? "the first epoch" : `the first ${epochs} epochs`);

// Which rows read what a search has found: the plan may leave it out.
async function readBy(element, plan, corpus, token, epochs) {
  const { num_found, rows } = await ask(address("/v1/lookup", { plan, corpus, token, epochs, limit: 3 }));
  const trained = rows.filter(({ step }) => step !== null);
  if (!num_found) element.replaceChildren(h("strong", {}, `no row of ${passes(epochs)} reads it`));
  else if (!trained.length && num_found <= rows.length) element.replaceChildren(h("strong", {}, "only skipped steps have it"));
  else element.replaceChildren(...trained.flatMap((row, n) => [n ? "; " : "", rowLink(plan, row)]), num_found > rows.length ? ` and ${plural(num_found - rows.length, "row")} more` : "");
}

async function look() {
  const given = Object.fromEntries(new FormData(form));
  history.replaceState(null, "", address(location.pathname, given));
  const { plan, corpus, epochs } = given;
  if (given.text) {
    await fill($("#found"), address(`/v1/corpora/${encodeURIComponent(corpus)}/search`, { text: given.text }), (response) => [
      h("p", {}, searched(response)),
      ...response.found.map((each) => h("p", { class: "found" },
        h("a", { href: address("/page/lookup", { plan, corpus, token: each.base_token, epochs }) }, `token ${number(each.base_token)}`),
        ": ", h("span", { class: "rows", "data-token": each.base_token }),
        h("span", { class: "text" }, visible(each.before), h("mark", {}, visible(each.text)), visible(each.after)))),
    ]);
    for (const element of document.querySelectorAll("#found .rows")) {
      await readBy(element, plan, corpus, element.dataset.token, epochs).catch((error) => element.replaceChildren(error.message));
    }
    return;
  }
  const target = address("/v1/lookup", { plan, corpus, document: given.document, token: given.document ? "" : given.token, epochs });
  await fill($("#found"), target, (response) => [
    h("p", {}, `${response.stop - response.start === 1 ? `Token ${number(response.start)} is` : `Tokens ${number(response.start)} to ${number(response.stop - 1)} are`} in ${plural(response.num_found, "row")} of ${passes(epochs)}${response.truncated ? "; the earliest are shown" : ""}.`),
    table(["epoch", "step", "row", "first token of the row"], response.rows.map((row) => [row.epoch,
      row.step === null ? "skipped" : h("a", { href: `${stepAddress(plan, row.step)}?row=${row.row}` }, number(row.step)), row.row, row.start])),
  ]);
}

form.elements.plan.addEventListener("change", () => listSources(form.elements.corpus.value).catch((error) => $("#found").replaceChildren(problem(error))));
form.addEventListener("submit", (event) => { event.preventDefault(); look(); });
start();
