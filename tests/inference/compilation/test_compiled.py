"""Compiled rounds write what eager ones write, from a number of graphs that is known beforehand.

Most run on torch's `eager` backend: everything of the static path but the code generator, in a
tenth of the time."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch._inductor.config
from torch._dynamo.utils import counters

from inference import LLM, SamplingParams
from inference.compilation import static_shapes
from inference.compilation.config import Compilation, read_compilation
from inference.compilation.static_shapes import Buckets, Shape, doubling
from inference.spec_decode.proposers.ngram import NgramProposer
from inference.spec_decode.tree_shape import DynamicTree
from speculators.errors import ConfigError
from tests.inference.conftest import StubProposer
from tests.inference.modules import make_llm
from tests.support.cases import Case, make

K, LIMIT = 2, 96
CPU, CUDA = torch.device("cpu"), torch.device("cuda")
TRACED = Compilation(backend="eager")
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

    def found(kind: str):
        model = tiny_model(
            DRAFTED[kind].architecture if kind in DRAFTED else "qwen3_sliding", num_hidden_layers=2
        )
        model.generation_config.eos_token_id = None
        return model

    return found


def llm_of(kind: str, model, rows: int, compilation: Compilation | None, **options) -> LLM:
    options = {"max_num_seqs": rows, "max_model_len": LIMIT, "compilation": compilation, **options}
    if kind in DRAFTED:
        target, drafter = make(DRAFTED[kind], model)
        return make_llm(target, drafter=drafter.freeze(), num_speculative_tokens=K, **options)
    return make_llm(model, proposer=NgramProposer(K, 1, 3) if kind == "ngram" else None, **options)


def write(llm: LLM, prompts=PROMPTS, **params) -> list[list[int]]:
    """Responses of various lengths, so that rows are ragged, and are joined and left by
    requests."""
    given = [
        SamplingParams(max_tokens=n, seed=n, **{"temperature": 0, **params})
        for n in LENGTHS[: len(prompts)]
    ]
    outputs = llm.generate(
        [{"prompt_token_ids": prompt} for prompt in prompts], given, use_tqdm=False
    )
    return [output.outputs[0].token_ids for output in outputs]


# ---------------------------------------------------------------------- the same tokens


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "rows"),
    [("ngram", 2), ("draft_model", 2), ("eagle3", 5), ("medusa", 1)],
)
def test_compiled_rounds_write_what_eager_ones_write(kind, rows, model_of):
    model = model_of(kind)
    compiled = llm_of(kind, model, rows, Compilation("eager", row_sizes=(rows,)))
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # nothing runs eager that was to be compiled
        assert write(compiled) == write(llm_of(kind, model, rows, None))
    assert compiled.engine.compiled.num_graphs == counters["stats"]["unique_graphs"] > 0


@pytest.mark.slow
def test_sampled_chains_are_the_same_too(model_of):
    model = model_of("eagle3")
    expected = write(llm_of("eagle3", model, 2, None), temperature=1.0)
    compilation = Compilation("eager", row_sizes=(2,))
    assert write(llm_of("eagle3", model, 2, compilation), temperature=1.0) == expected


def test_trees_run_eager_and_say_so(model_of, caplog):
    model, tree = model_of("eagle3"), DynamicTree(topk=2, depth=2, budget=3)
    compiled = llm_of("eagle3", model, 2, TRACED, tree=tree)
    assert write(compiled) == write(llm_of("eagle3", model, 2, None, tree=tree))
    assert "trees of drafts are not compiled" in caplog.text
    assert compiled.engine.compiled.chain is None


@pytest.mark.slow
def test_padding_to_a_row_that_holds_a_text_of_the_longest_length(tiny_model):
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

    def run(llm: LLM) -> list[list[int]]:
        return [
            list(output.outputs[0].token_ids)
            for output in llm.generate(inputs, params, use_tqdm=False)
        ]

    plain = run(make_llm(model, max_num_seqs=4))
    texts = {tuple(ids): written + [0] * 8 for ids, written in zip(asked, plain)}
    proposer = StubProposer("right", 4, 101, texts)
    assert run(make_llm(model, proposer=proposer, max_num_seqs=4, compilation=TRACED)) == plain


@pytest.mark.slow
def test_generated_code_writes_the_same(model_of):
    """On the inductor, as a user runs it."""
    model = model_of("eagle3")
    compiled = llm_of("eagle3", model, 1, Compilation())
    assert write(compiled, PROMPTS[:2]) == write(llm_of("eagle3", model, 1, None), PROMPTS[:2])
    rounds = compiled.engine.compiled
    assert all(len(step) for step in rounds.steps)


# ---------------------------------------------------------------------- how many graphs


@pytest.mark.slow
def test_the_number_of_graphs_is_bounded_and_the_same_rounds_need_no_more(model_of):
    llm = llm_of("eagle3", model_of("eagle3"), 5, TRACED)
    rounds = llm.engine.compiled
    caches = [llm.engine.cache, llm.engine.proposer.cache]
    first = write(llm)
    places = [each.data_ptr() for cache in caches for part in cache.memory() for each in part]
    found = rounds.num_graphs
    assert found == counters["stats"]["unique_graphs"]
    assert len(rounds.target) <= rounds.target.buckets.most == 4 * 2 * 1
    assert found <= rounds.most_graphs
    llm.reset_prefix_cache()
    assert write(llm) == first
    assert rounds.num_graphs == counters["stats"]["unique_graphs"] == found
    assert not counters["graph_break"]
    assert places == [
        each.data_ptr() for cache in caches for part in cache.memory() for each in part
    ]


def test_shapes_hold_what_they_are_asked_for():
    buckets = Buckets(6, 5, 3000)
    assert buckets.rows == (1, 2, 4, 6)
    assert buckets.keys == (256, 512, 1024, 2048, 3000)
    for rows in range(1, 7):
        for width in range(1, 6):
            for longest in (0, 250, 252, 255, 256, 2990):
                shape = buckets.shape(rows, width, longest)
                assert shape.rows >= rows
                assert shape.width in (1, 5)
                assert shape.width >= width
                assert shape.keys >= longest + shape.width
    assert buckets.shape(3, 1, 255) == Shape(4, 1, 256)
    assert buckets.most == 4 * 2 * 5
    assert Buckets(6, 1, 100, (2, 8)).rows == (2, 6)
    assert doubling(256, 256) == (256,)


# ---------------------------------------------------------------------- what is refused, and named


@pytest.mark.slow
def test_a_target_that_torch_cannot_compile_is_named_and_runs_eager(model_of):
    model = model_of("ngram")
    expected = write(llm_of("ngram", model, 2, None))
    model.model.layers[0].register_forward_pre_hook(
        lambda module, args: torch._dynamo.graph_break()
    )
    llm = llm_of("ngram", model, 2, TRACED)
    with pytest.warns(
        UserWarning, match=r"the target .* cannot be compiled and runs eager.*graph_break"
    ) as told:
        assert write(llm) == expected
    assert len([each for each in told if "cannot be compiled" in str(each.message)]) == 1
    assert llm.engine.compiled.num_graphs == 0


@pytest.mark.slow
def test_a_missing_compiler_is_an_error_that_says_what_to_do(model_of):
    missing = torch._inductor.config.patch(
        {"cpp.cxx": ("no-such-compiler",), "force_disable_caches": True}
    )
    with (
        missing,
        pytest.raises(
            ConfigError, match=r"needs a C\+\+ compiler.*Install one.*enforce_eager=True"
        ),
    ):
        write(llm_of("off", model_of("off"), 1, Compilation()))


# ---------------------------------------------------------------------- options


@pytest.mark.parametrize(
    ("enforce_eager", "config", "device", "expected"),
    [
        (None, None, CPU, None),
        (None, None, CUDA, Compilation("cudagraphs", when_warm=True)),
        (
            None,
            {"cudagraph_capture_sizes": [1, 2]},
            CUDA,
            Compilation("cudagraphs", row_sizes=(1, 2), when_warm=True),
        ),
        (None, {"cudagraph_mode": "NONE"}, CUDA, None),
        (True, None, CUDA, None),
        (None, 0, CUDA, None),
        (True, 3, CUDA, None),
        (False, None, CPU, Compilation()),
        (False, None, CUDA, Compilation()),
        (None, 3, CPU, Compilation()),
        (None, {"level": 3, "cudagraph_mode": "none"}, CUDA, Compilation(cudagraphs=False)),
        (
            None,
            {
                "mode": "vllm_compile",
                "cudagraph_capture_sizes": [4, 1, 8],
                "max_cudagraph_capture_size": 4,
            },
            CPU,
            Compilation(row_sizes=(1, 4)),
        ),
        (None, {"mode": 1, "max_cudagraph_capture_size": 5}, CPU, Compilation(row_sizes=(1, 2, 4))),
        (
            None,
            {"mode": 3, "pass_config": {"eliminate_noops": True}, "custom_ops": ["+rms_norm"]},
            CPU,
            Compilation(),
        ),
        (None, {"cudagraph_mode": "FULL_DECODE_ONLY"}, CUDA, Compilation()),
        (None, {"mode": 0, "cudagraph_mode": "FULL"}, CUDA, Compilation("cudagraphs")),
        (False, {"mode": 0}, CUDA, Compilation("cudagraphs")),
        (False, {"mode": 0}, CPU, None),
    ],
)
def test_options_mean_what_they_mean_in_vllm(enforce_eager, config, device, expected):
    assert read_compilation(enforce_eager, config, device) == expected


def test_unasked_cuda_graphs_are_for_few_rows():
    assert read_compilation(None, None, CUDA, max_num_seqs=8) is not None
    assert read_compilation(None, None, CUDA, max_num_seqs=9) is None
    assert read_compilation(False, None, CUDA, max_num_seqs=9) is not None


@pytest.mark.slow
def test_unasked_graphs_wait_for_the_warm_up_and_for_room(model_of, caplog, monkeypatch):
    model, warm = model_of("off"), Compilation("eager", row_sizes=(2,), when_warm=True)
    expected = write(llm_of("off", model, 2, None))
    llm = llm_of("off", model, 2, warm)
    assert write(llm) == expected and llm.engine.compiled is None
    assert llm.warm_up() == llm.engine.compiled.num_graphs > 0
    assert write(llm) == expected
    narrow = llm_of("off", model, 2, warm)
    monkeypatch.setattr(narrow.engine, "memory_fault", lambda: "no room")
    assert narrow.warm_up() == 0 and "rounds run eager" in caplog.text
    assert write(narrow) == expected


@pytest.mark.parametrize(
    ("enforce_eager", "config", "message"),
    [
        ("yes", None, "enforce_eager='yes'"),
        (None, {"mode": 7}, "mode"),
        (None, {"modes": 3}, r"modes: Extra inputs.*known: mode.*without effect: .*pass_config"),
        (None, {"cudagraph_capture_sizes": [0]}, "numbers of 1 or more"),
        (None, [3], "expected a dictionary"),
        (None, {"mode": 0, "cudagraph_mode": "FULL"}, "the device is cpu; set mode to 3"),
    ],
)
def test_options_that_mean_nothing_are_refused(enforce_eager, config, message):
    with pytest.raises(ConfigError, match=message):
        read_compilation(enforce_eager, config, CPU)


@pytest.mark.slow
def test_the_drafter_alone_may_run_eager(model_of):
    options = {"max_model_len": LIMIT, "compilation_config": {"mode": 3, "backend": "eager"}}
    drafting = {"method": "ngram", "num_speculative_tokens": 2, "enforce_eager": True}
    llm = LLM(model_of("off"), speculative_config=drafting, **options)
    assert llm.engine.compiled is not None
    eager = Compilation("eager", drafter=False)
    llm = llm_of("eagle3", model_of("eagle3"), 1, eager)
    write(llm, PROMPTS[:1])
    assert len(llm.engine.compiled.target) == llm.engine.compiled.num_graphs > 0
    assert read_compilation(False, None, CPU, eager_drafter=True) == Compilation(drafter=False)


# ------------------------------------------------------------------- compiled before it is needed


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ngram", "eagle3"])
def test_after_a_warm_up_no_request_meets_a_new_shape(kind, model_of, monkeypatch):
    """Texts of every length, drafts or none, and batches of every size; and texts are what they
    were."""
    rows = 2 if kind == "eagle3" else 1
    monkeypatch.setattr(
        static_shapes, "FEWEST_KEYS", 60 if rows == 1 else LIMIT
    )  # keys, or batches, of two sizes
    llm = llm_of(kind, model_of(kind), rows, TRACED)
    graphs = llm.warm_up()
    assert graphs == llm.engine.compiled.num_graphs == llm.engine.compiled.most_graphs
    assert llm.get_metrics().num_drafts == 0
    plain = llm_of(kind, model_of(kind), rows, None)
    asked = [[3 + i % 80 for i in range(70)], *PROMPTS[1:]]
    for prompts in (asked[:1], asked, PROMPTS):
        assert write(llm, prompts) == write(plain, prompts)
    assert llm.engine.compiled.num_graphs == graphs
    assert plain.warm_up() == 0
