"""Hidden states of texts by real vLLM (its method `extract_hidden_states`), for every target that
vLLM can run.

vLLM writes the states of each prompt to a file, which is read and removed here. Its own connector
writes them on a GPU; on a CPU, where that one asks for CUDA streams,
`vllm_bridge/connectors/cpu_hidden_states.py` does."""

from __future__ import annotations

import fcntl
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load
from torch import Tensor

from draftsmith.inference.vllm_bridge.vllm_engine import VllmError, Worker
from draftsmith.inference.vllm_python import vllm_python

CONNECTORS = Path(__file__).with_name("connectors")


class HiddenStates:
    """An engine for hidden states: `with HiddenStates(model, layers, …) as engine:
    engine.of(texts)`. It runs once it is made, and its process ends with the block.

    layers: k is the residual stream after k layers, the number of layers the one before the final
    norm. longest: tokens of a text, at most. folder: where vLLM's files lie until they are read;
    None: the system's.
    """

    def __init__(
        self,
        model: str,
        layers: Sequence[int],
        *,
        longest: int,
        dtype: str,
        python: str | None = None,
        options: Mapping[str, Any] | None = None,
        folder: Path | None = None,
    ) -> None:
        self.layers = tuple(layers)
        interpreter = vllm_python(python)
        self._folder = tempfile.TemporaryDirectory(prefix="hidden-states-", dir=folder)
        extraction = {
            "method": "extract_hidden_states",
            "num_speculative_tokens": 1,
            "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": list(layers)}},
        }
        question = {
            "model": model,
            "options": {"dtype": dtype, "max_model_len": longest + 2, **(options or {})},
            "speculative_config": extraction,
            "hidden_states": {"folder": self._folder.name},
        }
        try:
            self._worker = Worker(interpreter, question)
        except BaseException:
            self._folder.cleanup()
            raise

    def __enter__(self) -> HiddenStates:
        return self

    def __exit__(self, *_: Any) -> None:
        self._worker.stop()
        self._folder.cleanup()

    def of(self, texts: Sequence[Sequence[int]]) -> list[Tensor]:
        """[L, layers, H] of each text. VllmError if vLLM leaves none, or those of another text."""
        params = {"temperature": 0.0, "max_tokens": 1, "ignore_eos": True}
        question = {
            "prompts": [list(map(int, text)) for text in texts],
            "params": [params] * len(texts),
        }
        answers = self._worker.ask(question)["responses"]
        return [
            self._read(answer["hidden_states"], text)
            for answer, text in zip(answers, texts, strict=True)
        ]

    def _read(self, path: str | None, text: Sequence[int]) -> Tensor:
        if path is None or not Path(path).exists():
            raise VllmError(f"left no hidden states of a text of {len(text)} tokens", where="vLLM")
        file = Path(path)
        lock = Path(f"{path}.lock")
        if lock.exists():  # held until the file is whole
            with lock.open() as held:
                fcntl.flock(held, fcntl.LOCK_SH)
            lock.unlink()
        tensors = load(file.read_bytes())
        file.unlink()
        states: Tensor = tensors["hidden_states"]
        expected = (len(text), len(self.layers))
        if tensors["token_ids"].tolist() != list(text) or states.shape[:2] != expected:
            raise VllmError(
                f"left hidden states {tuple(states.shape)} of another text than asked for;"
                f" expected those of {expected[1]} layers and {expected[0]} tokens",
                where="vLLM",
            )
        if not torch.isfinite(states).all():
            raise VllmError(f"hidden states of {len(text)} tokens are not finite", where="vLLM")
        return states
