"""Before an endpoint writes: whether it serves the target, reads its tokens and writes them back.

Its tokenizer has to read a probe as ours does, and its greedy tokens have to be the target's: those of the target that
is loaded here, or where there is none those of the first endpoint. A share may differ (precision, kernels, ties);
`regenerate.min_agreement` says how many must not. Knows no pool and no retries.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace

from inference import LLM, SamplingParams
from train.recipe.data_sections import RegenerateSection
from train.regeneration.conversations import Ask
from train.regeneration.endpoint_client import Endpoint, EndpointError, Refused, Trouble

PROBES, PROBE_TOKENS = 8, 8
PROBE_TEXT = "def f(x):\n    return x**2  # 3.14, naïve – \u4f60\u597d\n"
ATTEMPTS = 4  # at a probe: one that fails now and then may write all the same

Tokens = tuple[int, ...] | None  # None: the server refuses this very request, which is no word about the others


@dataclass
class Check:
    """`asks`: some of the responses that are wanted, whose prompts are the probes. `llm`: the target itself, if it is
    loaded here. `agreement`: what was found, by the endpoint's URL."""

    asks: Sequence[Ask]
    section: RegenerateSection
    llm: LLM | None = None

    def __post_init__(self) -> None:
        self.asks = [_greedy(ask, PROBE_TOKENS) for ask in self.asks[:PROBES]]
        self.agreement: dict[str, float | None] = {}
        self._reference: list[Tokens] | None = None  # greedy ones, of every probe
        self._judge, self._unproved = "the target loaded here", 0

    async def __call__(self, endpoint: Endpoint) -> None:
        """EndpointError in words; Trouble and Refused as they come."""
        await endpoint.look()
        if self.section.top_k and endpoint.exchange == "text" and not endpoint.like_vllm:
            raise EndpointError(f"{endpoint.url}: is no server that knows top_k; set regenerate.top_k: 0")
        self._same_tokens(endpoint, await endpoint.tokens_of(PROBE_TEXT))
        if self.llm is not None and self._reference is None:
            self._reference = self._written_here(self.llm)
        if self._reference is None:
            self._reference, self._judge = await self._written(endpoint, self.asks), endpoint.url
            self.agreement[endpoint.url] = None
            return
        share = await (self._by_prefix if endpoint.exchange == "tokens" else self._by_text)(endpoint)
        self.agreement[endpoint.url] = share
        if share < self.section.min_agreement:
            raise EndpointError(
                f"{endpoint.url}: serves {endpoint.served} ({endpoint.root}), which agrees with {self._judge} in "
                f"{share:.0%} of greedy tokens, expected {self.section.min_agreement:.0%}: another model, revision or "
                "chat template, or a coarser precision; serve the recipe's target, or lower regenerate.min_agreement"
            )

    def _same_tokens(self, endpoint: Endpoint, theirs: list[int] | None) -> None:
        ours = endpoint.facts.tokenizer(PROBE_TEXT, add_special_tokens=False, verbose=False)["input_ids"]
        if theirs is not None and theirs != list(ours):
            raise EndpointError(
                f"{endpoint.url}: reads {PROBE_TEXT!r} as {theirs[:12]}…, the target's tokenizer as {list(ours)[:12]}…;"
                " serve the recipe's target with its own tokenizer"
            )

    async def _by_prefix(self, endpoint: Endpoint) -> float:
        """Share of the reference's tokens that it writes next, each after those before it."""
        assert self._reference is not None
        asks = [
            replace(_greedy(ask, 1), prompt_ids=(*ask.prompt_ids, *text[:n]))
            for ask, text in zip(self.asks, self._reference, strict=True)
            for n in range(len(text or ()))
        ]
        wanted = [token for text in self._reference for token in text or ()]
        found = await self._written(endpoint, asks)
        same = [token in text for token, text in zip(wanted, found, strict=True) if text is not None]
        return sum(same) / max(len(same), 1)

    async def _by_text(self, endpoint: Endpoint) -> float:
        """Share of the reference's tokens before the first that differs: nothing can be asked after half a text."""
        assert self._reference is not None
        same = total = 0
        for ours, theirs in zip(self._reference, await self._written(endpoint, self.asks), strict=True):
            if ours is None or theirs is None:
                continue
            ours = ours[: PROBE_TOKENS // 2]  # rounding sends greedy texts apart sooner or later
            same += next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), len(ours))
            total += len(ours)
        return same / max(total, 1)

    async def _written(self, endpoint: Endpoint, asks: Sequence[Ask]) -> list[Tokens]:
        room = asyncio.Semaphore(endpoint.section.max_concurrency)

        async def one(ask: Ask) -> tuple[int, ...]:
            for attempt in range(1, ATTEMPTS + 1):
                try:
                    async with room:
                        answer = await endpoint.write(ask)
                    self._require_use(endpoint, answer.proved)
                    return answer.token_ids
                except Trouble as trouble:
                    if trouble.reason == "no_token_ids":
                        raise EndpointError(
                            f"{endpoint.url}: its answers have no token_ids, so what it writes is not known as tokens; "
                            "serve with `draftsmith serve` or a vLLM that knows return_token_ids, or set "
                            "regenerate.exchange: text"
                        ) from None
                    if attempt == ATTEMPTS:
                        raise
                    await asyncio.sleep(0.2 * attempt)
            raise AssertionError

        found = await asyncio.gather(*(one(ask) for ask in asks), return_exceptions=True)
        texts: list[Tokens] = []
        for each in found:
            if isinstance(each, BaseException) and not isinstance(each, Refused):
                raise each
            texts.append(None if isinstance(each, Refused) else each)
        if found and all(text is None for text in texts):
            raise EndpointError(f"{endpoint.url}: refuses whatever it is asked: {found[0]}{_hint(endpoint)}")
        return texts

    def _require_use(self, endpoint: Endpoint, proved: bool) -> None:
        if not proved and self.section.unproved_tokens == "drop" and endpoint.exchange == "text":
            self._unproved += 1
            if self._unproved == PROBES:
                raise EndpointError(
                    f"{endpoint.url}: not one of {PROBES} responses could be proved to be the tokens that were "
                    "written: it counts no tokens (usage), or its chat template differs from ours; use exchange: "
                    "tokens, mend the template, or set regenerate.unproved_tokens: keep"
                )

    def _written_here(self, llm: LLM) -> list[Tokens]:
        outputs = llm.generate(
            [{"prompt_token_ids": list(ask.prompt_ids)} for ask in self.asks],
            [ask.params for ask in self.asks],
            use_tqdm=False,
        )
        return [tuple(output.outputs[0].token_ids) for output in outputs]


def _greedy(ask: Ask, tokens: int) -> Ask:
    return replace(ask, params=SamplingParams(temperature=0, max_tokens=min(tokens, ask.params.max_tokens or tokens)))


def _hint(endpoint: Endpoint) -> str:
    return "; a server that takes no token ids needs regenerate.exchange: text" if endpoint.exchange == "tokens" else ""
