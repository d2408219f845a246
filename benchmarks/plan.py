"""What to measure: which sizes and columns of which tables, and about how long that takes."""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

from benchmarks import cases, peers
from benchmarks.cases import Benchmark, Case, Grid, Point, Provider, Sizes

ROW_S, SLOW_S = 0.7, 5.0  # seconds on an H200: a row's truth, a slow column


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """What one run measures of one op, in one direction."""

    mode: str
    dtypes: Sequence[str]
    grid: Grid
    providers: Sequence[Provider]
    metrics: Sequence[str] = ("speed", "memory")
    calls: int = 50
    jobs: int = 4  # programs compiled at a time, by a sweep
    has: Callable[..., bool] = lambda **_: True

    def points(self) -> Iterator[tuple[str, Point]]:
        for dtype, values in itertools.product(self.dtypes, itertools.product(*self.grid.values())):
            point = dict(zip(self.grid, values, strict=True))
            if self.has(**point):
                yield dtype, point


@dataclasses.dataclass(frozen=True, kw_only=True)
class Work:
    """A row of a table, or some of its columns: the unit that a run does, saves and takes up."""

    benchmark: Benchmark
    plan: Plan
    dtype: str
    point: Point
    providers: Sequence[Provider]

    @property
    def optional(self) -> bool:
        return all(slow(provider) for provider in self.providers)

    @functools.cached_property
    def case(self) -> Case:
        return self.benchmark.case(cases.DTYPES[self.dtype], **self.point)

    @property
    def title(self) -> str:
        return self.case.title.format(metric="{metric}", mode=self.plan.mode, dtype=self.dtype)

    def __str__(self) -> str:
        point = " ".join(f"{axis}={value}" for axis, value in self.point.items())
        return f"{self.benchmark.op} {self.plan.mode} {point}"

    @functools.cached_property
    def bytes(self) -> int:
        return cases.moved_bytes(self.case, mode=self.plan.mode)

    def seconds(self) -> float:
        """An estimate."""
        return ROW_S + sum(SLOW_S if slow(p) else self.benchmark.point_s for p in self.providers)


def everything(benchmark: Benchmark, plan: Plan) -> list[Work]:
    """Every column of every row."""
    return [
        Work(
            benchmark=benchmark,
            plan=plan,
            dtype=dtype,
            point=point,
            providers=[p for p in plan.providers if p.has(**point)],
        )
        for dtype, point in plan.points()
    ]


def selected(benchmark: Benchmark, plan: Plan, *, step: int = 2) -> list[Work]:
    """Of every `step`th size, down from the largest, those that table and column ask for.

    Tables of few sizes have the columns that ask for all. Slow columns are works of their own,
    which can be dropped.
    """
    tables: dict[Any, list[tuple[str, Point]]] = {}
    for dtype, point in plan.points():
        rest = (dtype, *(value for axis, value in point.items() if axis != benchmark.x))
        tables.setdefault(rest, []).append((dtype, point))
    works = []
    for sizes in tables.values():
        points = sizes[::-step][::-1]
        asked = benchmark.sizes(mode=plan.mode, **points[-1][1])
        columns = [p for p in plan.providers if "all" in (asked, p.sizes)]
        for i, (dtype, point) in enumerate(points):
            kept = [
                p
                for p in columns
                if i in _places(asked, points) and i in _places(p.sizes, points) and p.has(**point)
            ]
            work = Work(
                benchmark=benchmark,
                plan=plan,
                dtype=dtype,
                point=point,
                providers=kept,
            )
            for is_slow in (False, True):
                some = [p for p in kept if slow(p) == is_slow]
                works += [dataclasses.replace(work, providers=some)] if some else []
    return works


def slow(provider: Provider) -> bool:
    """Eager functions, whose every operation is compiled for itself."""
    return not provider.jit and provider.sizes == "largest"


def _places(sizes: Sizes, points: Sequence[Any]) -> Collection[int]:
    last = len(points) - 1
    return {"all": range(last + 1), "few": {0, last}, "largest": {last}, "none": ()}[sizes]


def available(benchmark: Benchmark, mode: str) -> list[Provider]:
    return [p for p in benchmark.providers if mode in p.modes and peers.installed(*p.needs)]
