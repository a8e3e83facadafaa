"""What a pipeline will use next, learned from what it used: nothing about the order is assumed."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterator

    _Token = TypeVar("_Token", bound=Hashable)
else:
    _Token = TypeVar("_Token")

# Farther than any window reaches; every look ahead is bounded by it.
LOOKAHEAD_MAX = 512
REQUESTS_KNOWN_MAX = 128  # Twice the steps of a worker that calls its pipeline step by step.


class Forecast(Generic[_Token]):
    """What was used, request by request, as what is expected next; it follows jumps and repetitions.

        requests:  A B | C D C D E | A B | C D C D E | A B |        expected now:  C D C D E A B C ...

    A worker may serve one image in several requests (its encoders, or even its steps, called one by one). So what
    follows is what followed when the requests before were alike, as many of them as possible.
    """

    def __init__(self) -> None:
        self._requests: deque[list[_Token]] = deque(maxlen=REQUESTS_KNOWN_MAX)
        self._cycle: list[_Token] = []
        self._last: dict[_Token, int] = {}
        self._next = 0  # index into the cycle
        self._seen: list[_Token] = []
        self._is_whole = False  # The cycle comes from requests that have ended.

    def begin(self) -> None:
        """A request begins."""
        self._seen = []

    def note(self, token: _Token) -> None:
        """Something is used now."""
        cycle = self._cycle
        if self._next < len(cycle) and cycle[self._next] == token:
            self._next += 1
        else:
            self._jump(token)
        self._seen.append(token)

    def end(self) -> None:
        """The request has ended: what it did is what the next one like it is expected to do."""
        seen, self._seen = self._seen, []
        if not seen:
            return
        self._requests.append(seen)
        recent = list(self._requests)
        following = recent[_most_alike(recent) + 1 :]
        self._learn([token for request in following for token in request], is_whole=True)
        self._next = 0

    def forget(self) -> None:
        """Expect nothing."""
        self._requests.clear()
        self._learn([], is_whole=False)
        self._seen = []
        self._next = 0

    def ahead(self) -> Iterator[_Token]:
        """Yield what is expected, soonest first, over the end of the cycle into its beginning; bounded."""
        cycle = self._cycle
        for step in range(min(LOOKAHEAD_MAX, len(cycle))):
            yield cycle[(self._next + step) % len(cycle)]

    def is_last(self, token: _Token) -> bool:
        """Whether a token, just noted, is not expected again before the cycle begins anew. False if unknown."""
        return self._is_whole and token in self._last and self._next > self._last[token]

    def _jump(self, token: _Token) -> None:
        """Go on from the next place where the token was expected, around the end if need be."""
        if token not in self._last:
            if token not in self._seen:
                return
            # Within a first request: what it did so far is all there is to go by.
            self._learn(self._seen, is_whole=False)
        size = len(self._cycle)
        for step in range(size):
            index = (self._next + step) % size
            if self._cycle[index] == token:
                self._next = index + 1
                return

    def _learn(self, tokens: list[_Token], *, is_whole: bool) -> None:
        self._cycle, self._is_whole = list(tokens), is_whole
        self._last = {token: index for index, token in enumerate(tokens)}


def _most_alike(requests: list[list[_Token]]) -> int:
    """Return the index of the earlier request that has the longest history in common with the last one, -1: none.

    Requests are alike that begin alike. Of equally long histories the latest one counts.
    """
    kinds = [request[0] for request in requests]
    last = len(kinds) - 1
    found, longest = -1, 0
    for index in range(last - 1, -1, -1):
        if longest > index:
            break  # No history before it is as long.
        length = 0
        while length <= index and kinds[index - length] == kinds[last - length]:
            length += 1
        if length > longest:
            found, longest = index, length
    return found
