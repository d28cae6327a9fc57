"""A slice of a server's log as texts to train and to judge a drafter on.

A text stays as the target wrote it, token by token. An exchange whose tokens the recipe's chat
template and tokenizer would not give is left out and counted by its reason, as is one of another
model, and one that was sampled under what replay does not know."""

from __future__ import annotations

import hashlib
import json
import time
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

from draftsmith.inference.entrypoints.loading import generation_config
from draftsmith.inference.evaluation.expected_acceptance import WrittenText
from draftsmith.inference.sampling_params import SamplingParams
from draftsmith.inference.server.serve_command import sampling_defaults
from draftsmith.inference.traffic_log.reader import read_log
from draftsmith.inference.traffic_log.records import LoggedExchange
from draftsmith.speculators.errors import ConfigError, DataError
from draftsmith.train.data.bad_rows import BadRow
from draftsmith.train.data.examples import Example, parse_row
from draftsmith.train.data.loss_mask import ConversationTokenizer, tokenise
from draftsmith.train.data.packing import chat_template_of, template_date
from draftsmith.train.recipe.recipe import Recipe

WORKLOAD = "traffic"
DAY = 86_400.0  # seconds
CLOCKS_APART = 3_600.0  # seconds that a server's clock may be ahead
SHORTEST = 2  # tokens of a response; the first is never drafted
CHOICE_FROM = 0.7  # of the texts, in the order of time: where those begin that choose a checkpoint
JUDGE_FROM = 0.8  # and those that judge it
# Sampling parameters that leave the probabilities of tokens as they are, beside those of Sampling.
# Any other has to have its neutral value.
WITHOUT_EFFECT = {"n", "seed", "max_tokens", "stop", "stop_token_ids", "ignore_eos"}
WITHOUT_EFFECT |= {"include_stop_str_in_output", "skip_special_tokens", "detokenize", "logprobs"}
WITHOUT_EFFECT |= {"num_speculative_tokens", "prompt_logprobs", "spaces_between_special_tokens"}

# why an exchange is left out
OTHER_MODEL = "of another model"
OTHER_SAMPLING = "sampled with penalties, biases or constraints, which replay does not know"
OTHER_PROMPT = "the template and tokenizer give its prompt other tokens"
OTHER_RESPONSE = "its tokens do not give its text"
NO_RESPONSE = "without a response of two tokens and more"
NO_ROOM = "the prompt leaves no room in data.max_length"
OF_EVALUATION = "its prompt is one of the old suite"


class Sampling(NamedTuple):
    """What tokens were drawn under."""

    temperature: float
    top_p: float
    top_k: int

    def params(self) -> SamplingParams:
        """The same for a sampler."""
        return SamplingParams(**self._asdict())


@dataclass(frozen=True)
class LoggedText:
    """A prompt and the response to it, as tokens. `time`: of the request, in seconds since 1970;
    `conversation`: a hash of how it opened, the unit of statistics: texts of one conversation, and
    answers to one question, say less together than as many others would."""

    time: float
    conversation: str
    prompt_ids: Sequence[int]
    output_ids: Sequence[int]
    sampling: Sampling

    @property
    def tokens(self) -> WrittenText:
        """Prompt and response."""
        return self.prompt_ids, self.output_ids


@dataclass(frozen=True)
class TrafficSlice:
    """The texts of a slice in the order of time, and what was read for them. `left_out`: exchanges
    by their reason; `models`: by the name of their model."""

    texts: list[LoggedText]
    read: int
    left_out: dict[str, int]
    models: dict[str, int]

    @property
    def train(self) -> list[LoggedText]:
        """The oldest, which are learned from."""
        return [text for text in self.texts if text.time < self._from(CHOICE_FROM)]

    @property
    def choice(self) -> list[LoggedText]:
        """Later ones, which choose the best checkpoint."""
        begin, end = self._from(CHOICE_FROM), self._from(JUDGE_FROM)
        return [text for text in self.texts if begin <= text.time < end]

    @property
    def judge(self) -> list[LoggedText]:
        """The newest. No text is in two parts, nor are texts of the same moment."""
        return [text for text in self.texts if text.time >= self._from(JUDGE_FROM)]

    def _from(self, share: float) -> float:
        return self.texts[int(share * len(self.texts))].time

    def dumped(self) -> str:
        """As JSON, which `loaded` reads."""
        return json.dumps(asdict(self))

    @classmethod
    def loaded(cls, text: str) -> TrafficSlice:
        """What `dumped` wrote."""
        tree = json.loads(text)
        texts = [
            LoggedText(**entry | {"sampling": Sampling(*entry["sampling"])})
            for entry in tree.pop("texts")
        ]
        return cls(texts, **tree)


class _Unusable(Exception):
    """An exchange that is left out; its text is the reason."""


def newest_time(log: Path, names: Collection[str]) -> float:
    """Of the exchanges of a log with a model of these `names`, in seconds since 1970; of all, if
    there is none. Those of a clock that was ahead do not count. DataError: there is no other."""
    times: dict[bool, float] = {}  # by whether the model has one of the names
    for exchange in read_log(log, until=time.time() + CLOCKS_APART):
        wanted = exchange.model in names
        times[wanted] = max(exchange.time, times.get(wanted, exchange.time))
    if not times:
        raise DataError(
            "the log holds no exchange, or only those of a clock that is ahead of this one's",
            where=f"--log {log}",
        )
    return times.get(True, times.get(False, 0.0))


class TrafficReader:
    """Turns exchanges of a log into texts of a recipe's target."""

    def __init__(
        self, recipe: Recipe, tokenizer: Any, names: Sequence[str], defaults: dict[str, Any]
    ) -> None:
        """`names`: of the target as the server calls it. `defaults`: sampling parameters of a
        request that names none, as `serve_command.sampling_defaults` gives them."""
        self.data = recipe.data
        self.tokenizer = tokenizer
        self.names = frozenset(names)
        self.defaults = defaults
        self.vocab_size = recipe.target.sketch().vocab_size
        self.template = chat_template_of(recipe.data)
        asked = template_date(recipe.data, tokenizer, Path(recipe.output_dir))
        self.asks_for_date = asked is not None
        self.neutral = SamplingParams()

    @classmethod
    def of_recipe(cls, recipe: Recipe, tokenizer: Any, names: Sequence[str]) -> TrafficReader:
        """`names`: of the target as the server calls it, beside those that the recipe gives it."""
        target = recipe.target
        known = {target.model, Path(target.model).name, *names}
        config = generation_config(target.model, target.revision)
        defaults = sampling_defaults({} if config is None else config.to_diff_dict())
        return cls(recipe, tokenizer, sorted(known), defaults)

    def slice_of(
        self, exchanges: Iterable[LoggedExchange], held_out: Iterable[Sequence[int]] = ()
    ) -> TrafficSlice:
        """The texts of those exchanges that can be used. `held_out`: prompts of the old suite, as
        tokens, which no text may have."""
        left_out: Counter[str] = Counter()
        models: Counter[str] = Counter()
        suite = set(map(tuple, held_out))
        texts = []
        for exchange in exchanges:
            models[exchange.model] += 1
            try:
                texts.append(self._text(exchange, suite))
            except _Unusable as reason:
                left_out[str(reason)] += 1
        texts.sort(key=lambda text: text.time)
        return TrafficSlice(texts, models.total(), dict(left_out), dict(models))

    def _text(self, exchange: LoggedExchange, suite: set[tuple[int, ...]]) -> LoggedText:
        """Raises _Unusable."""
        if exchange.model not in self.names:
            raise _Unusable(OTHER_MODEL)
        sampling = self._sampling(exchange)
        tokenizer = self._tokenizer(exchange)
        example = _example(exchange)
        prompt = self._prompt(exchange, example, tokenizer)
        if tuple(prompt) in suite:
            raise _Unusable(OF_EVALUATION)
        output = self._response(exchange, example, tokenizer, prompt)
        if max(*prompt, *output) >= self.vocab_size:
            raise _Unusable(OTHER_PROMPT)
        room = self.data.max_length - len(prompt)
        if room < SHORTEST:
            raise _Unusable(NO_ROOM)
        opening = opening_of(exchange)
        return LoggedText(exchange.time, opening, prompt, output[:room], sampling)

    def _sampling(self, exchange: LoggedExchange) -> Sampling:
        named = {name: v for name, v in exchange.sampling.items() if v is not None}
        values = self.defaults | named
        for name in values.keys() - set(Sampling._fields) - WITHOUT_EFFECT:
            if values[name] != getattr(self.neutral, name, None):
                raise _Unusable(OTHER_SAMPLING)
        try:
            params = SamplingParams(
                **{name: values[name] for name in Sampling._fields if name in values}
            )
        except ConfigError:
            raise _Unusable(OTHER_SAMPLING) from None
        return Sampling(params.temperature, params.top_p, max(params.top_k, 0))

    def _tokenizer(self, exchange: LoggedExchange) -> ConversationTokenizer:
        """Of the template as this exchange had it: its variables, and the date of its day."""
        variables = {
            name: v for name, v in exchange.chat_template_kwargs.items() if name != "tools"
        }
        return ConversationTokenizer(
            self.tokenizer,
            chat_template=self.template,
            template_kwargs=self.data.chat_template_kwargs | variables,
            reasoning=self.data.reasoning,
            date=datetime.fromtimestamp(exchange.time) if self.asks_for_date else None,
        )

    def _prompt(
        self,
        exchange: LoggedExchange,
        example: Example | None,
        tokenizer: ConversationTokenizer,
    ) -> list[int]:
        logged = exchange.prompt_token_ids
        if example is None:  # it was sent as tokens, which no template has to give
            if not logged:
                raise _Unusable(OTHER_PROMPT)
            return logged
        try:
            prompt = tokenizer.prompt_ids(example)
        except BadRow:
            raise _Unusable(OTHER_PROMPT) from None
        if not prompt or logged not in (None, prompt):
            raise _Unusable(OTHER_PROMPT)
        return prompt

    def _response(
        self,
        exchange: LoggedExchange,
        example: Example | None,
        tokenizer: ConversationTokenizer,
        prompt: list[int],
    ) -> list[int]:
        """The tokens as logged, which have to give the text; without them, those of the text."""
        output = exchange.token_ids
        if output is None:
            output = self._retokenised(exchange, example, tokenizer, prompt)
        elif exchange.text is not None:
            special = exchange.sampling.get("skip_special_tokens", True)
            written = self.tokenizer.decode(
                output, skip_special_tokens=bool(special), clean_up_tokenization_spaces=False
            )
            # the text ends before a stop string, and before half a character
            if not written.strip().startswith(exchange.text.strip()):
                raise _Unusable(OTHER_RESPONSE)
        if len(output) < SHORTEST:
            raise _Unusable(NO_RESPONSE)
        return output

    def _retokenised(
        self,
        exchange: LoggedExchange,
        example: Example | None,
        tokenizer: ConversationTokenizer,
        prompt: list[int],
    ) -> list[int]:
        """The tokens that the template has the text as, with the end of the turn if it ended."""
        if not exchange.text:
            raise _Unusable(NO_RESPONSE)
        if example is None or example.prompt is not None:
            return tokenise(self.tokenizer, exchange.text)
        answer = {"role": "assistant", "content": exchange.text}
        try:
            row = tokenizer.rows(replace(example, messages=(*example.messages, answer)))[-1]
        except BadRow:
            raise _Unusable(OTHER_RESPONSE) from None
        ids = row.input_ids.tolist()
        if ids[: len(prompt)] != prompt:
            raise _Unusable(OTHER_RESPONSE)
        ended = exchange.finish_reason == "stop" and not exchange.sampling.get("stop")
        return ids[len(prompt) :] if ended else ids[len(prompt) : -1]


def _example(exchange: LoggedExchange) -> Example | None:
    """What was asked; None for a prompt of tokens."""
    if exchange.messages is None:
        if exchange.prompt is None:
            return None
        return Example(WORKLOAD, WORKLOAD, prompt=exchange.prompt, completion="")
    row = {"messages": exchange.messages, "tools": exchange.chat_template_kwargs.get("tools")}
    try:
        example = parse_row(row, origin=WORKLOAD, workload=WORKLOAD)
    except BadRow:
        raise _Unusable(OTHER_PROMPT) from None
    if example.messages[-1]["role"] == "assistant":  # which the target went on with
        raise _Unusable(OTHER_PROMPT)
    return example


def opening_of(exchange: LoggedExchange) -> str:
    """A hash of a conversation up to the user's first turn, of anything else of the prompt."""
    opening: Any = exchange.prompt
    if exchange.messages is not None:
        roles = [message.get("role") for message in exchange.messages]
        opening = exchange.messages[: roles.index("user") + 1 if "user" in roles else None]
    elif opening is None:
        opening = exchange.prompt_token_ids
    return hashlib.sha256(json.dumps(opening).encode()).hexdigest()[:16]


def evenly(texts: Sequence[LoggedText], count: int) -> Iterator[LoggedText]:
    """At most `count` of the texts, spread evenly over them."""
    step = max(1.0, len(texts) / count)
    return (texts[int(i * step)] for i in range(min(count, len(texts))))
