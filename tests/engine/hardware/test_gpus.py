"""The data file of GPUs: every number has a source that says how far it was checked, and NVIDIA's own header agrees where it is at hand."""

import importlib.util
import json
import re
from pathlib import Path

import pytest

from engine.hardware.gpus import FILE, gpu, gpus, limits
from engine.hardware.roofline import gpu_roofs, ridge

RAW = json.loads(FILE.read_text(encoding="utf-8"))


def test_every_number_names_a_source_and_every_source_is_used() -> None:
    facts = [f for table in RAW["capabilities"].values() for f in table.values()]
    for entry in RAW["gpus"].values():
        facts += [f for f in (*entry.values(), *entry["peak"].values()) if isinstance(f, dict) and "value" in f]
    assert all(set(f) == {"value", "source"} and f["value"] > 0 for f in facts)
    assert {f["source"] for f in facts} == set(RAW["sources"])


def test_a_source_says_whether_it_was_read() -> None:
    for name, text in RAW["sources"].items():
        assert re.search(r": read$|not opened|deviceQuery|no document of NVIDIA", text), name


def test_the_presets_are_there_with_what_a_roofline_needs() -> None:
    assert list(gpus()) == ["a100-40gb", "a100-80gb", "h100-sxm", "h200", "b200", "l4", "rtx4090"]
    for key, found in gpus().items():
        roofs = gpu_roofs(found)
        assert 100 < ridge(roofs.peak_of("bfloat16"), roofs.bandwidth) < 500, key
        assert roofs.peak_of("float16") == roofs.peak_of("bfloat16") == pytest.approx(2 * roofs.peak_of("float32"), rel=0.01)
        assert found.peak.get("fp8", 2 * found.peak["bf16"]) == pytest.approx(2 * found.peak["bf16"], rel=0.01)
        assert set(found.sources) >= {"bandwidth", "memory_bytes", *(f"peak.{d}" for d in found.peak)}


def test_an_unknown_gpu() -> None:
    with pytest.raises(ValueError, match=r"GPU must be one of .* got 'abacus'"):
        gpu("abacus")
    with pytest.raises(ValueError, match="no rate for 'fp8'"):
        gpu("a100-80gb").peak_of("fp8")


def _header() -> str:
    spec = importlib.util.find_spec("triton")
    path = Path(spec.origin).parent / "backends/nvidia/include/cuda_occupancy.h" if spec and spec.origin else None
    if path is None or not path.is_file():
        pytest.skip("Triton, which ships NVIDIA's cuda_occupancy.h, is not installed")
    return path.read_text(errors="replace")


def _value(header: str, function: str, major: int) -> int:
    """What a function of the header gives for a compute capability whose minor version does not matter."""
    body = header[header.index(f"static __OCC_INLINE cudaOccError {function}(") :]
    body = body[: body.index("\n}\n")]
    found = re.search(rf"case {major}:(?:\s*case \d+:)*\s*(?:switch[^;]*?default :\s*)?value = (\d+);", body)
    assert found is not None, (function, major)
    return int(found.group(1))


@pytest.mark.parametrize("capability", RAW["capabilities"])
def test_nvidias_header_agrees(capability: str) -> None:
    header, table, major = _header(), limits(capability), int(capability.split(".")[0])
    assert table.register_unit_per_warp == _value(header, "cudaOccRegAllocationGranularity", major)
    assert table.shared_unit == _value(header, "cudaOccSMemAllocationGranularity", major)
    assert table.warp_granularity == _value(header, "cudaOccSubPartitionsPerMultiprocessor", major)
    if major == 9:
        assert table.max_blocks_per_sm == _value(header, "cudaOccMaxBlocksPerMultiprocessor", major)
    assert table.shared_per_sm - table.shared_per_block == table.shared_reserved_per_block
    assert table.max_threads_per_sm == table.max_warps_per_sm * table.warp_size
