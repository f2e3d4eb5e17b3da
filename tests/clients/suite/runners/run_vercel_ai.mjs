// Vercel's ai: loops of tools by three providers, whole and streamed, objects, errors.

import assert from "node:assert/strict";

import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { APICallError, Output, generateText, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

import { ASK, PARIS, RESULT, TASK, add, check, main, rejects, server, temperature } from "./checks.mjs";

const HERE = server("openvino");
const SCRIPTED = server("scripted");
const providers = {
  chats: (one, name = one.model) =>
    createOpenAICompatible({
      name: "served",
      baseURL: one.openai,
      supportsStructuredOutputs: true,
      includeUsage: true,
    })(name),
  responses: (one) => createOpenAI({ baseURL: one.openai, apiKey: "none" }).responses(one.model),
  messages: (one) => createAnthropic({ baseURL: one.openai, apiKey: "none" })(one.model),
};
const tools = {
  temperature: tool({
    description: "Temperature in a city, in millikelvin.",
    inputSchema: z.object({ city: z.string() }),
    execute: temperature,
  }),
  add: tool({
    description: "Sum of two numbers.",
    inputSchema: z.object({ a: z.int(), b: z.int() }),
    execute: add,
  }),
};
const GREEDY = { temperature: 0, maxOutputTokens: 300, maxRetries: 0, prompt: ASK };
const City = z.object({ name: z.enum(["Paris", "Rome"]), large: z.boolean() });

for (const [api, model] of Object.entries(providers)) {
  const loop = { model: model(SCRIPTED), tools, prompt: TASK, stopWhen: stepCountIs(5), maxRetries: 0 };
  const called = (steps) => steps.flatMap((step) => step.toolCalls.map((call) => call.toolName));

  check(`agent loop by ${api}`, async () => {
    const { text, steps } = await generateText(loop);
    assert.deepEqual(called(steps), ["temperature", "add"]);
    assert(text.includes(RESULT), text);
    return text;
  });

  check(`agent loop by ${api} streamed`, async () => {
    const result = streamText({ ...loop, onError: () => {} });
    const pieces = [];
    for await (const piece of result.textStream) pieces.push(piece);
    assert.deepEqual(called(await result.steps), ["temperature", "add"]);
    assert(pieces.join("").includes(RESULT), pieces.join(""));
    assert(pieces.length > 3);
    assert((await result.totalUsage).outputTokens > 2);
  });
}

check("a chat by three apis", async () => {
  for (const model of Object.values(providers)) {
    const { text, usage } = await generateText({ ...GREEDY, model: model(HERE) });
    assert(text.startsWith(PARIS), text);
    assert(usage.outputTokens > 2);
  }
});

check("forced calls", async () => {
  const { toolCalls } = await generateText({
    ...GREEDY,
    model: providers.chats(HERE),
    tools,
    toolChoice: "required",
  });
  assert(toolCalls[0].toolName in tools);
});

check("an object by a schema", async () => {
  for (const api of ["chats", "responses"]) {
    const { output } = await generateText({
      ...GREEDY,
      model: providers[api](HERE),
      output: Output.object({ schema: City }),
    });
    City.parse(output);
  }
});

check("errors are typed", async () => {
  const absent = generateText({ ...GREEDY, model: providers.chats(HERE, "absent") });
  assert.equal((await rejects(absent, APICallError)).statusCode, 404);
});

await main();
