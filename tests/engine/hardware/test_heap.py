"""Freed memory leaves the process."""

import ctypes
import subprocess
import sys

import pytest

# Pieces below malloc's threshold for pages of their own, with one that stays on top of them: freed, they are kept for later.
PROGRAM = """
import ctypes, psutil
from engine.hardware.heap import give_back
c = ctypes.CDLL(None); c.malloc.restype = ctypes.c_void_p; c.free.argtypes = [ctypes.c_void_p]
pieces = [c.malloc(100_000) for _ in range(2000)]
for piece in pieces: ctypes.memset(piece, 1, 100_000)
top = c.malloc(100_000)
for piece in pieces: c.free(piece)
rss = psutil.Process().memory_info().rss
give_back()
print((rss - psutil.Process().memory_info().rss) >> 20)
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="no glibc")
def test_what_was_freed_is_given_back() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True, timeout=60)
    assert int(done.stdout) > 150  # MiB, of 190


def test_what_has_settled_is_not_looked_through_and_what_comes_later_is() -> None:
    """In a process of its own: it holds for good."""
    program = """
import gc, weakref
from engine.hardware.heap import settle
class Thing: pass
def circle():
    a = Thing(); a.itself = a
    return weakref.ref(a)
settle()
assert gc.get_freeze_count() > 1000 and len(gc.get_objects()) < 100
later = circle()
assert later() is not None
gc.collect()
assert later() is None
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
