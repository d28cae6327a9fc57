"""Options of speculative_config of the trained methods: heads of every family, and draft models."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field, model_validator
from typing_extensions import override

from draftsmith.inference.engine_options import option
from draftsmith.inference.spec_decode.proposers.options import MethodOptions
from draftsmith.inference.spec_decode.tree_shape import DynamicTree, StaticTree, TreeShape
from draftsmith.inference.spec_decode.verification.rejection_sampler import (
    AUTO,
    SAMPLE_MATCH,
    TRAVERSAL,
)


class HeadOptions(MethodOptions):
    """The options of `speculative_config` for a trained head."""

    trained: ClassVar[bool] = True

    model: str = option(..., "folder or repository id of an exported head")
    draft_sample_method: Literal["probabilistic", "greedy"] = option(
        "probabilistic", "at temperature > 0: sample from q, or take its argmax"
    )
    draft_vocab_size: int | None = option(
        None,
        "the number of tokens that are proposed: the most frequent of the text that the drafter was"
        " trained on, or the first of draft_token_ids",
        ge=1,
    )
    draft_token_ids: str | list[int] | None = option(
        None, "a JSON file of the token ids that are proposed, the most frequent first"
    )
    speculative_token_tree: str | list[list[int]] | None = option(
        None,
        "a fixed tree of drafts, as the ranks on the way to each, such as [(0,), (1,), (0, 0)];"
        " num_speculative_tokens is then its size",
    )
    speculative_eagle_topk: int | None = option(
        None,
        "a tree grown in every round: the number of drafts per level that are expanded;"
        " num_speculative_tokens is the number of its nodes that are verified, by default as many"
        " per level",
        ge=1,
    )
    speculative_num_steps: int | None = option(
        None, "levels of that tree; default: as many as the drafter drafts in a row", ge=1
    )

    with_: MethodOptions | None = Field(
        None,
        alias="with",
        description="ngram or suffix, whose options may follow: drafts beside the head, which is"
        " asked where that pays",
    )

    @override
    @property
    def beside(self) -> MethodOptions | None:
        """The method that `with` names."""
        return self.with_

    @override
    @property
    def samples(self) -> bool:
        """True unless drafts are to be the most likely tokens."""
        return self.draft_sample_method == "probabilistic"

    @override
    @property
    def default_tokens(self) -> int | None:
        """The nodes of a static tree; None: the number is asked for."""
        # what the drafter's folder says is filled in before (speculative_config.py)
        return self.tree.budget if isinstance(self.tree, StaticTree) else None

    @override
    @property
    def tree(self) -> TreeShape | None:
        """The static tree that is written out, or the dynamic one of a width; None: chains."""
        if self.speculative_token_tree is not None:
            return StaticTree.parse(self.speculative_token_tree)
        if self.speculative_eagle_topk is None or self.num_speculative_tokens is None:
            return None
        steps = self.speculative_num_steps or min(5, self.num_speculative_tokens)
        return DynamicTree(self.speculative_eagle_topk, steps, self.num_speculative_tokens)

    @model_validator(mode="after")
    def _check_tree(self) -> HeadOptions:
        grown = self.speculative_eagle_topk is not None
        steps = self.speculative_num_steps
        if (grown and self.speculative_token_tree is not None) or (steps and not grown):
            raise ValueError(
                "give one: speculative_token_tree, a fixed tree, or speculative_eagle_topk, a tree"
                " that grows, with or without speculative_num_steps"
            )
        tree = self.tree
        if tree is not None and tree.budget != self.num_speculative_tokens:
            raise ValueError(
                f"num_speculative_tokens is {self.num_speculative_tokens}, but"
                f" speculative_token_tree has {tree.budget} choices; expected the same number"
            )
        return self

    @model_validator(mode="after")
    def _check_beside(self) -> HeadOptions:
        if self.beside is None:
            return self
        if self.tree is not None:
            raise ValueError("with: chains are drafted beside chains; leave the tree out")
        if self.enable_adaptive_verification:
            raise ValueError(
                "with chooses by cost who drafts, and the head then drafts all of"
                " num_speculative_tokens; leave enable_adaptive_verification out"
            )
        if self.rejection_sample_method == TRAVERSAL:
            raise ValueError(
                f"rejection_sample_method {TRAVERSAL!r} needs drafts that were sampled, and those"
                f" of {self.beside.method} are deterministic; expected {AUTO}, {SAMPLE_MATCH} or a"
                " rule for chains"
            )
        return self


class DraftModelOptions(HeadOptions):
    """The options of `speculative_config` for a draft model."""

    use_heterogeneous_vocab: bool = option(
        False, "the draft model has another tokenizer; only shared tokens are drafted"
    )
