"""Snippets of vLLM's guides run with only the import and the models changed, and drafting changes
no token."""

from __future__ import annotations

import logging
import re
import warnings
from pathlib import Path

import pytest
import torch

from inference import LLM, SamplingParams
from speculators.errors import CheckpointError, ConfigError
from speculators.export import export_drafter
from speculators.families.draft_model.student import build_model
from speculators.registry import config_for_target, family_class
from speculators.target.frozen_target import FrozenTarget

PROMPTS = ["The future of AI is"]
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
        opt = build_model({"model_type": "opt", **OPT})
        opt.save_pretrained(root / "opt")
        for (
            parameter
        ) in opt.parameters():  # the draft model is nearly its target, so that drafts are accepted
            parameter.data += 0.01 * torch.randn_like(parameter)
        opt.save_pretrained(root / "opt-draft")
        llama = tiny_model(
            "llama", vocab_size=259, bos_token_id=256, eos_token_id=257, pad_token_id=258
        )
        llama.save_pretrained(root / "llama")
        target = FrozenTarget(llama, [1, 2, 3])
        for name, (family, shape) in HEADS.items():
            taps = [1, 2, 3] if family_class(family).reads_taps else None
            head = family_class(family)(
                config_for_target(target, family, tap_layers=taps, **shape)
            ).attach(target)
            export_drafter(head.eval(), root / name, dtype=torch.float32)
    for name in ("opt", "opt-draft", "llama"):
        byte_tokenizer.save_pretrained(root / name)
    return {path.name: str(path) for path in root.iterdir()}


# name -> target, options as in the guide (models by the names of `folders`), what the runtime must
# make of them
GUIDES = {
    "draft model": (
        "opt",
        dict(
            tensor_parallel_size=1,
            speculative_config={"model": "opt-draft", "num_speculative_tokens": 5},
        ),
        ("draft_model", 5),
    ),
    "n-grams": (
        "opt",
        dict(
            tensor_parallel_size=1,
            speculative_config={
                "method": "ngram",
                "num_speculative_tokens": 5,
                "prompt_lookup_max": 4,
            },
        ),
        ("ngram", 5),
    ),
    "suffix decoding": (
        "llama",
        dict(
            tensor_parallel_size=1,
            enforce_eager=True,
            speculative_config={"method": "suffix", "num_speculative_tokens": 15},
        ),
        ("suffix", 15),
    ),
    "n-grams, vLLM's name of a rule": (
        "opt",
        dict(
            speculative_config={
                "method": "ngram",
                "num_speculative_tokens": 5,
                "rejection_sample_method": "standard",
            }
        ),
        ("ngram", 5),
    ),
    "MLP speculator on four devices": (
        "llama",
        dict(
            tensor_parallel_size=4,
            speculative_config={"model": "accelerator", "draft_tensor_parallel_size": 1},
        ),
        ("mlp", 3),
    ),
    "EAGLE on four devices": (
        "llama",
        dict(
            tensor_parallel_size=4,
            speculative_config={"model": "eagle", "draft_tensor_parallel_size": 1},
        ),
        ("eagle", 5),
    ),
    "EAGLE, asynchronous": (
        "llama",
        dict(
            tensor_parallel_size=4,
            distributed_executor_backend="mp",
            enforce_eager=True,
            async_scheduling=True,
            speculative_config={
                "method": "eagle",
                "model": "eagle",
                "draft_tensor_parallel_size": 1,
                "num_speculative_tokens": 2,
            },
        ),
        ("eagle", 2),
    ),
    "EAGLE-3 by what it is": ("llama", dict(speculative_config={"model": "eagle3"}), ("eagle3", 5)),
    "Medusa by what it is": ("llama", dict(speculative_config={"model": "medusa"}), ("medusa", 2)),
    "MTP under vLLM's name": (
        "llama",
        dict(
            speculative_config={
                "method": "deepseek_mtp",
                "model": "mtp",
                "num_speculative_tokens": 2,
                "disable_padded_drafter_batch": "False",
            }
        ),
        ("mtp", 2),
    ),
    "older: draft model": (
        "opt",
        dict(
            tensor_parallel_size=1,
            speculative_model="opt-draft",
            num_speculative_tokens=5,
            use_v2_block_manager=True,
        ),
        ("draft_model", 5),
    ),
    "older: n-grams": (
        "opt",
        dict(
            tensor_parallel_size=1,
            speculative_model="[ngram]",
            num_speculative_tokens=5,
            ngram_prompt_lookup_max=4,
            use_v2_block_manager=True,
        ),
        ("ngram", 5),
    ),
    "older: MLP speculator": (
        "llama",
        dict(
            tensor_parallel_size=4,
            speculative_model="accelerator",
            speculative_draft_tensor_parallel_size=1,
        ),
        ("mlp", 3),
    ),
}


def placed(options: dict, folders: dict[str, str]) -> dict:
    """The options with folders in place of models."""
    options = dict(options)
    if "speculative_model" in options:
        options["speculative_model"] = folders.get(
            options["speculative_model"], options["speculative_model"]
        )
    config = options.get("speculative_config")
    if config and "model" in config:
        options["speculative_config"] = config | {"model": folders[config["model"]]}
    return options


@pytest.mark.slow
@pytest.mark.parametrize("name", GUIDES)
def test_a_guide_runs_as_it_is(name, folders, capsys):
    target, options, (method, k) = GUIDES[name]
    sampling_params = SamplingParams(temperature=0.8, top_p=0.95)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        llm = LLM(model=folders[target], **placed(options, folders))
    outputs = llm.generate(PROMPTS, sampling_params, use_tqdm=False)
    for output in outputs:
        prompt = output.prompt
        generated_text = output.outputs[0].text
        print(f"Prompt: {prompt!r}, Generated text: {generated_text!r}")
    assert (
        capsys.readouterr().out.startswith(f"Prompt: {PROMPTS[0]!r}, Generated text: '")
        and output.outputs[0].text
    )

    drafter = getattr(llm.engine.proposer, "_drafter", None)
    proposer = type(llm.engine.proposer).__name__.removesuffix("Proposer").lower()
    assert (drafter.config.family if drafter else proposer) == method
    assert llm.engine.proposer.num_speculative_tokens == k
    kinds = {warning.category for warning in seen if warning.filename == __file__}
    expected = {UserWarning} if options.get("tensor_parallel_size", 1) > 1 else set()
    assert kinds == expected | ({DeprecationWarning} if "speculative_model" in options else set())


@pytest.mark.slow
@pytest.mark.parametrize("name", GUIDES)
def test_a_guide_writes_what_its_target_writes_alone(name, folders):
    target, options, _ = GUIDES[name]
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        llm = LLM(model=folders[target], **placed(options, folders))
    prompts = [*PROMPTS, "ababab", "The the the the"]
    drafted, plain = (
        each.generate(prompts, params, use_tqdm=False) for each in (llm, LLM(model=folders[target]))
    )
    assert [o.outputs[0].token_ids for o in drafted] == [o.outputs[0].token_ids for o in plain]
    assert llm.get_metrics().num_drafts > 0


def test_the_older_form_is_shown_in_todays(folders):
    form = (
        "{'method': 'ngram', 'num_speculative_tokens': 5, 'prompt_lookup_max': 4,"
        " 'disable_by_batch_size': 8}"
    )
    with pytest.warns(DeprecationWarning, match=re.escape(f"speculative_config={form}")):
        LLM(
            folders["opt"],
            speculative_model="[ngram]",
            num_speculative_tokens=5,
            ngram_prompt_lookup_max=4,
            speculative_disable_by_batch_size=8,
        )


def test_a_depth_that_nothing_says_is_logged_and_one_that_an_export_says_is_used(
    folders, tmp_path, caplog
):
    with caplog.at_level(logging.WARNING):
        LLM(folders["llama"], speculative_config={"model": folders["eagle"]})
    assert "num_speculative_tokens is not given" in caplog.text and folders["eagle"] in caplog.text
    target = FrozenTarget(LLM(folders["llama"]).engine.target.model)
    head = family_class("eagle")(config_for_target(target, "eagle")).attach(target)
    export_drafter(
        head, tmp_path / "head", dtype=torch.float32, provenance={"num_speculative_tokens": 3}
    )
    llm = LLM(folders["llama"], speculative_config={"model": str(tmp_path / "head")})
    assert llm.engine.proposer.num_speculative_tokens == 3


HARMLESS = dict(
    gpu_memory_utilization=0.9,
    enforce_eager=True,
    disable_log_stats=False,
    tensor_parallel_size=1,
    swap_space=4,
    block_size=64,
    max_num_seqs=4,
    seed=42,
    dtype="float32",
    kv_cache_dtype="auto",
    quantization=None,
)


def test_options_that_change_no_output_are_accepted(folders):
    LLM(folders["opt"], **HARMLESS)


REFUSED = [
    (dict(kv_cache_dtype="fp8"), "kv_cache_dtype='fp8'"),
    (dict(max_lora_rank=8), "unknown options max_lora_rank"),
    (dict(num_speculative_tokens=4), "without speculative_model"),
    (
        dict(
            speculative_model="[ngram]",
            speculative_config={"method": "ngram", "num_speculative_tokens": 1},
        ),
        "give the former alone",
    ),
    (
        dict(
            speculative_model="[ngram]",
            num_speculative_tokens=2,
            spec_decoding_acceptance_method="typical_acceptance_sampler",
        ),
        "acceptance_method='typical_acceptance_sampler'",
    ),
]


@pytest.mark.parametrize(("options", "message"), REFUSED)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_what_would_change_the_output_is_refused_by_name(options, message, folders):
    with pytest.raises(ConfigError, match=message):
        LLM(folders["opt"], **options)


def test_a_folder_that_holds_no_drafter_is_named(folders, tmp_path):
    with pytest.raises(CheckpointError, match=str(tmp_path)):
        LLM(
            folders["opt"], speculative_config={"model": str(tmp_path), "num_speculative_tokens": 2}
        )
    with pytest.raises(CheckpointError, match="no-such-target"):
        options = {"model": folders["eagle"], "num_speculative_tokens": 2}
        LLM(str(Path(tmp_path) / "no-such-target"), speculative_config=options)
