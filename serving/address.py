"""The address of a server: it is reserved before anything slow begins, so this module is imported without torch."""

from __future__ import annotations

import ipaddress
import socket

from neuronmm.models.errors import UserError


def bind(host: str, port: int) -> socket.socket:
    """Reserve an address, which refuses connections until the server listens; port 0 takes a free one.

    Raises:
        UserError: the address does not exist here or is in use.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        reserved = socket.socket(family, kind, protocol)
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reserved.bind(address)
    except (OSError, UnicodeError) as error:  # Python encodes a host name before it looks it up
        reason = error.strerror if isinstance(error, OSError) else "not a host name"
        raise UserError(f"cannot listen on {host}, port {port}: {reason}; choose --host or --port") from None
    return reserved


def url(reserved: socket.socket) -> str:
    """Return the address of a server, for clients on this machine."""
    host, port = reserved.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def is_local(reserved: socket.socket) -> bool:
    """Return whether only this machine can connect."""
    return ipaddress.ip_address(reserved.getsockname()[0].partition("%")[0]).is_loopback
