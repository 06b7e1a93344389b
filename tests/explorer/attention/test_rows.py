"""Schedules as arrays: what the kernel records, what its arithmetic says, and what a model of the chip makes of them."""

from dataclasses import replace

import numpy as np
import pytest

from explorer.attention.rows import MODELLED, ORDER, TIME, Schedule, dealt, derived, derived_tiles, of_decode, of_records
from explorer.attention.shape import LENGTHS, WINDOWS, Shape, row_scores
from explorer.canvas.tiles import PROGRAMS, ROWS, TILES, pack
from tests.explorer.attention.made import BLOCK_M, BLOCK_N, columns


def visible(shape: Shape) -> np.ndarray:
    """bool [N, N], by the definition."""
    i, j = np.arange(shape.seq_len)[:, None], np.arange(shape.seq_len)[None, :]
    seen = np.ones((shape.seq_len, shape.seq_len), bool)
    if shape.causal:
        seen &= j <= i
    if shape.window:
        seen &= j > i - shape.window
    return seen


SHAPES = [
    Shape(), Shape(seq_len=256, window=64), Shape(seq_len=256, causal=False, group=2), Shape(block_m=128, block_n=32, seq_len=256),
    Shape(block_m=16, block_n=64, seq_len=128, window=64, causal=False),
]  # fmt: skip


@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: s.label)
def test_a_tile_is_done_where_some_query_sees_some_key_and_masked_where_not_all_do(shape: Shape) -> None:
    made, seen = derived(shape), visible(shape)
    done = {
        (int(made.programs["row"][p]), int(k)): int(m) for p, k, m in zip(*(made.tiles[n] for n in ("program", "k", "masked")))
    }
    assert made.num_tiles == derived_tiles(shape) == len(done)
    for row in range(len(made.rows["plane"])):
        index = int(made.rows["index"][row])
        for k in range(int(made.rows["total"][row])):
            part = seen[index * shape.block_m : (index + 1) * shape.block_m, k * shape.block_n : (k + 1) * shape.block_n]
            assert ((row, k) in done) == bool(part.any()), (row, k)
            if part.any() and not part.all():
                assert done[row, k] == 1
    assert made.num_tiles + made.skipped == shape.group * len(range(0, shape.seq_len, shape.block_m)) * -(
        -shape.seq_len // shape.block_n
    )
    assert len(made.planes) == shape.group


def test_bytes_are_those_of_the_tensors_that_programs_ask_for() -> None:
    made = derived(Shape(seq_len=128, causal=False))
    row = 64 * 2
    assert made.bytes_loaded == 128 * row + 2 * (2 * 128 * row) and made.bytes_stored == 128 * (row + 4)


@pytest.mark.parametrize("lengths", [[(40, 40)], [(40, 40), (20, 70)], [(1, 33), (16, 16)]])
def test_records_of_a_launch_become_the_same_arrays(lengths: list[tuple[int, int]]) -> None:
    made = of_records(columns(lengths, heads=2), lengths, BLOCK_M, BLOCK_N)
    assert made.clock == ORDER and len(made.planes) == 2 * len(lengths)
    expected = sum(-(-(kv - q + min(q, start + BLOCK_M)) // BLOCK_N) for q, kv in lengths for start in range(0, q, BLOCK_M))
    assert made.num_tiles == 2 * expected
    assert (made.tiles["start"] == np.arange(made.num_tiles)).all()
    assert np.isfinite(made.tiles["m"]).all() and (made.tiles["total"] > 0).all()
    for q, kv in lengths:
        assert any(rows == -(-q // BLOCK_M) and columns_ == -(-kv // BLOCK_N) for _title, rows, columns_ in made.planes)


def test_a_gpus_trace_has_a_lane_for_each_multiprocessor_and_its_time() -> None:
    made = of_records(columns([(64, 64)], heads=3, sms=2), [(64, 64)], BLOCK_M, BLOCK_N)
    assert made.clock == TIME and made.lanes == ["SM 0", "SM 1"]
    assert made.tiles["start"][0] == 0 and (made.tiles["end"] > made.tiles["start"]).all()
    assert made.tiles["end"][-1] == 1000 * (made.num_tiles - 1) + 900


def test_programs_whose_own_record_was_dropped_are_known_by_their_tiles() -> None:
    found = columns([(40, 40)])
    tiles = found["kind"] == 0
    made = of_records({name: column[tiles] for name, column in found.items()}, [(40, 40)], BLOCK_M, BLOCK_N)
    assert made.num_tiles == 6 and made.bytes_stored == 0 and made.rows["stop"].tolist() == [3, 2, 1]


def test_a_decode_is_one_plane_with_a_row_for_each_kv_head_and_a_program_for_each_part() -> None:
    fields = (
        "kind", "program_x", "program_y", "program_z", "q_start", "q_rows", "kv_start", "kv_rows", "running_max", "running_sum",
        "bytes_loaded", "bytes_stored", "masked", "sm", "time_start", "time_end",
    )  # fmt: skip
    table = []
    for z, kv in enumerate((40, 20)):
        for head in range(2):
            for part in range(2):
                for start in range(part * 32, min(kv, part * 32 + 32), 16):
                    table.append((0, part, head, z, 0, 3, start, min(16, kv - start), 1, 2, 100, 0, 0, -1, 0, 0))
                table.append((1, part, head, z, 0, 3, part * 32, max(0, min(32, kv - part * 32)), 1, 2, 10, 20, 0, -1, 0, 0))
    found = {name: np.array([row[i] for row in table]) for i, name in enumerate(fields)}
    made = of_decode(found, [(1, 40), (1, 20)], 2, 16)
    assert made.planes == [("", 4, 3)] and made.num_tiles == 2 * (3 + 2)
    assert made.rows["total"].tolist() == [3, 3, 2, 2] and made.skipped == 0
    assert len(made.programs["row"]) == 8


@pytest.mark.parametrize("slots", [1, 3, 8, 132])
def test_dealt_to_places_no_two_tiles_of_a_place_overlap_and_programs_keep_their_order(slots: int) -> None:
    made = derived(Shape(group=2))
    found = dealt(made, slots)
    assert found.clock == MODELLED and found.num_tiles == made.num_tiles and len(found.lanes) == min(slots, 16)
    lane = found.programs["lane"][found.tiles["program"]]
    assert len(set(zip(lane.tolist(), found.tiles["start"].tolist()))) == found.num_tiles
    for program in range(16):
        mine = found.tiles["program"] == program
        assert (np.diff(found.tiles["k"][mine]) == 1).all() and (np.diff(found.tiles["start"][mine]) == 1).all()
    longest = int(np.bincount(made.tiles["program"]).max())
    assert found.tiles["end"].max() >= max(longest, made.num_tiles / slots)
    if slots == 1:
        assert found.tiles["end"].max() == made.num_tiles


def test_the_wire_format_has_every_column_in_its_place() -> None:
    made: Schedule = of_records(columns([(40, 40)]), [(40, 40)], BLOCK_M, BLOCK_N)
    words = np.frombuffer(pack(made), "<u4")
    t, p, r = words[:3].tolist()
    assert (t, p, r) == (6, 3, 3) and len(words) == 3 + t * 9 + p * len(PROGRAMS) + r * len(ROWS)
    assert words[3 : 3 + t].tolist() == made.tiles["program"].tolist()
    at = 3 + t * len(TILES[0])
    assert words[at : at + t].view("<f4").tolist() == made.tiles["m"].tolist()
    assert words[-r:].tolist() == made.rows["request"].tolist()


def test_every_shape_that_can_be_chosen_can_be_drawn() -> None:
    for seq_len in LENGTHS[:5]:
        for window in WINDOWS:
            made = derived(Shape(seq_len=seq_len, window=window, block_m=256, block_n=16))
            assert made.num_tiles > 0 and pack(made)


def test_a_rows_scores_are_hidden_where_it_does_not_see() -> None:
    shape = Shape(seq_len=128, window=64)
    scores = row_scores(shape, 0, 100)
    assert np.isinf(scores[:37]).all() and np.isfinite(scores[37:101]).all() and np.isinf(scores[101:]).all()
    assert np.isfinite(row_scores(replace(shape, causal=False, window=0), 0, 3)).all()
