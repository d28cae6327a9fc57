"""What the matrix is made of: drafters, rules, trees, length policies, processors, rows, targets
and devices, which of them go together, and the LLM of a configuration."""

from __future__ import annotations

import copy
from collections import Counter
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch

from draftsmith.inference import LLM
from draftsmith.inference.entrypoints.loading import make_draft_length
from draftsmith.inference.entrypoints.speculative_config import parse_speculative_config
from draftsmith.inference.spec_decode.draft_length import GatedDraftLength
from draftsmith.inference.spec_decode.proposers.base import Proposer
from draftsmith.inference.spec_decode.tree_shape import DynamicTree, StaticTree
from tests.support.cases import Case
from tests.support.cases import make as make_drafter
from tests.support.covering import Partial, cover
from tests.support.draft_lengths import CHEAP
from tests.support.drafters import FakeHead, StubProposer
from tests.support.engines import byte_tokenizer, head_beside, make_llm
from tests.support.models import make_tiny_model

K = 3
BLOCK = {"num_layers": 1, "block_size": 4, "mask_token_id": 2}
FAMILIES = {
    "draft_model": Case("draft_model", options={"from_target": {"last": 1}}, noise=0.05),
    "eagle": Case("eagle", options={"init": "pass_through"}, noise=0.12),
    "eagle3": Case("eagle3", {"draft_vocab_size": 50}, taps=(1, 2)),
    "medusa": Case("medusa", {"num_heads": 3}),
    "mlp": Case("mlp", options={"unroll_steps": 3}),
    "mtp": Case("mtp"),
    "peagle": Case(
        "peagle", {"num_depths": 4, "mask_token_id": 2}, {"own_embeddings": False}, taps=(1, 2)
    ),
    "dflash": Case("dflash", BLOCK, taps=(1, 2)),
    "dspark": Case("dspark", {**BLOCK, "markov_rank": 8}, taps=(1, 2)),
    "dflash2": Case(
        "dflash2",
        {**BLOCK, "conv_group_size": 8, "selector_rank": 8, "selector_top_k": 3},
        taps=(1, 2),
    ),
}
BESIDE = {"eagle3+ngram": ("eagle3", "ngram"), "medusa+suffix": ("medusa", "suffix")}
STUBS = ["right", "wrong", "ragged", "branches", "sampled"]  # tests/support/drafters.py
TRAINING_FREE = {
    "ngram": {"num_speculative_tokens": K, "prompt_lookup_min": 1},
    "suffix": {"num_speculative_tokens": K},
    "lookahead": {
        "num_speculative_tokens": 6,
        "lookahead_window_size": 4,
        "lookahead_ngram_size": 3,
        "lookahead_num_guesses": 3,
    },
}
ATTENTION = {
    "full": ["qwen3", "llama", "granite", "qwen2"],
    "sliding": ["gemma3", "gpt_oss", "mistral", "gemma2", "phi3", "cohere2", "qwen3_sliding"],
    # latent; without transformers' functions; a mask per head; views, not reshapes; experts; masks
    # per row
    "own": ["deepseek_v3", "falcon", "doge", "afmoe", "mixtral", "xglm"],
    "recurrent": ["qwen3_next", "lfm2", "falcon_h1", "mamba"],
}
CONFIGS: dict[str, dict[str, Any]] = {  # of those that tests/support/models.py does not know
    "afmoe": {
        "head_dim": 8,
        "num_experts": 4,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "num_dense_layers": 1,
        "sliding_window": 5,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    "xglm": {"d_model": 32, "ffn_dim": 48, "num_layers": 3, "attention_heads": 4, "init_std": 0.3},
}
# nothing emulates their kernels
OF_EXPERTS = ["gpt_oss", "mixtral", "deepseek_v3", "afmoe", "qwen3_next"]
TREES = {
    "static": StaticTree.parse([(0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0)]),
    "dynamic": DynamicTree(topk=3, depth=3, budget=7),
}
LENGTHS: dict[str, dict[str, Any]] = {
    "fixed": {},
    "adaptive": {
        "enable_adaptive_verification": True,
        "adaptive_verification_costs": {"verify": [10, 10.5, 11, 11.5], "draft": [0.3, 0.6, 0.9]},
    },
    "batch size": {"num_speculative_tokens_per_batch_size": [[1, 2, 3], [3, 3, 2], [4, 500, 1]]},
    "request": {},  # SamplingParams.num_speculative_tokens
}


def possible(chosen: Partial) -> bool:
    """False if some of the values exclude each other."""
    drafter, rule, tree = (chosen.get(name) for name in ("drafter", "rule", "tree"))
    length, attention, device = (chosen.get(name) for name in ("length", "attention", "device"))
    head = drafter is None or drafter in (*FAMILIES, "head", "block")
    beside = drafter in (*BESIDE, "beside")
    sampled = head or beside or drafter in ("sampled", "fake")
    trees = tree in TREES
    draws_trees = trees or drafter in ("lookahead", "branches")
    return not (
        # only trained families grow trees, and recurrent targets verify none
        (trees and not head)
        or (draws_trees and attention == "recurrent")
        # a tree is judged by traversal or by matching, and only drafts that were sampled by the
        # former
        or (draws_trees and rule in ("token", "block"))
        or (rule == "traversal" and not sampled)
        # some drafts are deterministic, and lengths are chosen already
        or (beside and (rule == "traversal" or length == "adaptive"))
        # the shape of a tree does not adapt
        or (draws_trees and length == "adaptive")
        # trained families alone score the tokens of a vocabulary
        or (chosen.get("vocabulary") == "reduced" and not (head or beside))
        # nothing is drafted
        or (drafter == "off" and (rule not in (None, "auto") or length not in (None, "fixed")))
        # a cut of a recurrent target cannot be rolled back by the drafter
        or (drafter in ("draft_model", "mtp") and attention == "recurrent")
        # stubs draft as many as they can in any round
        or (length == "adaptive" and drafter in STUBS)
        # and, as the fake head, on the CPU
        or (device == "claimed gpu" and drafter in (*STUBS, "fake"))
    )


@dataclass(frozen=True)
class Configuration:
    drafter: str
    rule: str
    tree: str
    length: str
    processors: str
    rows: str
    architecture: str
    device: str = "cpu"
    vocabulary: str = "whole"

    def __str__(self) -> str:
        return "-".join(vars(self).values())

    @property
    def matched(self) -> bool:
        """True if no draft is sampled, and the target's own draws decide."""
        heads = self.drafter in (*FAMILIES, *BESIDE, "fake")
        return self.drafter != "sampled" and (
            self.rule == "sample_match" or (self.rule == "auto" and not heads)
        )

    def llm(self, target: Any, texts: dict[tuple[int, ...], list[int]], **options: Any) -> LLM:
        """An LLM of a target in memory. `texts`: what it writes by prompt, for the stubs."""
        options = {
            "tokenizer": byte_tokenizer(),
            "rejection_sample_method": self.rule,
            "max_num_seqs": int(self.rows),
            **options,
        }
        device = "cuda" if self.device == "claimed gpu" else "cpu"
        # what claims to be on a device stays there
        model = target if device == "cpu" else copy.deepcopy(target).to(device)
        vocab = model.config.get_text_config().vocab_size
        if self.length in ("adaptive", "batch size"):
            config = {"method": "ngram", "num_speculative_tokens": K, **LENGTHS[self.length]}
            options["draft_length"] = make_draft_length(parse_speculative_config(config))
        drafting = {
            "num_speculative_tokens": K,
            "draft_sample_method": "greedy" if self.rule == "sample_match" else "probabilistic",
        }
        family, beside = BESIDE.get(self.drafter, (self.drafter, None))
        if family in FAMILIES:
            frozen, drafter = make_drafter(_fitting(FAMILIES[family], vocab), model)
            if self.vocabulary == "reduced":
                known = drafter.draft_to_target
                known = torch.arange(vocab) if known is None else known
                drafter.reduce_vocabulary(known[::2])
            head = drafter.to(device).freeze()
            if beside is not None:
                other = self._training_free(beside, torch.device(device))
                schedule = LENGTHS[self.length].get("num_speculative_tokens_per_batch_size")
                options["length"] = GatedDraftLength(K, CHEAP, schedule)
                options.pop("draft_length", None)
                return head_beside(frozen, head, other, **drafting, **options)
            return make_llm(frozen, drafter=head, tree=TREES.get(self.tree), **drafting, **options)
        if self.drafter == "fake":
            head = FakeHead(vocab, (1, 2), model.config.hidden_size, range(1, vocab, 2))
            return make_llm(model, drafter=head, **drafting, **options)
        return make_llm(
            model, proposer=self._proposer(vocab, texts, torch.device(device)), **options
        )

    def _proposer(self, vocab: int, texts: dict, device: torch.device) -> Proposer | None:
        if self.drafter == "off":
            return None
        if self.drafter in TRAINING_FREE:
            return self._training_free(self.drafter, device)
        return StubProposer(self.drafter, K, vocab, texts)

    def _training_free(self, method: str, device: torch.device) -> Proposer:
        config = {"method": method, **TRAINING_FREE[method]}
        if method == "suffix" and self.rule != "sample_match":
            # drafts of earlier responses depend on who was first
            config["suffix_decoding_max_cached_requests"] = 0
        return parse_speculative_config(config).make_proposer(device)


def _fitting(case: Case, vocab: int) -> Case:
    """The case for a vocabulary of few tokens."""
    few = {"draft_vocab_size": 3, "selector_top_k": 2} if vocab < 50 else {}
    shape = {name: few.get(name, value) for name, value in case.shape.items()}
    return replace(case, shape=shape)


@cache
def target_of(architecture: str, vocab_size: int = 0) -> torch.nn.Module:
    """A random target that ends no response by itself; vocab_size: as it is if 0."""
    small = {"vocab_size": vocab_size, "pad_token_id": None, "bos_token_id": None}
    model = make_tiny_model(
        architecture,
        max_position_embeddings=64,
        **CONFIGS.get(architecture, {}),
        **(small if vocab_size else {}),
    )
    model.generation_config.eos_token_id = model.config.eos_token_id = None
    return model


def _configurations(
    factors: dict[str, list[str]], groups: dict[str, list[str]], without: str = ""
) -> list[Configuration]:
    """The covering design; members of a group of drafters, and architectures of a kind of
    attention, take turns. `without`: an architecture to leave out."""
    used: Counter[str] = Counter()

    def next_of(members: list[str]) -> str:
        member = min(members, key=lambda name: used[name])
        used[member] += 1
        return member

    configurations = []
    for chosen in cover(factors, possible, slow=("claimed gpu",)):
        members = [
            member
            for member in groups.get(chosen["drafter"], [chosen["drafter"]])
            if possible(chosen | {"drafter": member})
        ]
        architecture = next_of(
            [
                name
                for name in ATTENTION[chosen.pop("attention")]
                if name != without
                and not (chosen.get("device") == "claimed gpu" and name in OF_EXPERTS)
            ]
        )
        chosen |= {"drafter": next_of(members), "architecture": architecture}
        configurations.append(Configuration(**chosen))
    return configurations


GREEDY = _configurations(
    {
        "drafter": ["off", *TRAINING_FREE, *STUBS, "fake", *FAMILIES, *BESIDE],
        "attention": [*ATTENTION],
        "processors": ["none", "penalties", "masks", "ends"],
        "length": [*LENGTHS],
        "tree": ["chain", *TREES],
        "rule": ["auto", "sample_match", "token"],
        "rows": ["1", "3", "6"],
        "device": ["cpu", "claimed gpu"],
        "vocabulary": ["whole", "reduced"],
    },
    {},
)
SAMPLED = _configurations(
    {
        "rule": ["auto", "token", "block", "sample_match", "traversal"],
        "processors": ["none", "filters", "penalties", "masks", "ends"],
        "drafter": ["list", "lookahead", "sampled", "head", "block", "beside"],
        "attention": [*ATTENTION],
        "tree": ["chain", *TREES],
        "length": [*LENGTHS],
        "rows": ["40", "400"],
        "vocabulary": ["whole", "reduced"],
    },
    {
        "list": ["ngram", "suffix", "random"],
        "head": ["eagle3", "mtp", "medusa", "fake", "draft_model", "eagle", "mlp"],
        "block": ["dflash", "dspark", "dflash2", "peagle"],
        "beside": [*BESIDE],
    },
    without="gemma3",  # writes one text of four tokens nearly always
)
