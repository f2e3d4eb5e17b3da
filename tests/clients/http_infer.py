"""Triton's HTTP inference protocol as tritonclient.http speaks it, in JSON: one answer a request.

Written from reading its requests, for that client needs gevent, which nothing else here does.
"""

from __future__ import annotations

from typing import Any

import httpx

_S = 60


def infer(url: str, model: str, request_id: str = "", **inputs: Any) -> dict[str, list[Any]]:
    """``InferenceServerClient.infer``: outputs by name; raises RuntimeError with Triton's text."""
    tensors = []
    for name, value in inputs.items():
        data = value if isinstance(value, list) else [value]
        kind = {bool: "BOOL", int: "INT32", float: "FP32", str: "BYTES"}[type(data[0])]
        tensors.append({"name": name, "shape": [1, len(data)], "datatype": kind, "data": data})
    body = {"inputs": tensors} | ({"id": request_id} if request_id else {})
    answer = httpx.post(f"{url}/v2/models/{model}/infer", json=body, timeout=_S)
    found = answer.json()
    if answer.status_code != httpx.codes.OK:
        raise RuntimeError(found["error"])
    return {output["name"]: output["data"] for output in found["outputs"]}
