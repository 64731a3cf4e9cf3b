"""The network: from a request to the bytes of its response in a buffer that the caller owns. No torch."""
