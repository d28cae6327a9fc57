"""Load generators of others against our server: aiperf and guidellm read the acceptance that the
engine counted."""

from __future__ import annotations

from pathlib import Path

import pytest

from inference.evaluation.suites import Conversation
from scripts import setup_vllm
from scripts.bench_clients import CLIENTS, SERVE, Run

VENV = setup_vllm.ROOT / ".venv-clients"


@pytest.mark.slow
@pytest.mark.parametrize("client", CLIENTS)
def test_a_client_reads_what_the_engine_counted(
    client, serving, drafting_llm, tiny_model, byte_tokenizer, tmp_path
):
    if not (VENV / client / ".draftsmith").exists():
        pytest.skip(
            f"{VENV / client} has no {CLIENTS[client]}; python scripts/bench_clients.py makes it"
        )
    model = tiny_model("qwen3", vocab_size=len(byte_tokenizer), max_position_embeddings=512)
    model.generation_config.eos_token_id = None
    byte_tokenizer.save_pretrained(tmp_path / "target")
    llm = drafting_llm("ngram", model, max_num_seqs=2)
    flag, detail = SERVE
    options = {flag.removeprefix("--").replace("-", "_"): detail}
    url = serving(llm, served_model_name=(str(tmp_path / "target"),), **options)
    rows = [
        Conversation("any", ("What is it?", "And that?"), "1"),
        Conversation("any", ("Who?",), "2"),
    ]
    found = getattr(Run(url, Path(tmp_path / "target"), rows, 16, VENV, tmp_path), client)()
    counted = llm.engine.counters
    assert (found.num_drafts, found.num_accepted_tokens) == (
        counted.num_drafts,
        counted.num_accepted_tokens,
    )
    assert 0 < found.num_accepted_tokens
