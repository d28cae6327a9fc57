"""The advice of a comparison: the best K of each concurrency by its own figures, in a form that
servers read."""

from __future__ import annotations

import json
from statistics import median

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inference.bench.advice import SCHEDULE, LevelSpeeds, advise
from inference.bench.command import serving_modes
from inference.bench.options import BenchOptions, read_options
from inference.entrypoints.speculative_config import parse_speculative_config
from inference.spec_decode.draft_length.policy import DraftLength
from speculators.errors import ConfigError

CONFIG = {
    "method": "eagle3",
    "model": "somewhere",
    "num_speculative_tokens": 6,
    "draft_sample_method": "greedy",
}
SPEED = st.integers(1, 40)  # few values, so that ties occur


@st.composite
def measured(draw):
    repeats, lengths = draw(st.integers(1, 4)), draw(st.sets(st.integers(0, 6), min_size=1))
    speeds = st.tuples(*[SPEED.map(float)] * repeats)
    concurrencies = sorted(draw(st.sets(st.integers(1, 900), min_size=1, max_size=5)))
    return [LevelSpeeds(n, draw(speeds), {k: draw(speeds) for k in lengths}) for n in concurrencies]


class Row:
    draft_limit = most_drafts = 1000


def drafts(config, batch_size: int) -> int:
    """What our engine drafts for a batch of that size."""
    if config is None:
        return 0
    parsed = parse_speculative_config(json.loads(json.dumps(config)))
    assert parsed.num_speculative_tokens is not None
    policy = DraftLength(
        parsed.num_speculative_tokens, parsed.num_speculative_tokens_per_batch_size
    )
    return policy.limits([Row()] * batch_size)[0]  # type: ignore[list-item]


@settings(max_examples=60, deadline=None)
@given(measured())
def test_every_concurrency_gets_its_fastest_length(levels):
    advice = advise(levels, CONFIG)
    config = advice["speculative_config"]
    for level, row in zip(levels, advice["levels"], strict=True):
        tokens = row["num_speculative_tokens"]
        gains = {k: median(level.gains(k)) for k in {0, *level.fixed}}
        assert gains[tokens] == max(gains.values())
        assert tokens == min(k for k, gain in gains.items() if gain == gains[tokens])
        assert drafts(config, level.concurrency) == tokens
        gain = row["gain"]
        assert gain["smallest"] <= gain["median"] <= gain["largest"]
        if config is not None:
            assert gain["median"] == gains[tokens]
    assert (config is None) == all(row["num_speculative_tokens"] == 0 for row in advice["levels"])
    above = advice["off_above"]
    if above is not None:
        assert drafts(config, above + 1) == drafts(config, 2000) == 0 and (
            above == 0 or drafts(config, above) > 0
        )
    else:
        assert drafts(config, 2000) > 0


@settings(max_examples=60, deadline=None)
@given(measured())
def test_ranges_ascend_without_gaps(levels):
    config = advise(levels, CONFIG)["speculative_config"] or {}
    ranges = config.get(SCHEDULE, [])
    for before, after in zip([[0, 0, None], *ranges], ranges):
        assert after[0] == before[1] + 1 <= after[1] and after[2] != before[2]
    assert len(ranges) != 1
    if config:
        assert config["num_speculative_tokens"] == max(
            [k for *_, k in ranges] or [config["num_speculative_tokens"]]
        )
        assert {name: config[name] for name in ("method", "model", "draft_sample_method")} == {
            name: CONFIG[name] for name in ("method", "model", "draft_sample_method")
        }


def test_a_slow_moment_of_the_machine_decides_nothing():
    """The third repeat is ten times slower for all; ratios within a repeat do not see it."""
    level = LevelSpeeds(1, (10.0, 10.0, 1.0), {2: (15.0, 15.0, 1.5), 4: (14.0, 14.0, 1.4)})
    row = advise([level], CONFIG)["levels"][0]
    assert row["num_speculative_tokens"] == 2
    assert row["gain"] == pytest.approx({"median": 1.5, "smallest": 1.5, "largest": 1.5})


def test_a_waiting_drafter_is_judged_by_its_own_speed():
    """K = 0 while a drafter waits is slower than no drafter; it is what 'off above' serves."""
    slower = LevelSpeeds(8, (10.0,), {0: (9.0,), 4: (9.5,)})
    assert slower.best == 4
    assert LevelSpeeds(8, (10.0,), {4: (9.5,)}).best == 0


def asked(**more) -> BenchOptions:
    return BenchOptions(
        dataset_name="random", compare=True, model="target", speculative_config=CONFIG, **more
    )


def test_our_server_takes_every_length_and_vllm_has_one_for_each():
    modes, configs = serving_modes(asked(draft_lengths="0,2,8"), CONFIG)
    assert {name: (mode.server, mode.tokens) for name, mode in modes.items()} == {
        "off": ("off", None),
        "K=0": ("on", 0),
        "K=2": ("on", 2),
        "on": ("on", 6),
        "K=8": ("on", 8),
    }
    assert all(
        mode.body == {"num_speculative_tokens": mode.tokens}
        for mode in modes.values()
        if mode.server == "on"
    )
    assert configs == {"off": None, "on": CONFIG | {"num_speculative_tokens": 8}}

    options = asked(draft_lengths="0,2", serve_args="--engine vllm --max-num-seqs 4")
    modes, configs = serving_modes(options, CONFIG)
    assert all(mode.server == name and not mode.body for name, mode in modes.items())
    assert configs["K=2"] == CONFIG | {"num_speculative_tokens": 2} and configs["on"] == CONFIG
    assert drafts(configs["K=0"], 1) == drafts(configs["K=0"], 2000) == 0


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--draft-lengths", "2", "--baseline-url", "http://localhost:1"], "--draft-lengths"),
        (["--draft-lengths", "2", "--model", "m", "-sc", '{"speculative_eagle_topk": 2}'], "trees"),
        (["--draft-lengths", "-1", "--model", "m", "-sc", "{}"], "--draft-lengths"),
    ],
)
def test_what_cannot_be_advised_on_is_refused(flags, named):
    with pytest.raises(ConfigError, match=named):
        read_options(["--dataset-name", "random", "--compare", *flags])
