"""Which launch is best: every config that a module proposes, held to the truth and timed.

A person then edits the op's `config.py`; nothing is tuned while users' programs run.
"""

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from concurrent import futures
from typing import Any

from benchmarks import cases, suite
from benchmarks.cases import Benchmark, Point, Provider
from benchmarks.plan import Plan
from benchmarks.records import Report, Row


def configs(cls: type[Any], **choices: Sequence[Any]) -> list[Any]:
    """One config for each combination that `cls` does not refuse; the first is all choices' first.

    `configs(Config, block_n=(8, 16), num_warps=(2, 4))`
    """
    found = []
    for values in itertools.product(*choices.values()):
        try:
            found.append(cls(**dict(zip(choices, values, strict=True))))
        except ValueError:
            continue
    return found


def label(config: Any) -> str:
    """A column's name: the config's fields."""
    return "default" if config is None else repr(config).partition("(")[2][:-1]


def always(config: Any) -> Callable[..., Any]:
    """The choice of this config, whatever the case."""
    return lambda *_, **__: config


def run(benchmark: Benchmark, plan: Plan, advance: suite.Advance) -> Iterator[Report]:
    """A report for each case, with a column for each config."""
    for dtype, point in plan.points():
        providers = list(benchmark.proposals(mode=plan.mode, **point))
        one = dataclasses.replace(
            plan,
            dtypes=[dtype],
            grid={axis: [value] for axis, value in point.items()},
            providers=providers,
            metrics=["speed"],
        )
        case = benchmark.case(cases.DTYPES[dtype], **point)
        _compile(case, providers, point, plan)
        yield suite.run(benchmark, one, advance)


def _compile(case: cases.Case, providers: Sequence[Provider], point: Point, plan: Plan) -> None:
    """Fills the compilation cache, several programs at a time."""
    inputs = cases.inputs(case)

    def compile_one(provider: Provider) -> None:
        jitted: Any
        jitted, arguments = cases.prepare(
            provider, point, inputs, mode=plan.mode, constants=len(case.further)
        )
        jitted.lower(*arguments).compile()

    with futures.ThreadPoolExecutor(plan.jobs) as pool:
        for done in [pool.submit(compile_one, provider) for provider in providers]:
            done.exception()  # if any, the run will meet it again, and say so


def lines(report: Report) -> Iterator[str]:
    """The configs, fastest first, then those that are wrong or refused."""
    for table in report.tables:
        for row in table.rows:
            point = " ".join(f"{axis}={value}" for axis, value in row.point.items())
            copy = f"{1e3 * row.copy.kernel_ms:.1f} us" if row.copy.kernel_ms else "not timed"
            yield f"{report.op} {table.mode} {table.dtype} {point} (copy: {copy})"
            yield from _ranked(row)


def _ranked(row: Row) -> Iterator[str]:
    def time(item: Any) -> float:
        return float(item[1].kernel_ms or "inf")

    for name, cell in sorted(row.cells.items(), key=time):
        if cell.reason:
            yield f"  -1  {name}: {cell.reason}"
        else:
            speed = (
                f"{1e3 * cell.kernel_ms:9.1f} us  {cell.of_copy or 0:.3f}"
                if cell.kernel_ms
                else "ok"
            )
            yield f"  {speed}  {name}"
