"""LLM: the front door, in vLLM's shape. Text in, text out, and what drafting gained.

It owns the tokenizer, checks every prompt before any is run, and turns requests into outputs.
Rounds are the engine's."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Mapping, Sequence
from time import perf_counter
from typing import Any, TypedDict

import torch
from tqdm.auto import tqdm
from transformers import PreTrainedModel

from draftsmith.inference.engine.engine import Engine
from draftsmith.inference.engine.memory import memory_fault
from draftsmith.inference.engine_options import EngineOptions
from draftsmith.inference.entrypoints.checks import CheckedRequest, prompt_faults, sampling_faults
from draftsmith.inference.entrypoints.loading import (
    default_device,
    end_of_sequence_ids,
    load_drafter_for,
    load_target,
    load_tokenizer,
    loaded,
    make_draft_length,
    make_proposer,
    model_limit,
    require_as_loaded,
)
from draftsmith.inference.entrypoints.prompts import Prompt, chat_prompts, read_prompts
from draftsmith.inference.entrypoints.speculative_config import complete, parse_speculative_config
from draftsmith.inference.entrypoints.vllm_options import read_options, read_speculative_config
from draftsmith.inference.metrics import SpecDecodeCounters
from draftsmith.inference.outputs import RequestOutput
from draftsmith.inference.requests.detokenizer import Detokenizer
from draftsmith.inference.requests.request import Request
from draftsmith.inference.requests.response import Response
from draftsmith.inference.sampling.logits_processors import bad_word_ids
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

logger = logging.getLogger(__name__)

Params = SamplingParams | Sequence[SamplingParams] | None  # for all prompts, or one for each

WARM_UP_PROMPT = 64  # tokens, which are the context that costs of rounds are measured with


class HeadDrafting(TypedDict, total=False):
    """How a drafter of `LLM.from_modules` drafts; what is left out is as HeadProposer has it."""

    num_speculative_tokens: int
    draft_sample_method: str
    tree: TreeShape | None


class LLM:
    """A language model that writes text, optionally drafted for: what it writes is the model's own.

        from draftsmith import LLM, SamplingParams

        llm = LLM(
            "Qwen/Qwen3-8B",
            speculative_config={"model": "path/to/drafter", "num_speculative_tokens": 4},
        )
        outputs = llm.generate(["The capital of France is"], SamplingParams(max_tokens=64))
        print(outputs[0].outputs[0].text)
        print(llm.get_metrics().acceptance_length)

    model       the target: a folder, a repository id ("org/name", "org/name@revision"), or a model
                in memory (PreTrainedModel, FrozenTarget), which keeps its dtype and device
    tokenizer   a folder, a repository id or a tokenizer; None: the model's own. Without one, as
                with a model in memory, prompts are token ids and texts are empty
    dtype       precision of the target: "float32", "bfloat16", "float16"; "auto": the checkpoint's,
                or float32 in place of bfloat16 on a CPU without instructions for it
    device      "cpu", "cuda", "cuda:1", …; None: the accelerator of this machine, else cpu
    revision    branch, tag or commit of the model's repository; None: main
    trust_remote_code       run Python code that comes with the model's repository
    speculative_config      how to draft, by vLLM's names; None: no drafting. Its keys, of which
                            one of the first two is needed:
        "model"                     the exported drafter: a folder or a repository id
        "method"                    its family, which is read from its config.json if left out; or
                                    "ngram", "suffix", "lookahead", which need no model
        "num_speculative_tokens"    K, tokens drafted per round; by default what the drafter was
                                    made for
        others                      docs/runtime.md, "Drafting"
    seed                    what the seeds of requests without one are made from
    max_model_len           most tokens of a prompt and its response together; None: the model's own
                            limit, or its drafter's if that is less
    max_num_seqs            responses written at the same time; the others wait
    max_num_batched_tokens  prompt tokens that one forward of the target reads
    enforce_eager           False: rounds on CUDA run compiled, with CUDA graphs. True: never. None:
                            eager on every device, unless `compilation_config` asks for compiled
                            rounds
    compilation_config      how rounds are compiled, as in vLLM: a mode from 0 (not at all) to 3, or
                            a dict with "mode", "backend", "cudagraph_mode"
    tensor_parallel_size    without effect: the target is on one device. Above 1 it is a warning
    vllm_options            other options of vLLM's LLM, of today and of older versions, so that a
                            snippet written for vLLM runs as it is. Those that change no output
                            (gpu_memory_utilization, block_size, …) are without effect

    ConfigError, whose `where` names the place: an unknown option, or one that would change outputs
    and is not implemented; a wrong value; a drafter that does not fit the target; rows of the
    `max_model_len` that was passed do not fit the device. CheckpointError: files that cannot be
    loaded, or are not what their config.json says.
    """

    engine: Engine
    _tokenizer: Any
    _eos_token_ids: frozenset[int]
    _num_prompts: int  # names requests
    _num_seeded: int  # numbers the responses that brought no seed

    def __init__(
        self,
        model: str | FrozenTarget | PreTrainedModel,
        tokenizer: Any = None,
        *,
        dtype: str | torch.dtype = "auto",
        device: str | torch.device | None = None,
        revision: str | None = None,
        trust_remote_code: bool = False,
        speculative_config: Mapping[str, Any] | None = None,
        seed: int = 0,
        max_model_len: int | None = None,
        max_num_seqs: int = 8,
        max_num_batched_tokens: int = 512,
        enforce_eager: bool | None = None,
        compilation_config: Mapping[str, Any] | int | None = None,
        tensor_parallel_size: int = 1,
        **vllm_options: Any,
    ) -> None:
        options = read_options(
            {
                **vllm_options,
                "tokenizer": tokenizer,
                "dtype": dtype,
                "device": device,
                "revision": revision,
                "trust_remote_code": trust_remote_code,
                "speculative_config": speculative_config,
                "seed": seed,
                "max_model_len": max_model_len,
                "max_num_seqs": max_num_seqs,
                "max_num_batched_tokens": max_num_batched_tokens,
                "enforce_eager": enforce_eager,
                "compilation_config": compilation_config,
                "tensor_parallel_size": tensor_parallel_size,
            }
        )
        engine, loaded_tokenizer = _load(model, options)
        self._set_up(engine, loaded_tokenizer)

    @classmethod
    def from_modules(
        cls,
        target: FrozenTarget | PreTrainedModel,
        *,
        drafter: Drafter | None = None,
        drafting: HeadDrafting | None = None,
        proposer: Proposer | None = None,
        tokenizer: Any = None,
        options: EngineOptions | None = None,
        draft_length: DraftLength | None = None,
        rejection_sample_method: str = AUTO,
    ) -> LLM:
        """An LLM of modules in memory, for measurements during training and for tests; what is
        reported is measured on an export.

        drafter         drafts for the target, to which it is attached; with `drafting`
        proposer        drafts in place of a drafter; None and no drafter: nothing is drafted
        tokenizer       None: prompts are token ids, and texts are empty
        options         of the engine; those that load something have no effect
        draft_length    how many tokens a round drafts; None: as many as the proposer can
        rejection_sample_method     the verification rule at temperatures above 0

        Errors as of the constructor."""
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
        llm = cls.__new__(cls)
        llm._set_up(
            _make_engine(target, options, limit, proposer, draft_length, rejection_sample_method),
            tokenizer,
        )
        return llm

    def _set_up(self, engine: Engine, tokenizer: Any) -> None:
        self.engine = engine
        self._tokenizer = tokenizer
        self._eos_token_ids = end_of_sequence_ids(engine.target, tokenizer)
        self._num_prompts = 0
        self._num_seeded = 0

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
        checked = self.check(prompts, _params_per_prompt(sampling_params, len(prompts)))
        first = self._num_prompts
        try:
            responses = [self.start(request, speculate=speculate) for request in checked]
            self._finish(responses, use_tqdm)
        except BaseException:
            # An interrupt too leaves nothing queued, of the request that was being submitted either
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

    def check(
        self, prompts: Sequence[Prompt], params: Sequence[SamplingParams]
    ) -> list[CheckedRequest]:
        """The prompts with their parameters, as `start` takes them. ConfigError names every prompt
        that cannot be run; its `where` is "prompts", or the parameter that is at fault first.
        Changes nothing: callable from any thread."""
        limit = self.engine.max_model_len
        vocab_size = self.engine.target.vocab_size
        bad_words: dict[int, list[list[int]]] = {}  # by identity: many prompts may share parameters
        wrong_params: dict[int, dict[str, str]] = {}
        checked: list[CheckedRequest] = []
        faults: list[tuple[str, str]] = []  # what is at fault, and a sentence on it
        for i, (prompt, asked) in enumerate(zip(prompts, params, strict=True)):
            key = id(asked)
            if key not in bad_words:
                words = asked.bad_words if self._tokenizer is not None else ()
                bad_words[key] = bad_word_ids(self._tokenizer, words)
                wrong_params[key] = sampling_faults(
                    asked, bad_words[key], self._tokenizer, vocab_size, self._eos_token_ids
                )
            wrong = [("prompts", fault) for fault in prompt_faults(prompt, vocab_size, limit)]
            for name, fault in wrong_params[key].items():
                wrong.append((f"SamplingParams.{name}", fault))
            faults += [(where, f"prompt {i} {fault}") for where, fault in wrong]
            checked.append(CheckedRequest(prompt, asked, bad_words[key]))
        if faults:
            raise ConfigError("; ".join(fault for _, fault in faults), where=faults[0][0])
        return checked

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
        (checked,) = self.check([prompt], [sampling_params])
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
            eos_token_ids=self._eos_token_ids,
            max_model_len=self.engine.max_model_len,
            detokenizer=detokenizer,
            bad_words=checked.bad_words,
        )

    def abort(self, request_id: str) -> None:
        """Ends a request between two steps; its last output says finish_reason "abort"."""
        self.engine.abort(request_id)

    # ------------------------------------------------------------------ the engine

    def warm_up(self, limit_s: float = 900.0) -> None:
        """Compiles every shape that rounds can have, and measures what rounds cost where draft
        lengths go by that. From the thread that will run the rounds, before any request. `limit_s`:
        seconds after which nothing further is begun; what is left is compiled and measured when it
        is first met."""
        deadline = perf_counter() + limit_s
        few = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, seed=0)
        length = min(WARM_UP_PROMPT, self.engine.max_model_len // 2)
        prompt = {"prompt_token_ids": [0] * length}
        if self.engine.compiles:
            for speculate in (True, False):  # what each step is given
                self.generate(prompt, few, False, speculate=speculate)
            self.engine.warm_up(deadline)
        draft_length = self.engine.draft_length
        for rows in draft_length.sizes_to_measure(self.engine.options.max_num_seqs):
            if perf_counter() < deadline:
                self.generate([prompt] * rows, few, False)
        draft_length.forget()
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


def _load(
    model: str | FrozenTarget | PreTrainedModel, options: EngineOptions
) -> tuple[Engine, Any]:
    """The engine, and the tokenizer, which is None where a model in memory came without one."""
    source: dict[str, Any] = {
        "trust_remote_code": options.trust_remote_code,
        "revision": options.revision,
    }
    drafting = read_speculative_config(options.speculative_config)
    config = parse_speculative_config(complete(drafting, model, **source))
    device = default_device(options.device)
    target = load_target(model, dtype=options.dtype, device=device, **source)
    if loaded(model):
        require_as_loaded(target, options.dtype, options.device)
    tokenizer = load_tokenizer(model, options.tokenizer, **source)
    target, drafter = load_drafter_for(target, config, tokenizer)
    limit = model_limit(target, options.max_model_len, drafter)
    proposer = make_proposer(config, target, drafter, options.max_num_seqs, limit)
    rule = config.rejection_sample_method
    engine = _make_engine(target, options, limit, proposer, make_draft_length(config), rule)
    return engine, tokenizer


def _make_engine(
    target: FrozenTarget,
    options: EngineOptions,
    max_model_len: int,
    proposer: Proposer | None,
    draft_length: DraftLength | None,
    rejection_sample_method: str,
) -> Engine:
    """The engine, with rows of `max_model_len` tokens.

    ConfigError if an accelerator's memory does not hold rows of the length that the options ask
    for; a warning, if they ask for none: few texts are as long as a model's own limit."""
    engine = Engine(
        target,
        options.model_copy(update={"max_model_len": max_model_len}),
        proposer=proposer,
        draft_length=draft_length,
        rejection_sample_method=rejection_sample_method,
    )
    if (fault := memory_fault(engine)) is not None:
        if options.max_model_len is not None:
            raise ConfigError(fault)
        logger.warning("%s, or expect to run out of memory in long texts", fault)
    return engine


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
