"""Addresses of brokers: what is one, and when two are the same."""

from __future__ import annotations

import pytest

from natslog.errors import InvalidRequest
from natslog.urls import normal_url


@pytest.mark.parametrize(
    ("text", "normal"),
    [
        ("http://log1:9292", "http://log1:9292"),
        ("http://log1:9292/", "http://log1:9292"),
        ("HTTP://Log1:9292", "http://log1:9292"),
        ("http://log1:80", "http://log1"),
        ("https://log1:443/", "https://log1"),
        ("https://log1:80", "https://log1:80"),
        ("http://10.0.0.1:9292", "http://10.0.0.1:9292"),
        ("http://[FE80::1]:9292", "http://[fe80::1]:9292"),
        ("http://gateway/Broker1/", "http://gateway/Broker1"),
    ],
)
def test_address_has_one_form(text: str, normal: str) -> None:
    assert normal_url(text) == normal == normal_url(normal)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "must begin with"),
        ("log1:9292", "must begin with"),
        ("ftp://log1", "must begin with"),
        ("file:///etc/passwd", "must begin with"),
        ("http://", "names no host"),
        ("http://:9292", "names no host"),
        ("http:///path", "names no host"),
        ("http://log1:port", "not the URL of a broker"),
        ("http://log1:70000", "not the URL of a broker"),
        ("http://[::1", "not the URL of a broker"),
        ("http://log 1", "not the URL of a broker"),
        ("http://log1\n", "not the URL of a broker"),
        ("http://log1\0", "not the URL of a broker"),
        ("http://l\N{LATIN SMALL LETTER O WITH DIAERESIS}g", "not the URL of a broker"),
        ("http://" + "x" * 600, "not the URL of a broker"),
        ("http://user:password@log1", "must not contain credentials: write http://log1"),
        ("http://log1?x=1", "must end after host"),
        ("http://log1#x", "must end after host"),
        ("http://log1?", "must end after host"),
    ],
)
def test_what_is_no_address_of_a_broker_is_refused_with_the_reason(text: str, reason: str) -> None:
    with pytest.raises(InvalidRequest, match=reason) as refused:
        normal_url(text)
    assert "password" not in refused.value.message
