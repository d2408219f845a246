"""Plants one fault after the other in a copy of the package: the quick tests have to notice each.

`python -m tests.faults [NAME ...]` takes a minute or so a fault, and says which test noticed it.
"""

import pathlib
import shutil
import subprocess
import sys
import tempfile
from typing import NamedTuple

ROOT = pathlib.Path(__file__).parents[1]
OPTIONS = ("-q", "-x", "-m", "quick", "-n", "auto", "--maxprocesses", "8", "-p", "no:cacheprovider")
# It compares texts, and so would fail for every fault.
IGNORED = "--ignore=tests/test_faults.py"


class Fault(NamedTuple):
    """Text of a file of the package, and what stands there instead."""

    file: str
    right: str
    wrong: str


FAULTS = {
    "the last tile reads past the axis": Fault(
        "scan/tile.py", "size = jnp.minimum(size, s.n - before)", "size = size"
    ),
    "a segment starts from the totals up to its own": Fault(
        "scan/segments.py", "else number < own", "else number <= own"
    ),
    "many segments: the scan of totals goes one way": Fault(
        "scan/segments.py", "axis=1, reverse=reverse)", "axis=1)"
    ),
    "tiles that are scanned from their end are not flipped": Fault(
        "core/tiles.py",
        "joined(*reversed(halves(y, bit)), axis=bit)",
        "joined(*halves(y, bit), axis=bit)",
    ),
    "one pivot for tiles of any range": Fault(
        "ops/logcumsumexp/exact.py", "FAINT_BITS = 16 ", "FAINT_BITS = 200 "
    ),
    "a gradient of exact tiles without the factor of its own position": Fault(
        "ops/logcumsumexp/exact.py", "maps = factor, factor * shares", "maps = factor, shares"
    ),
    "NaN of what has summed nothing": Fault(
        "ops/logcumsumexp/tiles.py",
        "jnp.where(total == 0, 0.0, do * reciprocal(total))",
        "do * jnp.where(total == 0, 0.0, reciprocal(total))",
    ),
    "a chunk begins one too late": Fault(
        "ops/chunk_cumsum_decay/tiles.py", "edges[own] + (slot", "edges[own] + 1 + (slot"
    ),
    "the derivative of silu": Fault(
        "ops/lrpe_cosine/activation.py", "(1 + x * (1 - s))", "(1 + x * s)"
    ),
    "keys that do not count are loaded as they are": Fault(
        "ops/tpa_decode/keys.py", "        exists &= rank < ranks\n", ""
    ),
    "a window of one key more": Fault(
        "ops/tpa_decode/keys.py", ">= last - window)", ">= last - window - 1)"
    ),
    "pages out of range are followed": Fault(
        "ops/tpa_decode/keys.py",
        "return jnp.clip(page, 0, number - 1) * size + lax.rem(key, size)",
        "return page * size + lax.rem(key, size)",
    ),
    "splits are merged without their weights": Fault(
        "ops/tpa_decode/merge.py", " * weight[:, :, None]", ""
    ),
    "the sign of eight bits": Fault(
        "ops/tpa_decode/words.py", "mov.b32 minus, 0xBF80BF80;", "mov.b32 minus, 0x3F803F80;"
    ),
    "gradients of keys are rounded on the way": Fault(
        "ops/tpa_decode/kernel_backward.py",
        "d_inner = plan.dot(g, q.aq, d_inner)",
        "d_inner = plan.dot(g.astype(jnp.bfloat16).astype(g.dtype), q.aq, d_inner)",
    ),
    "ranks of a gradient in reverse": Fault(
        "ops/tpa_decode/heads.py", "return stack(xs)", "return stack(xs[::-1])"
    ),
    "queries that fill up a block count": Fault(
        "ops/tpa_decode/backward.py",
        "jnp.where(is_copy, jnp.inf, ",
        'jnp.where(is_copy, of_queries["lse"], ',
    ),
    "all of a prompt sees its last keys": Fault(
        "ops/tpa_decode/prompt.py", "count, is_causal=True)", "count)"
    ),
    "gradients of many queries without the scale of the values": Fault(
        "ops/tpa_decode/formed.py", "dv, av, bv, p.value_scale)", "dv, av, bv, 1.0)"
    ),
    "gradients of many queries round another query": Fault(
        "ops/tpa_decode/formed.py",
        "prompt.scaled_query(o.aq, o.bq, p)",
        "reference.query(o.aq, o.bq, p.score_scale), 1.0, p.score_scale",
    ),
    "of many queries only the last chunk counts": Fault(
        "ops/tpa_decode/formed.py", "dk = sums[0] + ", "dk = "
    ),
    "head factors of the block before": Fault(
        "ops/tpa_decode/kernel.py",
        "next_ak, next_av = load_ak(i + 1), load_av(i + 1)",
        "next_ak, next_av = load_ak(i), load_av(i)",
    ),
    "the heads of a word change places": Fault(
        "ops/tpa_decode/heads.py", "(pair << 16, pair & -(2**16))", "(pair & -(2**16), pair << 16)"
    ),
    "keys of a block change places": Fault(
        "ops/tpa_decode/keys.py",
        "(group * 4 + thread) * step + key",
        "group * 4 * step + thread + key",
    ),
    "vmapped operands fold into the wrong axis": Fault(
        "core/dispatch.py", "o.reshape(size, -1,", "o.reshape(-1, size,"
    ),
    "totals are differentiated below another pivot": Fault(
        "ops/logcumsumexp/vjp.py",
        'has_pairs=name in ("totals", "saving", "backward")',
        "has_pairs=False",
    ),
    "shards are met in the same order in reverse": Fault(
        "core/shards.py", "count - 1 - number if reverse else number", "number"
    ),
    "shards save the states of tiles that begin where they do": Fault(
        "ops/logcumsumexp/shards.py", "-(self.number * n) % block_n", "0 * self.number"
    ),
    "in reverse states of tiles are saved in the order of the sum": Fault(
        "ops/logcumsumexp/tiles.py",
        "self.plan.num_tiles - 1 - tile if self.view.reverse else tile",
        "tile",
    ),
    "both slots of ranks have the first piece": Fault(
        "ops/tpa_decode/matmul.py", "jnp.where(is_first, first, second)", "first"
    ),
    "float16 has as few pieces as bfloat16": Fault(
        "ops/tpa_decode/matmul.py", "3 if has_float16 else pieces", "pieces"
    ),
    "NaN of one query in the products of the others": Fault(
        "ops/tpa_decode/kernel.py", "mask & is_finite[:, None]", "mask"
    ),
    "float16 weights have one piece": Fault(
        "ops/tpa_decode/matmul.py", "[(second, b), (first, b)]", "[(first, b)]"
    ),
    "values are not rescaled where a larger weight comes": Fault(
        "ops/tpa_decode/softmax.py", "earlier / largest, p", "rescale, p"
    ),
    "scores keep 16 bits": Fault(
        "ops/tpa_decode/tiles.py", "is_high or s.is_quantised_bfloat16 else 3", "True else 3"
    ),
    "tensor cores read what is overwritten": Fault(
        "ops/tpa_decode/softmax.py", "accs = [acc + 0.0 for acc in accs]", "pass"
    ),
}


def noticed(fault: Fault) -> str:
    """The test that failed, or "" if none did."""
    with tempfile.TemporaryDirectory() as folder:
        copy = pathlib.Path(folder, "copy")
        shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".*", "results", "site"))
        path = copy / "pallas_ops" / fault.file
        text = path.read_text()
        assert text.count(fault.right) == 1, fault
        path.write_text(text.replace(fault.right, fault.wrong))
        run = [sys.executable, "-m", "pytest", *OPTIONS, IGNORED]
        result = subprocess.run(run, cwd=copy, capture_output=True, text=True, check=False)
        lines = result.stdout.splitlines()
        failed = [x for x in lines if x.startswith(("FAILED tests", "ERROR tests"))]
        assert bool(result.returncode) == bool(failed), result.stdout[-2000:]
        return failed[0] if failed else ""


def main(names: list[str]) -> int:
    missed = 0
    for name in names or FAULTS:
        test = noticed(FAULTS[name])
        missed += not test
        print(f"{name}: {test or 'NOT NOTICED'}", flush=True)
    return min(missed, 1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
