"""How one request wants its tokens chosen: vLLM's names, checked when made.

This module must not know logits, tokenizers or the engine: it holds what the user asked for and
refuses what cannot be honoured. What is changed in the logits is in
`sampling/logits_processors.py`, sampling itself in `sampling/sampler.py`."""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from draftsmith.speculators.errors import ConfigError

logger = logging.getLogger(__name__)

# As in vLLM: temperatures between 0 and this one are raised to it, with a warning.
MIN_TEMPERATURE = 0.01

# Beyond them half precision has no numbers, and a logit would be none.
MOST_BIAS = 10_000
MOST_PENALTY = 1000

# Arguments of vLLM's SamplingParams that this runtime has no field for -> the values that mean what
# is done here anyway; None: any value.
ACCEPTED: dict[str, tuple[Any, ...] | None] = {
    "best_of": (None, 1),
    "early_stopping": (False,),
    "extra_args": (None, {}),
    "flat_logprobs": (False,),
    "guided_decoding": (None,),
    "length_penalty": (1.0,),
    "logits_processors": (None, []),
    "output_kind": None,
    "skip_reading_prefix_cache": None,
    "spaces_between_special_tokens": (True,),
    "truncate_prompt_tokens": (None, -1),
    "use_beam_search": (False,),
}


def _with_vllms_arguments(cls: type[SamplingParams]) -> type[SamplingParams]:
    """Lets the constructor take the arguments of `ACCEPTED`; ConfigError for another value."""
    construct = cls.__init__

    @functools.wraps(construct)
    def __init__(self: SamplingParams, *args: Any, **options: Any) -> None:
        for name in [name for name in options if name in ACCEPTED]:
            value = options.pop(name)
            values = ACCEPTED[name]
            if values is not None:
                expected = " or ".join(map(repr, values))
                _require(value in values, name, value, f"{expected}: this runtime has no other way")
        construct(self, *args, **options)

    cls.__init__ = __init__  # type: ignore[method-assign]
    return cls


@_with_vllms_arguments
@dataclass
class SamplingParams:
    """Sampling parameters of one request. Fields may be assigned until it is handed over: a request
    keeps a checked copy. Harmless arguments of vLLM (`ACCEPTED`) are taken without effect.

    n                 responses to make for the prompt
    temperature       0 is greedy: the most probable token, the first one on a tie, whatever the
                      filters below
    top_p             keep the smallest set of most probable tokens whose mass reaches this
    top_k             keep this many of the most probable tokens; 0 or -1 is off
    min_p             keep tokens at least this many times as probable as the most probable one
    seed              makes the response depend on nothing but itself; None: seeded by the engine
    max_tokens        longest response; None: until the model's limit
    min_tokens        no end of sequence and no stop before this many tokens
    stop              strings that end the response; kept as a tuple
    stop_token_ids    tokens that end the response; kept as a tuple
    ignore_eos        go on after the end-of-sequence token
    detokenize        False: token ids only, every text is empty
    num_speculative_tokens   most drafts of a round, of a tree most levels; 0 drafts nothing, None:
                      as the drafter does

    Before temperature and filters, also at temperature 0, and in the order of docs/runtime.md:

    allowed_token_ids    no other tokens; None: all
    bad_words            strings that must not be written; kept as a tuple
    logit_bias           token id -> what is added to its logit
    repetition_penalty   of tokens in prompt and output, positive logits are divided by it, others
                         multiplied
    frequency_penalty    subtracted from a token's logit for each time it is in the output
    presence_penalty     subtracted once if it is in the output

    logprobs          report each output token's log-probability and those of this many most
                      probable tokens, before any of the above; -1 is the whole vocabulary, None
                      reports nothing
    prompt_logprobs   the same for the prompt's tokens
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
    detokenize: bool = True
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str] | None = None
    structured_outputs: None = None  # vLLM's
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    num_speculative_tokens: int | None = None

    def __post_init__(self) -> None:
        self.stop = (self.stop,) if isinstance(self.stop, str) else _as_tuple("stop", self.stop)
        self.stop_token_ids = _as_tuple("stop_token_ids", self.stop_token_ids)
        self.bad_words = _as_tuple("bad_words", self.bad_words)
        if self.allowed_token_ids is not None:
            self.allowed_token_ids = _as_tuple("allowed_token_ids", self.allowed_token_ids)
        self._check_numbers()
        self._check_lengths()
        self._check_penalties()
        self._check_logprobs()
        for text in self.stop or ():
            _require(
                isinstance(text, str) and text != "",
                "stop",
                self.stop,
                "strings that are not empty",
            )
        for text in self.bad_words or ():
            _require(
                isinstance(text, str) and text.strip() != "",
                "bad_words",
                self.bad_words,
                "words, not blanks",
            )
        for name in ("stop_token_ids", "allowed_token_ids"):
            token_ids = getattr(self, name)
            usable = all(_is_int(token) and token >= 0 for token in token_ids or ())
            _require(usable, name, token_ids, "token ids, 0 or more")
        _require(
            self.allowed_token_ids != (),
            "allowed_token_ids",
            [],
            "at least one token id, or None for all",
        )
        self._check_bias()
        _require(
            self.structured_outputs is None,
            "structured_outputs",
            self.structured_outputs,
            "None: output that follows a schema or grammar is what vLLM generates",
        )
        _require(
            self.detokenize or not self.stop, "detokenize", False, "True, which stop strings need"
        )
        for name in (
            "ignore_eos",
            "include_stop_str_in_output",
            "skip_special_tokens",
            "detokenize",
        ):
            _require(
                isinstance(getattr(self, name), bool), name, getattr(self, name), "True or False"
            )

    @property
    def greedy(self) -> bool:
        """True if the most probable token is always taken, so that no randomness is used."""
        return self.temperature == 0

    def clone(self) -> SamplingParams:
        """A copy, checked anew. ConfigError for a field that was assigned a wrong value."""
        return replace(self)

    def _check_numbers(self) -> None:
        hot = self.temperature
        _require(_is_real(hot) and hot >= 0, "temperature", hot, "0 for greedy, or more")
        if 0 < hot < MIN_TEMPERATURE:
            logger.warning(
                "temperature %g is raised to %g; 0 is greedy, without sampling",
                hot,
                MIN_TEMPERATURE,
            )
            self.temperature = MIN_TEMPERATURE
        _require(
            _is_real(self.top_p) and 0 < self.top_p <= 1,
            "top_p",
            self.top_p,
            "above 0, and 1 (off) at most",
        )
        _require(
            _is_int(self.top_k) and self.top_k >= -1,
            "top_k",
            self.top_k,
            "a whole number; 0 or -1 is off",
        )
        _require(
            _is_real(self.min_p) and 0 <= self.min_p <= 1,
            "min_p",
            self.min_p,
            "between 0 (off) and 1",
        )
        usable = self.seed is None or (_is_int(self.seed) and -(2**63) <= self.seed < 2**63)
        _require(usable, "seed", self.seed, "a whole number of 64 bits, or None")

    def _check_lengths(self) -> None:
        _require(_is_int(self.n) and self.n >= 1, "n", self.n, "1 or more")
        longest = math.inf if self.max_tokens is None else self.max_tokens
        usable = self.max_tokens is None or (_is_int(self.max_tokens) and self.max_tokens >= 1)
        _require(usable, "max_tokens", self.max_tokens, "1 or more, or None for the model's limit")
        drafts = self.num_speculative_tokens
        usable = drafts is None or (_is_int(drafts) and drafts >= 0)
        _require(
            usable,
            "num_speculative_tokens",
            drafts,
            "0 or more, or None for as many as the drafter has",
        )
        usable = _is_int(self.min_tokens) and 0 <= self.min_tokens <= longest
        _require(
            usable, "min_tokens", self.min_tokens, f"between 0 and max_tokens ({self.max_tokens})"
        )

    def _check_penalties(self) -> None:
        for name in ("presence_penalty", "frequency_penalty"):
            value = getattr(self, name)
            _require(
                _is_real(value) and -2 <= value <= 2, name, value, "between -2 and 2; 0 is off"
            )
        value = self.repetition_penalty
        usable = _is_real(value) and 1 / MOST_PENALTY <= value <= MOST_PENALTY
        _require(
            usable,
            "repetition_penalty",
            value,
            f"between {1 / MOST_PENALTY:g} and {MOST_PENALTY}; 1 is off",
        )

    def _check_bias(self) -> None:
        given = self.logit_bias
        if given is None:
            return
        _require(
            isinstance(given, Mapping), "logit_bias", given, "a dict of token id -> number, or None"
        )
        usable = all(
            _is_int(token) and token >= 0 and _is_real(bias) and abs(bias) <= MOST_BIAS
            for token, bias in given.items()
        )
        expected = f"token ids, 0 or more, and numbers between -{MOST_BIAS} and {MOST_BIAS}"
        _require(usable, "logit_bias", given, expected)
        self.logit_bias = dict(given)

    def _check_logprobs(self) -> None:
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            usable = value is None or (_is_int(value) and value >= -1)
            _require(usable, name, value, "how many, -1 for the whole vocabulary, or None for none")


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
        raise ConfigError(f"{name}={value!r}; expected {expected}", where="SamplingParams")
