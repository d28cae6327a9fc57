"""How the tokens of one request are chosen: vLLM's names, checked by the constructor. Knows no
logits, tokenizer or engine."""

from __future__ import annotations

import functools
import logging
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Annotated, Any

from pydantic import BeforeValidator, ConfigDict, Field, ValidationError
from pydantic.dataclasses import dataclass

from draftsmith.speculators.errors import ConfigError
from draftsmith.speculators.options import NonEmptyText

logger = logging.getLogger(__name__)

# As in vLLM: temperatures between 0 and this one are raised to it, with a warning.
MIN_TEMPERATURE = 0.01

# Beyond them half precision has no numbers, and a logit would be none.
MOST_BIAS = 10_000
MOST_PENALTY = 1000
MOST_TEMPERATURE = 1e20  # divided by more, the logit of a forbidden token is none of one any more

# Options of vLLM that this runtime has no use for -> the values that mean what is done here anyway;
# None: any value.
Accepted = dict[str, tuple[Any, ...] | None]
ACCEPTED: Accepted = {
    "best_of": (None, 1),
    "early_stopping": (False,),
    "extra_args": (None, {}),
    "flat_logprobs": (False,),
    "guided_decoding": (None,),
    "length_penalty": (1.0,),
    "logits_processors": (None, []),
    "output_kind": None,
    "prompt_logprobs": (None,),
    "skip_reading_prefix_cache": None,
    "spaces_between_special_tokens": (True,),
    "structured_outputs": (None,),
    "truncate_prompt_tokens": (None, -1),
    "use_beam_search": (False,),
}


def without_accepted(where: str, options: Mapping[str, Any], table: Accepted) -> dict[str, Any]:
    """The options that the table does not have. ConfigError for a value that it does not accept."""
    for name in table.keys() & options.keys():
        values = table[name]
        if values is not None and options[name] not in values:
            shown = reprlib.repr(options[name])
            raise ConfigError(
                f"{name}={shown} would change what is loaded or written, and this runtime does not"
                f" do it; leave it out (accepted: {', '.join(map(repr, values))})",
                where=f"{where}.{name}",
            )
    return {name: value for name, value in options.items() if name not in table}


def _checked(cls: Any) -> Any:
    """Lets the constructor take the arguments of `ACCEPTED`; ConfigError for a wrong value."""
    construct = cls.__init__

    @functools.wraps(construct)
    def __init__(self: SamplingParams, *args: Any, **options: Any) -> None:
        options = without_accepted("SamplingParams", options, ACCEPTED)
        try:
            construct(self, *args, **options)
        except ValidationError as error:
            first = error.errors()[0]
            name = str(first["loc"][0])
            if name not in cls.__dataclass_fields__:
                raise ConfigError("is no parameter", where=f"SamplingParams.{name}") from None
            raise _fault(name, options.get(name, first["input"]), first["msg"]) from None

    cls.__init__ = __init__
    return cls


def _fault(name: str, value: Any, reason: str) -> ConfigError:
    shown = reprlib.repr(value)  # values may be long, or nested deeply
    return ConfigError(f"{reason}, not {shown}", where=f"SamplingParams.{name}")


def _listed(value: Any) -> Any:
    """A list as a tuple, and one string as a tuple of one."""
    if isinstance(value, str):
        return (value,)
    return tuple(value) if isinstance(value, (list, set)) else value


TokenId = Annotated[int, Field(ge=0)]
Word = Annotated[str, Field(pattern=r"\S")]
Bias = Annotated[float, Field(ge=-MOST_BIAS, le=MOST_BIAS)]
Allowed = Annotated[Sequence[TokenId], Field(min_length=1)]
AsTuple = BeforeValidator(lambda value: () if value is None else _listed(value))


@_checked
@dataclass(config=ConfigDict(strict=True, allow_inf_nan=False, extra="forbid"))
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
    num_speculative_tokens   most drafts of a round, of a tree most nodes; 0 drafts nothing, None:
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
    """

    n: Annotated[int, Field(ge=1)] = 1
    temperature: Annotated[float, Field(ge=0, le=MOST_TEMPERATURE)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Field(ge=-1)] = 0
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    seed: Annotated[int | None, Field(ge=-(2**63), lt=2**63)] = None
    max_tokens: Annotated[int | None, Field(ge=1)] = 16
    min_tokens: Annotated[int, Field(ge=0)] = 0
    stop: Annotated[Sequence[NonEmptyText], AsTuple] = ()
    stop_token_ids: Annotated[Sequence[TokenId], AsTuple] = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    detokenize: bool = True
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    repetition_penalty: Annotated[float, Field(ge=1 / MOST_PENALTY, le=MOST_PENALTY)] = 1.0
    logit_bias: Mapping[TokenId, Bias] | None = None
    allowed_token_ids: Annotated[Allowed | None, BeforeValidator(_listed)] = None
    bad_words: Annotated[Sequence[Word], AsTuple] = ()
    logprobs: Annotated[int | None, Field(ge=-1)] = None
    num_speculative_tokens: Annotated[int | None, Field(ge=0)] = None

    def __post_init__(self) -> None:
        if 0 < self.temperature < MIN_TEMPERATURE:
            logger.warning(
                "temperature %g is raised to %g; 0 is greedy, without sampling",
                self.temperature,
                MIN_TEMPERATURE,
            )
            self.temperature = MIN_TEMPERATURE
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            reason = f"expected max_tokens, {self.max_tokens}, at most"
            raise _fault("min_tokens", self.min_tokens, reason)
        if self.stop and not self.detokenize:
            raise _fault("detokenize", False, "expected True, which stop strings need")

    @property
    def greedy(self) -> bool:
        """True if the most probable token is always taken, so that no randomness is used."""
        return self.temperature == 0

    def clone(self) -> SamplingParams:
        """A copy, checked anew. ConfigError for a field that was assigned a wrong value, and for a
        name that was assigned and is none of a field."""
        further = {name: value for name, value in vars(self).items() if name not in FIELDS}
        return replace(self, **further)


FIELDS = {field.name for field in fields(SamplingParams)}
