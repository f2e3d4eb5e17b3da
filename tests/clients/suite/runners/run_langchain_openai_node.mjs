// @langchain/openai: loops of tools by chats and responses, streams, structured output, errors.

import assert from "node:assert/strict";

import { HumanMessage } from "@langchain/core/messages";
import { tool } from "@langchain/core/tools";
import { ChatOpenAI, OpenAI } from "@langchain/openai";
import { z } from "zod";

import { ASK, PARIS, RESULT, TASK, add, check, main, rejects, server, temperature } from "./checks.mjs";

const HERE = server("openvino");
const SCRIPTED = server("scripted");
const given = (one) => ({
  model: one.model,
  apiKey: "none",
  configuration: { baseURL: one.openai },
  temperature: 0,
  maxTokens: 300,
  maxRetries: 0,
});
const tools = [
  tool(temperature, {
    name: "temperature",
    description: "Temperature in a city, in millikelvin.",
    schema: z.object({ city: z.string() }),
  }),
  tool(add, {
    name: "add",
    description: "Sum of two numbers.",
    schema: z.object({ a: z.int(), b: z.int() }),
  }),
];
const City = z.object({ name: z.enum(["Paris", "Rome"]), large: z.boolean() });

async function whole(model, messages) {
  return model.invoke(messages);
}

async function streamed(model, messages) {
  let answer;
  for await (const piece of await model.stream(messages)) {
    answer = answer === undefined ? piece : answer.concat(piece);
  }
  return answer;
}

async function loop(model, turn) {
  const messages = [new HumanMessage(TASK)];
  const called = [];
  for (;;) {
    const answer = await turn(model.bindTools(tools), messages);
    messages.push(answer);
    if (!answer.tool_calls.length) break;
    for (const call of answer.tool_calls) {
      called.push(call.name);
      messages.push(await tools.find((one) => one.name === call.name).invoke(call));
    }
  }
  assert.deepEqual(called, ["temperature", "add"]);
  assert(messages.at(-1).text.includes(RESULT), messages.at(-1).text);
  return messages.at(-1).text;
}

for (const [api, useResponsesApi] of Object.entries({ chats: false, responses: true })) {
  const model = new ChatOpenAI({ ...given(SCRIPTED), useResponsesApi });
  check(`agent loop by ${api}`, () => loop(model, whole));
  check(`agent loop by ${api} streamed`, () => loop(model, streamed));
}

check("a chat whole streamed and in a batch", async () => {
  const model = new ChatOpenAI(given(HERE));
  const answer = await model.invoke(ASK);
  assert(answer.text.startsWith(PARIS), answer.text);
  assert(answer.usage_metadata.output_tokens > 2);
  assert.equal((await streamed(model, ASK)).text, answer.text);
  const both = await model.batch([ASK, "What is the capital of Italy?"]);
  assert(both[1].text.includes("Rom"), both[1].text);
});

check("completions", async () => {
  const text = await new OpenAI({ ...given(HERE), maxTokens: 4 }).invoke("The capital of France is");
  assert(text.startsWith(" Paris"), text);
});

check("forced calls", async () => {
  const bound = new ChatOpenAI(given(HERE)).bindTools(tools, { tool_choice: "add" });
  assert.equal((await bound.invoke(ASK)).tool_calls[0].name, "add");
});

check("structured output", async () => {
  for (const method of ["jsonSchema", "functionCalling"]) {
    const model = new ChatOpenAI(given(HERE)).withStructuredOutput(City, { method, name: "city" });
    City.parse(await model.invoke(ASK));
  }
});

check("errors are told", async () => {
  const absent = new ChatOpenAI({ ...given(HERE), model: "absent" });
  assert.equal((await rejects(absent.invoke(ASK), Error)).status, 404);
});

await main();
