// Reads a loss curve, and finds its spikes.

// Lines of `step,loss`; anything else, such as a head, is passed over.
export function points(text) {
  return text.split("\n").map((line) => line.trim().split(/[,;\t ]+/).map(Number))
    .filter(([step, loss]) => Number.isFinite(step) && Number.isFinite(loss)).sort((a, b) => a[0] - b[0]);
}

// A step is a spike if its loss exceeds the median of the 50 before by five times their mean deviation.
export function spikes(losses) {
  const found = [];
  for (let n = 10; n < losses.length; n += 1) {
    const before = losses.slice(Math.max(0, n - 50), n).sort((a, b) => a - b);
    const median = before[before.length >> 1];
    const deviation = before.reduce((sum, each) => sum + Math.abs(each - median), 0) / before.length;
    if (losses[n] > median + 5 * Math.max(deviation, 1e-3 * Math.abs(median))) found.push(n);
  }
  return found;
}
