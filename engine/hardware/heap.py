"""Memory of a process that runs for long: what was freed goes back to the system, and what stays is not looked through again."""

import ctypes
import gc
import sys


def give_back() -> None:
    """What malloc keeps of memory that nobody uses any more. After loading or rounding a model's weights in several threads that is half
    a GiB, which would be counted as this process's. Only glibc is to be asked for it; elsewhere nothing happens."""
    if sys.platform != "linux":
        return
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def settle() -> None:
    """All objects that are there now count as staying. torch and a page's libraries are some 300,000 of them, and Python's collector takes
    0.2 s to look through them, in the middle of a step or of an answer. What nobody refers to any more goes all the same, unless
    it refers to itself in a circle."""
    gc.collect()
    gc.freeze()
