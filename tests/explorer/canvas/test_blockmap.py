"""What the block map sends to the browser, read back as the browser reads it."""

import numpy as np
import pytest

from explorer.canvas.blockmap import ESM, HELD, SHARED, BlockMap, pack_codes


class Reader:
    """The receiving half of the wire format, as in blockmap.js."""

    def __init__(self, view: BlockMap) -> None:
        self.codes = np.zeros(0, np.uint32)
        self.seq = -1
        self.missed = False
        self.sizes: list[int] = []
        view.param.watch(lambda event: self.full(event.new), "full")
        view.param.watch(lambda event: self.delta(event.new), "delta")
        self.full(view.full)

    def full(self, data: bytes) -> None:
        words = np.frombuffer(data, "<u4")
        if len(words):
            self.seq, self.block_size, self.codes = int(words[0]), int(words[1]), words[2:].copy()

    def delta(self, data: bytes) -> None:
        base, seq, count = np.frombuffer(data[:12], "<u4").tolist()
        self.sizes.append(len(data))
        if base != self.seq:
            self.missed = True
            return
        ids, codes = np.frombuffer(data[12:], "<u4").reshape(2, count)
        self.codes[ids] = codes
        self.seq = seq


def test_deltas_add_up_to_the_codes():
    rng = np.random.default_rng(0)
    view, codes = BlockMap(), rng.integers(0, 2**32, 1000, dtype=np.uint32)
    view.draw(codes, 16)
    reader = Reader(view)
    for step in range(20):
        codes = codes.copy()
        changed = rng.choice(1000, step * 40, replace=False)
        codes[changed] ^= 1
        assert view.draw(codes, 16) == len(changed)
        assert reader.codes.tolist() == codes.tolist()
    assert not reader.missed and reader.block_size == 16
    assert reader.sizes[0] == 12 + 8 * 40  # only what changed travels


def test_nothing_new_sends_nothing_and_the_callers_array_may_change_later():
    view, codes = BlockMap(), np.zeros(8, np.uint32)
    view.draw(codes, 16)
    before = (view.full, view.delta)
    assert view.draw(codes, 16) == 0
    assert (view.full, view.delta) == before
    codes[3] = 7
    assert view.draw(codes, 16) == 1


def test_another_pool_is_sent_whole_and_a_missed_delta_is_mended():
    view = BlockMap()
    view.draw(np.zeros(8, np.uint32), 16)
    reader = Reader(view)
    view.draw(np.ones(4, np.uint32), 16)
    assert reader.codes.tolist() == [1] * 4
    view.draw(np.ones(4, np.uint32), 32)
    assert reader.block_size == 32
    reader.seq -= 1  # as if one had been lost
    view.draw(np.array([1, 1, 1, 9], np.uint32), 32)
    assert reader.missed
    view.resync += 1
    assert reader.codes.tolist() == [1, 1, 1, 9]


def test_marks_are_sorted_ids_once_each():
    view = BlockMap()
    view.mark([5, 2, 5])
    assert np.frombuffer(view.marked, "<u4").tolist() == [2, 5]
    view.mark([])
    assert view.marked == b""


def test_pack_codes_keeps_every_part():
    kind, colour = np.array([HELD, SHARED], np.uint8), np.array([7, 255], np.uint8)
    codes = pack_codes(kind, colour, np.array([1, 1000], np.int32), np.array([12, 255], np.uint8))
    assert codes.dtype == np.uint32
    assert codes.tolist() == [HELD | 7 << 8 | 1 << 16 | 12 << 24, SHARED | 255 << 8 | 255 << 16 | 255 << 24]


@pytest.mark.parametrize("word", ["http://", "https://", "import "])
def test_the_script_fetches_nothing(word):
    assert word not in ESM
