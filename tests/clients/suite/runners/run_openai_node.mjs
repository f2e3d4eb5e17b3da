// openai for Node: its tool runner whole and streamed, chats, responses, structured output, errors.

import assert from "node:assert/strict";

import OpenAI from "openai";
import { zodResponseFormat, zodTextFormat } from "openai/helpers/zod";
import { z } from "zod";

import { ASK, PARIS, RESULT, TASK, add, check, main, rejects, server, temperature } from "./checks.mjs";

const HERE = server("openvino");
const SCRIPTED = server("scripted");
const client = (one) => new OpenAI({ baseURL: one.openai, apiKey: "none", maxRetries: 0 });
const ask = [{ role: "user", content: ASK }];
const GREEDY = { model: HERE.model, temperature: 0, max_tokens: 300 };
const City = z.object({ name: z.enum(["Paris", "Rome"]), large: z.boolean() });

const schemas = {
  temperature: [temperature, "Temperature in a city, in millikelvin.", { city: { type: "string" } }],
  add: [add, "Sum of two numbers.", { a: { type: "integer" }, b: { type: "integer" } }],
};
const tools = Object.entries(schemas).map(([name, [run, description, properties]]) => ({
  type: "function",
  function: {
    name,
    description,
    parameters: { type: "object", properties, required: Object.keys(properties) },
    function: run,
    parse: JSON.parse,
  },
}));
const loop = { model: SCRIPTED.model, messages: [{ role: "user", content: TASK }], tools };

check("agent loop", async () => {
  const runner = client(SCRIPTED).chat.completions.runTools(loop);
  const said = await runner.finalContent();
  assert(said.includes(RESULT), said);
  const called = runner.messages.flatMap((one) => one.tool_calls ?? []).map((one) => one.function.name);
  assert.deepEqual(called, ["temperature", "add"]);
  return said;
});

check("agent loop streamed", async () => {
  const runner = client(SCRIPTED).chat.completions.runTools({ ...loop, stream: true });
  let pieces = 0;
  runner.on("content", () => (pieces += 1));
  const said = await runner.finalContent();
  assert(said.includes(RESULT), said);
  assert(pieces > 3);
});

check("agent loop by responses streamed", async () => {
  const own = tools.map(({ function: { name, description, parameters } }) => ({
    type: "function",
    name,
    description,
    parameters,
    strict: false,
  }));
  let input = TASK;
  let previous_response_id;
  const called = [];
  for (;;) {
    const stream = client(SCRIPTED).responses.stream({
      model: SCRIPTED.model,
      input,
      previous_response_id,
      tools: own,
    });
    const response = await stream.finalResponse();
    const calls = response.output.filter((item) => item.type === "function_call");
    if (!calls.length) {
      assert(response.output_text.includes(RESULT), response.output_text);
      break;
    }
    previous_response_id = response.id;
    input = calls.map((call) => {
      called.push(call.name);
      const output = schemas[call.name][0](JSON.parse(call.arguments));
      return { type: "function_call_output", call_id: call.call_id, output };
    });
  }
  assert.deepEqual(called, ["temperature", "add"]);
});

check("a chat whole and streamed", async () => {
  const whole = await client(HERE).chat.completions.create({ ...GREEDY, messages: ask });
  assert(whole.choices[0].message.content.startsWith(PARIS));
  const pieces = [];
  const stream = await client(HERE).chat.completions.create({ ...GREEDY, messages: ask, stream: true });
  for await (const piece of stream) pieces.push(piece.choices[0]?.delta.content ?? "");
  assert.equal(pieces.join(""), whole.choices[0].message.content);
});

check("forced calls", async () => {
  const answer = await client(HERE).chat.completions.create({
    ...GREEDY,
    messages: ask,
    tools: JSON.parse(JSON.stringify(tools)),
    tool_choice: "required",
  });
  assert(answer.choices[0].message.tool_calls[0].function.name in schemas);
});

check("structured output", async () => {
  const chat = await client(HERE).chat.completions.parse({
    ...GREEDY,
    messages: ask,
    response_format: zodResponseFormat(City, "city"),
  });
  City.parse(chat.choices[0].message.parsed);
  const response = await client(HERE).responses.parse({
    model: HERE.model,
    input: ASK,
    text: { format: zodTextFormat(City, "city") },
  });
  City.parse(response.output_parsed);
});

check("a background response is polled and deleted", async () => {
  const responses = client(SCRIPTED).responses;
  let found = await responses.create({ model: SCRIPTED.model, input: TASK, background: true });
  while (["queued", "in_progress"].includes(found.status)) {
    await new Promise((resolve) => setTimeout(resolve, 50));
    found = await responses.retrieve(found.id);
  }
  assert.equal(found.status, "completed");
  assert(found.output_text.includes("temperature"), found.output_text);
  await responses.delete(found.id);
  await rejects(responses.retrieve(found.id), OpenAI.NotFoundError);
});

check("errors are typed", async () => {
  const chats = client(HERE).chat.completions;
  await rejects(chats.create({ ...GREEDY, model: "absent", messages: ask }), OpenAI.NotFoundError);
  const long = [{ role: "user", content: "a ".repeat(9000) }];
  const error = await rejects(chats.create({ ...GREEDY, messages: long }), OpenAI.BadRequestError);
  assert(error.message.includes("E1002"), error.message);
});

await main();
