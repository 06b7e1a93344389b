"""SamplingParams: every range and what the messages say. Request and RequestOutput: what is derived from what."""

import dataclasses
import math
import pickle
from typing import Any

import pytest

from engine.request import FINISH_REASONS, CompletionOutput, Request, RequestOutput, SamplingParams, TokenLogprob

NAN, INF = math.nan, math.inf
HUGE = 10**400  # an int that no float holds

GOOD: list[tuple[str, Any]] = [
    ("temperature", 0),
    ("temperature", 0.0),
    ("temperature", 2),
    ("temperature", 1e-3),
    ("top_k", 0),
    ("top_k", -1),
    ("top_k", 10**6),
    ("top_p", 1),
    ("top_p", 1e-9),
    ("min_p", 0),
    ("min_p", 1.0),
    ("repetition_penalty", 0.01),
    ("repetition_penalty", 2),
    ("presence_penalty", -2),
    ("presence_penalty", 2.0),
    ("frequency_penalty", -2.0),
    ("frequency_penalty", 2),
    ("seed", None),
    ("seed", 0),
    ("seed", 2**64 - 1),
    ("max_tokens", 1),
    ("max_tokens", 10**6),
    ("stop", ()),
    ("stop", ("a", "\n\n", "停")),
    ("stop_token_ids", ()),
    ("stop_token_ids", (0, 2)),
    ("ignore_eos", True),
    ("n", 1),
    ("n", 64),
    ("logprobs", None),
    ("logprobs", 0),
    ("logprobs", 100),
    ("beam_width", None),
    ("beam_width", 1),
    ("beam_width", 1024),
    ("length_penalty", 1.0),
    ("early_stopping", False),
]

# name, value, what the message says is allowed
BAD: list[tuple[str, Any, str]] = [
    *(("temperature", value, "a number >= 0") for value in (-1e-9, -1, NAN, INF, -INF, True, "1", None, HUGE)),
    *(("top_k", value, "an integer >= 0") for value in (-2, 1.0, NAN, True, "5", None)),
    *(("top_p", value, "0 < top_p <= 1") for value in (0, 0.0, -0.1, 1.1, NAN, INF, True, "0.9", None, HUGE)),
    *(("min_p", value, "0 <= min_p <= 1") for value in (-0.1, 1.1, NAN, INF, True, "0", None)),
    *(("repetition_penalty", value, "a number > 0") for value in (0, -1, NAN, INF, True, "1", None)),
    *(("presence_penalty", value, "[-2, 2]") for value in (-2.1, 2.1, NAN, INF, True, "0", None)),
    *(("frequency_penalty", value, "[-2, 2]") for value in (-2.1, 2.1, NAN, INF, False, "0", None)),
    *(("seed", value, "[0, 2**64)") for value in (-1, 2**64, 1.0, True, "0", NAN)),
    *(("max_tokens", value, "an integer >= 1") for value in (0, -1, 1.0, True, "16", None, NAN)),
    *(("ignore_eos", value, "a bool") for value in (0, 1, "yes", None)),
    *(("n", value, "[1, 64]") for value in (0, -1, 65, 1.0, True, "1", None)),
    *(("logprobs", value, "[0, 100]") for value in (-1, 101, 1.0, True, "5", NAN)),
    *(("beam_width", value, "[1, 1024]") for value in (0, -1, 1025, 2.0, True, "4", NAN)),
    *(("length_penalty", value, "[-10, 10]") for value in (-11, 10.5, NAN, INF, True, "1", None)),
    *(("early_stopping", value, 'True, False or "never"') for value in (1, None, "always", NAN)),
    ("length_penalty", 0.5, "without beam_width"),
    ("early_stopping", "never", "without beam_width"),
    ("stop", ("",), "non-empty strings"),
    ("stop", ("fine", ""), "non-empty strings"),
    ("stop", (1,), "non-empty strings"),
    ("stop", (b"x",), "non-empty strings"),
    ("stop_token_ids", (-1,), "token ids >= 0"),
    ("stop_token_ids", (1.0,), "token ids >= 0"),
    ("stop_token_ids", (True,), "token ids >= 0"),
    ("stop_token_ids", ("2",), "token ids >= 0"),
]


@pytest.mark.parametrize(("name", "value"), GOOD)
def test_a_value_in_range_is_kept(name: str, value: Any) -> None:
    assert getattr(SamplingParams(**{name: value}), name) == value


def test_every_parameter_has_a_good_value_above() -> None:
    assert {name for name, _ in GOOD} == {f.name for f in dataclasses.fields(SamplingParams)}


@pytest.mark.parametrize(("name", "value", "allowed"), BAD, ids=lambda value: str(value)[:24])
def test_a_value_out_of_range_says_what_was_got_and_what_is_allowed(name: str, value: Any, allowed: str) -> None:
    for make in (lambda: SamplingParams(**{name: value}), lambda: SamplingParams().changed(**{name: value})):
        with pytest.raises(ValueError) as error:
            make()
        text = str(error.value)
        assert text.startswith(f"{name} must be ") and text.endswith(f"got {value!r}") and allowed in text, text


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("length_penalty", -2.5),
        ("early_stopping", "never"),
        ("early_stopping", True),
        ("n", 4),
        ("temperature", 0),
        ("top_k", -1),
    ],
)
def test_with_a_beam_width(name: str, value: Any) -> None:
    assert getattr(SamplingParams(beam_width=4, **{name: value}), name) == value


@pytest.mark.parametrize(("name", "value", "allowed"), [
    ("n", 5, "at most beam_width (4)"), ("temperature", 0.7, "0 or 1 in a beam search"), ("top_k", 20, "0 in a beam search"),
    ("top_p", 0.9, "1 in a beam search"), ("min_p", 0.1, "0 in a beam search"),
])  # fmt: skip
def test_what_draws_does_not_go_with_beams(name: str, value: Any, allowed: str) -> None:
    with pytest.raises(ValueError) as error:
        SamplingParams(beam_width=4, **{name: value})
    assert str(error.value).startswith(f"{name} must be ") and allowed in str(error.value)


@pytest.mark.parametrize("empty", ["", ("",), [""]])
def test_an_empty_stop_string_is_refused(empty: Any) -> None:
    with pytest.raises(ValueError, match="stop must be non-empty strings"):
        SamplingParams(stop=empty)


@pytest.mark.parametrize("name", ["stop", "stop_token_ids"])
@pytest.mark.parametrize("value", [None, 3])
def test_what_is_no_sequence_is_refused(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"{name} must be a sequence of .*, got {value!r}"):
        SamplingParams(**{name: value})


def test_one_stop_string_and_lists_become_tuples() -> None:
    params = SamplingParams(stop="END", stop_token_ids=[2, 5])  # type: ignore[arg-type]
    assert params.stop == ("END",) and params.stop_token_ids == (2, 5)
    assert SamplingParams(stop=["a", "b"]).stop == ("a", "b")  # type: ignore[arg-type]
    assert hash(params) == hash(pickle.loads(pickle.dumps(params)))


def test_an_unknown_parameter_lists_the_known_ones() -> None:
    for make in (lambda: SamplingParams(temprature=1), lambda: SamplingParams().changed(temprature=1)):  # type: ignore[call-arg]
        with pytest.raises(ValueError, match=r"unknown SamplingParams field 'temprature'; known: temperature, .*logprobs"):
            make()


def test_frozen_and_changed() -> None:
    params = SamplingParams(temperature=0.5, stop="x")
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.temperature = 1.0  # type: ignore[misc]
    assert params.changed(temperature=0.7) == SamplingParams(temperature=0.7, stop="x")
    assert params.temperature == 0.5


def test_the_first_output_is_the_requests() -> None:
    first = CompletionOutput(0, [5, 6], "ab", "stop", "stop string 'c'", [TokenLogprob(5, -0.1), TokenLogprob(6, -0.2)])
    second = CompletionOutput(1, [7], "c", "length")
    out = RequestOutput("r", [1, 2], [first, second], num_cached_tokens=1)
    assert (out.token_ids, out.text, out.finish_reason, out.message) == ([5, 6], "ab", "stop", "stop string 'c'")
    assert out.logprobs == first.logprobs and first.finish_reason in FINISH_REASONS
    # Two outputs never share the list of alternatives.
    assert first.logprobs is not None and first.logprobs[0].top is not first.logprobs[1].top


def test_a_request_splits_its_tokens_at_the_prompts_end() -> None:
    prompt = [1, 2, 3]
    request = Request("r", prompt, SamplingParams(), seed=7)
    request.token_ids += [9, 8]
    assert prompt == [1, 2, 3], "the caller's list was changed"
    assert (request.prompt_token_ids, request.output_token_ids, request.num_tokens) == ([1, 2, 3], [9, 8], 5)
    assert (request.status, request.group_id, request.seed) == ("waiting", "r", 7)
    assert request.logprobs is None and Request("s", prompt, SamplingParams(logprobs=0), seed=0).logprobs == []
