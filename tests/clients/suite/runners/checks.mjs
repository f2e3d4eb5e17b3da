// What runners for Node share, as checks.py does: servers, checks that print a JSON line each, and
// the tools of cases.py.

import assert from "node:assert/strict";

const given = JSON.parse(process.env.COG_TRITON_SUITE);
const checks = [];

export const server = (kind) => given[kind];
export const check = (name, run) => checks.push([name, run]);

export async function rejects(promise, kind) {
  const found = await promise.then(
    (value) => assert.fail(`no error, but ${JSON.stringify(value)}`),
    (error) => error,
  );
  assert(found instanceof kind, `${found}`);
  return found;
}

export async function main() {
  const [, , , only = ""] = process.argv;
  for (const [check, run] of checks.filter(([name]) => name.includes(only))) {
    let ok = true;
    let detail = "";
    try {
      detail = (await run()) ?? "";
    } catch (error) {
      console.error(error);
      ok = false;
      detail = `${error}`;
    }
    console.log(JSON.stringify({ check, ok, detail: detail.slice(0, 1000) }));
  }
}

export const TASK = "What is the temperature in Paris, in millikelvin, plus 7000? Use the tools.";
export const RESULT = "295150";
export const ASK = "What is the capital of France?";
export const PARIS = "The capital of France is Paris";
export const temperature = ({ city }) => (city === "Paris" ? "288150" : "293150");
export const add = ({ a, b }) => `${a + b}`;
