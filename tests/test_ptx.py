"""The emulated card runs what is right, and tells what is wrong."""

import collections
from typing import Any

import jax
import numpy as np
import pytest

from tests import ptx
from tests.ptx.shared import Shared

INT32 = np.dtype(np.int32)


def program(body: str) -> ptx.Program:
    """Finds x and y in %rd1 and %rd2, 4 times its thread's number in %rd3."""
    return ptx.parse(f"""
.visible .entry pallas_ops_test(
    .param .u64 .ptr .align 16 test_param_0,
    .param .u64 .ptr .align 16 test_param_1
)
.reqntid 64, 1, 1
{{
    .reg .b32 %r<9>;
    ld.param.b64 %rd1, [test_param_0];
    ld.param.b64 %rd2, [test_param_1];
    mov.u32 %r1, %tid.x;
    mul.wide.u32 %rd3, %r1, 4; // bytes
    add.s64 %rd4, %rd1, %rd3;
    add.s64 %rd5, %rd2, %rd3;
    {body}
    ret;
}}""")


def run(body: str, x: Any, grid: tuple[int, ...] = (1, 1, 1), size: int = 64) -> Any:
    """y, as int32, of an x of int32."""
    y, traffic = jax.ShapeDtypeStruct((size,), INT32), collections.Counter[str]()
    (out,) = ptx.run(program(body), grid, [np.asarray(x, INT32)], [y], traffic)
    return out, traffic


def test_a_copy_and_its_traffic() -> None:
    body = "ld.global.b32 %r2, [%rd4]; st.global.b32 [%rd5], {%r2};"
    out, traffic = run(body, np.arange(64))
    np.testing.assert_array_equal(out, np.arange(64))
    assert traffic == {
        "loads bytes": 256,
        "loads requests": 2,
        "loads sectors": 8,
        "stores bytes": 256,
        "stores requests": 2,
        "stores sectors": 8,
    }


def test_distant_numbers_take_a_sector_each() -> None:
    body = """
    shl.b64 %rd6, %rd3, 4;
    add.s64 %rd6, %rd1, %rd6;
    ld.global.b32 %r2, [ %rd6 + 4 ];
    st.global.b32 [%rd5], %r2;"""
    out, traffic = run(body, np.arange(1024))
    np.testing.assert_array_equal(out, 16 * np.arange(64) + 1)
    assert traffic["loads sectors"] == 64


def test_the_upper_half_of_a_product_of_64_bits() -> None:
    factors = np.asarray([2**64 - 1, 2**63 + 12345, 7**20, 3], np.uint64)
    body = "".join(
        f"mov.b64 %rd{5}, {int(x)}; mul.hi.u64 %rd6, %rd5, 2635249153617166336;"
        f"st.global.b64 [%rd2+{8 * k}], %rd6;"
        for k, x in enumerate(factors)
    )
    out, _ = run(body, np.zeros(64), size=8)
    want = [int(x) * 2635249153617166336 >> 64 for x in factors]
    np.testing.assert_array_equal(out.view(np.uint64), np.asarray(want, np.uint64))


@pytest.mark.parametrize(("order", "zero"), [("max", 0.0), ("min", -0.0)])
def test_zeros_of_two_signs_have_an_order(order: str, zero: float) -> None:
    body = f"""
    ld.global.b32 %r2, [%rd4];
    xor.b32 %r3, %r2, 0x80000000;
    {order}.f32 %r4, %r2, %r3;
    st.global.b32 [%rd5], %r4;"""
    zeros = np.tile(np.asarray([0.0, -0.0], np.float32), 32)
    out, _ = run(body, zeros.view(np.int32))
    np.testing.assert_array_equal(out, np.full(64, zero, np.float32).view(np.int32))


def test_programs_of_a_grid_go_their_ways() -> None:
    body = """
    mov.u32 %r2, %ctaid.y;
    mov.b32 %r3, 7;
    setp.eq.b32 %p1, %r2, 1;
    @%p1 bra $L__BB0_2;
    mov.b32 %r3, 5;
$L__BB0_2:
    mad.lo.s32 %r4, %r2, 64, %r1;
    mul.wide.u32 %rd6, %r4, 4;
    add.s64 %rd6, %rd2, %rd6;
    st.global.b32 [%rd6], {%r3};"""
    out, _ = run(body, [0], grid=(1, 3, 1), size=192)
    np.testing.assert_array_equal(out, np.repeat([5, 7, 5], 64))


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("ld.global.b32 %r2, [%rd4+4];", "global load outside of an array"),
        ("ld.global.b32 %r2, [%rd4+1048576];", "global load outside of an array"),
        ("ld.global.v2.b32 {%r2, %r3}, [%rd4];", "misaligned global load"),
        ("st.global.b32 [%rd4], %r1;", "global store into an operand"),
        ("ld.global.b32 %r2, [%rd5];", "global load from a result"),
        ("st.global.b32 [%rd2], %r1;", "different numbers are stored at one place"),
        ("st.shared.b32 [global_smem], %r1;", "two threads store different numbers"),
        (
            "st.global.b32 [%rd5], %r1; add.s32 %r2, %r1, 1; st.global.b32 [%rd5], %r2;",
            "different numbers are stored at one place",
        ),
        ("ld.shared.b32 %r2, [global_smem];", "shared memory is read before it is written"),
        ("add.s32 %r2, %r3, 1;", "%r3 is read before it is written"),
        ("shfl.sync.idx.b32 %r2, %r1, 0, 7199, -1;", "no such shuffle here"),
        (
            "setp.eq.b32 %p1, %r1, 1; @%p1 add.s32 %r2, %r1, 1;",
            "for some threads alone: .*@%p1 add.s32 %r2, %r1, 1;",
        ),
        (
            "setp.eq.b32 %p1, %r1, 1;\n@%p1 bra $L__BB0_1;\n$L__BB0_1:",
            "threads of one program part",
        ),
        ("add.sat.s32 %r2, %r1, 1;", "no such instruction here: .*add.sat.s32"),
    ],
)
def test_what_a_card_would_not_tell(body: str, message: str) -> None:
    with pytest.raises(ptx.MachineError, match=message):
        run(body, np.arange(64))


WRITE = "mul.lo.s32 %r2, %r1, 4; st.shared.b32 [%r2], %r1;"
READ = "xor.b32 %r3, %r2, 128; ld.shared.b32 %r4, [%r3]; st.global.b32 [%rd5], %r4;"
USED = "mov.b32 %r9, global_smem;"


def test_warps_meet_at_barriers() -> None:
    out, _ = run(f"{USED}{WRITE} bar.sync 0; {READ}", [0])
    np.testing.assert_array_equal(out, np.arange(64) ^ 32)
    with pytest.raises(ptx.MachineError, match="no barrier between a write"):
        run(USED + WRITE + READ, [0])
    with pytest.raises(ptx.MachineError, match="no barrier between a read"):
        run(f"{USED}{WRITE} bar.sync 0; {READ} {WRITE}", [0])
    all_read = "ld.shared.b32 %r4, [global_smem+252];"
    with pytest.raises(ptx.MachineError, match="no barrier between a read"):
        run(f"{USED}{WRITE} bar.sync 0; {all_read} {WRITE}", [0])


def test_asynchronous_copies_are_waited_for() -> None:
    copy = f"""{USED}
    mul.lo.s32 %r2, %r1, 4;
    cp.async.ca.shared.global [ %r2 + 0 ], [ %rd4 + 0 ], 0x4, 4;
    cp.async.commit_group;"""
    read = "ld.shared.b32 %r4, [%r2]; st.global.b32 [%rd5], %r4;"
    x = np.arange(64)
    np.testing.assert_array_equal(run(f"{copy} cp.async.wait_group 0; {read}", x)[0], x)
    with pytest.raises(ptx.MachineError, match="asynchronous copy is about to write"):
        run(f"{copy} cp.async.wait_group 1; {read}", x)
    with pytest.raises(ptx.MachineError, match="asynchronous copy is about to write"):
        run(f"{copy} {copy}", x)


def test_tensor_cores_read_until_they_are_waited_for() -> None:
    shared, first, all_lanes = Shared(1), np.array([0]), np.ones((1, 32), bool)
    address = np.arange(0, 128, 4)[None]
    numbers = np.arange(32, dtype=np.uint32)[None, :, None]
    shared.store(first, 0, address, all_lanes, numbers)
    with pytest.raises(ptx.MachineError, match="no barrier between a write"):
        shared.fetch(first, 0, address, 4)
    np.testing.assert_array_equal(shared.fetch(first, 1, address, 4), numbers[..., 0])
    with pytest.raises(ptx.MachineError, match="tensor cores may yet read"):
        shared.store(first, 2, address, all_lanes, numbers)
    shared.fetched(first, 2, address)
    with pytest.raises(ptx.MachineError, match="no barrier between a read"):
        shared.store(first, 2, address, all_lanes, numbers)
    shared.store(first, 3, address, all_lanes, numbers)


NAN, ONE, TWO, DENORMAL = (int(np.float32(x).view(np.int32)) for x in (np.nan, 1, 2, 2.0**-130))


@pytest.mark.parametrize(
    ("body", "x", "want"),
    [
        ("shl.b32 %r3, %r2, 32;", [5, -1], [0, 0]),
        ("shr.s32 %r3, %r2, 40;", [8, -8], [0, -1]),
        ("shr.u32 %r3, %r2, 28;", [-1], [15]),
        ("mul.hi.s32 %r3, %r2, -3;", [1, -1], [-1, 0]),
        ("mul.hi.u32 %r3, %r2, -3;", [2], [1]),
        ("bfe.s32 %r3, %r2, 4, 4;", [0xF0, 0x70], [-1, 7]),
        ("prmt.b32 %r3, %r2, 0, 0x8880U;", [0x80, 0x7F], [-128, 0x7F]),
        ("min.f32 %r3, %r2, 0f3F800000;", [NAN, TWO], [ONE, ONE]),
        ("setp.gtu.f32 %p1, %r2, 0f3F800000; selp.b32 %r3, 1, 0, %p1;", [NAN, ONE, TWO], [1, 0, 1]),
        ("setp.gt.f32 %p1, %r2, 0f3F800000; selp.b32 %r3, 1, 0, %p1;", [NAN, ONE, TWO], [0, 0, 1]),
        ("cvt.rna.tf32.f32 %r3, %r2;", [ONE + 0x1000, ONE + 0xFFF], [ONE + 0x2000, ONE]),
        ("add.rn.f32 %r3, %r2, %r2;", [DENORMAL], [2 * DENORMAL]),
        ("cvt.s8.s32 %rs1, %r2; cvt.s32.s16 %r3, %rs1;", [0x180, 0x17F], [-128, 127]),
        ("sub.rn.bf16x2 %r3, %r2, 0x43004300;", [0x43014300], [0x3F800000]),
        (
            "mov.b32 {%rs1, %rs2}, %r2; cvt.rn.f16.bf16 %rs1, %rs2; cvt.u32.u16 %r3, %rs1;",
            [ONE],
            [0x3C00],
        ),
        ("cvt.u16.u32 %rs1, %r2; cvt.rn.f16x2.e4m3x2 %r3, %rs1;", [0x7EB8], [0x5F00BC00]),
        ("rcp.approx.ftz.f32 %r3, %r2;", [ONE, DENORMAL], [ONE, 0x7F800000]),
        ("shfl.sync.up.b32 %r3, %r1, 1, 0, -1;", [0], [0, *range(31), 32, *range(32, 63)]),
    ],
)
def test_edges(body: str, x: list[int], want: list[int]) -> None:
    out, _ = run(f"ld.global.b32 %r2, [%rd4]; {body} st.global.b32 [%rd5], %r3;", np.resize(x, 64))
    np.testing.assert_array_equal(out, np.resize(want, 64))
