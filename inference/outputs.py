"""Outputs of a request, with vLLM's shapes and names. Plain records without engine or tokenizer."""

from __future__ import annotations

from dataclasses import dataclass, field

from draftsmith.inference.metrics import SpecDecodeCounters


@dataclass
class RequestMetrics(SpecDecodeCounters):
    """The counts, summed over the request's responses. Times are `time.perf_counter()` seconds:
    only their differences mean something.

    accepted_per_round  committed draft tokens of every round after prefill, 0 for a round without a
                        proposal; with n > 1 the responses' lists follow one another. Round i of a
                        response starts at output token 1 + sum(accepted_per_round[:i]) + i.
    drafted_per_round   tokens drafted in each of these rounds; empty: not known
    num_compiled_rounds how many of these rounds the target ran compiled; None: not known
    """

    arrival_time: float = 0.0
    first_token_time: float | None = None
    finished_time: float | None = None
    accepted_per_round: list[int] = field(default_factory=list)
    drafted_per_round: list[int] = field(default_factory=list)
    num_compiled_rounds: int | None = None


@dataclass
class Logprob:
    """Logprob of one token; rank 1 is the most probable. `decoded_token`: its text; None without a
    tokenizer."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


# of each place, by token: the one that stands there first, then the most probable
SampleLogprobs = list[dict[int, Logprob]]


@dataclass
class CompletionOutput:
    """One response. `finish_reason`: "stop" (end of sequence, stop token or stop string), "length"
    (max_tokens or the context limit), "abort", or None while it is being written. `stop_reason`:
    the stop string or stop token id that ended it; None for the end-of-sequence token. `token_ids`
    end with the token that stopped the response.

    logprobs             for each of `token_ids` its own and those of the most probable tokens; None
                         unless asked for
    cumulative_logprob   sum over the tokens written so far; None unless `logprobs` is asked for
    rounds               what became of the drafts; None unless a server was asked for them
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    spec_decode_metrics: SpecDecodeCounters = field(default_factory=SpecDecodeCounters)
    logprobs: SampleLogprobs | None = None
    cumulative_logprob: float | None = None
    rounds: list[JudgedRound] | None = None


@dataclass
class RequestOutput:
    """All responses to one prompt. In a delta, `text`, `token_ids` and `logprobs` of the outputs
    are what is new."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestMetrics


# a token, and its position in the proposal, from 0; None: the target's own
Placed = tuple[int, int | None]


@dataclass
class JudgedRound:
    """One verification of one response, or its first token, which nobody drafted.

    tokens            committed: accepted drafts, then the target's own token unless the response
                      ended before it
    rejected          the drafts that were not; of a tree, those beside the path that was taken
    num_draft_tokens  drafted, 0 for a round without a proposal
    """

    tokens: list[Placed]
    rejected: list[Placed] = field(default_factory=list)
    num_draft_tokens: int = 0
