"""Converts vLLM's counters to this project's definition: a draft counts as accepted if it was also
committed.

vLLM counts a round's accepted drafts before it cuts the text at its end, so the last round of a
response may claim more than was written. That round follows from the number of tokens that each
step brought."""

from __future__ import annotations

from collections.abc import Sequence

from draftsmith.inference.outputs import CompletionOutput, RequestMetrics, RequestOutput
from draftsmith.speculators.errors import DataError


def response_of(
    prompt: Sequence[int],
    token_ids: Sequence[int],
    finish_reason: str | None,
    metrics: RequestMetrics | None = None,
) -> RequestOutput:
    """A response of vLLM as a RequestOutput."""
    completion = CompletionOutput(
        index=0, text="", token_ids=list(token_ids), finish_reason=finish_reason
    )
    return RequestOutput("", None, list(prompt), [completion], True, metrics or RequestMetrics())


def committed_rounds(sizes: Sequence[int], accepted: Sequence[int]) -> list[int]:
    """Committed drafts of every round after prefill, 0 for one without a proposal.

    sizes       tokens that each step brought, the prefill's first; cut where the text ended
    accepted    drafts accepted in each round that had some, as the verifier counted them; the last
                may exceed its step

    A step of n > 1 tokens committed n - 1 drafts and the target's own token; only in the last one
    the target's own may be missing, and drafts with it. DataError if the two do not fit together.
    """
    rounds = [size - 1 for size in sizes[1:]]
    whole = [count for count in rounds[:-1] if count]
    claimed = [count for count in accepted if count]
    last = claimed[len(whole) :]  # of the last step, if it has some
    fits = min(sizes) > 0 and len(last) < 2 and sum(rounds[-1:]) <= sum(last)
    if not fits or claimed[: len(whole)] != whole:
        raise DataError(
            f"steps of {list(sizes)} tokens, and rounds that accepted {list(accepted)} drafts, are"
            " not of one response",
            where="vLLM",
        )
    if last:
        rounds[-1] = min(last[0], sizes[-1])
    return rounds


def metrics_of(
    sizes: Sequence[int], accepted: Sequence[int], drafted: Sequence[int]
) -> RequestMetrics:
    """Counters of one response; `drafted`: tokens proposed in each round of `accepted`."""
    rounds = committed_rounds(sizes, accepted)
    return RequestMetrics(
        num_drafts=len(accepted),
        num_draft_tokens=sum(drafted),
        num_accepted_tokens=sum(rounds),
        num_accepted_tokens_per_pos=[
            sum(count > k for count in rounds) for k in range(max(rounds, default=0))
        ],
        accepted_per_round=rounds,
        drafted_per_round=list(drafted) if len(drafted) == len(rounds) else [],
    )
