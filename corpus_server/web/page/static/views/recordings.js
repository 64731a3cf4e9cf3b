import { $, h, planLink, recordingAddress, table } from "../dom.js";
import { fill } from "../api.js";

fill($("#recordings"), "/v1/recordings", ({ recordings }) => (recordings.length
  ? table(["run", "first step", "last step", "rows", "sources", "plan"], recordings.map((each) => [
    h("a", { href: recordingAddress(each.name) }, each.name), each.start, each.stop - 1, each.num_rows, each.sources.join(", "), planLink(each.plans.at(-1))]))
  : h("p", {}, "Nothing was recorded. A loader writes losses with ", h("code", {}, "record_dir=DIR"), ", and the server shows them with ", h("code", {}, "serve --record-dir DIR"), ".")));
