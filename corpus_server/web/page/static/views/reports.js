import { $, h, planLink, reportAddress, table, visible } from "../dom.js";
import { fill } from "../api.js";

const found = (report) => report.corpora.reduce((sum, each) => sum + each.num_items_found, 0);
const names = (report) => visible(report.corpora.map((each) => each.corpus).join(", "));
const firstStep = (report) => {
  const steps = report.corpora.map((each) => each.first_step ?? null).filter((each) => each !== null);
  return steps.length ? Math.min(...steps) : "none";
};

fill($("#reports"), "/v1/reports", ({ reports }) => {
  const shown = reports.filter((each) => each.report);
  const problems = reports.filter((each) => each.problem).map((each) => h("p", { class: "problem" }, visible(each.problem)));
  if (!reports.length) return h("p", {}, "There is no report. ", h("code", {}, "corpus-server find ... --out DIR/NAME"), " writes one, and the server shows it with ", h("code", {}, "serve --report-dir DIR"), ".");
  return [...problems, shown.length ? table(["report", "corpora", "items", "found", "plan", "before step", "first step that saw one", "written"], shown.map(({ name, report, written_unix_seconds: written }) => [
    h("a", { href: reportAddress(name) }, visible(name)), names(report), report.num_items, found(report),
    report.plan ? planLink(report.plan) : "", report.before_step ?? "", report.plan ? firstStep(report) : "",
    new Date(written * 1000).toISOString().slice(0, 16).replace("T", " ")])) : ""];
});
