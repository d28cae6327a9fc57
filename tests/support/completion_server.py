"""A server of completions without a model, in memory: its texts are those of a Markov chain."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import httpx2
import numpy as np
import openai

SIZE = 6  # tokens of the vocabulary, which are ids and no texts
CHAIN = np.array([[(1 + (i + 5 * j) % SIZE) / 21 for j in range(SIZE)] for i in range(SIZE)])


@dataclass
class ChainServer:
    """Greedy texts are the most probable tokens, with those of `greedy` in their place. Prompts
    that are texts have as many tokens as characters.

    drafts_at   temperatures at which it counts a draft for each request; None: it has no counters
    noise       moves the log-probability of the fifth token in every second request, as rounding in
                another batch shape does
    change      what becomes of a choice before it is sent
    """

    drafts_at: tuple[float, ...] | None = None
    greedy: dict[int, int] = field(default_factory=dict)  # after a token: another than the chain's
    noise: float = 0.0
    change: Callable[[dict[str, Any]], dict[str, Any]] = lambda choice: choice
    bodies: list[dict[str, Any]] = field(default_factory=list)
    drafts: int = 0

    def client(self) -> openai.AsyncOpenAI:
        http = httpx2.AsyncClient(transport=httpx2.MockTransport(self.answer))
        options = {"api_key": "none", "max_retries": 0, "http_client": http}
        return openai.AsyncOpenAI(base_url="http://chain/v1", **options)

    def answer(self, request: httpx2.Request) -> httpx2.Response:
        if request.url.path == "/v1/models":
            return httpx2.Response(200, json={"data": [{"id": "chain"}]})
        if request.url.path == "/metrics":
            return self.metrics()
        body = json.loads(request.content)
        self.bodies.append(body)
        if self.drafts_at is not None:
            self.drafts += body["temperature"] in self.drafts_at
        return httpx2.Response(200, json={"choices": [self.change(self.choice(body))]})

    def metrics(self) -> httpx2.Response:
        if self.drafts_at is None:
            return httpx2.Response(404)
        counts = {"num_drafts": 1, "num_draft_tokens": 4, "num_accepted_tokens": 2}
        lines = [
            f"vllm:spec_decode_{name}_total {times * self.drafts}\n"
            for name, times in counts.items()
        ]
        return httpx2.Response(200, text="".join(lines))

    def choice(self, body: dict[str, Any]) -> dict[str, Any]:
        prompt = body["prompt"]
        ids = [ord(letter) % SIZE for letter in prompt] if isinstance(prompt, str) else prompt
        rng = np.random.default_rng(body.get("seed"))
        last = ids[-1]
        tokens = []
        leading = []
        for _ in range(body["max_tokens"]):
            logprobs = np.log(CHAIN[last])
            logprobs[logprobs.argsort()[1]] += self.noise * (len(self.bodies) % 2)
            drawn = int(rng.choice(SIZE, p=CHAIN[last]))
            likeliest = self.greedy.get(last, int(CHAIN[last].argmax()))
            last = drawn if body["temperature"] else likeliest
            tokens.append(last)
            entries = {f"token_id:{token}": float(value) for token, value in enumerate(logprobs)}
            leading.append(entries)
        logprobs = {"top_logprobs": leading} if body.get("logprobs") else None
        return {"prompt_token_ids": ids, "token_ids": tokens, "logprobs": logprobs}
