"""Connections that are encrypted and verified: TLS."""
