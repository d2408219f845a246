"""Cumulative log-sum-exp: api, reference, vjp, kernel, config, in that order."""
