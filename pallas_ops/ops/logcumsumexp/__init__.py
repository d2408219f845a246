"""Cumulative log-sum-exp: api, reference, vjp, kernel, config, in that order."""

from pallas_ops.ops.logcumsumexp.api import logcumsumexp, logcumsumexp_with_state
from pallas_ops.ops.logcumsumexp.config import LogcumsumexpConfig

__all__ = ["LogcumsumexpConfig", "logcumsumexp", "logcumsumexp_with_state"]
