import { $, h, bytes, facts, number, plural, tokenizer, corpusAddress } from "../dom.js";
import { fill } from "../api.js";

// A view has a file of its own; the shards are those of its corpus.
const size = (corpus) => (corpus.view ? corpus.view.size_bytes : corpus.shards.reduce((sum, shard) => sum + shard.size_bytes, 0));

// The corpus of a view, by its name if it is served here.
function base(view, corpora) {
  const found = corpora.find((each) => !each.view && Object.values(each.fingerprints).includes(view.fingerprint));
  const chosen = `, ${plural(view.num_documents, "document")}`;
  return found ? h("span", {}, h("a", { href: corpusAddress(found.name) }, found.name), chosen) : `a corpus that is not served by itself${chosen}`;
}

fill($("#corpora"), "/v1/corpora", ({ corpora }) => corpora.map((corpus) =>
  h("article", { class: "card" },
    h("h2", {}, h("a", { href: corpusAddress(corpus.name) }, corpus.name)),
    h("p", { class: "figure" }, number(corpus.num_tokens), h("small", {}, " tokens")),
    facts([
      ["documents", corpus.num_documents ?? "no index"],
      ["dtype", corpus.dtype],
      ["size", bytes(size(corpus))],
      ...(corpus.view ? [["view of", base(corpus.view, corpora)]] : [["shards", corpus.shards.length]]),
      ...(corpus.num_masks ? [["loss masks", corpus.num_masks]] : []),
      ["format", [...new Set(corpus.shards.map((shard) => shard.format))].join(", ")],
      ["tokenizer", tokenizer(corpus)],
    ]),
    h("p", { class: "fingerprint" }, h("code", { title: corpus.fingerprint }, corpus.fingerprint)))));
