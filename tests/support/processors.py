"""Processors of logits, and how a response ends, restated in plain Python."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from draftsmith.inference.sampling.logits_processors import FORBIDDEN, bad_word_ids
from draftsmith.inference.sampling_params import SamplingParams


def processed(
    logits: Tensor,
    params: SamplingParams,
    prompt: Sequence[int],
    output: Sequence[int],
    bad_words: Sequence[list[int]] = (),
) -> Tensor:
    """One place, token by token, in Python floats: logits [V] -> [V], in vLLM's order."""
    values = [float(x) for x in logits]
    for token in range(len(values)):
        if params.allowed_token_ids is not None and token not in params.allowed_token_ids:
            values[token] = FORBIDDEN
        if any(
            word[-1] == token and list(output)[len(output) - len(word) + 1 :] == word[:-1]
            for word in bad_words
        ):
            values[token] = FORBIDDEN
        if len(output) < params.min_tokens and token in params.stop_token_ids:
            values[token] = FORBIDDEN
        values[token] += (params.logit_bias or {}).get(token, 0.0)
        if token in prompt or token in output:
            scale = params.repetition_penalty
            values[token] = values[token] / scale if values[token] > 0 else values[token] * scale
        values[token] -= params.frequency_penalty * list(output).count(token)
        values[token] -= params.presence_penalty * (token in output)
    return torch.tensor(values)


@torch.no_grad()
def greedy_text(
    model: torch.nn.Module,
    prompt: Sequence[int],
    params: SamplingParams,
    tokenizer: object,
    limit: int,
) -> tuple[list[int], str]:
    """What the target alone writes at temperature 0, by its own forward over the whole text, and
    why it ends: ("stop" or "length"). `limit`: longest prompt and response."""
    bad_words = bad_word_ids(tokenizer, params.bad_words) if params.bad_words else []
    output: list[int] = []
    most = min(limit - len(prompt), params.max_tokens or limit)
    while len(output) < most:
        ids = torch.tensor([[*prompt, *output]])
        logits = model(input_ids=ids, use_cache=False).logits[0, -1]
        output.append(int(processed(logits, params, prompt, output, bad_words).argmax()))
        if len(output) >= params.min_tokens:
            text = tokenizer.decode(output)
            if output[-1] in params.stop_token_ids or any(stop in text for stop in params.stop):
                return output, "stop"
    return output, "length"
