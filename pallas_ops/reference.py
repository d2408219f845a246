"""The ops in jax.numpy: the same names and signatures, without `implementation` and `config`."""

from pallas_ops.ops.chunk_cumsum_decay.reference import chunk_cumsum_decay as chunk_cumsum_decay
from pallas_ops.ops.logcumsumexp.reference import logcumsumexp as logcumsumexp
from pallas_ops.ops.logcumsumexp.reference import (
    logcumsumexp_with_state as logcumsumexp_with_state,
)
from pallas_ops.ops.lrpe_cosine.reference import lrpe_cosine as lrpe_cosine
from pallas_ops.ops.lrpe_cosine.reference import md_lrpe_cosine as md_lrpe_cosine
from pallas_ops.ops.tpa_decode.reference import tpa_decode as tpa_decode
from pallas_ops.ops.tpa_decode.reference import tpa_decode_naive as tpa_decode_naive
from pallas_ops.ops.tpa_decode.reference import tpa_decode_with_lse as tpa_decode_with_lse
