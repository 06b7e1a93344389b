"""Choices, what they make of a configuration, and its text."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.config import EngineConfig
from engine.load.arrivals import Burst
from engine.load.generate import Load, make_load
from engine.load.lengths import Equal, Uniform
from engine.speculation.config import SpeculativeConfig
from engine.tuning.space import POOL_SHARE, Space, as_text, configured, default_knobs, default_space, key, longest_request
from tests.engine.tuning.fake import LOAD


def test_the_default_space_has_where_the_configuration_stands() -> None:
    config = EngineConfig(max_num_seqs=5, block_size=4, enable_chunked_prefill=False)
    space = default_space(config, LOAD)
    assert space.choices["max_num_seqs"] == (1, 2, 4, 5, 8, 16)  # no more than there are requests, rounded up to a power of two
    assert 4 in space.choices["block_size"] and set(space.choices["enable_chunked_prefill"]) == {True, False}
    assert "continuous" in space.choices["batching"]
    assert configured(config, default_knobs(config, space.choices), 8192, 17) == config


def test_every_point_once_and_each_a_configuration() -> None:
    space = Space({"max_num_seqs": (4, 2, 4), "enable_chunked_prefill": (True, False), POOL_SHARE: (0.5, 1, 1.0)})
    assert space.choices["max_num_seqs"] == (2, 4) and space.choices[POOL_SHARE] == (0.5, 1)
    points = list(space.points())
    assert len(points) == 8 == len({key(knobs) for knobs in points})
    for knobs in points:
        config = configured(EngineConfig(), knobs, 640, 10)
        assert config.max_num_seqs == knobs["max_num_seqs"]
        assert config.num_kv_blocks == (None if knobs[POOL_SHARE] == 1 else 20)


def test_a_time_to_gather_matters_to_dynamic_batching_alone() -> None:
    if not hasattr(EngineConfig(), "batching_timeout_ms"):
        pytest.skip("this engine has no dynamic batching")
    space = Space({"batching": ("continuous", "dynamic"), "batching_timeout_ms": (10, 20)})
    assert sorted(map(str, space.points())) == sorted(
        map(str, [{"batching": "continuous"}, *({"batching": "dynamic", "batching_timeout_ms": ms} for ms in (10, 20))])
    )


@given(st.sampled_from([0.01, 0.25, 0.5, 1.0]), st.sampled_from([1, 8, 16, 64]), st.integers(64, 10_000), st.integers(1, 400))
def test_a_pool_holds_its_share_and_the_longest_request(share: float, block_size: int, tokens: int, longest: int) -> None:
    config = EngineConfig(block_size=16)
    got = configured(config, {POOL_SHARE: share, "block_size": block_size}, tokens, longest).num_kv_blocks
    if share == 1.0 and block_size == 16:
        assert got is None  # as the engine chooses
    else:
        assert got is not None and got * block_size >= longest
        assert got * block_size >= share * tokens - block_size / 2 and (
            (got - 1) * block_size < max(longest, share * tokens + block_size / 2)
        )


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        ({"speed": (1,)}, "'speed' cannot be tuned; knobs: pool_share, dtype"),
        ({"num_kv_blocks": (10,)}, "'num_kv_blocks' cannot be tuned"),
        ({"max_num_seqs": ()}, "max_num_seqs needs at least one value"),
        ({POOL_SHARE: (0.0,)}, r"pool_share must lie in \(0, 1\], got 0.0"),
        ({POOL_SHARE: (True,)}, "pool_share must lie in"),
    ],
)
def test_choices_that_are_none_are_refused(choices: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Space(choices)


def test_values_that_a_configuration_cannot_take_are_refused() -> None:
    with pytest.raises(ValueError, match=r"max_num_seqs must be an integer in \[1, 4096\], got 0"):
        Space({"max_num_seqs": (0, 4), "block_size": (8,)}).check(EngineConfig())
    groups = Space({"quantization": (None, "int4"), "quantization_group_size": (None, 32)})
    groups.check(EngineConfig())  # with int4 there are groups
    with pytest.raises(ValueError, match="quantization_group_size goes with a quantization"):
        Space({"quantization_group_size": (None, 32)}).check(EngineConfig())


def test_the_longest_request_is_that_of_the_load() -> None:
    load = Load(
        arrivals=Burst(), num_requests=9, prompt=Uniform(3, 30), output=Uniform(2, 20), prefix_share=0.5, prefix_length=40, seed=3
    )
    assert longest_request(load) == max(len(a.token_ids) + a.max_tokens for a in make_load(load))
    assert longest_request(load.changed(num_requests=1, prefix_share=0.0, prompt=Equal(5), output=Equal(4), turns=Equal(3))) == 27


@pytest.mark.parametrize(
    "config",
    [
        EngineConfig(),
        EngineConfig(model="a 'quoted' path", max_num_seqs=3, num_kv_blocks=77, enable_prefix_caching=False, max_model_len=64),
        EngineConfig(
            quantization="int4",
            quantization_group_size=32,
            speculative=SpeculativeConfig(method="ngram", num_speculative_tokens=3),
        ),
    ],
)
def test_the_text_makes_the_configuration(config: EngineConfig) -> None:
    text = as_text(config)
    assert eval(text, {"EngineConfig": EngineConfig, "SpeculativeConfig": SpeculativeConfig}) == config
    assert text.startswith("EngineConfig(\n    model=") and "seed" not in text
