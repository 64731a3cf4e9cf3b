import { $, h, number, parameters, planLink, plural, rowDocument, stepAddress, table } from "../dom.js";
import { fill } from "../api.js";

const { plan_id: one, other } = parameters;
const shown = (value) => h("code", {}, value === null ? "-" : JSON.stringify(value));

fill($("#diff"), `/v1/plans/${one}/diff?other=${other}`, (response) => [
  h("p", {}, "Plan ", planLink(response.a), " and plan ", planLink(response.b), "."),
  table(["field", "first plan", "second plan"], response.fields.map((field) => [field.field, shown(field.a), shown(field.b)]), "Fields that differ", { stacked: true }),
  h("h2", {}, "Steps"),
  h("p", {}, proof(response.rows)),
  response.rows.steps.length ? table(["step", "rows that differ", "which", "open"], response.rows.steps.map((step) => [
    step.step, step.num_rows, step.rows.slice(0, 8).map(([start, stop]) => `${start}-${stop - 1}`).join(", "),
    h("span", {}, h("a", { href: stepAddress(one, step.step) }, "first"), " ", h("a", { href: stepAddress(other, step.step) }, "second")),
  ])) : "",
  ...response.views.flatMap(documents),
]);

function documents(change) {
  return [
    h("h2", {}, `Documents of ${change.a === change.b ? change.a : `${change.a} and ${change.b}`}`),
    h("p", {}, `${plural(change.num_documents, "document")} of an epoch differ${change.num_documents === 1 ? "s" : ""}: ${number(change.num_taken_out)} only in the first plan, ${number(change.num_put_in)} only in the second.${change.documents.length < change.num_documents ? ` The first ${number(change.documents.length)} are listed.` : ""}`),
    table(["document", "times in the first plan", "in the second"], change.documents.map((each) => [
      h("a", { href: rowDocument(change.a, each.document) }, number(each.document)), each.a, each.b])),
  ];
}

function proof(rows) {
  if (rows.equal_steps === null) return "Every step is the same.";
  const before = rows.equal_steps ? `Steps before ${number(rows.equal_steps)} are the same: what the two plans say of them is equal. ` : "";
  if (rows.compared_until === rows.equal_steps) return `${before}No step was compared: one takes more rows than a question may compute.`;
  if (rows.first_step === null) return `${before}The rows of all steps up to ${number(rows.compared_until - 1)} were compared: none differs.`;
  return `${before}The first step that differs is ${number(rows.first_step)}; the rows of all steps up to ${number(rows.compared_until - 1)} were compared. ${rows.steps.length === 1 ? "One step that differs is" : `${rows.steps.length} steps that differ are`} listed; all compared rows that are not listed are the same.`;
}
