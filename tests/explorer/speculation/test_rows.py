"""Events to rounds, pieces, stages and trees; counts against counting by hand."""

import math
from itertools import product

import pytest

from engine.events.types import DraftVerified, Event, TokenSampled
from explorer.speculation import picture, stats
from explorer.speculation.rows import NOTHING, Setting, SpeculationRows
from tests.explorer.speculation.made import SPEC, TEXTS, Made


def rows_of(made: Made) -> SpeculationRows:
    rows = SpeculationRows()
    rows.feed(made.log)
    return rows


@pytest.fixture
def made() -> Made:
    """A plain step, then drafts that are kept in part, whole and not at all, one step without a draft, and a tree."""
    made = Made()
    made.add("r")
    made.plain("r")
    for accepted in (2, 4, 0):
        made.spec_step("r", accepted=accepted)
    made.spec_step("r", empty=True)
    made.spec_step("r", parents=[-1, -1, 0, 0, 1, 2], path=[0, 2])
    made.finish("r")
    return made


def test_every_token_is_somebodys(made: Made) -> None:
    track = rows_of(made).tracks["r"]
    data = picture.ribbon_data(track, made.step)
    kinds = [piece[2] for piece in data["pieces"]]
    expected = ["plain"] * 2 + ["accepted"] * 2 + ["corrected"] + ["accepted"] * 4 + ["bonus"] + ["corrected", "plain"]
    assert kinds == [*expected, "accepted", "accepted", "corrected"]
    assert [piece[0] for piece in data["pieces"]] == list(range(9, 9 + len(kinds)))
    for kind in ("plain", "accepted", "corrected", "bonus"):
        assert data["counts"][kind] == kinds.count(kind), kind
    assert (data["counts"]["rejected"], data["counts"]["unseen"]) == (3, 1 + 3 + 3)


def test_what_was_struck_out_stands_before_what_replaced_it(made: Made) -> None:
    track = rows_of(made).tracks["r"]
    first = track.rounds[0]
    corrected = next(piece for piece in picture.ribbon_data(track, made.step)["pieces"] if piece[2] == "corrected")
    position, text, _kind, of, facts, lost, residual = corrected
    assert (position, of, text) == (first.position + 2, first.position, first.verified.text)
    assert [(each[0], each[1]) for each in lost] == [
        (first.proposed.nodes[2].text, "rejected"), (first.proposed.nodes[3].text, "unseen"),
    ]  # fmt: skip
    assert lost[0][2] == [0.25, 0.5, 0.8, 0.5, "rejection"] and facts == [0.6, None, 0.3, None, ""]
    assert residual == [[first.verified.residual_texts[0], 0.6], [first.verified.residual_texts[1], 0.4]]


def test_time_goes_back(made: Made) -> None:
    track = rows_of(made).tracks["r"]
    at = track.rounds[1].step
    assert len(picture.ribbon_data(track, at)["pieces"]) == 2 + 3 + 5
    assert len(picture.ribbon_data(track, track.rounds[0].step - 1)["pieces"]) == 2


def test_texts_come_from_the_drafts_where_tokens_were_not_watched(made: Made) -> None:
    rows, watched = SpeculationRows(), rows_of(made).tracks["r"]
    rows.feed(e for e in made.log if not isinstance(e, TokenSampled))
    track = rows.tracks["r"]
    assert len(track.tokens) == 3 + 5 + 1 + 3
    assert all(track.tokens[p] == watched.tokens[p] for p in track.tokens)


def test_counts_are_those_of_counting(made: Made) -> None:
    rows = rows_of(made)
    [group] = stats.groups(rows.tallies, made.step)
    assert (group.rounds, group.nodes, group.accepted, group.kept) == (4, 3 * 4 + 6, 2 + 4 + 0 + 2, 3 + 5 + 1 + 3)
    assert group.proposed == [4, 4, 4, 3] and group.passed == [3, 3, 1, 1] and group.reached == [4, 3, 3, 1]
    assert group.lengths == [1, 0, 2, 0, 1]
    assert group.rate == pytest.approx(8 / 11) and group.per_pass == 3
    assert dict(group.metrics())["vllm:spec_decode_num_accepted_tokens_per_pos"] == "3, 3, 1, 1"
    assert stats.groups(rows.tallies, rows.tracks["r"].rounds[0].step)[0].rounds == 1


def test_groups_are_told_apart_by_drafter_rule_and_temperature() -> None:
    made = Made()
    made.add("a", temperature=0)
    made.spec_step("a", rule="draw")
    made.add("b", temperature=1.2)
    made.spec_step("b")
    made.knob("speculative", {**SPEC, "method": "ngram"})
    made.spec_step("b", rule="draw")
    found = [(g.method, g.rule, g.temperature) for g in stats.groups(rows_of(made).tallies, made.step)]
    assert found == [("ngram", "draw", 1.2), ("eagle", "rejection", 1.2), ("eagle", "draw", 0.0)]


def test_a_drafter_after_lookup_is_counted_apart() -> None:
    made = Made()
    made.add("r")
    made.spec_step("r")
    made.knob("speculative", {**SPEC, "prompt_lookup": True})
    made.spec_step("r")
    rows = rows_of(made)
    names = {stats.method_name(t.method) for t in rows.tallies}
    assert names == {"EAGLE", "EAGLE after lookup"} and rows.steps[-1].method == rows.setting.method == "eagle+lookup"


def test_steps_tell_what_they_cost_and_gave(made: Made) -> None:
    steps = rows_of(made).steps
    assert [(s.asked, s.drafting, s.nodes, s.kept) for s in steps] == [
        (0, 0, 0, 1), (1, 1, 4, 3), (1, 1, 4, 5), (1, 1, 4, 1), (1, 0, 0, 1), (1, 1, 6, 3),
    ]  # fmt: skip
    assert [s.depth for s in steps] == [0, 4, 4, 4, 0, 3]
    assert steps[1].draft_ms == 2.0 and steps[1].verify_ms == pytest.approx(14.0) and steps[0].verify_ms == pytest.approx(10.0)
    each, mean = stats.per_pass(list(steps), window=2)[1:]
    assert each == [1, 3, 5, 1, 1, 3] and mean == [1, 2, 4, 3, 1, 2]


def test_steps_with_a_prompt_in_them_are_not_timed() -> None:
    made = Made()
    made.add("a")
    assert not rows_of(made).steps and rows_of(made).tracks["a"].timing.tokens == 0


def test_the_setting_follows_the_knob() -> None:
    made = Made(None)
    assert rows_of(made).setting == NOTHING and not rows_of(made).setting.on
    made.knob("speculative", {**SPEC, "tree": [2, 1]})
    assert rows_of(made).setting == Setting("eagle", 4, "rejection", (2, 1)) and rows_of(made).setting.on
    made.knob("speculative", {**SPEC, "num_speculative_tokens": 0})
    assert not rows_of(made).setting.on
    made.knob("speculative", None)
    assert rows_of(made).facts is None


# -- one verification ------------------------------------------------------------------------------------------------------


def test_the_stages_tell_the_draft_the_pass_each_test_and_the_end(made: Made) -> None:
    track = rows_of(made).tracks["r"]
    partly, whole, none, tree = track.rounds
    shows = {id(r): [(s["show"], s["node"]) for s in picture.stages(r)] for r in track.rounds}
    assert shows[id(partly)] == [("draft", -1), ("verify", -1), ("test", 0), ("test", 1), ("test", 2), ("own", -1), ("end", -1)]
    assert [node for show, node in shows[id(whole)] if show == "test"] == [0, 1, 2, 3]
    assert [node for show, node in shows[id(none)] if show == "test"] == [0]
    assert [node for show, node in shows[id(tree)] if show == "test"] == [0, 2, 5]
    titles = [s["title"] for s in picture.stages(whole)]
    assert titles[-2].startswith("Bonus") and titles[-1] == "Gained: 5 tokens"
    words = " ".join(s["words"] for s in picture.stages(partly))
    assert "min(1, p / q) = 0.5000" in words and "u = 0.8000 does not lie below" in words
    assert "The chance to get here was 0.5000" in words and "2 tokens are rolled back" in words


def test_without_a_q_the_targets_own_draw_decides() -> None:
    made = Made({**SPEC, "method": "ngram"})
    made.add("r", temperature=0)
    made.spec_step("r", accepted=1, rule="draw")
    [r] = rows_of(made).tracks["r"].rounds
    data = picture.verification_data(rows_of(made).tracks["r"], r)
    assert [node["q"] for node in data["nodes"]] == [None] * 4 and data["residual"] == []
    tests = [s["words"] for s in data["stages"] if s["show"] == "test"]
    assert "It did: accepted." in tests[0] and "It fell on another one: rejected." in tests[1]
    assert not any("min(1" in s["words"] for s in data["stages"])


def test_candidates_of_both_sides_stand_in_one_list(made: Made) -> None:
    r = rows_of(made).tracks["r"].rounds[0]
    node, seen = r.proposed.nodes[0], r.verified.nodes[0]
    found = {text: (q, p) for text, q, p, _drafted in picture.pairs(node, seen)}
    assert found[node.text] == (0.5, 0.75)
    assert found[TEXTS[(node.token_id + 1) % 8]] == (0.25, None) and found[TEXTS[(node.token_id + 3) % 8]] == (None, 0.25)
    assert [drafted for *_rest, drafted in picture.pairs(node, seen)].count(True) == 1


def ancestors(parents: list[int], i: int) -> set[int]:
    return {i} | (ancestors(parents, parents[i]) if parents[i] >= 0 else set())


def test_the_mask_is_ancestors_and_oneself() -> None:
    """Against walking up, for every tree of five nodes."""
    for parents in product(*(range(-1, i) for i in range(5))):
        mask = picture.mask(list(parents))
        assert mask[0] == [1, 0, 0, 0, 0, 0]
        for i in range(5):
            assert {j for j, on in enumerate(mask[i + 1]) if on} == {0, *(a + 1 for a in ancestors(list(parents), i))}


def test_no_two_nodes_of_a_tree_stand_in_one_place() -> None:
    for parents in product(*(range(-1, i) for i in range(6))):
        lanes, depth = picture._lanes(list(parents)), [len(ancestors(list(parents), i)) for i in range(6)]
        assert len({*zip(lanes, depth)}) == 6


def test_what_is_not_known_is_not_made_up(made: Made) -> None:
    r = rows_of(made).tracks["r"].rounds[0]
    unseen = picture.verification_data(rows_of(made).tracks["r"], r)["nodes"][3]
    assert unseen["u"] is None and unseen["accept"] is None and unseen["q"] == 0.5
    assert not any(isinstance(x, float) and math.isnan(x) for x in unseen.values())


@pytest.mark.parametrize("changes", [{"path": [7]}, {"path": [-2]}, {"nodes": []}])
def test_a_saved_run_that_contradicts_itself_is_refused(made: Made, changes: dict[str, object]) -> None:
    def damaged(e: Event) -> Event:
        return (
            DraftVerified(**{**{f: getattr(e, f) for f in e.__struct_fields__}, **changes}) if isinstance(e, DraftVerified) else e
        )

    with pytest.raises(ValueError, match="contradicts itself"):
        SpeculationRows().feed(map(damaged, made.log))


def test_a_draft_that_a_limit_cuts_short_has_no_token_of_the_targets_own() -> None:
    made = Made()
    made.add("r")
    made.spec_step("r", accepted=2)

    def shortened(e: Event) -> Event:
        if not isinstance(e, DraftVerified):
            return e
        fields = {name: getattr(e, name) for name in e.__struct_fields__}
        return DraftVerified(
            **{**fields, "path": [0], "token_id": -1, "text": "", "own": "", "own_prob": math.nan, "num_kept": 1}
        )

    rows = SpeculationRows()
    rows.feed(map(shortened, made.log))
    [r] = rows.tracks["r"].rounds
    assert "own" not in [s["show"] for s in picture.stages(r)] and picture.stages(r)[-1]["title"] == "Gained: 1 token"
    assert picture.tree_data(r)["own"] == [] and picture.verification_data(rows.tracks["r"], r)["own"] is None
