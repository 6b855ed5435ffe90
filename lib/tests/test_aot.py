"""Every stage compiles for Hopper and Blackwell, on a machine that has neither; on tensor cores, within limits, without spills."""

import pytest

from qkvlab import IMPLEMENTATIONS, UnsupportedError, aot, hardware, suite
from qkvlab.kernels.launch import Config

# The largest that was timed without a loss: notebook 06, "size of the code".
LARGEST_CODE = 67_328
SHAPES = [(case.batch_size, case.seq_len) for case in suite.cases()]


@pytest.mark.parametrize("arch", aot.ARCHITECTURES)
@pytest.mark.parametrize("stage", IMPLEMENTATIONS)
def test_stage_compiles(stage, arch):
    if stage == "persistent" and arch != "sm_90":
        with pytest.raises(UnsupportedError, match="wgmma, which compute capability 9.0 alone has, not 10"):
            aot.compiled(stage, arch, SHAPES)
        return
    table = aot.compiled(stage, arch, SHAPES)
    assert len(table) == IMPLEMENTATIONS[stage].launches * len(SHAPES)
    assert (table.spill_bytes == 0).all() and (table.shared_bytes <= hardware.shared_memory_limit()).all()
    assert table.code_bytes.between(512, LARGEST_CODE).all()
    assert (table.groupby(["batch_size", "seq_len"]).mma.max() != "").all()
    large = table[table.batch_size * table.seq_len >= 512]
    assert (large.groupby(["batch_size", "seq_len"]).mma.max() == {"sm_90": "wgmma.mma_async"}.get(arch, "tcgen05.mma")).all()


def test_what_does_not_compile_is_an_error():
    with pytest.raises(RuntimeError, match="fused does not compile for sm_90: .*power of 2"):
        aot.compiled("fused", "sm_90", [(1, 1)], config=Config(BLOCK_M=64, BLOCK_K=96, num_warps=4, num_stages=2))


@pytest.mark.parametrize("stages", [3, 8])
def test_persistent_refuses_buffers_in_which_weights_cannot_stay(stages):
    with pytest.raises(RuntimeError, match="persistent does not compile for sm_90"):
        aot.compiled("persistent", "sm_90", [(1, 1)], config=Config(BLOCK_M=128, BLOCK_K=64, num_warps=8, num_stages=stages))


@pytest.mark.parametrize("stage, arch", [("no such stage", "sm_90"), ("fused", "sm_10")])
def test_what_is_unknown_is_named(stage, arch):
    with pytest.raises(ValueError, match="stage is one of naive.*arch one of sm_90"):
        aot.compiled(stage, arch, [(1, 1)])
