"""How many blocks of a kernel one streaming multiprocessor holds at a time, and what binds.

The rules are those of the CUDA Toolkit's occupancy calculator (cuda_occupancy.h): warps, registers, shared memory and block
slots each admit a number of blocks, rounded by their granularities, and the smallest wins.
"""

from dataclasses import dataclass

from engine.hardware.gpus import SmLimits

BINDERS = ("warps", "registers", "shared memory", "blocks")


@dataclass(frozen=True, kw_only=True)
class Occupancy:
    """Blocks that fit on one SM, by resource; 0 in ``blocks_per_sm`` for a kernel that cannot be launched."""

    blocks_per_sm: int
    warps_per_block: int
    active_warps: int
    max_warps: int
    by: dict[str, int]  # binder -> blocks it admits; a resource that the kernel does not take is left out
    limited_by: tuple[str, ...]  # those that admit the fewest

    @property
    def occupancy(self) -> float:
        """Active warps over the most that an SM holds: 0..1."""
        return self.active_warps / self.max_warps


def occupancy(limits: SmLimits, *, threads: int, registers: int, shared: int) -> Occupancy:
    """``threads`` a block, ``registers`` a thread, ``shared``: bytes a block, static and dynamic together.

    ValueError for a negative number or a block without threads. A kernel that asks for more than a block may have gets 0 blocks.
    """
    if threads < 1 or registers < 0 or shared < 0:
        raise ValueError(f"threads must be >= 1, registers and shared >= 0, got {threads}, {registers} and {shared}")
    warps = -(-threads // limits.warp_size)
    by = {"warps": limits.max_warps_per_sm // warps, "blocks": limits.max_blocks_per_sm}
    if threads > limits.max_threads_per_block:
        by["warps"] = 0
    if registers:
        by["registers"] = _by_registers(limits, warps, registers)
    if shared:
        by["shared memory"] = _by_shared(limits, shared)
    else:  # the system's share is taken of a block that asks for none, too
        by["shared memory"] = limits.shared_per_sm // max(1, limits.shared_reserved_per_block)
    blocks = min(by.values())
    ordered = {name: by[name] for name in BINDERS if name in by}
    return Occupancy(
        blocks_per_sm=blocks,
        warps_per_block=warps,
        active_warps=blocks * warps,
        max_warps=limits.max_warps_per_sm,
        by=ordered,
        limited_by=tuple(name for name, count in ordered.items() if count == blocks),
    )


def _by_registers(limits: SmLimits, warps: int, registers: int) -> int:
    """Registers are dealt warp by warp, and each of the SM's partitions has its own share of them."""
    per_warp = _up(registers * limits.warp_size, limits.register_unit_per_warp)
    partitions = limits.warp_granularity
    if registers > limits.max_registers_per_thread or per_warp * _up(warps, partitions) > limits.registers_per_block:
        return 0
    return (limits.registers_per_sm // partitions // per_warp) * partitions // warps


def _by_shared(limits: SmLimits, shared: int) -> int:
    if shared > limits.shared_per_block:
        return 0
    return limits.shared_per_sm // _up(shared + limits.shared_reserved_per_block, limits.shared_unit)


def _up(value: int, unit: int) -> int:
    return -(-value // unit) * unit
