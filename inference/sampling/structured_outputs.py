"""Output that follows a grammar: what the next token may be, at every place of a proposal.

The grammar is llguidance's, one matcher per request. Committed tokens are read once; drafted ones
are read along their paths, depth first, and taken back, so that nothing is left of a draft that was
rejected. Knows no logits: it answers with masks."""

from __future__ import annotations

import json as json_module
from collections.abc import Collection, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from inference.sampling_params import StructuredOutputsParams
from speculators.errors import ConfigError, DraftsmithError


class Grammars:
    """Grammars compiled for one tokenizer and one model; the same one is compiled once.

    vocab_size      V of the model's logits
    eos_token_ids   what may be written where a grammar is complete
    """

    def __init__(self, tokenizer: Any, vocab_size: int, eos_token_ids: Collection[int]) -> None:
        self._tokenizer, self._vocab_size = tokenizer, vocab_size
        self._eos_token_ids = frozenset(eos_token_ids)
        self._llguidance_tokenizer = lru_cache(maxsize=1)(self._make_tokenizer)
        self._compiled = lru_cache(maxsize=64)(self._compile)

    def matcher(self, params: StructuredOutputsParams, num_prompt_tokens: int) -> GrammarMatcher:
        """For one response. ConfigError if the grammar cannot be compiled, or there is nothing to
        compile it with."""
        compiled = self._compiled(_grammar_text(params), f"structured_outputs.{params.kind}")
        return GrammarMatcher(
            compiled.deep_copy(), self._eos_token_ids, self._vocab_size, num_prompt_tokens
        )

    def _compile(self, grammar: str, where: str) -> Any:
        tokenizer = self._llguidance_tokenizer()
        matcher = _llguidance().LLMatcher(tokenizer, grammar, log_level=0)
        if matcher.is_error():
            raise ConfigError(f"{where}: {matcher.get_error().strip()}")
        return matcher

    def _make_tokenizer(self) -> Any:
        if self._tokenizer is None:
            raise ConfigError("structured_outputs needs a tokenizer; pass LLM(tokenizer=...)")
        if not self._eos_token_ids:
            where = "the model's generation config or its tokenizer"
            raise ConfigError(
                "structured_outputs needs an end-of-sequence token to end with; name one in"
                f" {where}"
            )
        size = max(self._vocab_size, len(self._tokenizer))
        _llguidance()
        from llguidance.hf import from_tokenizer

        try:
            return from_tokenizer(self._tokenizer, size, sorted(self._eos_token_ids))
        except ValueError as error:
            kind = type(self._tokenizer).__name__
            raise ConfigError(
                f"structured_outputs: llguidance cannot read the tokenizer ({kind}): {error}"
            ) from error


class GrammarMatcher:
    """Where one response is in its grammar: what it has committed, and how far along a draft it was
    last looked at.

    A response may end where the grammar is complete. After an end that was ignored (`ignore_eos`)
    nothing is masked."""

    def __init__(
        self, matcher: Any, eos_token_ids: frozenset[int], vocab_size: int, num_prompt_tokens: int
    ) -> None:
        self._matcher, self._eos_token_ids, self._vocab_size = matcher, eos_token_ids, vocab_size
        self._read = num_prompt_tokens  # tokens of the text that the matcher has read for good
        self._drafted: list[int] = []  # and of a draft, behind them
        self._ended = False
        self._masks: dict[
            tuple[int, ...], Tensor | None
        ] = {}  # by path: a drafter has asked for many of them before

    def masks(
        self, token_ids: Sequence[int], paths: Sequence[Sequence[int]]
    ) -> list[Tensor | None]:
        """Committed text and paths -> for each path bool [V], True where the token after it is
        allowed.

        None where nothing is forbidden: after the end of sequence, and after a draft that the
        grammar forbids, which is never committed."""
        self._catch_up(token_ids)
        if self._ended:
            return [None] * len(paths)
        for path in sorted(tuple(path) for path in paths):  # depth first
            if path not in self._masks:
                self._masks[path] = self._mask() if self._walk(path) else None
        return [self._masks[tuple(path)] for path in paths]

    def _catch_up(self, token_ids: Sequence[int]) -> None:
        if len(token_ids) == self._read:
            return
        self._take_back(0)
        self._masks.clear()
        for token in token_ids[self._read :]:
            if self._ended:
                break
            self._ended = token in self._eos_token_ids
            if not self._ended and not self._matcher.consume_token(token):
                fault = self._matcher.get_error().strip()
                raise DraftsmithError(
                    f"structured_outputs: committed token {token} does not fit the grammar: {fault}"
                )
        self._read = len(token_ids)

    def _walk(self, path: tuple[int, ...]) -> bool:
        """Reads a draft, going on from the one read last. False if a token in it is forbidden or
        ends the response."""
        shared = 0
        while shared < min(len(path), len(self._drafted)) and path[shared] == self._drafted[shared]:
            shared += 1
        self._take_back(shared)
        for token in path[shared:]:
            if token in self._eos_token_ids or self._matcher.try_consume_tokens([token]) == 0:
                return False
            self._drafted.append(token)
        return True

    def _take_back(self, length: int) -> None:
        extra = len(self._drafted) - length
        if extra:
            self._matcher.rollback(extra)
            del self._drafted[length:]

    def _mask(self) -> Tensor:
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        if self._matcher.is_error():
            raise DraftsmithError(
                f"structured_outputs: {self._matcher.get_error().strip()}; simplify the grammar"
            )
        allowed = np.unpackbits(bits, count=self._vocab_size, bitorder="little")
        return torch.from_numpy(allowed).bool()


def _grammar_text(params: StructuredOutputsParams) -> str:
    llguidance = _llguidance()
    if params.kind in ("json", "json_object"):
        schema = {"type": "object"} if params.json is None else params.json
        options: dict[str, Any] = {"whitespace_flexible": not params.disable_any_whitespace}
        if params.whitespace_pattern is not None:
            options["whitespace_pattern"] = params.whitespace_pattern
        text = schema if isinstance(schema, str) else json_module.dumps(schema)
        try:
            return llguidance.LLMatcher.grammar_from_json_schema(text, overrides=options)
        except ValueError as error:
            raise ConfigError(
                f"structured_outputs.json: {error}; expected a JSON schema"
            ) from error
    value = getattr(params, params.kind)
    try:
        return llguidance.grammar_from(
            params.kind, json_module.dumps(value) if params.kind == "choice" else value
        )
    except ValueError as error:
        raise ConfigError(f"structured_outputs.{params.kind}: {error}") from error


def _llguidance() -> Any:
    try:
        import llguidance
    except ImportError as error:
        raise ConfigError(
            "structured_outputs needs the package llguidance; install it: pip install"
            ' "draftsmith[structured]"'
        ) from error
    return llguidance
