"""Names for `jax.checkpoint` policies."""

import enum

from pallas_ops.ops.logcumsumexp import vjp as _logcumsumexp
from pallas_ops.ops.lrpe_cosine import vjp as _lrpe_cosine
from pallas_ops.ops.tpa_decode import vjp as _tpa_decode


class Residuals(enum.StrEnum):
    """What the ops save for their gradients besides their arguments, by name.

    These arrays are small, but not the angles of lrpe_cosine's `cache_angles`. Under
    `jax.checkpoint(f, policy=jax.checkpoint_policies.save_only_these_names(*Residuals))` no forward
    kernel runs again for its op's own gradient, except chunk_cumsum_decay's if its scale is an
    array (its sums have no name). A result that f uses further is computed again, unless it has a
    name too (`jax.ad_checkpoint.checkpoint_name`).
    """

    LOGCUMSUMEXP = _logcumsumexp.RESIDUALS
    LRPE_COSINE = _lrpe_cosine.RESIDUALS  # and md_lrpe_cosine
    TPA_DECODE = _tpa_decode.RESIDUALS
