"""Count of the tokens with which an answer begins its reasoning, by the markers around it."""

from __future__ import annotations


class ReasoningCount:
    """Counts tokens up to the closing marker, both markers' own included.

    Unless the prompt has `opened` it, only an answer that begins with the opening marker has any.
    """

    def __init__(self, opening: str, closing: str, opened: bool) -> None:
        self.tokens = 0
        self.ended = False
        self._opening, self._closing, self._opened = opening, closing, opened
        self._begun = False
        self._text = ""

    def add(self, text: str) -> None:
        """Count one more token, which completes `text`; call until it has `ended`."""
        self.tokens += 1
        self._text += text
        if not self._begun:
            self._text = self._text.lstrip()
            if self._opening.startswith(self._text):
                return
            self._begun = self._opened or self._text.startswith(self._opening)
        if not self._begun:
            self.tokens, self.ended = 0, True
        self.ended |= self._closing in self._text
        self._text = self._text[-len(self._closing) :]
