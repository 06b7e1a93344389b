"""What the compiler's IR and report say becomes bars to scale."""

import pytest

from explorer.attention.memory import bars, buffers, occupancy_of
from explorer.attention.shape import Shape

TTGIR = """
    %q_50 = ttg.local_alloc %q_49 : (tensor<128x64xf16, #blocked>) -> !ttg.memdesc<128x64xf16, #shared, #smem>
    %k = ttg.local_alloc : () -> !ttg.memdesc<3x64x64xf16, #shared, #smem, mutable>
    %v = ttg.local_alloc : () -> !ttg.memdesc<3x64x64xf16, #shared, #smem, mutable>
    %total = ttg.local_alloc : () -> !ttg.memdesc<2x1xi64, #shared1, #smem, mutable>
    %k_111 = ttg.local_alloc : () -> !ttg.memdesc<2x64x64xf16, #shared, #smem, mutable>
    %acc = ttng.tmem_alloc : () -> !ttg.memdesc<128x64xf32, #tmem, #ttng.tensor_memory, mutable>
    %s = ttg.local_alloc %k_99 : (tensor<64x64xf16, #blocked>) -> !ttg.memdesc<64x64xf16, #shared, #smem>
    %other = arith.constant dense<0.0>
"""


def report(**changes: object) -> dict[str, object]:
    facts: dict[str, object] = {
        "refused": "", "shared_bytes": 65536, "registers": 200, "tensor_memory_columns": None,
        "buffers": [
            {"name": "q", "where": "shared", "copies": 1, "nbytes": 16384}, {"name": "k", "where": "shared", "copies": 3, "nbytes": 24576},
        ],
    }  # fmt: skip
    return {**facts, **changes}


def test_a_buffer_is_told_once_and_barriers_are_left_out() -> None:
    found = {(b.name, b.where): (b.copies, b.nbytes) for b in buffers(TTGIR)}
    assert found == {
        ("q", "shared"): (1, 16384), ("k", "shared"): (3, 24576), ("v", "shared"): (3, 24576), ("acc", "tensor"): (1, 32768),
    }  # fmt: skip
    assert buffers("") == []


def test_registers_add_up_to_what_the_report_says() -> None:
    shape = Shape(block_m=128, block_n=64)
    shared, registers = bars(shape, report())
    assert shared.used == 65536 and shared.limit == shape.chip.limits.shared_per_block and shared.kind == "measured"
    assert registers.used == 4 * 200 * 128 == sum(part.nbytes for part in registers.parts)
    assert {part.name: part.nbytes for part in registers.parts}["acc"] == 128 * 64 * 4


def test_with_tensor_memory_the_accumulator_does_not_lie_in_registers() -> None:
    found = report(tensor_memory_columns=256, buffers=[{"name": "acc", "where": "tensor", "copies": 1, "nbytes": 32768}])
    _shared, registers, tensor = bars(Shape(gpu="b200"), found)
    assert "acc" not in {part.name for part in registers.parts} and tensor.used == 256 * 512 and tensor.limit == 512 * 512


def test_without_a_report_sizes_are_modelled() -> None:
    shared, registers = bars(Shape(num_stages=3, head_dim=80), None)
    assert shared.used is None and registers.kind == shared.kind == "modelled"
    assert shared.parts[0].nbytes == 3 * 64 * 128 * 2 and shared.parts[0].copies == 3  # 80 padded to 128


@pytest.mark.parametrize("missing", ["registers", "shared_bytes"])
def test_no_occupancy_where_the_compiler_did_not_get_so_far(missing: str) -> None:
    assert occupancy_of(Shape(), report(**{missing: None})) is None
    room = occupancy_of(Shape(), report())
    assert room is not None and room.blocks_per_sm == 2 and room.limited_by == ("registers",)
