// A list of documents: filtered and sorted by the server, and what a selection of them makes.

import { $, h, number, plural, table, visible, code } from "./dom.js";
import { address, ask, fill, quoted } from "./api.js";

const COUNT = 20;
const WIDEST = 60;  // characters of a cell
const chosen = new Map();  // by number of the document in its corpus: its tokens there

const brief = (value) => {
  if (value === null || value === undefined) return "";
  if (typeof value === "number") return value;
  const text = visible(typeof value === "string" ? value : JSON.stringify(value));
  return text.length > WIDEST ? h("span", { title: text.slice(0, 1000) }, `${text.slice(0, WIDEST)}\u2026`) : text;
};

export async function listDocuments(name, route, read) {
  const form = $("#list");
  const target = (place = {}) => {
    const given = new FormData(form);
    const sort = given.get("sort");
    return address(`${route}/documents`, { count: COUNT, where: given.get("where").trim(), sort: sort && (given.get("down") ? `-${sort}` : sort), ...place });
  };

  function choose(each, isOn) {
    if (isOn) chosen.set(each.base_document ?? each.document, [each.start, each.start + each.num_tokens]);
    else chosen.delete(each.base_document ?? each.document);
    showChosen();
  }

  // Documents that are ticked become a list to leave out; conditions become the expression of a view.
  function showChosen() {
    const where = new FormData(form).get("where").trim();
    const numbers = [...chosen.keys()].sort((a, b) => a - b);
    const made = [];
    if (numbers.length) {
      made.push(h("p", {}, `${plural(numbers.length, "document")} ticked. To leave out of a view, or of the later steps of a plan:`),
        code("A list of documents", `printf '%s\\n' ${numbers.join(" ")} > without.txt\ncorpus-server view create CORPUS --without without.txt --out without.view`));
      if (!isView) made.push(code("Tokens that a stage excludes", JSON.stringify({ exclude: { [name]: [...chosen.values()].sort((a, b) => a[0] - b[0]) } })));
    }
    if (where && !/\bnum_tokens\b/.test(where)) made.push(code("A view of the documents that meet the conditions", `corpus-server view create CORPUS --where ${quoted(where)} --out chosen.view`));
    $("#chosen").replaceChildren(...made);
  }

  // Of the whole list, by the server: a click on the column that sorts already turns the order around.
  const sortedBy = (column) => {
    const { sort, down } = form.elements;
    const key = { tokens: "num_tokens", document: "" }[column] ?? raw.get(column);
    if (![...sort.options].some((each) => each.value === key)) return column;
    return h("button", { type: "button", class: "sort", title: `Sort by ${column}`, onclick: () => {
      down.checked = key !== "" && sort.value === key && !down.checked;
      sort.value = key;
      show({}, []);
    } }, column);
  };

  const show = (place, before) => fill($("#listed"), target(place), (response) => {
    const columns = Object.keys(response.columns);
    const isSorted = Boolean(new FormData(form).get("sort"));
    const rows = response.documents.map((each) => [
      h("input", { type: "checkbox", "aria-label": `Tick document ${each.document}`, checked: chosen.has(each.base_document ?? each.document),
        onchange: (event) => choose(each, event.target.checked) }),
      h("button", { type: "button", class: "link", onclick: () => read(each.document) }, number(each.document)),
      each.num_tokens, ...columns.map((column) => brief(each.metadata?.[column])), brief(each.text)]);
    const skip = place.skip ?? 0;
    const following = isSorted ? (skip + COUNT < response.num_found ? { ...place, skip: skip + COUNT } : null)
      : (response.next_first === null ? null : { first: response.next_first });
    const further = isSorted && response.next_first !== null ? { first: response.next_first } : null;
    const go = (label, to, trail) => h("button", { type: "button", disabled: to === null, onclick: () => show(to, trail) }, label);
    return [
      response.metadata_problem ? h("p", { class: "problem" }, response.metadata_problem) : "",
      h("p", {}, isSorted ? `${plural(response.num_found, "document")} meet the conditions; looked at ${response.looked_at}${response.complete ? "." : ". The sort is of these alone."}`
        : `Looked at ${response.looked_at}.`),
      rows.length ? table(["tick", "document", "tokens", ...columns.map(visible), "text"], rows, "Documents", { stacked: true, sortedBy })
        : h("p", {}, "None of them meets the conditions."),
      h("div", { class: "buttons" }, go("Before", before.length ? before.at(-1) : null, before.slice(0, -1)), go("After", following, [...before, place]),
        further ? go("Sort those behind", further, [...before, place]) : ""),
    ];
  });

  const raw = new Map();  // names of columns by what is shown of them
  let isView = false;
  const corpus = await ask(route).catch(() => null);
  if (!corpus || corpus.num_documents === null) return;
  isView = Boolean(corpus.view);
  $("#documents-section").hidden = false;
  const first = await ask(address(`${route}/documents`, { count: 1 })).catch(() => null);
  for (const column of Object.keys(first?.columns ?? {})) raw.set(visible(column), column);
  form.elements.sort.append(h("option", { value: "num_tokens" }, "tokens"), ...[...raw].map(([shown, column]) => h("option", { value: column }, shown)));
  form.addEventListener("submit", (event) => { event.preventDefault(); show({}, []); showChosen(); });
  await show({}, []);
}
