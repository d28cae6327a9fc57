"""The families that vLLM serves, by version: the layouts against vLLM's own registry, which is read
as text. Other versions than the one of `make test-vllm`: DRAFTSMITH_VLLM_WHEELS names wheels of
them, with a colon between."""

from __future__ import annotations

import ast
import os
import subprocess
import zipfile
from pathlib import Path

import pytest

from draftsmith.speculators.export.formats import LAYOUTS, NATIVE
from draftsmith.speculators.export.serving_commands import vllm_method

REGISTRY, METHODS = "vllm/model_executor/models/registry.py", "vllm/config/speculative.py"
WHEELS = [Path(name) for name in os.environ.get("DRAFTSMITH_VLLM_WHEELS", "").split(":") if name]


def strings(tree: ast.AST) -> set[str]:
    return {
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }


def assigned(text: str, ending: str) -> set[str]:
    """The strings in the values of a module's variables whose names end so; of a dictionary, its
    keys."""
    names = set[str]()
    for node in ast.parse(text).body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "").endswith(ending):
            value = node.value
            parts = value.keys if isinstance(value, ast.Dict) else [value]
            names |= set().union(*(strings(part) for part in parts if part is not None))
    return names


def check(version: str, registry: str, methods: str) -> None:
    architectures = assigned(registry, "_SPECULATIVE_DECODING_MODELS")
    known = assigned(methods, "Method") | assigned(methods, "ModelTypes")
    assert len(architectures) > 20 and {"eagle3", "ngram"} <= known
    for (format_, family), written_as in LAYOUTS.items():
        if format_ != NATIVE:
            continue
        layout = written_as.layout
        served = layout.in_vllm and not layout.dropped(version)
        if layout.in_vllm:
            named = vllm_method(family)["method"] in (known | {"mtp"})
            assert named == served, (version, family)
        if layout.architectures:
            assert bool(architectures & set(layout.architectures)) == served, (version, family)


def test_families_of_the_layouts_are_those_of_the_installed_vllm(vllm_python):
    code = "import importlib.metadata as m; d = m.packages_distributions()['vllm'][0];"
    code += " print(m.version(d), m.distribution(d).locate_file(''))"
    done = subprocess.run([vllm_python, "-c", code], capture_output=True, text=True, check=True)
    version, root = done.stdout.split()
    check(version, *((Path(root) / name).read_text() for name in (REGISTRY, METHODS)))


@pytest.mark.parametrize("wheel", WHEELS, ids=lambda path: path.name)
def test_families_of_the_layouts_are_those_of_a_wheel(wheel):
    with zipfile.ZipFile(wheel) as archive:
        texts = [archive.read(name).decode() for name in (REGISTRY, METHODS)]
    check(wheel.name.split("-")[1], *texts)
