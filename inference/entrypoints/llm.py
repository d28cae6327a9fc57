"""LLM: the front door, in vLLM's shape. Text in, text out, and what drafting gained.

    drafting = {"method": "eagle3", "model": "path/to/head", "num_speculative_tokens": 4}
    llm = LLM("path/to/target", speculative_config=drafting)
    for output in llm.generate(["Hello"], SamplingParams(temperature=0, max_tokens=64)):
        print(output.outputs[0].text)

It owns the tokenizer, checks every prompt before any is run, and turns requests into outputs.
Rounds are the engine's."""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from tqdm.auto import tqdm
from transformers import PreTrainedModel

from draftsmith.inference.engine.engine import Engine, OnRound
from draftsmith.inference.engine.memory import memory_fault
from draftsmith.inference.engine_options import EngineOptions
from draftsmith.inference.entrypoints.loading import (
    default_device,
    end_of_sequence_ids,
    load_drafter_for,
    load_target,
    load_tokenizer,
    make_draft_length,
    make_proposer,
    model_limit,
)
from draftsmith.inference.entrypoints.prompts import Prompt, chat_prompts, read_prompts
from draftsmith.inference.entrypoints.sampling import RequestSampling
from draftsmith.inference.entrypoints.speculative_config import parse_speculative_config
from draftsmith.inference.entrypoints.speculative_defaults import complete
from draftsmith.inference.entrypoints.vllm_options import read_options, read_speculative_config
from draftsmith.inference.metrics import SpecDecodeCounters
from draftsmith.inference.outputs import RequestOutput
from draftsmith.inference.requests.detokenizer import Detokenizer
from draftsmith.inference.requests.request import Request
from draftsmith.inference.requests.response import Response
from draftsmith.inference.sampling.sampler import make_generator
from draftsmith.inference.sampling_params import SamplingParams
from draftsmith.inference.spec_decode.draft_length import AdaptiveDraftLength
from draftsmith.inference.spec_decode.proposers.base import Proposer
from draftsmith.inference.spec_decode.proposers.head import DraftOptions, HeadProposer
from draftsmith.speculators.drafter import Drafter
from draftsmith.speculators.errors import ConfigError
from draftsmith.speculators.target.frozen_target import FrozenTarget

logger = logging.getLogger(__name__)

DUMMY_TOKENS = 32  # of prompts and responses whose rounds are measured before any request


class LLM:
    """A target, optionally drafted for.

    model      folder or repository id; or a loaded FrozenTarget or PreTrainedModel
    tokenizer  folder, repository id or tokenizer object; None: the model's own
    on_round   called after every verification with what was drafted and kept (see Engine)
    options    those of EngineOptions (inference/engine_options.py), and options of vLLM that change
               no output, today's and those of its older versions
               (inference/entrypoints/vllm_options.py)
    """

    def __init__(
        self,
        model: str | FrozenTarget | PreTrainedModel,
        tokenizer: Any = None,
        *,
        on_round: OnRound | None = None,
        **options: Any,
    ) -> None:
        given = read_options({**options, "tokenizer": tokenizer})
        drafting = given.speculative_config
        device = default_device(given.device)
        source: dict[str, Any] = {
            "trust_remote_code": given.trust_remote_code,
            "revision": given.revision,
        }
        config = parse_speculative_config(
            complete(read_speculative_config(drafting), model, **source)
        )
        target = load_target(model, dtype=given.dtype, device=device, **source)
        tokenizer = load_tokenizer(model, given.tokenizer, **source)
        target, drafter = load_drafter_for(target, config, tokenizer)
        limit = model_limit(target, given.max_model_len, drafter)
        engine = Engine(
            target,
            given.model_copy(update={"max_model_len": limit}),
            proposer=make_proposer(config, target, drafter, given.max_num_seqs, limit),
            draft_length=make_draft_length(config),
            on_round=on_round,
            rejection_sample_method=config.rejection_sample_method,
        )
        self._set_up(engine, tokenizer, length_given=options.get("max_model_len") is not None)

    @classmethod
    def from_modules(
        cls,
        target: FrozenTarget | PreTrainedModel,
        *,
        drafter: Drafter | None = None,
        drafting: DraftOptions | None = None,
        proposer: Proposer | None = None,
        tokenizer: Any = None,
        options: EngineOptions | None = None,
        **others: Any,
    ) -> LLM:
        """An LLM of modules in memory: a target, and a drafter, which is attached to it, or a
        proposer.

        `drafting`: how the drafter drafts. `options`: those of the engine; nothing is loaded by
        them. `others`: further arguments of Engine. For measurements during training and tests;
        what is reported is measured on an export."""
        taps = drafter.config.tap_layers if drafter is not None and drafter.reads_taps else ()
        target = load_target(target, taps)
        given = options or EngineOptions()
        limit = model_limit(target, given.max_model_len, drafter)
        options = given.model_copy(update={"max_model_len": limit})
        if drafter is not None:
            head, how = drafter.attach(target), drafting or DraftOptions()
            proposer = HeadProposer(head, target, how, options.max_num_seqs, limit)
        llm = cls.__new__(cls)
        engine = Engine(target, options, proposer=proposer, **others)
        llm._set_up(engine, tokenizer, length_given=given.max_model_len is not None)
        return llm

    def _set_up(self, engine: Engine, tokenizer: Any, *, length_given: bool) -> None:
        """ConfigError if an accelerator's memory does not hold rows of the length that was given; a
        warning, if it was not: few texts are as long as a model's own limit."""
        if (fault := memory_fault(engine)) is not None:
            if length_given:
                raise ConfigError(fault)
            logger.warning("%s, or expect to run out of memory in long texts", fault)
        self.engine, self._tokenizer = engine, tokenizer
        self._eos_token_ids = end_of_sequence_ids(engine.target, tokenizer)
        self._sampling = RequestSampling(tokenizer, engine.target.vocab_size, self._eos_token_ids)
        self._num_prompts = 0  # names requests
        self._num_seeded = 0  # numbers the responses that brought no seed

    def generate(
        self,
        prompts: Any,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        speculate: bool = True,
    ) -> list[RequestOutput]:
        """Responses to prompts, in their order.

        A prompt is a string, {"prompt": str}, a list of token ids or {"prompt_token_ids": [int]};
        one or a list of them.
        `sampling_params`: one for all or one per prompt. `speculate=False` runs these prompts in
        the same engine with drafting off. Every prompt is checked before any is run: ConfigError
        names each one that cannot be."""
        return self._run(
            read_prompts(prompts, self._tokenizer), sampling_params, use_tqdm, speculate
        )

    def chat(
        self,
        messages: Sequence[Any],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        speculate: bool = True,
        add_generation_prompt: bool = True,
        chat_template: str | None = None,
        tools: list[Any] | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Responses to one conversation, a list of {"role", "content"}, or a list of them, by the
        chat template."""
        options = dict(
            add_generation_prompt=add_generation_prompt, chat_template=chat_template, tools=tools
        )
        prompts = chat_prompts(
            messages, self._tokenizer, {**options, **(chat_template_kwargs or {})}
        )
        return self._run(prompts, sampling_params, use_tqdm, speculate)

    def stream(
        self, prompt: Any, sampling_params: SamplingParams | None = None, *, speculate: bool = True
    ) -> Iterator[RequestOutput]:
        """One prompt's response as it is written: each output holds what is new since the last one.

        Text that may still turn out to be a stop string is held back. The request starts with the
        first output asked for; closing the iterator aborts it."""
        prompts = read_prompts(prompt, self._tokenizer)
        if len(prompts) != 1:
            raise ConfigError(
                f"{len(prompts)} prompts; expected one (use generate for several)", where="stream"
            )
        self._check(prompts, _params_per_prompt(sampling_params, 1))
        return self._stream(prompts, sampling_params, speculate)

    def check(self, prompt: Prompt, sampling_params: SamplingParams) -> None:
        """ConfigError if the prompt cannot be run with these parameters. Changes nothing: callable
        from any thread."""
        self._check([prompt], [sampling_params])

    def submit(
        self, prompt: Prompt, sampling_params: SamplingParams, *, streaming: bool = False
    ) -> Response:
        """Hands a prompt to the engine and returns at once, for whoever calls `engine.step`
        themselves: each step writes on the response, whose `delta` (with `streaming`) and `output`
        tell what there is."""
        (response,) = self._submit([prompt], sampling_params, True, streaming)
        return response

    def abort(self, request_id: str) -> None:
        """Ends a request between two outputs of its stream; its last output says finish_reason
        "abort"."""
        self.engine.abort(request_id)

    def warm_up(
        self, report: Callable[[int, int], None] = lambda *_: None, limit_s: float = math.inf
    ) -> int:
        """Compiles every shape that rounds can have, and measures what an adaptive draft length
        goes by, so that neither stalls a request later. Returns how many graphs there are, 0 where
        rounds run eager. From the thread that will run the rounds, before any request. `report` and
        `limit_s`: as for `CompiledRounds.warm_up`."""
        graphs, sizes = 0, {2**i for i in range(self.engine.scheduler.max_num_seqs.bit_length())}
        if (compiled := self.engine.compiled) is not None:
            for speculate in (True, False):  # what each step is given
                self._write_dummies(1, speculate)
            with torch.inference_mode():
                graphs = compiled.warm_up(report, limit_s)
        if isinstance(length := self.engine.draft_length, AdaptiveDraftLength):
            length.forget(costs=True)  # compiling took part of the time
            for rows in sorted(sizes | {self.engine.scheduler.max_num_seqs}):
                self._write_dummies(rows)
            length.forget()  # acceptance on dummies says nothing about real text
        self.reset_metrics()
        return graphs

    def _write_dummies(self, rows: int, speculate: bool = True) -> None:
        prompt = [0] * min(DUMMY_TOKENS, self.engine.max_model_len // 2)
        tokens = min(DUMMY_TOKENS, self.engine.max_model_len - len(prompt))
        few = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, seed=0)
        self.generate([{"prompt_token_ids": prompt}] * rows, few, False, speculate=speculate)

    def get_default_sampling_params(self) -> SamplingParams:
        """New sampling parameters, as `generate` takes them where none are given."""
        return SamplingParams()

    def get_tokenizer(self) -> Any:
        return self._tokenizer

    def get_metrics(self) -> SpecDecodeCounters:
        """Totals over all requests since the start or `reset_metrics`, under vLLM's metric names: a
        dict by `.to_dict()`, or one Metric after the other."""
        return copy.deepcopy(self.engine.counters)

    def reset_prefix_cache(self) -> None:
        """As in vLLM. Here nothing is reused between requests; needed when somebody changes the
        weights of the target in place."""
        self.engine.read_weights()

    def reset_metrics(self) -> None:
        """Sets the counters to zero."""
        self.engine.reset_metrics()

    def _run(
        self, prompts: list[Prompt], sampling_params: Any, use_tqdm: bool, speculate: bool
    ) -> list[RequestOutput]:
        responses = self._submit(prompts, sampling_params, speculate)
        unfinished = {id(request) for response in responses for request in response.requests}
        bar = tqdm(total=len(unfinished), desc="generate", unit="response", disable=not use_tqdm)
        tokens = 0
        try:
            while unfinished:
                for request in self.engine.step():
                    if id(request) in unfinished:
                        unfinished.discard(id(request))
                        tokens += len(request.token_ids) - request.num_prompt_tokens
                        speed = tokens / max(bar.format_dict["elapsed"], 1e-9)
                        bar.set_postfix_str(f"{speed:.0f} tokens/s", refresh=False)
                        bar.update()
        finally:
            # after an error or an interrupt the engine is left usable
            for response in responses if unfinished else ():
                self.engine.abort(response.request_id)
            bar.close()
        return [response.output() for response in responses]

    def _stream(
        self, prompts: list[Prompt], sampling_params: Any, speculate: bool
    ) -> Iterator[RequestOutput]:
        (response,) = self._submit(prompts, sampling_params, speculate, streaming=True)
        try:
            while not response.finished:
                self.engine.step()
                if (new := response.delta()) is not None:
                    yield new
            if (new := response.delta()) is not None:  # what an abort left
                yield new
        finally:
            self.engine.abort(response.request_id)

    def _submit(
        self, prompts: list[Prompt], sampling_params: Any, speculate: bool, streaming: bool = False
    ) -> list[Response]:
        """Checks everything, then hands all requests to the engine: n of them for each prompt."""
        params = _params_per_prompt(sampling_params, len(prompts))
        self._check(prompts, params)
        self.engine.set_speculation(speculate)
        responses = []
        for prompt, prompt_params in zip(prompts, params, strict=True):
            request_id, self._num_prompts = str(self._num_prompts), self._num_prompts + 1
            requests = [
                self._request(request_id, i, prompt, prompt_params, streaming)
                for i in range(prompt_params.n)
            ]
            tokenizer = self._tokenizer if prompt_params.detokenize else None
            responses.append(
                Response(request_id, prompt.text, prompt.token_ids, requests, tokenizer)
            )
        for response in responses:
            for request in response.requests:
                self.engine.add(request)
        return responses

    def _request(
        self, request_id: str, index: int, prompt: Prompt, params: SamplingParams, streaming: bool
    ) -> Request:
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
            eos_token_ids=self._eos_token_ids,
            max_model_len=self.engine.max_model_len,
            detokenizer=detokenizer,
            **self._sampling.options(params),
        )

    def _check(self, prompts: list[Prompt], params: list[SamplingParams]) -> None:
        limit, vocab_size = self.engine.max_model_len, self.engine.target.vocab_size
        faults = []
        for i, (prompt, prompt_params) in enumerate(zip(prompts, params, strict=True)):
            length = len(prompt.token_ids)
            if length == 0:
                faults.append(f"prompt {i} is empty; give it at least one token")
            elif length >= limit:
                faults.append(
                    f"prompt {i} has {length} tokens, max_model_len is {limit} and at least one"
                    " must be left for the response; shorten it or raise max_model_len"
                )
            elif not 0 <= min(prompt.token_ids) <= max(prompt.token_ids) < vocab_size:
                faults.append(
                    f"prompt {i} has token ids outside 0..{vocab_size - 1}; is the tokenizer the"
                    " model's?"
                )
            faults += [f"prompt {i}: {fault}" for fault in self._sampling.faults(prompt_params)]
        if faults:
            raise ConfigError("; ".join(faults))


def _params_per_prompt(given: Any, count: int) -> list[SamplingParams]:
    if given is None or isinstance(given, SamplingParams):
        given = SamplingParams() if given is None else given.clone()
        return [given] * count
    params = list(given)
    if len(params) != count:
        raise ConfigError(
            f"{len(params)} sampling params for {count} prompts; give one for all, or one for each"
        )
    wrong = [i for i, one in enumerate(params) if not isinstance(one, SamplingParams)]
    if wrong:
        kind = type(params[wrong[0]]).__name__
        raise ConfigError(f"sampling_params[{wrong[0]}] is a {kind}; expected SamplingParams")
    return [one.clone() for one in params]
