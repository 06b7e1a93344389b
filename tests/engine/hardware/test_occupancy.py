"""Occupancy, worked out by hand from the rules of NVIDIA's calculator."""

import pytest

from engine.hardware.gpus import gpu, gpus, limits
from engine.hardware.occupancy import occupancy


@pytest.mark.parametrize(
    ("capability", "threads", "registers", "shared", "blocks", "binder"),
    [
        ("8.0", 256, 32, 0, 8, "warps"),  # 64 warps / 8
        ("8.0", 256, 64, 0, 4, "registers"),  # 2048 registers a warp: 32 warps
        ("8.0", 128, 255, 0, 2, "registers"),  # 8192 a warp: 8 warps
        ("8.0", 32, 16, 0, 32, "blocks"),
        ("8.0", 128, 32, 48 * 1024, 3, "shared memory"),  # 164 KiB / 49 KiB
        ("8.0", 128, 32, 163 * 1024, 1, "shared memory"),
        ("8.0", 128, 32, 163 * 1024 + 1, 0, "shared memory"),
        ("8.9", 1024, 32, 0, 1, "warps"),  # 48 warps hold one block of 32
        ("8.9", 256, 40, 0, 6, "warps"),
        ("9.0", 384, 168, 227 * 1024, 1, "registers"),
        ("9.0", 128, 168, 64 * 1024, 3, "registers"),  # 5376 a warp: 3 in each of four partitions
        ("9.0", 1024, 65, 0, 0, "registers"),  # 2304 x 32 > 65536: cannot be launched
        ("9.0", 96, 128, 0, 5, "registers"),  # 16 warps, blocks of 3
        ("9.0", 128, 256, 0, 0, "registers"),
        ("9.0", 2048, 16, 0, 0, "warps"),
    ],
)
def test_by_the_rules_of_the_calculator(
    capability: str, threads: int, registers: int, shared: int, blocks: int, binder: str
) -> None:
    found = occupancy(limits(capability), threads=threads, registers=registers, shared=shared)
    assert found.blocks_per_sm == blocks and binder in found.limited_by
    assert found.occupancy == blocks * -(-threads // 32) / found.max_warps


def test_bad_input() -> None:
    with pytest.raises(ValueError, match="threads must be >= 1"):
        occupancy(limits("8.0"), threads=0, registers=1, shared=0)
    with pytest.raises(ValueError, match="compute capability"):
        limits("1.0")
    with pytest.raises(ValueError, match="GPU must be one of"):
        gpu("gtx")


def test_every_number_names_its_source() -> None:
    for card in gpus().values():
        assert set(card.sources) >= {"num_sms", "memory_bytes", "bandwidth"} and all(card.sources.values())
        assert {f"peak.{dtype}" for dtype in card.peak} <= set(card.sources)
    assert gpu("a100-40gb").l2_bytes == 40 * 2**20 and gpu("h100-sxm").arch == 90
    with pytest.raises(ValueError, match="no rate for 'fp8'"):
        gpu("a100-80gb").peak_of("fp8")
