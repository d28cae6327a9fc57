"""A record of every draft and its fate, round by round, for looking at drafting.

Listens to the engine's `on_round` and keeps what it hears of the requests that are watched. Knows
no text and no protocol."""

from __future__ import annotations

from collections.abc import Sequence

from draftsmith.inference.engine.engine import Engine
from draftsmith.inference.outputs import JudgedRound, Placed
from draftsmith.inference.requests.request import Request
from draftsmith.inference.spec_decode.proposal import Proposal


class RoundTracer:
    """Records the rounds of one engine. Used by the engine's thread alone."""

    def __init__(self, engine: Engine) -> None:
        self._rounds: dict[Request, list[JudgedRound]] = {}  # that were not taken yet
        self._taken: dict[Request, int] = {}  # tokens of those that were
        engine.on_round = self._listen

    def watch(self, requests: Sequence[Request]) -> None:
        """From their first token on."""
        for request in requests:
            self._rounds[request], self._taken[request] = [], 0

    def forget(self, requests: Sequence[Request]) -> None:
        """They have ended."""
        for request in requests:
            self._rounds.pop(request, None)
            self._taken.pop(request, None)

    @property
    def watched(self) -> int:
        """Requests that are."""
        return len(self._rounds)

    def take(self, request: Request) -> list[JudgedRound] | None:
        """The rounds committed since the last call; None for a request that is not watched."""
        if request not in self._rounds:
            return None
        rounds, self._rounds[request] = self._rounds[request], []
        output = request.output_token_ids
        if output and not self._taken[request]:  # the prefill's
            rounds.insert(0, JudgedRound([(output[0], None)]))
        self._taken[request] += sum(len(judged.tokens) for judged in rounds)
        if (beyond := self._taken[request] - len(output)) > 0:  # the end of the response
            del rounds[-1].tokens[-beyond:]
        return rounds

    def _listen(
        self, rows: Sequence[Request], proposal: Proposal, new_tokens: Sequence[Sequence[int]]
    ) -> None:
        for row, (request, tokens) in enumerate(zip(rows, new_tokens, strict=True)):
            if request in self._rounds:
                self._rounds[request].append(_judged(proposal, row, tokens))


def _judged(proposal: Proposal, row: int, new_tokens: Sequence[int]) -> JudgedRound:
    """All of `new_tokens` but the last are drafts. The last is the target's own even where it
    equals a rejected one."""
    count = proposal.counts[row]
    drafts = list(zip(proposal.drafted[row][:count], proposal.depths()[row], strict=False))
    children, place, accepted = proposal.children(row), -1, []
    for token in new_tokens[:-1]:
        place = next(child for child in children[place] if drafts[child][0] == token)
        accepted.append(place)
    kept: list[Placed] = [(token, depth) for depth, token in enumerate(new_tokens[:-1])]
    rejected: list[Placed] = [
        (token, depth - 1) for place, (token, depth) in enumerate(drafts) if place not in accepted
    ]
    return JudgedRound([*kept, (new_tokens[-1], None)], rejected, count)
