"""SmolLM2-135M-Instruct: losslessness of every method, loss masks of its template, a short run to
an export that loads, and the drafts of that export in real vLLM."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from draftsmith import LLM, SamplingParams
from draftsmith.inference.spec_decode.proposers.methods import TRAINING_FREE
from draftsmith.train.data.examples import parse_row
from draftsmith.train.data.loss_mask import ConversationTokenizer
from draftsmith.train.pipeline.run import run
from tests.support.vllm import with_head

pytestmark = [pytest.mark.slow, pytest.mark.integration]
RECIPES = Path(__file__).resolve().parents[2] / "recipes"
DATA = RECIPES / "quickstart" / "data"
FAMILIES = ("eagle3", "peagle", "dspark", "mlp", "draft_model")
SHORT = (  # three steps on a few rows
    "training.steps=3",
    "training.max_minutes=null",
    "training.eval_every=3",
    "regenerate.max_new_tokens=16",
    "data.max_length=256",
    f"data.train=[{{path: {DATA / 'train.jsonl.gz'}, limit: 8}}]",
    f"data.validation=[{{path: {DATA / 'validation.jsonl.gz'}, limit: 2}}]",
    "evaluation.prompts=[]",
    "evaluation.max_tokens=8",
    "evaluation.prompts_per_workload=1",
    "evaluation.timed_prompts=1",
    "evaluation.repeats=1",
    "gates={}",
)
TOKENS = 40


def rows(name: str, count: int) -> list[dict]:
    with gzip.open(DATA / name, "rt", encoding="utf-8") as file:
        return [json.loads(line) for line, _ in zip(file, range(count))]


@pytest.fixture(scope="session")
def tokenizer(smollm2):
    return AutoTokenizer.from_pretrained(smollm2)


@pytest.fixture(scope="session")
def prompts(tokenizer) -> list[list[int]]:
    """Two prompts of each workload."""
    chats = [row["messages"][:-1] for row in rows("test.jsonl.gz", 12)]
    ids = tokenizer.apply_chat_template(chats, add_generation_prompt=True, return_dict=False)
    return [*ids, *(tokenizer(row["prompt"]).input_ids for row in rows("code-test.jsonl.gz", 2))]


@pytest.fixture(scope="session")
def greedy(smollm2, prompts) -> list[list[int]]:
    """What `transformers.generate` writes in float32."""
    model = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32)
    written = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        output = model.generate(ids, max_new_tokens=TOKENS, do_sample=False)
        written.append(output[0, len(prompt) :].tolist())
    return written


@pytest.fixture(scope="session")
def export(smollm2, tmp_path_factory) -> Callable[[str], Path]:
    """`export(family)`: the drafter of a run of three steps. Each family runs once."""
    root, exports = tmp_path_factory.mktemp("runs"), dict[str, Path]()

    def of(family: str) -> Path:
        if family not in exports:
            recipe = RECIPES / "smollm2-135m-instruct" / f"{family}.yaml"
            overrides = (f"target.model={smollm2}", f"output_dir={root / family}")
            cache = f"regenerate.cache_dir={root / 'responses'}"
            assert run(recipe, (*SHORT, *overrides, cache)) == 0
            exports[family] = root / family / "export"
        return exports[family]

    return of


@pytest.mark.parametrize("method", [*TRAINING_FREE, *FAMILIES])
def test_greedy_text_of_a_method_is_that_of_transformers(method, smollm2, prompts, greedy, request):
    config = {"method": method, "num_speculative_tokens": 4}
    if method in FAMILIES:
        config["model"] = str(request.getfixturevalue("export")(method))
    llm = LLM(str(smollm2), dtype="float32", speculative_config=config, max_num_seqs=4)
    params = SamplingParams(temperature=0, max_tokens=TOKENS)
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
    assert [list(output.outputs[0].token_ids) for output in outputs] == greedy


def test_loss_mask_of_the_template_holds_the_answers(tokenizer):
    turns = ConversationTokenizer(tokenizer)
    for number, row in enumerate(rows("train.jsonl.gz", 200)):
        example = parse_row(row, origin=f"train:{number}")
        text = "".join(
            tokenizer.decode([i for i, kept in zip(part.input_ids, part.loss_mask) if kept])
            for part in turns.rows(example)
        )
        answers = [m["content"] for m in row["messages"] if m["role"] == "assistant"]
        assert text == "".join(f"{answer}<|im_end|>" for answer in answers)


@pytest.mark.parametrize("family", ["eagle3", "draft_model"])
def test_drafts_of_an_export_in_vllm_are_ours(family, smollm2, export, same_as_ours):
    config = {"method": family, "model": str(export(family)), "num_speculative_tokens": 3}
    model = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32)
    model.generation_config.eos_token_id = None  # vLLM's test engine knows no end either
    llm = with_head(model, export(family), config["num_speculative_tokens"])
    counters = same_as_ours(smollm2, config, llm, engine={"dtype": "float32"})
    assert counters.num_drafts > 0
