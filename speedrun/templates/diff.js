"use strict";
const CONTEXT = 3;  // unchanged lines around a change
const [from, to, told, rows] = ["from", "to", "told", "rows"].map(id => document.getElementById(id));

// Return the runs of equal lines: first in a, first in b, count. The last is empty, at both ends
function agreements(a, b) {
  const {scripts, pairs} = DATA, end = scripts[a].length;
  if (a === b) return [[0, 0, end], [end, end, 0]];
  return pairs[`${a} ${b}`] ?? pairs[`${b} ${a}`].map(([i, j, n]) => [j, i, n]);
}

function half(name, i, kind) {
  const [number, line] = i === null ? ["", ""] : [i + 1, DATA.lines[DATA.scripts[name][i]]];
  return `<td class="at">${number}</td><td class="${i === null ? "none" : kind}">${line}</td>`;
}

const row = (i, j, gone = "", come = "") => `<tr>${half(from.value, i, gone)}${half(to.value, j, come)}</tr>`;
const unchanged = (i, j, n) => Array.from({length: n}, (_, k) => row(i + k, j + k)).join("");

function show() {
  const parts = [], end = DATA.scripts[from.value].length;
  let i = 0, j = 0, gone = 0, come = 0;
  for (const [a, b, n] of agreements(from.value, to.value)) {
    for (let k = 0; k < Math.max(a - i, b - j); k++)
      parts.push(row(i + k < a ? i + k : null, j + k < b ? j + k : null, "gone", "come"));
    [gone, come, i, j] = [gone + a - i, come + b - j, a + n, b + n];
    const head = a + b ? CONTEXT : 0, tail = i < end ? CONTEXT : 0, folded = n - head - tail;
    if (folded < 2) parts.push(unchanged(a, b, n));
    else parts.push(unchanged(a, b, head), `<tr><td colspan="4" class="fold"><button data-run="${a + head} ${b + head} ${folded}">`,
      `${folded} unchanged lines</button></td></tr>`, unchanged(i - tail, j - tail, tail));
  }
  rows.innerHTML = parts.join("");
  told.textContent = `+${come} \u2212${gone} lines`;
}

rows.addEventListener("click", ({target: {dataset: {run}, parentNode}}) => {
  if (run) parentNode.parentNode.outerHTML = unchanged(...run.split(" ").map(Number));
});

function choose() {  // what the address says after #
  const names = decodeURIComponent(location.hash.slice(1)).split("..");
  if (names.length === 2 && names.every(name => name in DATA.scripts)) [from.value, to.value] = names;
  show();
}

for (const select of [from, to])
  select.addEventListener("change", () => { history.replaceState(null, "", `#${from.value}..${to.value}`); show(); });
addEventListener("hashchange", choose);
choose();
