"""Fixtures shared by the three floors: tiny random targets of many architectures."""

from __future__ import annotations

import copy
import gc
import hashlib
import os
import shutil
import socket
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMultimodalLM

os.environ.setdefault(
    "TORCHINDUCTOR_COMPILE_THREADS", "1"
)  # no pool of processes that import torch each

_BASE = dict(
    vocab_size=101,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=256,
    # large: layers, masks and positions must matter for the tests to notice them
    initializer_range=0.3,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
)
_MIXED = ["sliding_attention", "full_attention", "sliding_attention"]
ARCHITECTURES: dict[str, dict] = {
    "llama": dict(model_type="llama"),
    "qwen2": dict(model_type="qwen2", tie_word_embeddings=True),
    "qwen3": dict(model_type="qwen3", head_dim=16),
    "qwen3_sliding": dict(
        model_type="qwen3",
        head_dim=8,
        use_sliding_window=True,
        sliding_window=4,
        max_window_layers=1,
    ),
    "mistral": dict(model_type="mistral", sliding_window=4),
    "gemma3": dict(model_type="gemma3_text", head_dim=16, sliding_window=4, layer_types=_MIXED),
    "gemma2": dict(
        model_type="gemma2",
        head_dim=16,
        sliding_window=4,
        layer_types=_MIXED,
        final_logit_softcapping=2.0,
    ),
    "phi3": dict(model_type="phi3", sliding_window=6),
    "gpt_oss": dict(
        model_type="gpt_oss",
        head_dim=8,
        sliding_window=4,
        layer_types=_MIXED,
        num_local_experts=4,
        num_experts_per_tok=2,
    ),
    "mixtral": dict(model_type="mixtral", num_local_experts=4, num_experts_per_tok=2),
    "granite": dict(model_type="granite", logits_scaling=4.0, embedding_multiplier=3.0),
    "deepseek_v3": dict(
        model_type="deepseek_v3",
        num_key_value_heads=4,
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        v_head_dim=12,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=2,
        topk_group=1,
        moe_intermediate_size=16,
        first_k_dense_replace=1,
    ),
    "cohere2": dict(model_type="cohere2", sliding_window=4, layer_types=_MIXED, logit_scale=0.25),
    "falcon": dict(
        model_type="falcon", multi_query=True
    ),  # its layers have their own attention, not transformers'
}
_MAMBA2 = dict(
    mamba_d_state=8, mamba_n_heads=4, mamba_d_head=16, mamba_n_groups=1, mamba_chunk_size=4
)
RECURRENT: dict[str, dict] = {  # of layers with states, or some of them
    "qwen3_next": dict(
        model_type="qwen3_next",
        head_dim=8,
        layer_types=["linear_attention", "full_attention", "linear_attention"],
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=16,
        decoder_sparse_step=2,
    ),
    "lfm2": dict(model_type="lfm2", layer_types=["conv", "full_attention", "conv"]),
    "falcon_h1": dict(
        model_type="falcon_h1", mamba_d_ssm=64, **_MAMBA2
    ),  # attention and states in every layer
    "mamba": dict(
        model_type="mamba", state_size=4
    ),  # no attention; its layers continue a text token by token
}


_VISION = dict(hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2)
_QWEN_VISION = dict(depth=1, hidden_size=32, out_hidden_size=32, intermediate_size=32, num_heads=2)
MULTIMODAL: dict[str, dict] = {  # whose language model is the target
    "gemma3_vision": dict(
        model_type="gemma3",
        text_config=ARCHITECTURES["gemma3"],
        vision_config=dict(_VISION, image_size=28, patch_size=14),
        mm_tokens_per_image=4,
    ),
    "mistral3": dict(
        model_type="mistral3",
        text_config=dict(model_type="mistral", head_dim=8, sliding_window=None),
        vision_config=dict(_VISION, model_type="pixtral"),
    ),
    "qwen2_5_vl": dict(  # M-RoPE
        model_type="qwen2_5_vl",
        text_config=dict(
            rope_parameters=dict(rope_type="default", rope_theta=1e4, mrope_section=[1, 1, 2])
        ),
        vision_config=_QWEN_VISION,
    ),
    "qwen3_5": dict(  # M-RoPE in a hybrid; transformers loads its language model alone
        model_type="qwen3_5",
        text_config=dict(
            {
                k: v
                for k, v in RECURRENT["qwen3_next"].items()
                if k.startswith(("linear", "layer_types"))
            },
            head_dim=16,
            rope_parameters=dict(
                rope_type="default",
                rope_theta=1e4,
                mrope_section=[1, 1, 0],
                partial_rotary_factor=0.25,
            ),
        ),
        vision_config=_QWEN_VISION,
    ),
}


def make_tiny_model(name: str, **overrides):
    """A random float32 model of the architecture (or model_type) `name`, always the same one for
    the same arguments. `overrides`: fields of the language model's config."""
    settings = {**_BASE, **(ARCHITECTURES | RECURRENT).get(name, {"model_type": name}), **overrides}
    if name in MULTIMODAL:
        settings = MULTIMODAL[name] | {
            "text_config": {**_BASE, **MULTIMODAL[name]["text_config"], **overrides}
        }
    config = AutoConfig.for_model(settings.pop("model_type"), **copy.deepcopy(settings))
    attention = (
        "eager" if getattr(config, "attn_logit_softcapping", None) else None
    )  # None: transformers' choice
    with torch.random.fork_rng():
        torch.manual_seed(0)
        auto = AutoModelForMultimodalLM if name in MULTIMODAL else AutoModelForCausalLM
        model = auto.from_config(config, dtype=torch.float32, attn_implementation=attention).eval()
        for parameter in (
            model.parameters()
        ):  # some architectures leave biases, sinks or norms at their neutral value
            if parameter.ndim == 1:
                parameter.data += 0.1 * torch.randn_like(parameter)
    return model


@pytest.fixture(scope="session")
def tiny_model():
    """The function `make_tiny_model(name, **config)`."""
    return make_tiny_model


@pytest.fixture(params=sorted(ARCHITECTURES))
def any_architecture(request) -> str:
    """Every architecture in turn."""
    return request.param


@pytest.fixture(autouse=True)
def _accelerate_afresh():
    """accelerate keeps its state, the precision too, for the life of a process; a test shall not
    inherit another's."""
    yield
    if "accelerate" in sys.modules:
        from accelerate.state import AcceleratorState, GradientState

        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()


@pytest.fixture(scope="session")
def interpreter():
    """The path of a program that does what sys.executable does, in a process that has torch
    imported already."""
    from tests.forked import Interpreter

    with tempfile.TemporaryDirectory() as folder:
        made = Interpreter(Path(folder))
        yield made.path
        made.close()


@pytest.fixture
def traced(monkeypatch):
    """torch.compile without its code generator, which takes most of the time and is tested once
    (test_compiled.py)."""
    compile = torch.compile

    def eager(function, backend, options, **others):
        filters = {name: option for name, option in options.items() if name == "guard_filter_fn"}
        return compile(function, backend="eager", options=filters, **others)

    torch._dynamo.reset()
    monkeypatch.setattr(torch, "compile", eager)


def pytest_collection_finish():
    """What is imported stays: evaluation, which collects garbage between engines, need not look
    through it."""
    gc.collect()
    gc.freeze()


def pytest_sessionfinish():
    if "tests.forked" in sys.modules:
        sys.modules["tests.forked"].stop()


@pytest.fixture
def no_pictures(monkeypatch):
    """Pages and trackers with empty figures: drawing takes half the time of a tiny run
    (tests/inference/report)."""
    from matplotlib.figure import Figure

    from draftsmith.inference.report import html

    monkeypatch.setattr(
        html, "_figure", lambda title, height, draw: Figure(figsize=(1, 1), label=title)
    )
    monkeypatch.setattr(html, "svg", lambda figure: figure.get_label())


@pytest.fixture
def hub_cache(tmp_path, monkeypatch):
    """hub_cache(name, folder, revision): puts a folder into the Hub's cache, empty before, which is
    all there is: the client is offline."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub-cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)

    def hold(name: str, folder: Path, revision: str = "main") -> None:
        repository = tmp_path / "hub-cache" / f"models--{name.replace('/', '--')}"
        commit = hashlib.sha1(f"{name}@{revision}".encode()).hexdigest()
        shutil.copytree(folder, repository / "snapshots" / commit)
        (repository / "refs").mkdir(exist_ok=True)
        (repository / "refs" / revision).write_text(commit)

    return hold


@pytest.fixture
def serving():
    """serving(llm, **options): the base URL of a server of that LLM, on a port of its own, in a
    thread of its own; its Server is `serving.server(url)`. It is shut down when the test ends."""
    import uvicorn

    from draftsmith.inference.server.app import make_app
    from draftsmith.inference.server.options import ServerOptions

    running = {}

    def start(llm, **options) -> str:
        app = make_app(
            llm,
            ServerOptions(**{"served_model_name": ("tiny",), "shutdown_timeout_s": 0, **options}),
        )
        listening = socket.socket()
        listening.bind(("127.0.0.1", 0))
        server = uvicorn.Server(uvicorn.Config(app, log_config=None, timeout_graceful_shutdown=5))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
        thread.start()
        while not server.started and thread.is_alive():
            time.sleep(0.01)
        url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        running[url] = (app.state.server, server, thread)
        return url

    start.server = lambda url: running[url][0]
    yield start
    for _, server, thread in running.values():
        server.should_exit = True
        thread.join(20)
        assert not thread.is_alive()


@pytest.fixture
def claimed_gpu(monkeypatch):
    """A device that is not there (tests/device_emulation.py)."""
    from tests import device_emulation

    with device_emulation.claimed_gpu(monkeypatch) as emulation:
        yield emulation
