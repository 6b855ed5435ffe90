"""The formulas of sol.py against values worked out by hand."""

import pytest

from qkvlab import hardware, sol, suite


def test_flops_and_bytes_of_the_smallest_case():
    assert sol.flops(128) == 805_306_368  # 2 * 128 * 1024 * 3072
    # 128 * 1024 in, 3 * 1024 * 1024 + 256 weights, 3 * 128 * 1024 out, 4 bytes each
    assert sol.traffic_bytes(128) == 4 * (131_072 + 3_145_984 + 393_216) == 14_681_088
    assert sol.traffic_bytes(128, element_bytes=2) == 7_340_544


def test_what_the_stages_move_more():
    fused, split, naive = (sol.traffic_bytes(1000, hidden_reads=r, norm_passes=n) for r, n in ((1, 0), (1, 1), (3, 1)))
    assert split - fused == 1000 * 16 * 1024 and naive - split == 1000 * 8 * 1024


def test_bounds_by_hand():
    # M = 8192 on the H200: 51.54 GFLOP / 989.5 TFLOP/s; 146.8 MB / 4.8 TB/s
    assert sol.bound_parts_us(8192, "H200", "fp16") == pytest.approx((52.087, 30.584), abs=1e-3)
    assert sol.bound_us(8192, "H200", "fp16") == pytest.approx(52.087, abs=1e-3)
    assert sol.bound_us(128, "H200", "fp16") == pytest.approx(14.681088 / 4.8, rel=1e-9)
    assert sol.bound_us(8192, "H200", "tf32", measured=True) == pytest.approx(51539.607552 / 385, rel=1e-9)
    assert sol.bound_us(8192, "H200", "3xfp16") == pytest.approx(3 * sol.bound_us(8192, "H200", "fp16"))


def test_rates_are_kept_apart():
    bounds = [sol.bound_us(8192, "H200", precision) for precision in ("fp16", "tf32", "fp32")]
    assert bounds == sorted(bounds) and len(set(bounds)) == 3


@pytest.mark.parametrize("case", suite.cases(), ids=str)
def test_the_boards_sol_is_reproduced(case):
    assert round(sol.board_sol_us(case.m), 1) == case.b200_sol_us


def test_the_boards_sol_is_not_the_physical_bound():
    memory_bound = suite.case(1, 128)
    assert 0.5 < sol.bound_us(memory_bound.m, "B200", "fp16") - sol.board_sol_us(memory_bound.m) < 0.8


def test_score():
    assert sol.sol_score(100, 10, 100) == 0.5 and sol.sol_score(10, 10, 100) == 1
    assert sol.sol_score(55, 10, 100) == pytest.approx(2 / 3)


def test_an_unknown_gpu_has_no_bound():
    with pytest.raises(KeyError):
        sol.bound_us(128, "unknown", "fp16")
    assert hardware.gpus()["B200"].measured == {}
