"""What counts as left behind."""

import threading

from gradsync.testing import leaks


def test_thread_that_is_about_to_end_is_no_leak():
    before = leaks.take()
    ending = threading.Timer(0.1, lambda: None)
    ending.start()
    assert "thread" in leaks.differences(before, leaks.take())
    assert leaks.left_since(before) == {}


def test_thread_that_stays_is_a_leak():
    before, end = leaks.take(), threading.Event()
    staying = threading.Thread(target=end.wait, name="staying")
    staying.start()
    assert leaks.left_since(before) == {"thread": "'staying'"}
    end.set()
    staying.join()
