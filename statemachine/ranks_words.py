"""What a round's register holds once it is decided: commit or abort, and who said so, why."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from residency.errors import RankFailed

COMMIT = "commit"
ABORT = "abort"
WHY_MAX = 500  # characters: it is repeated by every rank


@dataclass(frozen=True, slots=True, kw_only=True)
class Word:
    """word: COMMIT or ABORT. rank: who wrote it, or whom it is about. pinned: because of a kill switch."""

    word: str
    rank: int | None
    why: str = ""
    pinned: bool = False


def commit_word(rank: int) -> bytes:
    """Return what a rank writes that has seen every vote."""
    return msgspec.json.encode(Word(word=COMMIT, rank=rank))


def abort_word(rank: int | None, why: str, *, pinned: bool) -> bytes:
    """Return what a rank writes that ends the round."""
    return msgspec.json.encode(Word(word=ABORT, rank=rank, why=why[:WHY_MAX], pinned=pinned))


def read_word(content: bytes) -> Word:
    """Return what a register holds. What cannot be read ends the round: nobody commits on a word unknown to it."""
    try:
        word = msgspec.json.decode(content, type=Word)
    except msgspec.MsgspecError:
        return Word(word=ABORT, rank=None, why="the register holds what no rank of this program wrote")
    return word if word.word == COMMIT else Word(word=ABORT, rank=word.rank, why=word.why, pinned=word.pinned)


def ended(content: bytes) -> RankFailed | None:
    """Return what a register means for those who wait, None if they may go on."""
    word = read_word(content)
    return None if word.word == COMMIT else RankFailed(rank=word.rank, problem=word.why, pinned=word.pinned)
