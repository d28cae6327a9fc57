"""Expected acceptance of a head over text that the target wrote: teacher-forced probabilities, then
the replay.

Training's held-out evaluation and the acceptance report share this function, so that their
expectations agree. Nothing is drafted: `Drafter.unroll` gives every depth of every slot in one
pass."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from draftsmith.inference.sampling.sampler import probabilities
from draftsmith.inference.sampling_params import SamplingParams
from draftsmith.inference.spec_decode.replay import ReplayResult, replay
from draftsmith.speculators.drafter import Drafter
from draftsmith.speculators.errors import DataError
from draftsmith.speculators.target.frozen_target import TargetFeatures
from draftsmith.speculators.target.target_head import TargetHead
from draftsmith.speculators.vocab.draft_vocab import to_draft_ids

Head = Callable[[Tensor], Tensor]
WrittenText = tuple[Sequence[int], Sequence[int]]  # the token ids of a prompt and of its response

BATCH_TOKENS = 2048  # of one forward, padding included: a CPU gains nothing from more
CHUNK_BYTES = 4 << 20  # of one chunk's float32 logits
SMALLEST_CHUNK = 128  # rows


@torch.no_grad()
def expected_acceptance(
    target: TargetHead,
    drafter: Drafter,
    texts: Sequence[WrittenText],
    temperature: float,
    k: int,
    *,
    top_p: float = 1.0,
    top_k: int = 0,
) -> list[ReplayResult]:
    """The rounds and accepted drafts of each text at `k` drafts per round, in expectation over the
    accept decisions.

    texts: (prompt_token_ids, output_token_ids), written by the target at this temperature, top_p
    and top_k: those that drafts will be verified under. On other text the result is no expectation
    of the runtime. The first output token comes from prefill. `target` must tap the layers the
    drafter reads. Both run in their own dtype, so give them as the runtime has them. Returns one
    result per text, in order; add them up for the whole."""
    for i, (prompt, output) in enumerate(texts):
        if not prompt or not output:
            raise DataError(
                f"text {i} needs a prompt and an output of at least one token each",
                where="expected acceptance",
            )
    params = SamplingParams(temperature=temperature, top_p=top_p, top_k=top_k)
    results: list[ReplayResult] = [ReplayResult()] * len(texts)
    for members in batches_of([len(prompt) + len(output) for prompt, output in texts]):
        chosen = [texts[i] for i in members]
        tables = accept_tables(target, drafter, teacher_forced(target, chosen), chosen, params, k)
        for i, table in zip(members, tables, strict=True):
            results[i] = replay(table, len(texts[i][1]))
    return results


@torch.no_grad()
def label_probabilities(
    target_hidden: Tensor, target_logits: Head, labels: Tensor, params: SamplingParams
) -> Tensor:
    """p(x) of the data tokens x, after temperature, top_p and top_k of `params`. [N]

    target_hidden [N, H] the states that the tokens were drawn from; target_logits [n, H] -> [n, V];
    labels [N] the ids of x."""
    result = torch.zeros(len(labels), device=labels.device)
    for rows in chunks_of(target_hidden, target_logits):
        p = probabilities(target_logits(target_hidden[rows]), params)  # [n, V]
        result[rows] = p.gather(-1, labels[rows, None])[:, 0]
    return result


@torch.no_grad()
def accept_probabilities(
    hidden: Tensor,
    head: Head,
    p: Tensor,
    labels: Tensor,
    params: SamplingParams,
    draft_to_target: Tensor | None = None,
) -> Tensor:
    """The probability that the data token x was an accepted draft, given that x came out: min(1,
    q(x) / p(x)). [N]

    hidden [N, D] the drafter's states; head [n, D] -> logits [n, V_draft]; p [N] of x, as
    `label_probabilities` gives it; labels [N] the target ids of x. p and q are taken after
    temperature, top_p and top_k of `params`, as the runtime takes them; q is 0 outside the draft
    vocabulary. temperature 0: 1 where the drafter's argmax is x, else 0, whatever p is. NaN where
    the drafter's logits are NaN."""
    accept = torch.zeros(hidden.shape[0], device=hidden.device)
    draft_labels = to_draft_ids(labels, draft_to_target)[:, None]  # below 0: outside
    for rows in chunks_of(hidden, head):
        draft_logits = head(hidden[rows])  # [n, V_draft]
        q = probabilities(draft_logits, params).gather(-1, draft_labels[rows].clamp_min(0))
        q = torch.where(draft_labels[rows] >= 0, q, 0.0)[:, 0]
        if params.greedy:
            accept[rows] = q.where(~draft_logits.amax(-1).isnan(), math.nan)
            continue
        # p(x) = 0 cannot be of a token that was drawn, but for rounding at the edge of a filter
        accept[rows] = torch.where(p[rows] > 0, (q / p[rows]).clamp_max(1.0), (q > 0).to(q))
    return accept


def chunks_of(hidden: Tensor, head: Head) -> list[slice]:
    """The rows of `hidden` [N, D] in parts whose logits are held at once."""
    if not len(hidden):
        return []
    size = chunk_size_of(head(hidden[:1]).shape[-1])
    return [slice(start, start + size) for start in range(0, len(hidden), size)]


def chunk_size_of(vocab_size: int) -> int:
    """The number of rows whose logits are held at once."""
    return max(SMALLEST_CHUNK, CHUNK_BYTES // (4 * vocab_size))


def batches_of(lengths: Sequence[int]) -> list[list[int]]:
    """The places of texts of these lengths, by batch: texts of like length together, each batch
    within BATCH_TOKENS (a longer text goes alone)."""
    batches: list[list[int]] = []
    for i in sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True):
        # the first text of a batch is its longest, to which the others are padded
        if batches and (len(batches[-1]) + 1) * lengths[batches[-1][0]] <= BATCH_TOKENS:
            batches[-1].append(i)
        else:
            batches.append([i])
    return batches


def accept_tables(
    target: TargetHead,
    drafter: Drafter,
    features: TargetFeatures,
    texts: Sequence[WrittenText],
    params: SamplingParams,
    k: int,
) -> list[Tensor]:
    """Per text the [k, output length] input of `replay`: entry [d, s] is of draft d + 1 in a round
    anchored at output token s. Such a round starts from the head's slot prompt length + s - 1,
    whose first draft is output token s + 1. `features`: of the texts, as `teacher_forced` gives
    them, with the taps that the drafter reads."""
    B, T = features.input_ids.shape
    table = torch.zeros(k, B * T, device=target.device)
    slots = torch.arange(B * T, device=target.device)  # of all rows, one after the other
    # the slot in its row that a round anchored at output token 0 starts from
    first = torch.tensor([len(prompt) - 1 for prompt, _ in texts], device=target.device)
    is_anchor = slots % T >= first[slots // T]
    ids = features.input_ids.flatten()
    p = torch.ones(B * T, device=target.device)  # of the token after each slot, once for all depths
    if not params.greedy:
        drawn = features.loss_mask.flatten().nonzero()[:, 0] - 1
        states = features.last_hidden.flatten(0, 1)[drawn]
        p[drawn] = label_probabilities(states, target.logits, ids[drawn + 1], params)
    for step in drafter.unroll(features, k):
        kept = is_anchor[step.anchor_index]
        index = step.target_index[kept]
        table[step.depth, step.anchor_index[kept]] = accept_probabilities(
            step.hidden[kept],
            partial(drafter.head, depth=step.depth),
            p[index],
            ids[index + 1],
            params,
            drafter.draft_to_target,
        ).to(table.dtype)
    table = table.view(k, B, T)
    return [
        table[:, b, len(prompt) - 1 : len(prompt) - 1 + len(output)]
        for b, (prompt, output) in enumerate(texts)
    ]


def teacher_forced(target: TargetHead, texts: Sequence[WrittenText]) -> TargetFeatures:
    """Features of the texts as right-padded rows [B, T]; every output token may be asked for."""
    lengths = [len(prompt) + len(output) for prompt, output in texts]
    ids = pad_sequence(
        [torch.tensor([*prompt, *output]) for prompt, output in texts], batch_first=True
    )
    positions = torch.arange(max(lengths)).expand_as(ids).contiguous()
    inside = positions < torch.tensor(lengths)[:, None]
    segments = torch.where(inside, 0, -1)
    first_output = torch.tensor([len(prompt) for prompt, _ in texts])
    is_output = inside & (positions >= first_output[:, None])
    device = target.device
    return target.features(
        ids.to(device), positions.to(device), segments.to(device), is_output.to(device)
    )
