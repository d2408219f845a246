"""One of two processes with four CPUs each: every op sharded over both, compared with one device.

`python -m tests.processes PORT NUMBER`; `tests/test_processes.py` starts both.
"""

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import pallas_ops
from tests import shards
from tests.support import assert_close

N = 40
Call = tuple[Callable[..., Any], tuple[tuple[int, ...], ...], tuple[P, ...], P]
SEQUENCE = P(None, "x")


def _decode(*factors: Any, **kwargs: Any) -> Any:
    return pallas_ops.tpa_decode(*factors, **kwargs)


def _logcumsumexp(x: Any, state: Any, **kwargs: Any) -> Any:
    return pallas_ops.logcumsumexp(x, axis=1, initial_state=state, **kwargs)


CALLS: list[Call] = [
    (_logcumsumexp, ((2, N, 3), (2, 1, 3)), (SEQUENCE, P()), SEQUENCE),
    *(
        (
            partial(pallas_ops.chunk_cumsum_decay, chunk_size=size, shift="sequence"),
            ((2, N, 3),),
            (SEQUENCE,),
            SEQUENCE,
        )
        for size in (5, 7, N)
    ),
    (
        partial(pallas_ops.lrpe_cosine, act="softmax", axis=1),
        ((2, N, 3, 4), (3, 4)),
        (SEQUENCE, P()),
        SEQUENCE,
    ),
    (
        _decode,
        ((2, 1, 3, 2), (2, N, 3), (2, N, 3), (2, 1, 2, 4), (2, N, 4), (2, N, 5)),
        (P(), SEQUENCE, SEQUENCE, P(), SEQUENCE, SEQUENCE),
        P(),
    ),
]


def check(mesh: Mesh, calls: list[Call], *, every_form: bool = False) -> None:
    """By jit and by name, results and gradients; every form: over explicit axes, unchecked, too.

    All calls are one program, which compiles in less time than many.
    """
    rng = np.random.default_rng(0)
    given, specs = [], []
    with jax.default_device(jax.local_devices()[0]):
        for fn, shapes, ins, outs in calls:
            xs = [rng.standard_normal(shape).astype(np.float32) for shape in shapes]
            out = jax.eval_shape(fn, *xs)
            given.append([*xs, rng.standard_normal(out.shape).astype(np.float32)])
            specs.append([*ins, outs])
        want = jax.tree.map(np.asarray, _run([fn for fn, *_ in calls], given))

    def over(**kwargs: Any) -> list[Any]:
        return [
            jax.shard_map(partial(fn, axis_name="x"), in_specs=ins, out_specs=outs, **kwargs)
            for fn, _, ins, outs in calls
        ]

    runs = [([fn for fn, *_ in calls], mesh), (over(mesh=mesh), mesh)]
    if every_form:
        explicit = Mesh(mesh.devices, "x", axis_types=(AxisType.Explicit,))
        runs += [(over(mesh=mesh, check_vma=False), mesh), (runs[0][0], explicit)]
    for forms, of_arrays in runs:
        with jax.set_mesh(of_arrays):
            got = _run(forms, jax.tree.map(partial(_placed, of_arrays), given, specs))
        for x, y in zip(*map(jax.tree.leaves, (got, want)), strict=True):
            for shard in x.addressable_shards:
                size = float(np.abs(y).max())
                assert_close(shard.data, y[shard.index], terms=64, scale=size)


def _placed(mesh: Mesh, x: np.ndarray, spec: P) -> jax.Array:
    return jax.make_array_from_callback(x.shape, NamedSharding(mesh, spec), x.__getitem__)


def _run(fns: list[Callable[..., Any]], given: Any) -> Any:
    """The results and gradients of each function, from its arguments and its cotangent."""

    def run(given: Any) -> Any:
        pairs = zip(fns, given, strict=True)
        return [shards.with_pullback(fn, len(xs) - 1)(*xs) for fn, xs in pairs]

    return jax.jit(run)(given)


def main(port: str, number: str) -> None:
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"localhost:{port}", num_processes=2, process_id=int(number))
    assert len(jax.devices()) == 8
    mesh = Mesh(np.array(jax.devices()), "x")
    check(mesh, CALLS)
    sys.stdout.write("all agree\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
