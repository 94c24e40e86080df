"""TLS for the node's ports, and the user that a client certificate names.

Only TLS 1.2 and later. With a client CA, clients without a certificate may still log in with a password; one whose
certificate is signed by that CA is authenticated by it.
"""

from __future__ import annotations

import ssl
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from upriver.errors import ConfigError
from upriver.node.options import NodeOptions


def tls_context(options: NodeOptions) -> ssl.SSLContext:
    """An SSL context for listening; ``ConfigError`` names the option that is missing or the file that is unusable."""
    if options.certificate is None or options.private_key is None:
        raise ConfigError("--tls-port needs --certificate and --private-key, files in PEM format")
    made = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    made.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        made.load_cert_chain(options.certificate, options.private_key)
    except (OSError, ssl.SSLError) as error:
        files = f"--certificate {options.certificate} with --private-key {options.private_key}"
        raise ConfigError(f"{files} cannot be used: {error}") from error
    if options.client_ca:
        _ask_for_client_certificates(made, options.client_ca)
    return made


def _ask_for_client_certificates(made: ssl.SSLContext, client_ca: Path) -> None:
    try:
        made.load_verify_locations(client_ca)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"--client-ca {client_ca} cannot be used: {error}") from error
    made.verify_mode = ssl.CERT_OPTIONAL  # optional: a client may log in with a password instead


def certificate_users(certificate: Mapping[str, Any] | None) -> list[str]:
    """The user names in a verified certificate, in order of preference: common name, then alternative names.

    >>> certificate_users({"subject": ((("commonName", "ann"),),), "subjectAltName": (("DNS", "ann.example"),)})
    ['ann', 'ann.example']
    """
    if not certificate:
        return []
    common = [value for part in certificate.get("subject", ()) for name, value in part if name == "commonName"]
    alternative = [value for kind, value in certificate.get("subjectAltName", ()) if kind in ("DNS", "URI", "email")]
    return list(dict.fromkeys(common + alternative))
