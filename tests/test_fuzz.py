"""Random calls of every op: valid ones against its loop in float64, invalid ones refused.

By default some 40 calls an op, of few signatures (`tests/fuzz`). PALLAS_OPS_FUZZ sets another
number of calls, PALLAS_OPS_FUZZ_SEED takes other signatures. The long run, on a CPU or a GPU:

    PALLAS_OPS_FUZZ=2000 python -m pytest tests/test_fuzz.py -n 16
"""

import functools
import itertools
import math
import os
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_ops
from pallas_ops import (
    ChunkCumsumDecayConfig,
    LrpeCosineConfig,
    TpaDecodeConfig,
)
from tests.fuzz import chunk_cumsum_decay, logcumsumexp, lrpe_cosine, tpa_decode
from tests.fuzz.calls import Call, Form, FuzzedOp, Rng, Signature, pick, split, transformed
from tests.fuzz.check import check
from tests.fuzz.draw import draw
from tests.fuzz.refused import NOT_ARRAYS, NOT_NAMES, NOT_SCALES, OPTIONAL, SCALES, each
from tests.support import kernel_implementation

CALLS = int(os.environ.get("PALLAS_OPS_FUZZ", "40"))
SEED = int(os.environ.get("PALLAS_OPS_FUZZ_SEED", "0"))
BLOCKS = 16 if CALLS >= 400 else 2  # of an op's calls, each with signatures of its own
SIGNATURES = max(4, CALLS // BLOCKS // 18)  # of a block
KERNEL = kernel_implementation()
INTERPRETED = None if jax.default_backend() == "gpu" else "interpret"
IMPLEMENTATIONS = (KERNEL, None, "xla", None, KERNEL, "xla", INTERPRETED, None)
PHASES = (hypothesis.Phase.generate, hypothesis.Phase.shrink)


# Signatures


def random_config(rng: Rng, op: FuzzedOp, form: Form) -> Any:
    _, operands, static = form
    choice = {name: pick(rng, *options) for name, options in op.launches.items()}
    choice |= dict(num_warps=pick(rng, 1, 2), num_stages=pick(rng, 1, 2, 3))
    if op.config is LrpeCosineConfig and static["act"] != "softmax" and rng.random() < 0.5:
        choice |= dict(variant="sequence", num_parts=1, num_stages=1)
    if op.config is ChunkCumsumDecayConfig and "cu_seqlens" not in operands:
        whole = static["chunk_size"] >= operands["x"].shape[static["axis"]]
        choice["num_segments"] = pick(rng, 1, 3) if whole else 1
    return op.config(**choice)


def random_form(rng: Rng, op: FuzzedOp) -> Form:
    name, operands, static = op.form(rng)
    operands, static = (
        {k: v for k, v in x.items() if v is not None or k in ("shape", "bq")}
        for x in (operands, static)
    )
    return name, operands, static


def takes_kernel(form: Form) -> bool:
    _, operands, static = form
    dtypes = {static.get("dtype"), *(x.dtype for x in operands.values())}
    return "float64" not in dtypes and all(0 not in x.shape for x in operands.values())


def random_signature(rng: Rng, op: FuzzedOp, implementation: Any) -> Signature:
    name, operands, static = form = random_form(rng, op)
    if not takes_kernel(form):
        implementation = pick(rng, None, "xla")
    if implementation is not None:
        static["implementation"] = implementation
    has_choice = implementation in ("triton", "interpret") and "batch_invariant" not in static
    if has_choice and rng.random() < 0.5:
        static["config"] = random_config(rng, op, form)
    return transformed(rng, Signature(name, tuple(operands.items()), tuple(static.items())))


# Tests


def refused(op: FuzzedOp, form: Form) -> Iterator[dict[str, Any]]:
    """What all ops refuse, and what this one does."""
    _, operands, _ = form
    for name, x in operands.items():
        other = "int32" if x.is_floating else "float32"
        dtypes = ("bool", "complex64") if name == "positions" else (other, "bool", "complex64")
        arrays = (x._replace(dtype=dtype) for dtype in dtypes)
        wrong = NOT_SCALES if name in SCALES else (*NOT_ARRAYS, *arrays)
        yield from each(**{name: wrong if name in OPTIONAL else (*wrong, None)})
    yield from each(implementation=NOT_NAMES, config=(3, "fast", {}, [1]))
    configs = LrpeCosineConfig(), TpaDecodeConfig(block_h=1), ChunkCumsumDecayConfig(block_n=8)
    yield from ({"config": config} for config in configs if not isinstance(config, op.config))
    config = op.config(**{name: options[0] for name, options in op.launches.items()})
    yield dict(config=config, implementation="xla")
    if not takes_kernel(form):
        yield from each(implementation=("triton", "interpret"))
    yield from op.refused(form)


OPS = {
    "chunk_cumsum_decay": chunk_cumsum_decay.OP,
    "logcumsumexp": logcumsumexp.OP,
    "lrpe_cosine": lrpe_cosine.OP,
    "md_lrpe_cosine": lrpe_cosine.MD_OP,
    "tpa_decode": tpa_decode.OP,
}
every_op = pytest.mark.parametrize("name", OPS)


def run(test: Callable[..., None], calls: int, *ids: Any) -> None:
    """A hypothesis test of so many calls, other ones for each of the ids."""
    settings = hypothesis.settings(max_examples=calls, phases=PHASES)
    settings(hypothesis.seed(zlib.crc32(repr((SEED, ids)).encode()))(test))()


@every_op
@pytest.mark.parametrize("block", range(BLOCKS))
def test_valid_calls_are_the_loop(name: str, block: int) -> None:
    op = OPS[name]
    rng = np.random.default_rng([SEED, block, zlib.crc32(name.encode())])
    implementations = itertools.islice(itertools.cycle(IMPLEMENTATIONS), block, block + SIGNATURES)
    pool = [random_signature(rng, op, implementation) for implementation in implementations]
    specials = st.lists(st.sampled_from([math.inf, -math.inf, math.nan]), max_size=2).map(tuple)
    calls = st.builds(
        Call,
        signature=st.sampled_from(pool),
        kind=st.sampled_from(op.kinds),
        specials=st.just(()) | specials,
        seed=st.integers(0, 2**32 - 1),
    )

    @hypothesis.given(call=calls)
    def test(call: Call) -> None:
        check(call, draw, op.truth, op.terms)

    run(test, CALLS // BLOCKS, name, block)


@every_op
def test_invalid_calls_are_refused(name: str) -> None:
    @hypothesis.given(seed=st.integers(0, 2**32 - 1), which=st.integers(0, 2**32 - 1))
    def test(seed: int, which: int) -> None:
        form = random_form(np.random.default_rng(seed), OPS[name])
        changes = list(refused(OPS[name], form))
        assert_refused(form, changes[which % len(changes)])

    run(test, CALLS, name)


def assert_refused(form: Form, change: dict[str, Any]) -> None:
    """While tracing, in our own words."""
    name, operands, static = form
    arrays, others = split(operands | static | change)
    with jax.enable_x64(any("64" in x.dtype for x in arrays.values())):
        structs = {k: jax.ShapeDtypeStruct(x.shape, jnp.dtype(x.dtype)) for k, x in arrays.items()}
        fn = functools.partial(getattr(pallas_ops, name), **others)
        hypothesis.note(f"{form} with {change}")
        with pytest.raises((TypeError, ValueError), match="accepted"):
            jax.eval_shape(lambda arrays: fn(**arrays), structs)
