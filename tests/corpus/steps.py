"""What the cases ask for, step by step, and the record of what was seen.

A step is one of: a request (`get: PATH`, `post:`, ...), bytes (`send:`), or a word of `_WORDS`.
With `each`, a request is sent with other fields of its JSON each time; all are refused.
"""

from __future__ import annotations

import json
import os
import re
import select
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from itertools import pairwise
from typing import Any
from urllib.parse import quote

from stack import Stack, pids_of, wait_until
from webhook_receiver import Receiver

from .client import Answer, Connection, Ended, encoded
from .normal import Normal

METHODS = ("get", "post", "put", "delete", "head", "options", "patch")
_ACTIVE = re.compile(r'^nv_trt_llm_request_metrics\{.*"active".*\} (\d+)', re.MULTILINE)
_DONE = {"succeeded", "failed", "canceled"}
_NAME = re.compile(r"\$\{(\w+)\}")


class Case:
    """Runs a case against a server."""

    def __init__(self, case: dict[str, Any], defaults: dict[str, Any], server: Stack) -> None:
        self.case, self.defaults, self.server = case, defaults, server
        numbers = (server.port, server.openai, server.http, server.metrics)
        self.ports = dict(zip(("cog", "openai", "triton", "metrics"), numbers, strict=True))
        self.places = {f":{number}": f":<{name}>" for name, number in self.ports.items()}
        self.places |= {str(server.work_dir): "<work>", str(server.cwd): "<tree>"}
        self.values: dict[str, str] = {}
        self.beside: dict[str, tuple[Future[Any], threading.Event]] = {}
        self.receiver: Receiver | None = None
        self.held: list[Connection] = []

    def run(self) -> Any:
        """The record: of each step, or of the one that there is."""
        with ExitStack() as stack:
            self.pool = stack.enter_context(ThreadPoolExecutor(16))
            stack.callback(lambda: [each.end() for each in self.held])
            if "webhook" in self.case:
                *first, last = self.case["webhook"]
                self.receiver = stack.enter_context(
                    Receiver(lambda _, count: ([*first, last][min(count, len(first))], {}))
                )
                self.places[f":{self.receiver.port}"] = ":<hook>"
                self.values["hook"] = self.receiver.url
            self.normal = Normal(self.places, self.case.get("either", []))
            if "steps" not in self.case:
                return self._step(self.case)
            return [seen for step in self.case["steps"] if (seen := self._step(step)) is not None]

    def _step(self, step: dict[str, Any]) -> Any:
        step = self._filled(step)
        if "beside" in step:
            flowing = threading.Event()
            ask = self._until if "until" in step else self._request
            work = self.pool.submit(ask, step, flowing)
            self.beside[step["beside"]] = work, flowing
            return None
        if "send" in step:
            return self._raw(step)
        if "until" in step:
            return self._until(step)
        if "each" in step:
            return [self._refusal(step, fields) for fields in step["each"]]
        if any(method in step for method in METHODS):
            return self._recorded(step, *self._request(step))
        word = next(word for word in step if word in _WORDS)
        self.normal.cut = step.get("cut", 0)
        return _WORDS[word](self, step[word])

    def _refusal(self, step: dict[str, Any], fields: dict[str, Any]) -> str:
        """The status and the error of a request whose JSON has other `fields`, in short."""
        answer, body = self._request({**step, "json": {**step["json"], **fields}})
        error = _parsed(answer, body)["error"]
        if not isinstance(error, dict):
            return f"{answer.status} {self.normal(error)}"
        param = f"{error['param']}: " if error.get("param") else ""
        return f"{answer.status} {param}{self.normal(error['message'])}"

    def _filled(self, value: Any) -> Any:
        if isinstance(value, str):
            return _NAME.sub(lambda found: self.values[found[1]], value)
        if isinstance(value, list):
            return [self._filled(each) for each in value]
        if isinstance(value, dict):
            if value.keys() == {"$repeat", "times"}:
                return value["$repeat"] * value["times"]
            return {name: self._filled(each) for name, each in value.items()}
        return value

    def _request(self, step: dict[str, Any], flowing: threading.Event | None = None) -> Any:
        """The answer, and its events, or the bytes of its body."""
        method = next(method for method in METHODS if method in step)
        port = self.ports[step.get("port", self.defaults.get("port", "cog"))]
        headers = {"host": f"127.0.0.1:{port}", "accept": "*/*", **self.defaults["headers"]}
        if "json" in step:
            headers["content-type"] = "application/json"
        headers |= step.get("headers", {})
        body = encoded(json.dumps(step["json"]) if "json" in step else step.get("body", ""))
        if "json" in step or "body" in step:
            headers["content-length"] = str(len(body))
        lines = [f"{name}: {value}" for name, value in headers.items() if value is not None]
        target = "".join(quote(c) if ord(c) > 126 else c for c in step[method])
        head = f"{method.upper()} {target} HTTP/1.1\r\n" + "\r\n".join([*lines, "", ""])
        connection = Connection(port)
        if flowing:
            self.held.append(connection)
        try:
            connection.send([head, body])
            if step.get("hang up"):
                wait_until(lambda: self._active() > 0)
                time.sleep(step["hang up"])
                return None, []
            answer = connection.answer(method.upper())
            if not answer.is_stream:
                return answer, b"".join(answer.pieces)
            events: list[tuple[str, Any]] = []
            for event in answer.events():
                events.append(event)
                if flowing and len(events) > 3:
                    flowing.set()
                if len(events) == step.get("leave"):
                    break
            return answer, events
        finally:
            connection.close()

    def _recorded(self, step: dict[str, Any], answer: Answer | None, body: Any) -> dict[str, Any]:
        if answer is None:
            return {"hung up": True}
        headers = self.normal.headers(answer.headers)
        found: dict[str, Any] = {"status": answer.status}
        if headers:
            found["headers"] = headers
        if answer.framing != "length":
            found["framing"] = answer.framing
        if not answer.is_whole:
            found["broken off"] = True
        if "leave" in step:
            return {**found, "left after": len(body)}
        told = [data for _, data in body] if isinstance(body, list) else _parsed(answer, body)
        for name, path in step.get("save", {}).items():
            value = told
            for key in path.split("."):
                value = value[int(key) if isinstance(value, list) else key]
            self.values[name] = str(value)
        if isinstance(body, list):
            return {**found, "events": self.normal.events(body)}
        return {**found, "body": self.normal(VIEWS[step.get("view", "whole")](told))}

    def _until(self, step: dict[str, Any], _: object = None) -> Any:
        """Ask until the status, or a field, is as wished; with `all`, each state that was seen."""
        seen: list[Any] = []
        wished = step["until"]

        def is_so() -> bool:
            try:
                answer, body = self._request(step)
            except (Ended, OSError):
                return False
            told = _parsed(answer, body)
            state = told.get("status") if isinstance(told, dict) else None
            if step.get("all"):
                found = [answer.status, state if isinstance(wished, str) else _code(body)]
                if not seen or seen[-1] != found:
                    seen.append(found)
            else:
                seen[:] = [answer, body]
            within = step.get("within") and wished.encode() in body
            return bool(within) or wished in (answer.status, state)

        wait_until(is_so)
        return seen if step.get("all") else self._recorded(step, *seen)

    def _raw(self, step: dict[str, Any]) -> dict[str, Any]:
        """Bytes as they are, the answers to them, and whether the connection stays open."""
        port = self.ports[step.get("port", self.defaults.get("port", "cog"))]
        connection = Connection(port, step.get("receive buffer", 0))
        records: list[dict[str, Any]] = []
        is_open = True
        try:
            connection.send(step["send"])
            if "unread" in step:
                return self._unread(connection, step["unread"])
            if step.get("shut"):
                connection.socket.shutdown(1)
            for _ in range(step.get("answers", 1)):
                answer = connection.answer(step.get("method", "GET"))
                body = [*answer.events()] if answer.is_stream else b"".join(answer.pieces)
                found = self._recorded({"view": step.get("view", "whole")}, answer, body)
                if records and _alike(records[-1]) == _alike(found):
                    records[-1]["times"] = records[-1].get("times", 1) + 1
                else:
                    records.append(found)
            if step.get("idle"):
                return {"answers": records, "ended by the server": connection.rest() == 0}
            connection.send("GET /probe HTTP/1.1\r\nhost: localhost\r\n\r\n")
            connection.answer()
        except Ended:
            is_open = False
        finally:
            connection.close()
        return {"answers": records, "connection": "stays" if is_open else "ends"}

    def _unread(self, connection: Connection, most: int) -> dict[str, Any]:
        """Read nothing until the server must have ended the connection; a FIN waits behind data."""
        poll = select.poll()
        poll.register(connection.socket, select.POLLHUP | select.POLLERR | select.POLLRDHUP)
        poll.poll(40_000)
        return {"all was sent": connection.rest(most) >= most}

    # Words of the life of a server.

    def _active(self) -> int:
        step = {"get": "/metrics", "port": "metrics"}
        _, body = self._request(step)
        return sum(map(int, _ACTIVE.findall(body.decode())))

    def _until_active(self, count: int) -> Any:
        """Wait until so many requests are in the engine."""
        wait_until(lambda: self._active() == count, 60)
        return {"in the engine": count}

    def _join(self, name: str) -> Any:
        """The record of a request that ran beside."""
        found = self.beside[name][0].result()
        return found if isinstance(found, list) else self._recorded({}, *found)

    def _flow(self, name: str) -> None:
        """Wait until a request beside has sent some events."""
        assert self.beside[name][1].wait(120), f"{name} sends nothing"

    def _hooks(self, wished: dict[str, int]) -> Any:
        """Webhooks in their order, once so many, or so many ends, have come."""
        receiver, least = self.receiver, {"count": 0, "ends": 0, "after": 0, **wished}
        assert receiver is not None
        events = receiver.events
        wait_until(lambda: len(events) >= least["count"])
        wait_until(lambda: sum(each["status"] in _DONE for each in events) >= least["ends"])
        time.sleep(least["after"])
        found: list[Any] = []
        for event in events:
            short = {"status": event["status"], "fields": sorted(event)}
            if event["status"] in _DONE or short not in found:
                found.append(self.normal(event) if event["status"] in _DONE else short)
        whole = ["".join(each.get("output") or []) for each in events]
        grows = all(late.startswith(early) for early, late in pairwise(whole))
        head = self.normal.headers(receiver.headers[0])
        return {"headers": head, "events": found, "each output begins with the one before": grows}

    def _hold(self, what: dict[str, Any]) -> None:
        """Connections that send something, and stay until the case ends."""
        for _ in range(what["connections"]):
            self.held.append(Connection(self.ports[what["port"]]))
            self.held[-1].send(what["send"])


_WORDS: dict[str, Callable[[Case, Any], Any]] = {
    "active": Case._until_active,
    "join": Case._join,
    "flow": Case._flow,
    "hooks": Case._hooks,
    "hold": Case._hold,
    "start": lambda case, _: case.server.start(),
    "kill": lambda case, word: os.kill(pids_of(case.server, word)[0], signal.SIGKILL),
    "signal": lambda case, name: case.server.process.send_signal(getattr(signal, name)),
    "exit": lambda case, _: {"exit code": case.server.finish()[0]},
}


def _parsed(answer: Answer, body: bytes) -> Any:
    if "inference-header-content-length" in answer.headers:
        size = int(answer.headers["inference-header-content-length"])
        return {"json": json.loads(body[:size]), "tensors": body[size:].hex()}
    try:
        return json.loads(body)
    except ValueError:
        return body.decode("utf-8", "backslashreplace")


def _alike(record: dict[str, Any]) -> str:
    return re.sub(r" \d+>", ">", json.dumps({**record, "times": 0}))


def _code(body: Any) -> str:
    found = re.search(rb"E[12]\d{3}", body) if isinstance(body, bytes) else None
    return found[0].decode() if found else ""


def _openapi(document: dict[str, Any]) -> dict[str, Any]:
    """Paths with methods and statuses; schemas with their fields, `*` where required."""

    def fields(schema: dict[str, Any]) -> str:
        needed = schema.get("required", ())
        return " ".join(name + "*" * (name in needed) for name in sorted(schema["properties"]))

    return {
        **{
            f"{method} {path}": " ".join(sorted(one.get("responses", {})))
            for path, each in sorted(document["paths"].items())
            for method, one in each.items()
        },
        **{
            name: fields(schema)
            for name, schema in sorted(document["components"]["schemas"].items())
            if "properties" in schema
        },
    }


def _tensors(config: dict[str, Any]) -> dict[str, Any]:
    """A model's inputs and outputs: type, shape, `?` where optional."""
    kinds = {
        kind: {
            each["name"]: f"{each['data_type']} {each['dims']}{'?' * each.get('optional', False)}"
            for each in config[kind]
        }
        for kind in ("input", "output")
    }
    return {
        name: config.get(name) for name in ("name", "backend", "model_transaction_policy")
    } | kinds


def _types(text: str) -> list[str]:
    """Names of metrics, but of GPUs that another machine has."""
    return sorted(
        line[7:] for line in text.splitlines() if line.startswith("# TYPE") and "nv_gpu" not in line
    )


VIEWS: dict[str, Callable[[Any], Any]] = {
    "whole": lambda body: body,
    "kind": lambda body: type(body).__name__,
    "openapi": _openapi,
    "tensors": _tensors,
    "types": _types,
    "title": lambda text: text[text.find("<title>") : text.find("</title>")],
    "names": sorted,
}
