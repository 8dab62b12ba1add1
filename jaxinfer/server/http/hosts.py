"""Tells names of this machine from others, to which a stranger's page may have let its own name point."""

import ipaddress


def is_loopback(host: str) -> bool:
    """Tell whether an address reaches this machine alone."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def names_this_machine(header: str) -> bool:
    """Tell whether a ``Host`` header, with or without a port, is a loopback address or ``localhost``."""
    if header.startswith("["):
        return is_loopback(header[1:].partition("]")[0])
    return is_loopback(header.partition(":")[0])
