"""Sequences sharded over the GPUs of one machine, in every form; elsewhere CPUs stand for them."""

from functools import partial
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import pallas_ops
from tests import processes
from tests.processes import SEQUENCE, Call

N = 2048
WHOLE: P = P()


def _of_state(x: Any, state: Any, **kwargs: Any) -> Any:
    return pallas_ops.logcumsumexp(x, axis=1, initial_state=state, **kwargs)


def _packed(x: Any, **kwargs: Any) -> Any:
    edges = np.array([3, 700, 700, 1025, 2000], np.int32)
    return pallas_ops.chunk_cumsum_decay(x, cu_seqlens=edges, **kwargs)


def _decode(*factors: Any, full: bool = False, **kwargs: Any) -> Any:
    aq, ak, av, *bq, bk, bv = factors
    lengths = np.array([N - 5, 700], np.int32)
    return pallas_ops.tpa_decode(
        aq, ak, av, None if full else bq[0], bk, bv, lengths=lengths, **kwargs
    )


def scans() -> list[Call]:
    calls: list[Call] = []
    for columns in (3, 200):
        shape, state = (2, N, columns), (2, 1, columns)
        for reverse in (False, True):
            of_state = partial(_of_state, reverse=reverse, clip=2.0 if reverse else None)
            calls.append((of_state, (shape, state), (SEQUENCE, WHOLE), SEQUENCE))
            sums = partial(_packed, reverse=reverse, shift="sequence", scale=-0.5)
            for size in (128, 100, N):
                call = partial(pallas_ops.chunk_cumsum_decay, chunk_size=size, reverse=reverse)
                calls.append((call, (shape,), (SEQUENCE,), SEQUENCE))
                calls.append((partial(sums, chunk_size=size), (shape,), (SEQUENCE,), SEQUENCE))
    return calls


def rotations() -> list[Call]:
    line = partial(pallas_ops.lrpe_cosine, offset=7)
    grid = partial(pallas_ops.md_lrpe_cosine, shape=(31, 66), num_prefix_tokens=2)
    acts: list[Any] = [dict(act="silu"), dict(act="softmax", axis=1), dict(act="softmax", axis=-1)]
    return [
        (partial(fn, **act), ((2, N, 3, 16), theta), (SEQUENCE, WHOLE), SEQUENCE)
        for fn, theta in ((line, (3, 16)), (grid, (3, 8)))
        for act in acts
    ]


def decoding() -> list[Call]:
    calls: list[Call] = []
    whole = WHOLE, SEQUENCE, SEQUENCE, WHOLE, SEQUENCE, SEQUENCE
    for n, ranks, options in ((1, (), {}), (3, (2,), dict(window=900)), (1, (2,), dict(full=True))):
        full = "full" in options
        heads, features = (2, N, *ranks, 6), (2, N, *ranks, 32)
        query = [(2, n, 6, 32)] if full else [(2, n, 6, 4)]
        bq = [] if full else [(2, n, 4, 32)]
        shapes = (*query, heads, heads, *bq, features, features)
        specs = (*whole[:3], *whole[4:]) if full else whole
        calls.append((partial(_decode, **options), shapes, specs, WHOLE))
    return calls


CALLS = {"scans": scans, "rotations": rotations, "decoding": decoding}


@pytest.mark.slow
@pytest.mark.parametrize("name", CALLS)
def test_every_form_agrees_with_one_device(name: str) -> None:
    if jax.default_backend() != "gpu":
        pytest.skip("tests/test_processes.py and test_*_shards.py do the same on CPUs")
    if jax.device_count() < 2:
        pytest.skip("needs two GPUs")
    mesh = Mesh(np.array(jax.devices()[:2]), "x")
    processes.check(mesh, CALLS[name](), every_form=True)
