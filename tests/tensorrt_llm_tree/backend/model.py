"""Look-alike of TensorRT-LLM's backend: says what it got, and answers with the prompt's tokens."""

import json
import os
from pathlib import Path

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        parameters = json.loads(args["model_config"])["parameters"]
        self.path = parameters["seen"]["string_value"] if "seen" in parameters else None
        self.path = self.path or os.environ["TENSORRT_LLM_SEEN"]
        self.held = []
        self.tasks = set()

    def execute(self, requests):
        for request in requests:
            seen = {t.name(): t.as_numpy().ravel().tolist() for t in request.inputs()}
            seen = {name: value for name, value in seen.items() if value}
            seen["shapes"] = {t.name(): t.as_numpy().shape for t in request.inputs()}
            with Path(self.path).open("a") as file:
                file.write(json.dumps(seen, default=str) + "\n")
            sender = request.get_response_sender()
            if seen.get("stop") == [True]:
                self.end(sender, seen)
                for held in [each for each in self.held if each[2] == request.request_id()]:
                    self.held.remove(held)
                    self.end(*held[:2])
                continue
            task = seen.get("lora_task_id", [0])[0]
            if "lora_weights" in seen:
                self.tasks.add(task)
            elif task and task not in self.tasks:
                text = f"[ERROR] LoRA task {task} not found in cache. Please send LoRA weights"
                sender.send(
                    pb_utils.InferenceResponse(error=pb_utils.TritonError(text)),
                    flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL,
                )
                continue
            if seen["request_output_len"] == [17]:  # as when others take its place
                self.tasks.clear()
            if seen["request_output_len"] == [13]:
                text = "[ERROR] Prompt length (900) exceeds maximum input length (512)"
                sender.send(
                    pb_utils.InferenceResponse(error=pb_utils.TritonError(text)),
                    flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL,
                )
                continue
            if seen["request_output_len"] == [64]:  # all 64 of them must be here at once
                self.held.append((sender, seen, request.request_id()))
                for held in self.held if len(self.held) == 64 else ():
                    self.answer(*held[:2])
                continue
            self.answer(sender, seen)

    def answer_whole(self, sender, seen):
        ids = seen["input_ids"]
        echo = [] if seen.get("exclude_input_in_output") == [True] else ids
        whole = [*echo, *ids]
        tensors = [
            pb_utils.Tensor("output_ids", np.array([[[*whole, 0, 0]]], dtype=np.int32)),
            pb_utils.Tensor("sequence_length", np.array([[len(whole)]], dtype=np.int32)),
        ]
        sender.send(
            pb_utils.InferenceResponse(output_tensors=tensors),
            flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL,
        )

    def end(self, sender, seen):
        if seen.get("streaming") == [False]:
            self.answer_whole(sender, seen)
        else:
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)

    def answer(self, sender, seen):
        if seen.get("streaming") == [False]:
            self.answer_whole(sender, seen)
            return
        final = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
        joined = seen["request_output_len"][0] % 2  # the end comes with the last token, or after it
        for place, token in enumerate(seen["input_ids"]):
            tensors = [
                pb_utils.Tensor("output_ids", np.array([[[token]]], dtype=np.int32)),
                pb_utils.Tensor("sequence_length", np.array([[1]], dtype=np.int32)),
            ]
            if seen.get("return_log_probs") == [True]:
                values = np.array([-0.1, -np.inf][place % 2 :], dtype=np.float32)
                tensors.append(pb_utils.Tensor("output_log_probs", values.reshape(1, 1, -1)))
            if seen.get("return_context_logits") == [True]:
                logits = np.arange(6, dtype=np.float32).reshape(1, 2, 3)
                tensors.append(pb_utils.Tensor("context_logits", logits))
            last = joined and place == len(seen["input_ids"]) - 1
            sender.send(pb_utils.InferenceResponse(output_tensors=tensors), final if last else 0)
        if not joined:
            sender.send(flags=final)
