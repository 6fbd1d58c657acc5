"""Views that readers use now are kept for a while; their messages are pinned as long as they are."""

from __future__ import annotations

import pytest
from pyroaring import BitMap64

from natslog.errors import InvalidRequest, ViewExpired
from natslog.log.latest_views import LatestViews

HIGH_WATERMARK = 10


class Log:
    """A log whose view is of one message, the newest one."""

    def __init__(self) -> None:
        self.end, self.erasures = HIGH_WATERMARK, 0
        self.views = LatestViews(lambda: (BitMap64([self.end - 1]), self.end), lambda: self.erasures)


def test_view_is_the_same_while_it_is_used() -> None:
    log = Log()
    view = log.views.begin(None, 0)
    log.end = 20
    for now_s in (800, 1600, 2400):
        assert log.views.begun(HIGH_WATERMARK, log.end, now_s) is view
    assert (list(view.visible), view.end) == ([9], 10)
    assert log.views.pinned(2400 + 901) == BitMap64()
    assert log.views.begun(HIGH_WATERMARK, log.end, 3302) is None
    with pytest.raises(ViewExpired, match="begin to read again"):
        log.views.begin(HIGH_WATERMARK, 3302)


def test_view_that_is_not_kept_is_determined_again_if_nothing_was_appended() -> None:
    log = Log()
    assert log.views.begun(HIGH_WATERMARK, log.end, 0) is None
    assert log.views.begin(HIGH_WATERMARK, 0).end == HIGH_WATERMARK


def test_messages_of_all_views_in_use_are_pinned() -> None:
    log = Log()
    for end in range(10, 50):
        log.end = end
        log.views.begin(None, 0)
    assert log.views.pinned(1) == BitMap64(range(33, 49)), "of the newest 16"
    assert log.views.begun(33, log.end, 1) is None


def test_erasure_ends_all_views() -> None:
    log = Log()
    log.views.begin(None, 0)
    log.erasures = 1
    assert log.views.begun(HIGH_WATERMARK, log.end, 1) is None
    assert log.views.pinned(1) == BitMap64()


def test_view_as_of_a_high_watermark_in_the_future_is_refused() -> None:
    log = Log()
    with pytest.raises(InvalidRequest, match="above the high watermark 10"):
        log.views.begun(11, log.end, 0)
