"""A head with n-grams or suffixes beside it: who drafts, what the head has read, the options."""

from __future__ import annotations

import pytest

from draftsmith.inference import SamplingParams
from draftsmith.inference.entrypoints.loading import make_draft_length
from draftsmith.inference.entrypoints.speculative_config import parse_speculative_config
from draftsmith.inference.server.prometheus import ServerMetrics
from draftsmith.inference.spec_decode.draft_length import DraftLength, GatedDraftLength
from draftsmith.inference.spec_decode.proposal import Proposal
from draftsmith.inference.spec_decode.proposers.head import HeadProposer
from draftsmith.inference.spec_decode.round_plan import RoundPlan
from draftsmith.speculators.errors import ConfigError
from tests.support.cases import CASES, make
from tests.support.draft_lengths import CHEAP, K
from tests.support.drafters import StubProposer
from tests.support.engines import head_beside, ids_of, make_llm, proposer_of

PROMPTS = [{"prompt_token_ids": [3 + i % 7 for i in range(n)]} for n in (40, 9, 25, 10)]
# of other lengths, so that rows end and move at other rounds
PARAMS = [
    SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True) for tokens in (70, 9, 50, 30)
]


class Recorded:
    """The drafts of a head by the text that they follow, as `propose` is called."""

    def __init__(self, monkeypatch) -> None:
        self.drafts: dict[tuple[int, ...], list[int]] = {}
        self.all_of: list[bool] = []
        propose = HeadProposer.propose

        def recording(proposer, requests, plan):
            proposal = propose(proposer, requests, plan)
            for row, (request, count) in enumerate(zip(requests, proposal.counts, strict=True)):
                if count == K:
                    self.drafts[tuple(request.token_ids)] = proposal.token_ids[row].tolist()
            self.all_of.append(all(proposal.counts))
            return proposal

        monkeypatch.setattr(HeadProposer, "propose", recording)


class AskedAndIgnored(RoundPlan):
    """The head drafts in every round, and nothing of it is verified."""

    def settle(self, proposal: Proposal) -> Proposal:
        return Proposal.empty(proposal.num_rows)


class Sometimes(RoundPlan):
    """A row's head is asked in one of eleven rounds, in turns of its own."""

    turn = 0

    def divide(self, beside: Proposal) -> tuple[list[int], list[int]]:
        turns = [Sometimes.turn + row for row in range(len(self.limits))]
        Sometimes.turn += 1
        asked = [0 if turn % 11 else limit for turn, limit in zip(turns, self.limits, strict=True)]
        return [0 if a else count for a, count in zip(asked, beside.counts, strict=True)], asked


class Planned(DraftLength):
    """Rounds by plans of a kind."""

    def __init__(self, kind: type[RoundPlan]) -> None:
        super().__init__(K)
        self.kind = kind

    def plan(self, rows):
        return self.kind(self._room(rows))


@pytest.mark.parametrize("case", ["eagle3", "medusa", "draft_model, cut", "dflash"])
def test_drafts_after_rounds_without_the_head_are_those_of_a_head_asked_in_every_round(
    case, tiny_model, monkeypatch
):
    target, drafter = make(CASES[case], tiny_model("llama"))
    drafter.freeze()
    recorded = Recorded(monkeypatch)
    options = {"num_speculative_tokens": K, "max_num_seqs": 4, "max_num_batched_tokens": 16}
    every = make_llm(target, drafter=drafter, draft_length=Planned(AskedAndIgnored), **options)
    text = ids_of(every.generate(PROMPTS, PARAMS, False))
    reference = dict(recorded.drafts)
    recorded.drafts.clear()
    Sometimes.turn = 0
    texts = dict(zip([tuple(p["prompt_token_ids"]) for p in PROMPTS], text, strict=True))
    beside = StubProposer("ragged", K, 0, texts)  # some of what will be written
    llm = head_beside(target, drafter, beside, Planned(Sometimes), **options)
    assert ids_of(llm.generate(PROMPTS, PARAMS, False)) == text
    assert len(recorded.drafts) > 3
    assert not all(recorded.all_of)
    assert recorded.drafts == {after: reference[after] for after in recorded.drafts}


@pytest.fixture(scope="module")
def eagle3(tiny_model):
    target, drafter = make(CASES["eagle3"], tiny_model("llama"))
    return target, drafter.freeze()


@pytest.mark.parametrize("method", ["ngram", "suffix"])
def test_rows_of_one_round_are_drafted_by_both_and_counted_by_method(method, eagle3, monkeypatch):
    target, drafter = eagle3
    llm = head_beside(target, drafter, proposer_of(method, K), num_speculative_tokens=K)
    mixed = []
    plain = llm.generate(PROMPTS, PARAMS, False, speculate=False)
    propose = type(llm.engine.proposer).propose

    def recording(proposer, requests, plan):
        proposal = propose(proposer, requests, plan)
        drafted = zip(proposal.methods, proposal.counts, strict=True)
        mixed.append({name for name, count in drafted if count})
        return proposal

    monkeypatch.setattr(type(llm.engine.proposer), "propose", recording)
    outputs = llm.generate(PROMPTS, PARAMS, False)
    assert ids_of(outputs) == ids_of(plain)
    assert {"head", "beside"} in mixed
    metrics = llm.get_metrics()
    assert sum(metrics.num_drafts_by_method.values()) == metrics.num_drafts
    assert set(metrics.num_drafts_by_method) == {"head", "beside"}
    for name in ("head", "beside"):
        of_requests = [output.metrics.num_drafts_by_method.get(name, 0) for output in outputs]
        assert sum(of_requests) == metrics.num_drafts_by_method[name]
    scraped = ServerMetrics("tiny", llm, lambda: 0, lambda: 0).registry.get_sample_value
    total = "vllm:spec_decode_num_drafts_by_method_total"
    labels = {"model_name": "tiny", "engine": "0", "method": "head"}
    assert scraped(total, labels) == metrics.num_drafts_by_method["head"]


# ---------------------------------------------------------------------- options

HEAD = {"method": "eagle3", "model": "folder", "num_speculative_tokens": K}


def test_options_of_both_methods_are_given_side_by_side():
    config = parse_speculative_config(
        {**HEAD, "with": "suffix", "suffix_decoding_max_spec_factor": 2.0}
    )
    assert config.beside.method == "suffix"
    assert config.beside.suffix_decoding_max_spec_factor == 2.0
    assert config.beside.num_speculative_tokens == K
    fields = {**HEAD, "with": "ngram", "adaptive_verification_costs": CHEAP}
    length = make_draft_length(parse_speculative_config(fields))
    assert isinstance(length, GatedDraftLength)
    assert not length.needs_costs
    assert make_draft_length(config).needs_costs


GREEDY_TRAVERSAL = {"draft_sample_method": "greedy", "rejection_sample_method": "traversal"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({**HEAD, "with": "lookahead"}, "with: 'lookahead'; expected ngram or suffix"),
        ({**HEAD, "with": "medusa"}, "with: 'medusa'; expected ngram or suffix"),
        ({**HEAD, "with": ["ngram"]}, r"with: \['ngram'\]; expected"),
        ({"method": "ngram", "with": "suffix"}, "with belongs to trained drafters"),
        ({**HEAD, "with": "ngram", "prompt_lookup_max": 0}, "prompt_lookup_max=0"),
        ({**HEAD, "prompt_lookup_max": 3}, "prompt_lookup_max belongs to ngram"),
        (
            {**HEAD, "with": "ngram", "suffix_decoding_max_tree_depth": 8},
            "suffix_decoding_max_tree_depth belongs to suffix",
        ),
        ({**HEAD, "with": "ngram", "speculative_eagle_topk": 2}, "leave the tree out"),
        (
            {**HEAD, "with": "ngram", "enable_adaptive_verification": True},
            "leave enable_adaptive_verification out",
        ),
        ({**HEAD, "with": "ngram", "rejection_sample_method": "traversal"}, "deterministic"),
        ({"method": "suffix", "rejection_sample_method": "traversal"}, "deterministic"),
        ({**HEAD, **GREEDY_TRAVERSAL}, "deterministic"),
        ({"method": "lookahead", "rejection_sample_method": "token"}, "judges chains"),
        (
            {**HEAD, "speculative_eagle_topk": 2, "rejection_sample_method": "block"},
            "judges chains",
        ),
    ],
)
def test_combinations_that_make_no_sense_are_refused(options, message):
    with pytest.raises(ConfigError, match=message) as raised:
        parse_speculative_config(options)
    assert raised.value.where == "speculative_config"
