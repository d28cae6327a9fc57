"""How one request wants its tokens chosen: vLLM's names, checked when made.

This module must not know logits, tokenizers or the engine: it holds what the user asked for and refuses what
cannot be honoured. Sampling itself is in `sampler.py`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from speculators.errors import ConfigError

MIN_TEMPERATURE = 1e-5  # below this, logits / temperature says nothing that temperature 0 does not say


@dataclass(frozen=True)
class SamplingParams:
    """What is asked of the sampler for one request. Change a copy with `dataclasses.replace`.

    n                 responses to make for the prompt
    temperature       0 is greedy: the most probable token, the first one on a tie, whatever the filters below
    top_p             keep the smallest set of most probable tokens whose mass reaches this
    top_k             keep this many of the most probable tokens; 0 or -1 is off
    min_p             keep tokens at least this many times as probable as the most probable one
    seed              makes the response depend on nothing but itself; None: seeded by the engine
    max_tokens        longest response; None: until the model's limit
    min_tokens        no end of sequence and no stop before this many tokens
    stop              strings that end the response; kept as a tuple
    stop_token_ids    tokens that end the response; kept as a tuple
    ignore_eos        go on after the end-of-sequence token
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "stop", (self.stop,) if isinstance(self.stop, str) else _as_tuple("stop", self.stop))
        object.__setattr__(self, "stop_token_ids", _as_tuple("stop_token_ids", self.stop_token_ids))
        self._check_numbers()
        self._check_lengths()
        for text in self.stop or ():
            _require(isinstance(text, str) and text != "", "stop", self.stop, "strings that are not empty")
        for token in self.stop_token_ids or ():
            _require(_is_int(token) and token >= 0, "stop_token_ids", self.stop_token_ids, "token ids, 0 or more")
        for name in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens"):
            _require(isinstance(getattr(self, name), bool), name, getattr(self, name), "True or False")

    @property
    def greedy(self) -> bool:
        """Whether the target's most probable token is always taken, so that no randomness is used."""
        return self.temperature == 0

    def _check_numbers(self) -> None:
        hot = self.temperature
        usable = _is_real(hot) and (hot == 0 or hot >= MIN_TEMPERATURE)
        _require(usable, "temperature", hot, f"0 for greedy, or at least {MIN_TEMPERATURE}")
        _require(_is_real(self.top_p) and 0 < self.top_p <= 1, "top_p", self.top_p, "above 0, and 1 (off) at most")
        _require(_is_int(self.top_k) and self.top_k >= -1, "top_k", self.top_k, "a whole number; 0 or -1 is off")
        _require(_is_real(self.min_p) and 0 <= self.min_p <= 1, "min_p", self.min_p, "between 0 (off) and 1")
        _require(self.seed is None or _is_int(self.seed), "seed", self.seed, "a whole number, or None")

    def _check_lengths(self) -> None:
        _require(_is_int(self.n) and self.n >= 1, "n", self.n, "1 or more")
        longest = math.inf if self.max_tokens is None else self.max_tokens
        usable = self.max_tokens is None or (_is_int(self.max_tokens) and self.max_tokens >= 1)
        _require(usable, "max_tokens", self.max_tokens, "1 or more, or None for the model's limit")
        usable = _is_int(self.min_tokens) and 0 <= self.min_tokens <= longest
        _require(usable, "min_tokens", self.min_tokens, f"between 0 and max_tokens ({self.max_tokens})")


def _as_tuple(name: str, value: Any) -> tuple:
    if value is None:
        return ()
    _require(isinstance(value, (list, tuple, set)), name, value, "a list, or None")
    return tuple(value)


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_real(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _require(holds: bool, name: str, value: Any, expected: str) -> None:
    if not holds:
        raise ConfigError(f"SamplingParams: {name}={value!r}; expected {expected}")
