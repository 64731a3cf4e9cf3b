"""TLS for the TCP sockets of a server."""

from __future__ import annotations

import ssl

from corpus_server.errors import InvalidParameter
from corpus_server.settings import Settings


def server_context(settings: Settings) -> ssl.SSLContext | None:
    """Return the context of a server's TCP sockets; None without TLS.

    Raises:
        InvalidParameter: a file cannot be read, or certificate and key do not belong together.
    """
    if settings.tls_certificate is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        # The password is asked for at a terminal otherwise, which a server may not have.
        context.load_cert_chain(settings.tls_certificate, settings.tls_key, password=lambda: "")
        if settings.tls_client_ca is not None:
            context.load_verify_locations(settings.tls_client_ca)
            context.verify_mode = ssl.CERT_REQUIRED
    except OSError as error:  # of ssl, too
        files = [settings.tls_certificate, settings.tls_key, settings.tls_client_ca]
        named = ", ".join(str(path) for path in files if path is not None)
        raise InvalidParameter(
            f"TLS cannot use {named}: {error}; expected PEM files: a key without password, its certificate",
            parameter="tls_certificate",
        ) from error
    return context
