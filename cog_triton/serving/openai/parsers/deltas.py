"""Deltas of an answer: what parsers give for text, in the order of OpenAI's stream."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple


class Content(NamedTuple):
    """Text of the answer itself."""

    text: str


class Reasoning(NamedTuple):
    """Text that the model wrote before its answer."""

    text: str


class CallStart(NamedTuple):
    """Start of tool call number `call`, counted from 0; its arguments follow."""

    call: int
    name: str


class CallArguments(NamedTuple):
    """More of the arguments of tool call `call`; all of them joined are a JSON object."""

    call: int
    text: str


Delta = Content | Reasoning | CallStart | CallArguments


@dataclass(slots=True)
class Call:
    """A tool call; `arguments` are a JSON object, cut off if the answer was."""

    name: str
    arguments: str = ""


@dataclass(slots=True)
class Answer:
    """All deltas of an answer, joined."""

    content: str = ""
    reasoning: str = ""
    calls: list[Call] = field(default_factory=list)


def join(deltas: Iterable[Delta]) -> Answer:
    """The answer that the deltas make."""
    content, reasoning = [], []
    calls: list[tuple[str, list[str]]] = []
    for delta in deltas:
        match delta:
            case Content(text):
                content.append(text)
            case Reasoning(text):
                reasoning.append(text)
            case CallStart(_, name):
                calls.append((name, []))
            case CallArguments(call, text):
                calls[call][1].append(text)
    made = [Call(name, "".join(parts)) for name, parts in calls]
    return Answer("".join(content), "".join(reasoning), made)


def merge(deltas: Iterable[Delta]) -> list[Delta]:
    """The deltas with neighbours of one kind as one, so that a stream has fewer chunks."""
    merged: list[Delta] = []
    for delta in deltas:
        last = merged[-1] if merged else None
        match last, delta:
            case (Content(before), Content(text)):
                merged[-1] = Content(before + text)
            case (Reasoning(before), Reasoning(text)):
                merged[-1] = Reasoning(before + text)
            case (CallArguments(call, before), CallArguments(same, text)) if call == same:
                merged[-1] = CallArguments(call, before + text)
            case _:
                merged.append(delta)
    return merged
