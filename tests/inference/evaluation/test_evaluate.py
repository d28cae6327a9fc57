"""What is measured: replay is the runtime, differences are judged by measured noise, the report is
whole."""

from __future__ import annotations

import weakref
from dataclasses import replace

import pytest
import torch

from draftsmith.inference import LLM, SamplingParams
from draftsmith.inference.evaluation import expected_acceptance as expected_module
from draftsmith.inference.evaluation import lossless
from draftsmith.inference.evaluation.engines import RuntimeEngine
from draftsmith.inference.evaluation.evaluate import (
    Chat,
    EvaluationSettings,
    EvaluationStopped,
    MeasuredSuite,
    evaluate,
)
from draftsmith.inference.evaluation.expected_acceptance import (
    accept_probabilities,
    expected_acceptance,
    label_probabilities,
)
from draftsmith.inference.evaluation.lossless import compare_greedy
from draftsmith.inference.model_runner.model_runner import ModelRunner
from draftsmith.inference.outputs import CompletionOutput, RequestMetrics, RequestOutput
from draftsmith.inference.report.measurement import compare_expected
from draftsmith.inference.report.schema import SuiteFacts
from draftsmith.inference.report.table import notes
from draftsmith.inference.sampling.sampler import probabilities
from draftsmith.speculators.errors import ConfigError, DataError
from draftsmith.speculators.export import load_drafter
from draftsmith.speculators.families.eagle3 import Eagle3
from draftsmith.speculators.target.frozen_target import FrozenTarget
from draftsmith.speculators.vocab.draft_vocab import scatter_to_target
from tests.support.errors import raises_at

K = 3


@pytest.fixture(scope="module")
def llm(folders) -> LLM:
    speculative = {"method": "eagle3", "model": folders[1], "num_speculative_tokens": K}
    return LLM(folders[0], speculative_config=speculative, max_num_seqs=8)


@pytest.fixture(scope="module")
def drafter(llm, folders) -> Eagle3:
    return load_drafter(folders[1], llm.engine.target)


def some_prompts(count: int, seed: int = 0) -> list[list[int]]:
    source = torch.Generator().manual_seed(seed)
    return [torch.randint(3, 250, (4 + i % 7,), generator=source).tolist() for i in range(count)]


def written(llm: LLM, count: int, temperature: float, **options):
    prompts = [{"prompt_token_ids": prompt} for prompt in some_prompts(count)]
    params = [
        SamplingParams(temperature=temperature, seed=i, **{"max_tokens": 30, **options})
        for i in range(count)
    ]
    return llm.generate(prompts, params, use_tqdm=False)


def texts_of(outputs) -> list[tuple[list[int], list[int]]]:
    return [(output.prompt_token_ids, output.outputs[0].token_ids) for output in outputs]


# ---------------------------------------------------------------------------- expected = measured


@pytest.mark.slow
def test_greedy_replay_counts_the_rounds_of_the_runtime(llm, drafter) -> None:
    """At temperature 0 nothing is left to chance: rounds and accepted drafts are equal, request by
    request."""
    outputs = written(llm, 12, 0.0)
    results = expected_acceptance(llm.engine.target, drafter, texts_of(outputs), 0.0, K)
    counts = [output.metrics for output in outputs]
    assert [r.rounds for r in results] == [m.num_drafts for m in counts]
    assert [r.accepted_per_position for r in results] == [
        m.num_accepted_tokens_per_pos for m in counts
    ]
    assert sum(m.num_accepted_tokens for m in counts) > 20, (
        "a drafter that is never right proves nothing"
    )


@pytest.mark.slow
@pytest.mark.parametrize("filters", [{}, {"top_p": 0.8, "top_k": 7}], ids=["plain", "filtered"])
def test_sampled_replay_is_the_runtime_in_expectation(llm, drafter, filters) -> None:
    """On the text that drafting wrote only the accept decisions differ from replay, and they
    average out."""
    outputs = written(llm, 48, 0.8, max_tokens=24, **filters)
    results = expected_acceptance(llm.engine.target, drafter, texts_of(outputs), 0.8, K, **filters)
    comparison = compare_expected([output.metrics for output in outputs], results)
    assert comparison.acceptance_length > 1.1
    assert abs(comparison.relative_difference) < 4 * comparison.standard_error
    assert comparison.standard_error < 0.05


def test_replay_does_not_depend_on_how_texts_are_batched(llm, drafter, monkeypatch) -> None:
    texts = texts_of(written(llm, 9, 1.0))
    together = expected_acceptance(llm.engine.target, drafter, texts, 1.0, K)
    monkeypatch.setattr(expected_module, "BATCH_TOKENS", 1)
    alone = expected_acceptance(llm.engine.target, drafter, texts, 1.0, K)
    for a, b in zip(together, alone, strict=True):
        assert a.rounds_by_accepted == pytest.approx(b.rounds_by_accepted, abs=1e-4)


def test_text_of_one_token_has_no_rounds(llm, drafter) -> None:
    (result,) = expected_acceptance(llm.engine.target, drafter, [([5, 6], [7])], 1.0, K)
    assert result.rounds == 0 and result.expected_acceptance_length == 1


@pytest.mark.parametrize(("temperature", "filters"), [(0.0, {}), (0.7, {}), (0.7, {"top_p": 0.7})])
def test_accept_probability_is_the_ratio_of_the_processed_distributions(
    temperature, filters, monkeypatch
) -> None:
    torch.manual_seed(0)
    monkeypatch.setattr(expected_module, "CHUNK_BYTES", 0)
    monkeypatch.setattr(expected_module, "SMALLEST_CHUNK", 16)
    draft_to_target = torch.tensor([1, 2, 5, 8, 11])
    q_logits, p_logits = 2 * torch.randn(40, 5), 2 * torch.randn(40, 12)
    labels = torch.randint(12, (40,))
    params = SamplingParams(temperature=temperature, **filters)
    full_q = scatter_to_target(probabilities(q_logits, params), draft_to_target, 12)
    q = full_q.gather(-1, labels[:, None])[:, 0]
    p = probabilities(p_logits, params).gather(-1, labels[:, None])[:, 0]
    target_probabilities = label_probabilities(p_logits, lambda x: x, labels, params)
    torch.testing.assert_close(target_probabilities, p)
    accept = accept_probabilities(q_logits, lambda x: x, p, labels, params, draft_to_target)
    if temperature == 0:  # the text says what the target chose, whatever its logits are here
        assert torch.equal(accept, q)
    else:
        drawn = p > 0  # the others cannot come out
        torch.testing.assert_close(accept[drawn], (q / p).clamp(max=1)[drawn])
    q_logits[3] = torch.nan
    labels[3] = draft_to_target[0]
    ones = torch.ones(40)
    accept = accept_probabilities(q_logits, lambda x: x, ones, labels, params, draft_to_target)
    assert accept.isnan().nonzero().tolist() == [[3]]


# ---------------------------------------------------------------------------------- the same tokens


def check(runner, prompt, reference, output):
    off, on = (
        [RequestOutput("", None, prompt, [CompletionOutput(0, "", ids)], True, RequestMetrics())]
        for ids in (reference, output)
    )
    return compare_greedy(runner, off, on, num_speculative_tokens=K, rows=2)


def test_difference_is_told_with_its_place_and_gap(llm) -> None:
    output = written(llm, 1, 0.0)[0]
    tokens, prompt = output.outputs[0].token_ids, output.prompt_token_ids
    assert check(llm.engine.runner, prompt, tokens, tokens).mismatches == 0
    changed = [*tokens[:6], (tokens[6] + 1) % 250, *tokens[7:]]
    result = check(llm.engine.runner, prompt, tokens, changed)
    assert (result.dtype, result.mismatches, result.ties) == ("float32", 1, 0)
    detail = result.details[0]
    assert (detail.position, detail.reference_token, detail.token) == (6, tokens[6], changed[6])
    assert detail.noise < 1e-3 < detail.top_two_gap


def test_noise_is_that_of_the_engines_forward_in_whole_verifications(llm, monkeypatch) -> None:
    """Also where the first difference is before K + 1 tokens were written."""
    runs, after = [], lossless._logits_after
    forwards, scratch = [], llm.engine.runner.scratch
    monkeypatch.setattr(lossless, "_logits_after", lambda *run: runs.append(run) or after(*run))
    monkeypatch.setattr(
        llm.engine.runner,
        "scratch",
        lambda *sizes: forwards.append(scratch(*sizes)) or forwards[-1],
    )
    prompt = some_prompts(1)[0]
    check(llm.engine.runner, prompt, [3, 5], [3, 6])
    assert len(forwards) == len(runs)
    assert all(scratch.forward is llm.engine.runner.forward for scratch in forwards)
    assert any(pieces == [len(ids) - K - 1, K + 1] for _, ids, pieces, *_ in runs)
    later = [*range(3, 9)]  # a verification and two tokens before it
    check(llm.engine.runner, prompt, [*later, 5], [*later, 6])
    assert any(pieces == [len(prompt), 2, K + 1] for _, _, pieces, *_ in runs)


def test_noise_is_what_the_gap_of_two_logits_changes_by() -> None:
    runs = [torch.tensor([1.0, 0.9, 0.0]), torch.tensor([0.94, 0.95, 0.0])]
    gap, noise, tie = lossless._judge(iter(runs), 0, 1)
    assert (gap, noise, tie) == (pytest.approx(0.1), pytest.approx(0.11), True)


def test_noise_of_a_long_text_is_measured_in_forwards_as_large_as_the_engines(
    llm, monkeypatch
) -> None:
    forwards, call = [], ModelRunner.__call__
    monkeypatch.setattr(
        ModelRunner,
        "__call__",
        lambda self, start, ids: forwards.append(ids.numel()) or call(self, start, ids),
    )
    monkeypatch.setattr(lossless, "MOST_TOKENS", 32)
    check(llm.engine.runner, list(range(3, 60)), [3, 5], [3, 6])
    assert 0 < max(forwards) <= 32


@pytest.mark.parametrize("dtype, ties", [("bfloat16", 1), ("float32", 0)])
def test_ties_are_told_from_mistakes_and_float32_has_none(dtype, ties, folders) -> None:
    """Two tokens with the same output row tie exactly; any other replacement is a mistake."""
    target = FrozenTarget.from_pretrained(folders[0], dtype=getattr(torch, dtype))
    prompt = some_prompts(1)[0]
    logits = target.logits(target(torch.tensor([prompt]))[1])[0, -1].float()
    best, worst = int(logits.argmax()), int(logits.argmin())
    runner_up = (best + 1) % 250
    target.lm_head.weight.data[runner_up] = target.lm_head.weight.data[best]
    tied = check(ModelRunner(target, 1, 1), prompt, [best], [runner_up])
    assert (tied.dtype, tied.mismatches, tied.ties) == (dtype, 1 - ties, ties)
    assert tied.details[0].top_two_gap == 0
    wrong = check(ModelRunner(target, 1, 1), prompt, [best], [worst])
    assert (wrong.mismatches, wrong.ties) == (1, 0)
    ended = check(ModelRunner(target, 1, 1), prompt, [best, best], [best])
    assert (ended.mismatches, ended.details[0].token) == (1, None)


# ---------------------------------------------------------------------------------- times


# ---------------------------------------------------------------------------------- the whole

SMALL = EvaluationSettings(
    num_speculative_tokens=K,
    max_tokens=12,
    prompts_per_workload=4,
    timed_prompts=2,
    timed_tokens=1,
    repeats=2,
    lossless_prompts=2,
)


ADAPTIVE = {
    "enable_adaptive_verification": True,
    "adaptive_verification_costs": {"verify": [10, 10.5, 11, 11.5], "draft": [0.3, 0.6, 0.9]},
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("further", "nodes", "levels"),
    [
        (ADAPTIVE, K, K),
        ({"speculative_eagle_topk": 2}, 2 * K, K),
        ({"speculative_eagle_topk": 2, "speculative_num_steps": 2}, 4, 2),
        ({"speculative_token_tree": "[(0,), (1,), (0, 0)]"}, 3, 2),
    ],
    ids=["adaptive", "grown", "grown in two levels", "fixed"],
)
def test_lengths_that_adapt_and_trees_are_measured(further, nodes, levels, folders) -> None:
    """Replay, which models chains of K, expects nothing of them."""
    settings = replace(SMALL, speculative_config=further, repeats=0, max_tokens=20)
    report = evaluate(*folders, {"one": some_prompts(3)}, settings)
    assert report.provenance.speculative_config == further
    assert report.provenance.num_speculative_tokens == nodes
    assert report.summary["lossless_mismatches"] == 0
    for cell in report.pooled():
        assert cell.expected is None and len(cell.num_accepted_tokens_per_pos) == levels
        per_round = cell.num_draft_tokens / cell.num_drafts
        assert 0 < per_round < K if further is ADAPTIVE else nodes / 2 < per_round <= nodes


@pytest.mark.slow
def test_a_method_beside_the_head_is_measured_and_its_rounds_are_reported(folders) -> None:
    """In an evaluation it drafts from no earlier response."""
    costs = ADAPTIVE["adaptive_verification_costs"]
    further = {"with": "suffix", "adaptive_verification_costs": costs}
    settings = replace(SMALL, speculative_config=further, repeats=0, max_tokens=20)
    report = evaluate(*folders, {"one": some_prompts(3)}, settings)
    assert report.summary["lossless_mismatches"] == 0
    (cell,) = [cell for cell in report.pooled() if cell.temperature == 0]
    assert set(cell.num_drafts_by_method) == {"eagle3", "suffix"}
    assert sum(cell.num_drafts_by_method.values()) == cell.num_drafts
    assert any("drafted by" in line and "suffix in" in line for line in notes(report))


def test_further_options_do_not_name_another_drafter(folders) -> None:
    with raises_at(ConfigError, "speculative_config"):
        evaluate(
            *folders, {"one": some_prompts(1)}, replace(SMALL, speculative_config={"model": "x"})
        )


@pytest.mark.slow
def test_the_report_is_whole(folders) -> None:
    shares: list[float] = []
    report = evaluate(
        *folders,
        {"one": some_prompts(5), "two": some_prompts(3, seed=1)},
        SMALL,
        provenance={"recipe_name": "tiny"},
        progress=lambda share, note="", total=None: shares.append(share),
    )
    names = [(c.workload, c.temperature) for c in report.results]
    one_two = [(name, t) for t in (0, 1) for name in ("one", "two")]
    assert names == [*one_two, ("all", 0), ("all", 1)]
    kinds = {"speculative", "autoregressive"}
    for cell in report.results:
        assert set(cell.tokens_per_second) == set(cell.passes) == kinds
        assert cell.expected
        verified = cell.output_tokens - cell.prompts  # the first tokens come from prefills
        assert cell.tokens_per_forward == verified / cell.num_rounds
        for passes in cell.passes.values() if cell.workload != "all" else ():
            assert [run.repeat for run in passes] == [0, 1]
            assert len({run.tokens for run in passes}) == 1  # the same prompts and seeds
    assert [report.cell(name, 0).prompts for name in ("one", "two")] == [4, 3]
    assert report.summary["lossless_mismatches"] == 0
    pooled = report.cell("all", 0)
    assert pooled.expected.relative_difference == pytest.approx(0, abs=1e-12)
    assert [check.checked_prompts for check in pooled.lossless] == [4 + 7]  # float32 twice
    provenance = report.provenance
    assert provenance.recipe_name == "tiny" and provenance.drafter_config["draftsmith"]
    assert shares == sorted(shares) and (shares[0], shares[-1]) == (0, 1)
    assert any(0 < share < 1 / 4 for share in shares)  # within the first of the four cells


def test_a_workload_without_prompts_is_refused(folders) -> None:
    with pytest.raises(DataError, match="two"):
        evaluate(*folders, {"one": some_prompts(1), "two": []}, SMALL)


def test_a_workload_with_the_name_of_the_pool_is_refused(folders) -> None:
    with raises_at(ConfigError, "evaluate"):
        evaluate(*folders, {"all": some_prompts(1)}, SMALL)


# ------------------------------------------------------------------ suites


def test_a_second_turn_is_asked_with_the_live_answer(folders, byte_tokenizer) -> None:
    """Its prompt holds the text that drafting just wrote; every turn is a request, and both means
    are of requests."""
    asked: list[tuple[str, ...]] = []

    def chat(first: str, *later: str, longest: int = 200) -> Chat:
        def ask(answers) -> list[int]:
            asked.append(tuple(answers))
            turns = [first, *later][: len(answers) + 1]
            exchanges = [f"{turn}:{answer}" for turn, answer in zip(turns, answers)]
            return byte_tokenizer("|".join([*exchanges, turns[-1]])).input_ids

        return Chat(ask([]), later, ask, longest)

    chats = {"a": [chat("x", "y"), chat("z")], "b": [chat("v", "w", "u", longest=2)]}
    facts = SuiteFacts(
        name="two",
        path="",
        sha256="",
        conversations=3,
        conversations_in_file=3,
        max_tokens=10,
        num_speculative_tokens=K,
    )
    settings = replace(SMALL, temperatures=(0.0,), max_tokens=10, repeats=0, lossless_prompts=0)
    suites = [MeasuredSuite(facts, chats)]
    report = evaluate(*folders, {"own": some_prompts(2)}, settings, suites=suites)
    a, b, pooled = (report.of_suite("two").cell(name, 0) for name in ("a", "b", "all"))
    assert (a.prompts, b.prompts, pooled.prompts) == (3, 1, 4)
    assert report.cell("all", 0).prompts == 2
    prompt = {"prompt_token_ids": byte_tokenizer("x").input_ids}
    (output,) = LLM(folders[0]).generate([prompt], settings.sampling(0.0, [0]))
    answer = byte_tokenizer.decode(output.outputs[0].token_ids, skip_special_tokens=True)
    assert (answer,) in asked
    rounds, accepted = a.num_drafts + b.num_drafts, a.num_accepted_tokens + b.num_accepted_tokens
    assert pooled.acceptance_length == pytest.approx(1 + accepted / rounds)
    mean = (3 * a.acceptance_length_macro + b.acceptance_length) / 4
    assert pooled.acceptance_length_macro == pytest.approx(mean)
    # the later turns are replayed and compared alike
    assert pooled.expected.relative_difference == pytest.approx(0, abs=1e-12)
    assert pooled.lossless[0].checked_prompts == 4 and pooled.lossless[0].mismatches == 0
    of_prompts = report.cell("all", 0).acceptance_length
    assert report.summary["t0.acceptance_length"] == of_prompts != pooled.acceptance_length


BRIEF = replace(SMALL, temperatures=(0.0,), repeats=1, timed_prompts=1, lossless_prompts=1)


def test_a_timed_pass_has_the_least_number_of_tokens_where_prompts_are_enough(folders) -> None:
    settings = replace(BRIEF, temperatures=(1.0,), timed_tokens=30, lossless_prompts=0)
    report = evaluate(*folders, {"w": some_prompts(4), "few": some_prompts(2, seed=1)}, settings)
    (enough,), (few,) = (report.cell(w, 1).passes["speculative"] for w in ("w", "few"))
    assert 30 <= enough.tokens < report.cell("w", 1).output_tokens
    assert few.tokens == report.cell("few", 1).output_tokens < 30


def test_evaluation_that_is_interrupted_holds_the_cells_that_it_has_measured(folders) -> None:
    def interrupt(done: float, note: str = "", total: float | None = None) -> None:
        if note.startswith("two, T=0: times"):
            raise KeyboardInterrupt

    prompts = {"one": some_prompts(1), "two": some_prompts(1, seed=1)}
    with pytest.raises(EvaluationStopped) as stop:
        evaluate(*folders, prompts, BRIEF, progress=interrupt)
    (cell,) = stop.value.cells
    assert cell.workload == "one" and set(cell.passes) == {"speculative", "autoregressive"}


def test_evaluation_that_is_interrupted_behind_its_passes_keeps_them(folders, monkeypatch) -> None:
    def interrupt(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(RuntimeEngine, "time_rounds", interrupt)
    with pytest.raises(EvaluationStopped) as stop:
        evaluate(*folders, {"one": some_prompts(1)}, BRIEF)
    assert [set(cell.passes) for cell in stop.value.cells] == [{"speculative", "autoregressive"}]


@pytest.mark.slow
def test_the_whole_evaluation_runs_on_a_device(claimed_gpu, folders):
    """Engines, replay, the float32 comparison: no host tensor among those of the device."""
    settings = replace(BRIEF, temperatures=(0.0, 1.0))
    options = {"device": "cuda", "enforce_eager": True}
    report = evaluate(*folders, {"w": some_prompts(2)}, settings, llm_options=options)
    assert report.summary["lossless_mismatches"] == 0
    assert report.summary["t0.acceptance_length"] >= 1


def test_the_first_engine_is_gone_before_the_float32_one_is_loaded(folders, monkeypatch):
    """Two targets at once do not fit the device that training fitted; nor do more rows than
    prompts."""
    first, alive, rows = [], [], []
    init, again = RuntimeEngine.__init__, RuntimeEngine.in_float32

    def make(engine, drafting):
        init(engine, drafting)
        first.append(weakref.ref(engine.llm.engine.target.model))
        rows.append(engine.llm.engine.scheduler.max_num_seqs)

    def in_float32(engine, count):
        alive.append(first[0]() is not None)
        return again(engine, count)

    monkeypatch.setattr(RuntimeEngine, "__init__", make)
    monkeypatch.setattr(RuntimeEngine, "in_float32", in_float32)
    settings = replace(BRIEF, repeats=0)
    report = evaluate(*folders, {"a": some_prompts(3), "b": some_prompts(3, 1)}, settings)
    assert alive == [False] and rows == [6, 2]
    assert report.summary["lossless_mismatches"] == 0
    assert all(reference() is None for reference in first)
