"""What every view has: a lock under which badges say where that view's numbers come from."""

import threading
from types import SimpleNamespace

import pytest

from explorer.base import ExplorerView, ViewLock
from explorer.theme import badge, replaying


def test_badges_follow_the_view_that_draws_and_not_the_one_made_last() -> None:
    before = replaying.set(False)
    try:
        views = [ExplorerView(SimpleNamespace(replayed=replayed)) for replayed in (False, True)]
        for _ in range(2):
            for view, word in zip(views, ("measured", "replayed")):
                with view.lock:
                    assert word in badge("measured")
                    with views[0].lock:
                        assert "measured" in badge("measured")
                    assert word in badge("measured")
    finally:
        replaying.reset(before)


def test_a_lock_is_held_by_one_thread_as_often_as_it_likes() -> None:
    lock = ViewLock(lambda: False)
    with pytest.raises(RuntimeError, match="not held"):
        lock.release()
    got: list[bool] = []

    def another() -> None:
        got.append(lock.acquire(blocking=False))
        if got[-1]:
            lock.release()

    def ask() -> bool:
        thread = threading.Thread(target=another)
        thread.start()
        thread.join()
        return got[-1]

    with lock:
        with lock:
            assert not ask()
        assert not ask()
    assert ask()
