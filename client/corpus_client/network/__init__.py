"""The network: from a request to the bytes of its answer in a buffer that the caller owns. No torch."""
