"""TextGenerator: prompts in, texts out, over an engine that is there already.

It owns the tokenizer, checks every prompt before any is run, and turns requests into outputs.
Rounds are the engine's; what an engine is made of is loaded by llm.py."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any, TypedDict

from tqdm.auto import tqdm
from transformers import PreTrainedModel

from draftsmith.inference.engine.engine import Engine
from draftsmith.inference.engine.round_costs import measure_costs
from draftsmith.inference.engine_options import EngineOptions
from draftsmith.inference.entrypoints.checks import CheckedRequest, RequestChecker
from draftsmith.inference.entrypoints.loading import (
    end_of_sequence_ids,
    load_target,
    make_engine,
    model_limit,
)
from draftsmith.inference.entrypoints.prompts import Prompt, chat_prompts, read_prompts
from draftsmith.inference.metrics import SpecDecodeCounters
from draftsmith.inference.outputs import RequestOutput
from draftsmith.inference.requests.detokenizer import Detokenizer
from draftsmith.inference.requests.request import Request
from draftsmith.inference.requests.response import Response
from draftsmith.inference.sampling.sampler import make_generator
from draftsmith.inference.sampling_params import SamplingParams
from draftsmith.inference.spec_decode.draft_length import DraftLength
from draftsmith.inference.spec_decode.proposers.base import Proposer
from draftsmith.inference.spec_decode.proposers.head import HeadProposer
from draftsmith.inference.spec_decode.tree_shape import TreeShape
from draftsmith.inference.spec_decode.verification.rejection_sampler import AUTO
from draftsmith.speculators.drafter import Drafter
from draftsmith.speculators.errors import ConfigError
from draftsmith.speculators.target.frozen_target import FrozenTarget

Params = SamplingParams | Sequence[SamplingParams] | None  # for all prompts, or one for each

WARM_UP_PROMPT = 64  # tokens


class HeadDrafting(TypedDict, total=False):
    """How a drafter of `TextGenerator.from_modules` drafts; what is left out is as HeadProposer has
    it."""

    num_speculative_tokens: int
    draft_sample_method: str
    tree: TreeShape | None


class TextGenerator:
    """Writes texts with an engine. `tokenizer`: None where prompts are token ids, and texts are
    empty. `generate` and `chat` may be called from several threads, of which one runs at a time."""

    def __init__(self, engine: Engine, tokenizer: Any) -> None:
        self.engine = engine
        self.checker = RequestChecker(
            tokenizer,
            engine.target.vocab_size,
            engine.max_model_len,
            end_of_sequence_ids(engine.target, tokenizer),
        )
        self._tokenizer = tokenizer
        self._running = threading.RLock()  # an engine is one thread's at a time
        self._num_prompts = 0  # names requests
        self._num_seeded = 0  # numbers the responses that brought no seed

    @staticmethod
    def from_modules(
        target: FrozenTarget | PreTrainedModel,
        *,
        drafter: Drafter | None = None,
        drafting: HeadDrafting | None = None,
        proposer: Proposer | None = None,
        tokenizer: Any = None,
        options: EngineOptions | None = None,
        draft_length: DraftLength | None = None,
        rejection_sample_method: str = AUTO,
    ) -> TextGenerator:
        """A generator of modules in memory, for measurements during training and for tests; what is
        reported is measured on an export.

        drafter         drafts for the target, to which it is attached; with `drafting`
        proposer        drafts in place of a drafter; None and no drafter: nothing is drafted
        tokenizer       None: prompts are token ids, and texts are empty
        options         of the engine; those that load something have no effect
        draft_length    how many tokens a round drafts; None: as many as the proposer can
        rejection_sample_method     the verification rule at temperatures above 0

        Errors as of LLM."""
        taps: Sequence[int] = ()
        if drafter is not None and drafter.traits.reads_taps:
            taps = drafter.config.tap_layers
        target = load_target(target, taps)
        options = options or EngineOptions()
        limit = model_limit(target, options.max_model_len, drafter)
        if drafter is not None:
            attached = drafter.attach(target)
            rows = options.max_num_seqs
            proposer = HeadProposer(attached, target, rows, limit, **(drafting or {}))
        engine = make_engine(
            target, options, limit, proposer, draft_length, rejection_sample_method
        )
        return TextGenerator(engine, tokenizer)

    # ------------------------------------------------------------------ text

    def generate(
        self,
        prompts: Any,
        sampling_params: Params = None,
        use_tqdm: bool | Callable[..., Any] = True,
        *,
        speculate: bool = True,
    ) -> list[RequestOutput]:
        """Responses to prompts, in their order: `outputs[i].outputs[0].text` is what was written
        after prompt i.

        prompts          a string, {"prompt": str}, a list of token ids,
                         {"prompt_token_ids": [int]}, or a list of these
        sampling_params  one for all prompts, or a list with one for each; None: SamplingParams(),
                         which samples 16 tokens at temperature 1
        use_tqdm         show a bar of responses; a callable makes one from tqdm's arguments
        speculate        False: nothing is drafted

        ConfigError names every prompt or parameter that cannot be run; then none has been."""
        return self._run(
            read_prompts(prompts, self._tokenizer), sampling_params, use_tqdm, speculate
        )

    def chat(
        self,
        messages: Sequence[Any],
        sampling_params: Params = None,
        use_tqdm: bool | Callable[..., Any] = True,
        *,
        speculate: bool = True,
        add_generation_prompt: bool = True,
        chat_template: str | None = None,
        tools: list[Any] | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Responses to conversations, which the chat template makes prompts of.

        messages                a conversation, a list of {"role": …, "content": …}, or a list of
                                conversations
        add_generation_prompt   end each prompt with the opening of the model's turn
        chat_template           used in place of the tokenizer's: the template, not its file
        tools                   for the template; None: none
        chat_template_kwargs    further variables of the template

        The others, and errors, as of `generate`."""
        options = {
            "add_generation_prompt": add_generation_prompt,
            "chat_template": chat_template,
            "tools": tools,
            **(chat_template_kwargs or {}),
        }
        prompts = chat_prompts(messages, self._tokenizer, options)
        return self._run(prompts, sampling_params, use_tqdm, speculate)

    def _run(
        self,
        prompts: list[Prompt],
        sampling_params: Params,
        use_tqdm: bool | Callable[..., Any],
        speculate: bool,
    ) -> list[RequestOutput]:
        checked = self.checker.check(prompts, _params_per_prompt(sampling_params, len(prompts)))
        with self._running:
            first = self._num_prompts
            try:
                responses = [self.start(request, speculate=speculate) for request in checked]
                self._finish(responses, use_tqdm)
            except BaseException:
                # An interrupt too leaves nothing queued, of the request that was being submitted
                # either
                for number in range(first, self._num_prompts):
                    self.abort(str(number))
                raise
        return [response.output() for response in responses]

    def _finish(self, responses: Sequence[Response], use_tqdm: bool | Callable[..., Any]) -> None:
        """Runs the engine until these responses are whole."""
        unfinished = {id(request) for response in responses for request in response.requests}
        total = len(unfinished)
        make_bar = use_tqdm if callable(use_tqdm) else tqdm
        with make_bar(total=total, desc="generate", unit="response", disable=not use_tqdm) as bar:
            while unfinished:
                for request in self.engine.step():
                    if id(request) in unfinished:
                        unfinished.discard(id(request))
                        bar.update()

    # ------------------------------------------------------------------ one request

    def submit(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams,
        *,
        streaming: bool = False,
        speculate: bool = True,
    ) -> Response:
        """Checks a prompt, hands it to the engine and returns at once, for whoever calls
        `engine.step` themselves: each step writes on the response, whose `delta` (with `streaming`)
        and `output` tell what there is."""
        (checked,) = self.checker.check([prompt], [sampling_params])
        return self.start(checked, streaming=streaming, speculate=speculate)

    def start(
        self,
        checked: CheckedRequest,
        *,
        streaming: bool = False,
        speculate: bool = True,
        decodes_logprobs: bool = True,
    ) -> Response:
        """`submit` for what was checked before. `decodes_logprobs`: see Response."""
        if self.engine.draft_length.lacks_costs:  # no request has begun
            measure_costs(self.engine)
        self.engine.set_speculation(speculate)
        request_id = str(self._num_prompts)
        self._num_prompts += 1
        requests = [
            self._request(request_id, i, checked, streaming) for i in range(checked.params.n)
        ]
        for request in requests:
            self.engine.add(request)
        prompt = checked.prompt
        tokenizer = self._tokenizer if checked.params.detokenize else None
        return Response(
            request_id, prompt.text, prompt.token_ids, requests, tokenizer, decodes_logprobs
        )

    def _request(
        self, request_id: str, index: int, checked: CheckedRequest, streaming: bool
    ) -> Request:
        prompt = checked.prompt
        params = checked.params
        generator = detokenizer = None
        if params.seed is not None:
            generator = make_generator(params.seed + index)
        else:
            if not params.greedy:
                generator = make_generator((self.engine.options.seed << 32) + self._num_seeded)
            self._num_seeded += 1
        if self._tokenizer is not None and params.detokenize and (streaming or params.stop):
            detokenizer = Detokenizer(self._tokenizer, prompt.token_ids, params)
        return Request(
            request_id,
            index,
            prompt.token_ids,
            params,
            generator=generator,
            eos_token_ids=self.checker.eos_token_ids,
            max_model_len=self.engine.max_model_len,
            detokenizer=detokenizer,
            bad_words=checked.bad_words,
        )

    def abort(self, request_id: str) -> None:
        """Ends a request between two steps; its last output says finish_reason "abort"."""
        self.engine.abort(request_id)

    # ------------------------------------------------------------------ the engine

    def warm_up(self, limit_s: float = 900.0, longest: int | None = None) -> None:
        """Compiles every shape that rounds can have; nothing where all runs eager. From the thread
        that will run the rounds, before any request. `limit_s`: seconds after which nothing further
        is begun; what is left is compiled when it is first met or, where compiled rounds are the
        default, run eager. `longest`: tokens of the longest text that is to come, its response
        included; None: of any length."""
        deadline = perf_counter() + limit_s
        if not self.engine.begin_compiling():
            return
        few = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, seed=0)
        length = min(WARM_UP_PROMPT, self.engine.max_model_len // 2)
        for speculate in (True, False):  # what each step is given
            self.generate({"prompt_token_ids": [0] * length}, few, False, speculate=speculate)
        self.engine.warm_up(deadline, longest)
        measure_costs(self.engine)  # compiled rounds cost less than those that were measured
        self.engine.draft_length.forget()
        self.reset_metrics()

    def get_default_sampling_params(self) -> SamplingParams:
        """New sampling parameters, as `generate` takes them where none are given."""
        return SamplingParams()

    def get_tokenizer(self) -> Any:
        """The tokenizer; None where a model in memory came without one."""
        return self._tokenizer

    def get_metrics(self) -> SpecDecodeCounters:
        """Totals over all requests since the start or `reset_metrics`, under vLLM's metric names: a
        dict by `.to_dict()`, or one Metric after the other."""
        return copy.deepcopy(self.engine.counters)

    def reset_metrics(self) -> None:
        """Sets the counters to zero."""
        self.engine.reset_metrics()


def _params_per_prompt(sampling_params: Params, count: int) -> list[SamplingParams]:
    if sampling_params is None:
        return [SamplingParams()] * count
    if isinstance(sampling_params, SamplingParams):
        return [sampling_params.clone()] * count
    if not isinstance(sampling_params, Sequence):
        raise ConfigError(
            f"a {type(sampling_params).__name__}; expected SamplingParams, or a list of them",
            where="sampling_params",
        )
    params = list(sampling_params)
    if len(params) != count:
        raise ConfigError(
            f"{len(params)} sampling params for {count} prompts; give one for all, or one for each",
            where="sampling_params",
        )
    for i, one in enumerate(params):
        if not isinstance(one, SamplingParams):
            kind = type(one).__name__
            raise ConfigError(f"a {kind}; expected SamplingParams", where=f"sampling_params[{i}]")
    return [one.clone() for one in params]
