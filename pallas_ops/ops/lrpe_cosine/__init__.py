"""Linearised relative positional encoding: api, reference, vjp, kernel, config, in that order."""
