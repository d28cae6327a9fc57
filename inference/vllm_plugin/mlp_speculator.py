"""MLP speculators in vLLM, which knows their name and config.json but has neither a model nor a
proposer for them.

    speculative_config={"method": "mlp_speculator", "model": DIR, "num_speculative_tokens": K}

The model is registered under IBM's architecture (mlp_model.py). The runner is made as for Medusa,
whose heads ask the same of vLLM (the last hidden state, no cache of their own), and is then given
Medusa's proposer with a recurrence in it (mlp_proposer.py), which is handed the sampled tokens too.
The method keeps its name in the configuration, by which vLLM knows what else holds for it: its V1
runner, and no asynchronous scheduling."""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable, Sequence
from typing import Any

logger = logging.getLogger("vllm.draftsmith")

METHOD = "mlp_speculator"
ARCHITECTURE = "MLPSpeculatorPreTrainedModel"
MODEL = "inference.vllm_plugin.mlp_model:MLPSpeculatorModel"
TESTED = "0.32."  # prefix of the versions of vLLM that the tests ran with

# Arguments of the runner's propose_draft_token_ids that the proposer needs.
PROPOSING = (
    "scheduler_output",
    "sampled_token_ids",
    "sampling_metadata",
    "sample_hidden_states",
    "spec_decode_metadata",
)


def register() -> None:
    """Registers the model with vLLM. `extend_runner` follows in the processes that draft."""
    from vllm import ModelRegistry
    from vllm.config import SpeculativeConfig

    if ARCHITECTURE not in ModelRegistry.get_supported_archs():
        ModelRegistry.register_model(ARCHITECTURE, MODEL)
        _wrap(SpeculativeConfig, "__post_init__", (), _with_heads_counted)


def _wrap(owner: Any, name: str, parameters: Sequence[str], make: Callable[[Any], Any]) -> None:
    """Replaces `owner.name` by `make` of it; TypeError unless it takes parameters of these
    names."""
    original = getattr(owner, name)
    if missing := set(parameters) - set(inspect.signature(original).parameters):
        raise TypeError(
            f"{original.__qualname__} takes no {', '.join(sorted(missing))} in this version of vLLM"
        )
    setattr(owner, name, functools.wraps(original)(make(original)))


def require_heads(tokens: int | None, heads: Any) -> None:
    """ValueError if there are fewer heads than tokens to draft. Either may be unknown."""
    if isinstance(heads, int) and tokens is not None and tokens > heads:
        raise ValueError(
            f"speculative_config: num_speculative_tokens is {tokens}, but this MLP speculator has"
            f" {heads} heads (n_predict in its config.json) and drafts one token with each; ask for"
            f" {heads} or fewer"
        )


def _with_heads_counted(post_init: Any) -> Any:
    """Checks the number of heads before any weight is read; vLLM's own check wants a multiple of
    n_predict."""

    def __post_init__(self: Any) -> None:
        try:
            post_init(self)
        finally:
            if self.method == METHOD:
                fields = getattr(self.draft_model_config, "hf_config", None)
                require_heads(self.num_speculative_tokens, getattr(fields, "n_predict", None))

    return __post_init__


@functools.cache
def extend_runner() -> None:
    """Lets `GPUModelRunner`, and with it vLLM's runner on CPUs, draft with MLP speculators."""
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    _wrap(GPUModelRunner, "propose_draft_token_ids", PROPOSING, _with_sampled_tokens)
    _wrap(GPUModelRunner, "__init__", ("vllm_config", "device"), _with_recurrence)


def _with_recurrence(original: Any) -> Any:
    def __init__(self: Any, vllm_config: Any, device: Any) -> None:
        config = vllm_config.speculative_config
        if config is None or config.method != METHOD:
            original(self, vllm_config, device)
            return
        config.method = "medusa"
        try:
            original(self, vllm_config, device)
        finally:
            config.method = METHOD
        if hasattr(self, "drafter"):  # of a pipeline's stages, the last alone drafts
            from vllm import __version__ as version

            from inference.vllm_plugin.mlp_proposer import MLPProposer

            if not version.startswith(TESTED):
                logger.warning(
                    "Draftsmith: method %r was tested with vLLM %sx, and this is %s",
                    METHOD,
                    TESTED,
                    version,
                )
            self.drafter = MLPProposer(vllm_config, device)

    return __init__


def _with_sampled_tokens(original: Any) -> Any:
    signature = inspect.signature(original)

    def propose_draft_token_ids(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.speculative_config.method != METHOD:
            return original(self, *args, **kwargs)
        given = signature.bind(self, *args, **kwargs).arguments
        draft_token_ids, probabilities = self.drafter.propose_after(
            **{name: given[name] for name in PROPOSING}
        )
        self._draft_probs = probabilities
        self._draft_prob_req_ids = (
            None if probabilities is None else self.input_batch.req_ids.copy()
        )
        return draft_token_ids

    return propose_draft_token_ids
