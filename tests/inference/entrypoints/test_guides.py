"""Snippets of vLLM's guides run with only the import and the models changed, and drafting changes
no token."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch

from draftsmith.inference import LLM, SamplingParams
from draftsmith.inference.engine_options import EngineOptions
from draftsmith.inference.entrypoints.speculative_config import complete, parse_speculative_config
from draftsmith.inference.entrypoints.vllm_options import read_options
from draftsmith.inference.spec_decode.tree_shape import DynamicTree, StaticTree
from draftsmith.speculators.errors import CheckpointError, ConfigError
from draftsmith.speculators.export import export_drafter
from draftsmith.speculators.families.draft_model.student import build_model
from draftsmith.speculators.registry import config_for_target, family_class
from draftsmith.speculators.target.frozen_target import FrozenTarget
from tests.support.engines import ids_of

PROMPTS = ["The future of AI is", "ababab", "The the the the"]
OPT = dict(
    hidden_size=24,
    ffn_dim=40,
    num_hidden_layers=2,
    num_attention_heads=4,
    word_embed_proj_dim=24,
    max_position_embeddings=256,
    init_std=0.2,
    dropout=0.0,
    vocab_size=259,
    bos_token_id=256,
    eos_token_id=257,
)
HEADS = {
    "accelerator": ("mlp", {"n_predict": 3}),
    "eagle": ("eagle", {}),
    "eagle3": ("eagle3", {"draft_vocab_size": 100}),
    "medusa": ("medusa", {"num_heads": 2}),
    "mtp": ("mtp", {}),
}


@pytest.fixture(scope="module")
def folders(tiny_model, byte_tokenizer, tmp_path_factory) -> dict[str, str]:
    """Models of the guides' kinds, tiny and random, as folders: opt (and its small draft), llama
    and its heads."""
    root = tmp_path_factory.mktemp("guides")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        small_opt = build_model({"model_type": "opt", **OPT})
        small_opt.save_pretrained(root / "opt")
        # the draft model is nearly its target, so that drafts are accepted
        for parameter in small_opt.parameters():
            parameter.data += 0.01 * torch.randn_like(parameter)
        small_opt.save_pretrained(root / "opt-draft")
        llama = tiny_model(
            "llama", vocab_size=259, bos_token_id=256, eos_token_id=257, pad_token_id=258
        )
        llama.save_pretrained(root / "llama")
        target = FrozenTarget(llama, [1, 2, 3])
        for name, (family, shape) in HEADS.items():
            taps = [1, 2, 3] if family_class(family).traits.reads_taps else None
            head = family_class(family)(
                config_for_target(target, family, tap_layers=taps, **shape)
            ).attach(target)
            export_drafter(head.eval(), root / name, dtype=torch.float32)
    for name in ("opt", "opt-draft", "llama"):
        byte_tokenizer.save_pretrained(root / name)
    return {path.name: str(path) for path in root.iterdir()}


FOUR = {"tensor_parallel_size": 4}
ONE = {"draft_tensor_parallel_size": 1, "disable_padded_drafter_batch": "False"}
NGRAM = {"num_speculative_tokens": 5, "use_v2_block_manager": True, "ngram_prompt_lookup_max": 4}
# target, further options of LLM, speculative_config as in a guide (models by the names of
# `folders`) -> method and K
GUIDES = [
    ("opt", {}, {"model": "opt-draft", "num_speculative_tokens": 5}, "draft_model", 5),
    ("opt", {}, {"method": "ngram", "prompt_lookup_max": 4}, "ngram", 5),
    ("opt", {}, {"method": "ngram", "rejection_sample_method": "standard"}, "ngram", 5),
    (
        "llama",
        {"enforce_eager": True},
        {"method": "suffix", "num_speculative_tokens": 15},
        "suffix",
        15,
    ),
    ("llama", FOUR, {"model": "accelerator", **ONE}, "mlp", 3),
    ("llama", {"distributed_executor_backend": "mp"}, {"model": "eagle", **ONE}, "eagle", 5),
    (
        "llama",
        {"async_scheduling": True},
        {"model": "eagle3", "disable_padded_drafter_batch": "False"},
        "eagle3",
        5,
    ),
    ("llama", {}, {"model": "medusa"}, "medusa", 2),
    (
        "llama",
        {},
        {"method": "deepseek_mtp", "model": "mtp", "num_speculative_tokens": 2},
        "mtp",
        2,
    ),
    ("opt", {"speculative_model": "opt-draft", "num_speculative_tokens": 5}, {}, "draft_model", 5),
    ("opt", {"speculative_model": "[ngram]", **NGRAM}, {}, "ngram", 5),
    (
        "llama",
        {"speculative_model": "accelerator", "speculative_draft_tensor_parallel_size": 1},
        {},
        "mlp",
        3,
    ),
]


def in_folders(options: dict, name: str, folders: dict[str, str]) -> dict:
    """The options with a folder in place of this model."""
    return options | ({name: folders[options[name]]} if options.get(name) in folders else {})


@pytest.mark.slow
@pytest.mark.parametrize(("target", "options", "config", "method", "k"), GUIDES)
def test_a_guide_runs_as_it_is(target, options, config, method, k, folders):
    """And writes what its target writes alone."""
    if config:
        options = options | {"speculative_config": in_folders(config, "model", folders)}
    options = in_folders(options, "speculative_model", folders)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        llm = LLM(model=folders[target], **options)
    drafter = getattr(llm.engine.proposer, "_drafter", None)
    proposer = type(llm.engine.proposer).__name__.removesuffix("Proposer").lower()
    assert (drafter.config.family if drafter else proposer) == method
    assert llm.engine.proposer.num_speculative_tokens == k
    kinds = {warning.category for warning in seen if warning.filename == __file__}
    expected = {UserWarning} if "tensor_parallel_size" in options else set()
    assert kinds == expected | ({DeprecationWarning} if "speculative_model" in options else set())

    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    drafted = llm.generate(PROMPTS, params, use_tqdm=False)
    assert llm.get_metrics().num_drafts > 0 and drafted[0].outputs[0].text
    plain = llm.generate(PROMPTS, params, use_tqdm=False, speculate=False)
    assert ids_of(drafted) == ids_of(plain)


def test_drafts_are_as_many_as_an_export_says_or_five_with_a_warning(folders, tmp_path, caplog):
    llm = LLM(folders["llama"], speculative_config={"model": folders["eagle"]})
    assert llm.engine.proposer.num_speculative_tokens == 5
    assert "num_speculative_tokens" in caplog.text
    caplog.clear()
    target = FrozenTarget(LLM(folders["llama"]).engine.target.model)
    head = family_class("eagle")(config_for_target(target, "eagle")).attach(target)
    export_drafter(
        head, tmp_path / "head", dtype=torch.float32, provenance={"num_speculative_tokens": 3}
    )
    llm = LLM(folders["llama"], speculative_config={"model": str(tmp_path / "head")})
    assert llm.engine.proposer.num_speculative_tokens == 3
    assert "num_speculative_tokens" not in caplog.text


@pytest.mark.parametrize(
    ("options", "tree"),
    [
        ({"speculative_token_tree": "[(0,), (1,), (0, 0)]"}, StaticTree(((0,), (1,), (0, 0)))),
        ({"speculative_eagle_topk": 2, "speculative_num_steps": 6}, DynamicTree(2, 6, 12)),
        ({"speculative_eagle_topk": 2}, DynamicTree(2, 5, 10)),
        ({"speculative_eagle_topk": 2, "num_speculative_tokens": 7}, DynamicTree(2, 5, 7)),
    ],
)
def test_tree_without_a_number_has_one_that_fits_it(options, tree, folders):
    filled = complete({"model": folders["eagle"], **options}, folders["llama"])
    assert parse_speculative_config(filled).tree == tree


def test_options_that_change_no_output_are_accepted(folders):
    harmless = {"gpu_memory_utilization": 0.9, "disable_log_stats": False, "swap_space": 4}
    harmless |= {"block_size": 64, "kv_cache_dtype": "auto", "quantization": None}
    read = read_options({**harmless, "max_num_seqs": 4, "seed": 42, "dtype": torch.float32})
    assert read == EngineOptions(max_num_seqs=4, seed=42, dtype="float32")


OLDER = {"speculative_model": "[ngram]", "num_speculative_tokens": 2}
REFUSED = [
    (dict(kv_cache_dtype="fp8"), "kv_cache_dtype"),
    (dict(max_lora_rank=8), "max_lora_rank"),
    (OLDER | {"speculative_config": {"method": "ngram"}}, "speculative_config"),
    (OLDER | {"spec_decoding_acceptance_method": "typical"}, "acceptance_method"),
    (dict(tensor_parallel_size=0), "tensor_parallel_size"),
]


@pytest.mark.parametrize(("options", "named"), REFUSED)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_what_would_change_the_output_is_refused_by_name(options, named, folders):
    with pytest.raises(ConfigError, match=named):
        LLM(folders["opt"], **options)


def test_a_folder_that_holds_no_drafter_is_named(folders, tmp_path):
    with pytest.raises(CheckpointError, match=str(tmp_path)):
        LLM(
            folders["opt"], speculative_config={"model": str(tmp_path), "num_speculative_tokens": 2}
        )
    with pytest.raises(CheckpointError, match="no-such-target"):
        options = {"model": folders["eagle"], "num_speculative_tokens": 2}
        LLM(str(Path(tmp_path) / "no-such-target"), speculative_config=options)
