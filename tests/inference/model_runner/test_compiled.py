"""Compiled rounds write what eager ones write, from a number of graphs that is known beforehand.

Most run on torch's `eager` backend: everything of the static path but the code generator, in a
tenth of the time."""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import replace

import pytest
import torch
import torch._inductor.config
from torch._dynamo.utils import counters

from draftsmith.inference import LLM, SamplingParams
from draftsmith.inference.engine import engine
from draftsmith.inference.engine_options import EngineOptions
from draftsmith.inference.model_runner import compile_options, static_shapes
from draftsmith.inference.model_runner.compile_options import CompileOptions, read_compilation
from draftsmith.inference.model_runner.compiled_step import CachedStep
from draftsmith.inference.model_runner.static_shapes import Shape, all_shapes, shape_for
from draftsmith.speculators.errors import ConfigError
from tests.support.cases import MASK, Case, make
from tests.support.drafters import StubProposer
from tests.support.engines import drafting_llm, ids_of, make_llm, proposer_of
from tests.support.errors import raises_at

K, LIMIT = 2, 96
TRACED = {"mode": 3, "backend": "eager"}
PROMPTS = [
    [7],
    [3 + (5 * i) % 40 for i in range(18)],
    [70 + i % 9 for i in range(25)],
    [5, 6, 7, 8],
    [9] * 11,
]
LENGTHS = [12, 9, 1, 20, 7]
DRAFTED = {
    "draft_model": Case("draft_model", options={"from_target": {"last": 1}}, noise=0.05),
    "eagle3": Case("eagle3", {"draft_vocab_size": 40}, taps=(1, 2)),
    "medusa": Case("medusa", {"num_heads": 2}),
    "peagle": Case("peagle", {"num_depths": 4, **MASK}, taps=(1, 2)),
}


@pytest.fixture(autouse=True)
def _one_thread():
    """The code generator in this process, and every test with graphs of its own."""
    torch._dynamo.reset()
    counters.clear()
    with torch._inductor.config.patch(compile_threads=1):
        yield


@pytest.fixture(scope="module")
def model_of(tiny_model):
    """model_of(kind): a target that the kind's drafter is for."""

    def model(kind: str):
        architecture = DRAFTED[kind].architecture if kind in DRAFTED else "qwen3_sliding"
        return tiny_model(architecture, num_hidden_layers=2)

    return model


def llm_of(kind: str, model, rows: int, config: dict | None, **options) -> LLM:
    options = {"max_num_seqs": rows, "max_model_len": LIMIT, **options}
    options["compilation_config"] = config
    if kind in DRAFTED:
        target, drafter = make(DRAFTED[kind], model)
        return make_llm(target, drafter=drafter.freeze(), num_speculative_tokens=K, **options)
    ngram = proposer_of("ngram", K, prompt_lookup_min=1, prompt_lookup_max=3)
    return make_llm(model, proposer=ngram if kind == "ngram" else None, **options)


def write(llm: LLM, prompts=PROMPTS, **params) -> list[list[int]]:
    """Responses of various lengths, so that rows are ragged, and are joined and left by
    requests."""
    sampling_params = [
        SamplingParams(max_tokens=n, seed=n, **{"temperature": 0, **params})
        for n in LENGTHS[: len(prompts)]
    ]
    inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
    return ids_of(llm.generate(inputs, sampling_params, use_tqdm=False))


def steps_of(llm: LLM) -> list[CachedStep]:
    """What is compiled: the target's forward, and the drafter's chain if it has one."""
    chain = getattr(llm.engine.proposer, "_best_chain", None)
    return [llm.engine.runner.compiled.step, *([] if chain is None else [chain.step])]


# ---------------------------------------------------------------------- the same tokens


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "rows", "temperature"),
    [("ngram", 2, 0), ("draft_model", 2, 0), ("eagle3", 5, 0), ("eagle3", 2, 1), ("medusa", 1, 0)],
)
def test_compiled_rounds_write_what_eager_ones_write(kind, rows, temperature, model_of):
    model = model_of(kind)
    compiled = llm_of(kind, model, rows, TRACED)
    eager = llm_of(kind, model, rows, None)
    assert write(compiled, temperature=temperature) == write(eager, temperature=temperature)
    assert counters["stats"]["unique_graphs"] > 0 and not counters["graph_break"]
    assert len(steps_of(compiled)) == 1 + (kind in ("draft_model", "eagle3"))


@pytest.mark.parametrize(("kind", "has_one"), [("eagle3", True), ("peagle", False)])
def test_only_drafts_that_are_made_one_by_one_have_a_compiled_chain(kind, has_one, model_of):
    llm = llm_of(kind, model_of(kind), 2, TRACED)
    assert (llm.engine.proposer._best_chain is not None) == has_one


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["static", "dynamic", "lookahead"])
def test_trees_are_verified_compiled_and_write_what_eager_ones_write(kind, tiny_model):
    """Rows of different lengths, and trees narrower than the step's, on a model with windows."""
    model = tiny_model("qwen3_sliding", num_hidden_layers=2)
    limits = {"max_num_seqs": 2, "max_model_len": LIMIT}
    llm = drafting_llm(kind, model, compilation_config=TRACED, **limits)
    eager = drafting_llm(kind, model, **limits)
    assert llm.engine.proposer.drafts_trees
    assert write(llm) == write(eager)
    assert set(compiled_shares(llm)) == {1}
    assert llm.engine.runner.compiled.tree_step.compiled


@pytest.mark.slow
def test_padding_to_a_row_that_held_a_text_of_the_longest_length(tiny_model):
    """The round that ended it had all its drafts accepted; later rounds of the others are padded to
    its row."""
    model = tiny_model("llama", max_position_embeddings=64)
    asked = [
        list(range(3, 57)),
        [5, 6, 7, 8, 9],
        [10, 11, 12, 13, 14, 15],
        [20, 21, 22, 23, 24, 25, 26],
    ]
    params = [
        SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in (None, 40, 40, 40)
    ]
    inputs = [{"prompt_token_ids": ids} for ids in asked]
    plain = ids_of(make_llm(model, max_num_seqs=4).generate(inputs, params, use_tqdm=False))
    texts = {tuple(ids): written + [0] * 8 for ids, written in zip(asked, plain, strict=True)}
    proposer = StubProposer("right", 4, 101, texts)
    llm = make_llm(model, proposer=proposer, max_num_seqs=4, compilation_config=TRACED)
    assert ids_of(llm.generate(inputs, params, use_tqdm=False)) == plain


@pytest.mark.slow
def test_generated_code_writes_the_same(model_of):
    """On the inductor, as on a GPU."""
    model = model_of("medusa")
    compiled = llm_of("medusa", model, 1, {"mode": 3, "backend": "inductor"})
    assert write(compiled, PROMPTS[:2]) == write(llm_of("medusa", model, 1, None), PROMPTS[:2])
    assert counters["stats"]["unique_graphs"] > 0


# ---------------------------------------------------------------------- how many graphs


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ngram", "eagle3"])
@torch._dynamo.config.patch(accumulated_recompile_limit=1)
def test_after_a_warm_up_no_request_meets_a_new_shape(kind, model_of, monkeypatch):
    """Texts of every length, drafts or none, and batches of every size; keys and values stay where
    they are, and texts are what they were. However many graphs the process has had before."""
    rows = 2 if kind == "eagle3" else 1
    # keys, or batches, of two sizes
    monkeypatch.setattr(static_shapes, "FEWEST_KEYS", 60 if rows == 1 else LIMIT)
    llm, plain = (llm_of(kind, model_of(kind), rows, config) for config in (TRACED, None))
    llm.warm_up()
    graphs = sum(len(step.shapes) for step in steps_of(llm))
    assert graphs == counters["stats"]["unique_graphs"] and llm.get_metrics().num_drafts == 0
    cache = llm.engine.runner.cache
    places = [memory.data_ptr() for part in cache.memory() for memory in part]
    asked = [[3 + i % 80 for i in range(70)], *PROMPTS[1:]]
    for prompts in (asked[:1], asked, PROMPTS):
        assert write(llm, prompts) == write(plain, prompts)
    assert graphs == counters["stats"]["unique_graphs"]
    assert places == [
        memory.data_ptr() for part in llm.engine.runner.cache.memory() for memory in part
    ]


def test_shapes_hold_what_they_are_asked_for():
    shapes = all_shapes(6, 5, 3000)
    assert {shape.rows for shape in shapes} == {1, 2, 4, 6} and len(shapes) == 4 * 2 * 5
    assert {shape.keys for shape in shapes} == {256, 512, 1024, 2048, 3000}
    for rows in range(1, 7):
        for width in range(1, 6):
            for longest in (0, 250, 252, 255, 256, 2990):
                shape = shape_for(shapes, rows, width, longest)
                assert shape.rows >= rows and shape.width >= width and shape.width in (1, 5)
                assert shape.keys >= longest + shape.width
    assert shape_for(shapes, 3, 1, 255) == Shape(4, 1, 256)
    assert all_shapes(1, 1, 256) == [Shape(1, 1, 256)]


# ---------------------------------------------------------------------- the default of CUDA


@pytest.fixture
def like_cuda(monkeypatch):
    """Engines take the options of CUDA, but for the backend and two rows at most."""

    def read(options: EngineOptions, device: str) -> CompileOptions | None:
        chosen = read_compilation(options, "cuda")
        if chosen is None:
            return None
        return replace(chosen, arguments={"backend": "eager"}, most_rows=2)

    monkeypatch.setattr(engine, "read_compilation", read)


def compiled_shares(llm: LLM, prompts=PROMPTS) -> list[float]:
    """Of each response the share of its rounds that ran compiled."""
    inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
    params = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)
    metrics = [output.metrics for output in llm.generate(inputs, params, use_tqdm=False)]
    return [m.num_compiled_rounds / len(m.accepted_per_round) for m in metrics]


@pytest.mark.slow
def test_rounds_of_few_rows_are_compiled_by_default_after_a_warm_up(like_cuda, model_of):
    """Before it, and with more rows than the default's, they are eager; the texts are the same."""
    model = model_of("eagle3")
    llm = llm_of("eagle3", model, 3, None)
    expected = write(llm)
    assert compiled_shares(llm) == [0] * len(PROMPTS)
    llm.warm_up(longest=LIMIT)
    assert compiled_shares(llm, PROMPTS[:2]) == [1, 1]
    assert compiled_shares(llm, PROMPTS[:3])[0] < 1
    assert write(llm) == expected


@pytest.mark.slow
def test_default_warm_up_leaves_out_shapes_of_longer_texts(like_cuda, model_of, monkeypatch):
    monkeypatch.setattr(static_shapes, "FEWEST_KEYS", 24)
    llm = llm_of("ngram", model_of("ngram"), 1, None)
    llm.warm_up(longest=40)
    (step,) = steps_of(llm)
    assert {shape.keys for shape in step.compiled} == {24, 48}
    assert compiled_shares(llm, PROMPTS[:1]) == [1]
    assert compiled_shares(llm, [[7] * 60]) == [0]


@pytest.mark.slow
def test_warm_up_runs_a_shape_until_its_cuda_graph_is_recorded(like_cuda, model_of, monkeypatch):
    """Which torch does in the second run; else the first request of a shape waits for it."""
    runs: Counter[Shape] = Counter()
    run = CachedStep._run

    def count(step, shape, *arguments):
        runs[shape] += 1
        return run(step, shape, *arguments)

    monkeypatch.setattr(CachedStep, "_run", count)
    llm = llm_of("ngram", model_of("ngram"), 1, None)
    llm.warm_up()
    (step,) = steps_of(llm)
    assert all(runs[shape] >= 2 for shape in step.shapes) and len(step.shapes) == 2


@pytest.mark.slow
def test_default_falls_back_to_eager_rounds_with_a_warning(like_cuda, model_of, caplog):
    model = model_of("medusa")
    model.model.layers[0].register_forward_pre_hook(
        lambda module, args: torch._dynamo.graph_break()
    )
    llm = llm_of("medusa", model, 1, None)
    with caplog.at_level(logging.WARNING, "draftsmith.inference.engine.engine"):
        llm.warm_up()
    assert len(caplog.records) == 1 and not llm.engine.compiles
    assert compiled_shares(llm, PROMPTS[:1]) == [0]


def test_rounds_of_cuda_stay_eager_where_triton_builds_no_kernel(like_cuda, model_of, monkeypatch):
    monkeypatch.setattr(compile_options, "why_not_triton", lambda: "no C compiler")
    assert compile_options.compiler_fault(DEFAULT, "cuda") == "no C compiler"
    assert compile_options.compiler_fault(DEFAULT, "cpu") is None
    assert compile_options.compiler_fault(CompileOptions({"backend": "eager"}), "cuda") is None
    llm = llm_of("ngram", model_of("ngram"), 1, None)
    monkeypatch.setattr(engine, "compiler_fault", lambda options, device: "no C compiler")
    llm.warm_up()
    assert not llm.engine.compiles


def test_enforce_eager_turns_the_default_off(like_cuda, model_of):
    llm = llm_of("ngram", model_of("ngram"), 1, None, enforce_eager=True)
    llm.warm_up()
    assert not llm.engine.compiles


# ---------------------------------------------------------------------- options


@pytest.mark.slow
def test_a_target_that_torch_cannot_compile_is_an_error(model_of):
    model = model_of("ngram")
    model.model.layers[0].register_forward_pre_hook(
        lambda module, args: torch._dynamo.graph_break()
    )
    with pytest.raises(ConfigError, match="enforce_eager=True"):
        write(llm_of("ngram", model, 2, TRACED))


GRAPHS = {"backend": "inductor", "mode": "reduce-overhead"}
DEFAULT = CompileOptions(GRAPHS, asked=False, most_rows=8)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, DEFAULT),
        ({"compilation_config": {"backend": "inductor"}}, DEFAULT),
        ({"enforce_eager": True, "compilation_config": 3}, None),
        ({"enforce_eager": False}, CompileOptions(GRAPHS)),
        ({"enforce_eager": False, "compilation_config": 0}, None),
        ({"compilation_config": {"cudagraph_mode": "FULL_DECODE_ONLY"}}, CompileOptions(GRAPHS)),
        (
            {"compilation_config": {"mode": 3, "cudagraph_mode": "none"}},
            CompileOptions({"backend": "inductor"}),
        ),
        ({"compilation_config": {"cudagraph_mode": "NONE"}}, None),
        (
            {"compilation_config": {"mode": "vllm_compile", "custom_ops": []}},
            CompileOptions(GRAPHS),
        ),
    ],
)
def test_compile_options_mean_what_they_mean_in_vllm(options, expected):
    assert read_compilation(EngineOptions(**options), "cuda") == expected


def test_on_a_cpu_a_backend_is_named():
    named = EngineOptions(compilation_config=TRACED)
    assert read_compilation(EngineOptions(), "cpu") is None
    assert read_compilation(EngineOptions(enforce_eager=False), "cpu") is None
    assert read_compilation(named, "cpu") == CompileOptions({"backend": "eager"})
    with raises_at(ConfigError, "compilation_config"):
        read_compilation(EngineOptions(compilation_config={"mode": 7}), "cuda")
