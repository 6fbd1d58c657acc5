"""What went wrong with a connection to another broker, in words of the network."""

from __future__ import annotations

import errno
import os
import re

import aiohttp

from natslog.errors import NatslogError

_NUMBER = re.compile(r"\[Errno (-?\d+)\]")
_SOURCE = re.compile(r" \(_ssl\.c:\d+\)")


def problem_of(error: BaseException, within_s: float) -> str:
    """Without types and objects of Python. Args: within_s: the time limit that a `TimeoutError` is about."""
    match error:
        case NatslogError():
            return error.message
        case aiohttp.ClientConnectorCertificateError():
            return f"the TLS handshake failed: {_SOURCE.sub('', str(error.certificate_error))}"
        case aiohttp.ClientSSLError():
            return f"the TLS handshake failed: {_SOURCE.sub('', str(error.os_error))}"
        case aiohttp.ClientConnectorError():
            return f"no connection: {_reason(error.os_error)}"
        case TimeoutError():
            return f"no answer was received within {within_s:g} s"
        case OSError():
            return f"the connection failed: {_reason(error)}"
        case aiohttp.ClientResponseError():
            return f"the answer has status {error.status} {error.message}".strip()
        case _:
            return f"the connection failed: {str(error) or 'it was closed'}"


def is_refusal(error: BaseException) -> bool:
    """Whether the kernel at the address answered that no process listens there."""
    if isinstance(error, aiohttp.ClientConnectorError):
        error = error.os_error
    if not isinstance(error, OSError):
        return False
    numbers = {error.errno} if error.errno else {int(number) for number in _NUMBER.findall(str(error))}
    return numbers == {errno.ECONNREFUSED}


def _reason(error: OSError) -> str:
    """One reason, also of an error that has one for each address of the host."""
    if error.errno is not None and error.errno > 0:  # asyncio's `strerror` is a text of its own
        return os.strerror(error.errno)
    if error.strerror:
        return error.strerror
    numbers = [int(number) for number in _NUMBER.findall(str(error))]
    return os.strerror(numbers[0]) if numbers and numbers[0] > 0 else str(error) or "it was closed"
