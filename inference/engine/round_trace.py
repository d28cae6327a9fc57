"""A record of every draft and its fate, round by round, for looking at drafting.

Listens to the engine's `on_round` and keeps what it hears of the requests that are watched; the
others cost it a look into an empty table. Knows no text and no protocol."""

from __future__ import annotations

from collections.abc import Sequence

from inference.engine.engine import Engine
from inference.outputs import JudgedRound, Placed
from inference.requests.request import Request
from inference.spec_decode.proposal import Proposal


class RoundTracer:
    """Records the rounds of one engine, beside any earlier listener. Used by the engine's thread
    alone."""

    def __init__(self, engine: Engine) -> None:
        self._before = engine.on_round
        self._rounds: dict[
            Request, dict[int, JudgedRound]
        ] = {}  # by the length of the text they followed
        self._reported: dict[Request, int] = {}  # the length of the text that was reported
        engine.on_round = self._listen

    def watch(self, requests: Sequence[Request]) -> None:
        """From their first token on."""
        for request in requests:
            self._rounds[request] = {}
            self._reported[request] = request.num_prompt_tokens

    def forget(self, requests: Sequence[Request]) -> None:
        """They have ended."""
        for request in requests:
            self._rounds.pop(request, None)
            self._reported.pop(request, None)

    @property
    def watched(self) -> int:
        """Requests that are."""
        return len(self._rounds)

    def take(self, request: Request) -> list[JudgedRound] | None:
        """The rounds committed since the last call; None for a request that is not watched."""
        rounds = self._rounds.get(request)
        if rounds is None:
            return None
        done, length, taken = self._reported[request], len(request.token_ids), []
        while done < length:
            judged = rounds.pop(done, None) or JudgedRound([(request.token_ids[done], None)])
            del judged.tokens[length - done :]  # what follows the end of the response
            taken.append(judged)
            done += len(judged.tokens)
        self._reported[request] = done
        return taken

    def _listen(
        self, rows: Sequence[Request], proposal: Proposal, new_tokens: Sequence[Sequence[int]]
    ) -> None:
        if self._before is not None:
            self._before(rows, proposal, new_tokens)
        if not self._rounds:
            return
        for row, (request, tokens) in enumerate(zip(rows, new_tokens, strict=True)):
            rounds = self._rounds.get(request)
            if rounds is not None:  # a round that failed is judged again, from the same place
                rounds[len(request.token_ids)] = _judged(proposal, row, tokens)


def _judged(proposal: Proposal, row: int, new_tokens: Sequence[int]) -> JudgedRound:
    """All of `new_tokens` but the last are drafts. The last is the target's own even where it
    equals a rejected one."""
    count = proposal.counts[row]
    drafts, depths = proposal.drafted[row][:count], proposal.depths()[row]
    children, place, accepted = proposal.children(row), -1, []
    for token in new_tokens[:-1]:
        place = next(each for each in children[place] if drafts[each] == token)
        accepted.append(place)
    tokens: list[Placed] = [(token, depth) for depth, token in enumerate(new_tokens[:-1])]
    rejected: list[Placed] = [(drafts[i], depths[i] - 1) for i in range(count) if i not in accepted]
    return JudgedRound([*tokens, (new_tokens[-1], None)], rejected, count)
