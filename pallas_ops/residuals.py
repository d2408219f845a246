"""Names for `jax.checkpoint` policies."""

import enum

from pallas_ops.ops.logcumsumexp import vjp as _logcumsumexp
from pallas_ops.ops.lrpe_cosine import vjp as _lrpe_cosine
from pallas_ops.ops.tpa_decode import vjp as _tpa_decode


class Residuals(enum.StrEnum):
    """What the ops save for their gradients besides their arguments: small arrays, by name.

    Under `jax.checkpoint(f, policy=jax.checkpoint_policies.save_only_these_names(*Residuals))` no
    forward kernel runs a second time, but that of chunk_cumsum_decay if its scale is an array: its
    sums are not small, and have no name.
    """

    LOGCUMSUMEXP = _logcumsumexp.RESIDUALS
    LRPE_COSINE = _lrpe_cosine.RESIDUALS  # and md_lrpe_cosine
    TPA_DECODE = _tpa_decode.RESIDUALS
