"""The gradient of many queries at JAX's default precision: cuDNN's, from the saved log-sum-exp."""

import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from pallas_ops.ops.tpa_decode import prompt
from pallas_ops.ops.tpa_decode.config import Operands, Params, Sizes

# The gradient from a log-sum-exp that is given, which no public function takes.
CUDNN_BACKWARD: Any = getattr(prompt.cudnn, "_dot_product_attention_bwd_p_wrapper", None)


def has_gradient(o: Operands, p: Params) -> bool:
    """Whether cuDNN has this gradient, which is that of the output alone, and is the faster way."""
    if CUDNN_BACKWARD is None or o.lengths is not None or p.has_lse:
        return False
    s = Sizes.of(o, p)
    # With few keys its 25 launches take most of the time; with many, the other ways' products do.
    least_rows = prompt.LEAST_ROWS if s.b * s.m < 2048 else prompt.LEAST_ROWS // 4
    return s.n * s.h * s.most_ranks >= least_rows and prompt.has_form(s, p)


def with_even_sizes(
    backward: Callable[[Operands], tuple[jax.Array, ...]], o: Operands
) -> tuple[jax.Array, ...]:
    """Calls `backward` with even numbers of queries and keys, as cuDNN takes no others.

    Where the number of keys is odd, a key of zeros and its query are added at the end. Where the
    number of queries is odd then, a query is added at the front. The cotangents of these queries
    are 0, so they add to no gradient.
    """
    n, m = o.aq.shape[1], o.m
    end = m % 2
    front = (n + end) % 2

    def pad(x: jax.Array, front: int) -> jax.Array:
        return jnp.pad(x, [(0, 0), (front, end), *[(0, 0)] * (x.ndim - 2)])

    names = "aq", "bq", "out", "lse", "dout"
    queries = {name: pad(x, front) for name in names if (x := getattr(o, name)) is not None}
    daq, dak, dav, *dbq, dbk, dbv = backward(o.with_cache(lambda x: pad(x, 0))._replace(**queries))
    daq, *dbq = (x[:, front : front + n] for x in (daq, *dbq))
    dak, dav, dbk, dbv = (x[:, :m] for x in (dak, dav, dbk, dbv))
    return daq, dak, dav, *dbq, dbk, dbv


def backward(
    q: jax.Array, scale: float, o: Operands, value_scale: float
) -> tuple[jax.Array, list[Any]]:
    """cuDNN's gradient of q [B, N, H, D], and for each part its keys and the gradients of k and v.

    Those of a part follow from the output and the log-sum-exp of all keys.
    """
    q, out, dout = (x.astype(o.ak.dtype) for x in (q, o.out, o.dout))
    lse, dq, of_parts = o.lse.swapaxes(1, 2), jnp.zeros(q.shape, jnp.float32), []
    options: dict[str, Any] = dict(scale=scale, seed=0, dropout_rate=0.0)
    options |= dict(sliding_window_length=None, variadic_args=(False, False))
    options["layout"] = prompt.cudnn.AttentionLayout.BTNH.value
    if "score_mod" in inspect.signature(prompt.cudnn.dot_product_attention).parameters:
        options["score_mod"] = None
    masks, absent = prompt.cudnn.MaskType, [jnp.zeros(0, q.dtype)] * 7
    for keys, is_causal in prompt.parts_of_keys(q.shape[1], o.m):
        k, v = prompt.form_keys(o, None, keys, value_scale)
        options["mask_type"] = masks.CAUSAL if is_causal else masks.NO_MASK
        of_q, *of_keys = CUDNN_BACKWARD.bind(q, k, v, *absent, lse, out, dout, **options)
        dq += of_q.astype(jnp.float32)
        of_parts.append((keys, *of_keys))
    return dq, of_parts
