"""Deltas of an answer: what parsers give for text, in the order of OpenAI's stream."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import groupby
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
    for _, group in groupby(deltas, _kind):
        alike = list(group)
        first = alike[0]
        if isinstance(first, CallStart) or len(alike) == 1:
            merged += alike
        else:
            texts = [delta.text for delta in alike if not isinstance(delta, CallStart)]
            merged.append(first._replace(text="".join(texts)))
    return merged


def _kind(delta: Delta) -> tuple[type[Delta], int]:
    return type(delta), delta.call if isinstance(delta, CallStart | CallArguments) else -1
