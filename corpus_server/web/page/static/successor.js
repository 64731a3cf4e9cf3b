// Plans that follow another one from some step on, and the proof that nothing else moved.

import { h, number, planLink, table } from "./dom.js";
import { ask, curl, problem, Problem, copyable, request } from "./api.js";

const byStart = (ranges) => ranges.sort((a, b) => a[0] - b[0]);

// The plan without documents of a corpus. A stage begins at the step: what was trained before stays as it was.
export async function denied(plan, at, corpus, documents) {
  const ranges = await Promise.all(documents.map(async (each) => {
    const response = await ask(`/v1/corpora/${encodeURIComponent(corpus)}/documents/${each}?format=json`);
    return [response.start, response.stop];
  }));
  const made = structuredClone(plan);
  const n = made.stages.findLastIndex((stage) => stage.from_step <= at);
  if (made.stages[n].from_step < at) made.stages.splice(n + 1, 0, { ...structuredClone(made.stages[n]), from_step: at });
  const stage = made.stages.find((each) => each.from_step === at);  // what it excludes is out in later stages, too
  stage.exclude = { ...stage.exclude, [corpus]: byStart([...(stage.exclude?.[corpus] ?? []), ...ranges]) };
  return made;
}

export function skipped(plan, start, stop) {
  return { ...structuredClone(plan), skip_steps: byStart([...plan.skip_steps, [start, stop]]) };
}

// Says what a click would make, and makes it when the reader says so.
export function proposed(element, what, make) {
  const card = h("div", { class: "card" }, h("p", {}, `${what} This makes a new plan. The plan so far stays as it is, and no run that reads it changes.`),
    h("p", { class: "buttons" }, h("button", { type: "button", class: "primary", onclick: make }, "Make the successor plan"),
      h("button", { type: "button", onclick: () => element.replaceChildren() }, "Cancel")));
  element.replaceChildren(card);
  card.querySelector("button").focus();
}

// Keeps the successor of a plan, and shows where it first differs.
export async function successor(element, id, document_, what) {
  try {
    const response = await ask("/v1/plans", { method: "POST", body: JSON.stringify(document_) });
    const target = `/v1/plans/${id}/diff?other=${response.id}`;
    const { rows } = await ask(target);
    element.replaceChildren(h("div", { class: "card" },
      h("p", {}, `${what} Successor: `, planLink(response.id), rows.equal_steps ? `. Steps before ${number(rows.equal_steps)} are the same: what the two plans say of them is equal; ` : ". By what the plans say, every step may differ; ",
        rows.first_step === null ? "no compared step differs." : `the first step that differs is ${number(rows.first_step)}.`,
        " ", h("a", { href: `/page/plans/${id}/diff/${response.id}` }, "What differs")),
      rows.steps.length ? table(["step", "rows that differ"], rows.steps.map((each) => [each.step, each.num_rows])) : "",
      copyable(curl("/v1/plans", document_)), request(target)));
  } catch (error) {
    if (!(error instanceof Problem)) throw error;
    element.replaceChildren(problem(error));
  }
  element.scrollIntoView({ block: "nearest" });
}
