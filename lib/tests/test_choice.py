"""What "auto" runs, and how a configuration is admitted to the table that tells it."""

import json
from dataclasses import asdict

import pytest
import torch

from qkvlab import IMPLEMENTATIONS, Stage, UnsupportedError, api, hardware, reference, tables, tuned, tuning
from qkvlab.kernels import exact, launch, pair
from qkvlab.kernels.launch import Config

CUDA = torch.device("cuda", 0)
FAKE = {"stage": "tma", "config": {"BLOCK_M": 32, "BLOCK_K": 64, "num_warps": 4, "num_stages": 5}}


@pytest.fixture
def on(monkeypatch):
    """Pretend that the CUDA device has this name and capability, and that these tables are on record."""

    def pretend(name, capability, known):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        monkeypatch.setattr(launch, "sm_count", lambda device: 132)
        monkeypatch.setattr(tuned, "known", lambda: known)
        monkeypatch.setattr(tuned, "classes", tuned.classes.__wrapped__)
        return api.chosen.__wrapped__

    return pretend


def test_the_smallest_class_that_is_not_below(on):
    table = tuple((m, (("tma", FAKE["config"] | {"BLOCK_M": block}),)) for m, block in ((64, 16), (256, 32), (1024, 128)))
    chosen = on("NVIDIA H200", (9, 0), {"H200": table})
    assert [chosen(m, CUDA).config.BLOCK_M for m in (1, 64, 65, 256, 257, 1024, 9999)] == [16, 16, 32, 32, 128, 128, 128]
    assert chosen(65, CUDA).why == "tuned at M = 256" and isinstance(chosen(1, CUDA).config, Config)


def test_a_gpu_that_nobody_tuned_for_works_and_says_so(on):
    chosen = on("NVIDIA B300", (10, 3), {"H200": ((64, (("tma", FAKE["config"]),)),)})
    assert [chosen(m, CUDA).stage for m in (1, 1024, 1025)] == ["tma", "wide", "pair"]
    assert chosen(1, CUDA).why == "heuristic: nobody tuned for this GPU" and chosen(1, CUDA).config is None


def test_a_hopper_that_nobody_tuned_for(on):
    chosen = on("NVIDIA H100", (9, 0), {})
    assert [chosen(m, CUDA).stage for m in (1024, 1025)] == ["wide", "persistent"]


def test_wide_where_its_tiles_are_one_wave_and_those_of_tma_are_not(on):
    chosen = on("NVIDIA H100", (9, 0), {})
    stages = [chosen(m, CUDA).stage for m in range(1, 1025)]
    changes = [m for m in range(2, 1025) if stages[m - 1] != stages[m - 2]]
    assert stages[0] == "tma" and changes == [5 * 64 + 1, 8 * 64 + 1, 5 * 128 + 1]


@pytest.mark.parametrize("heuristic, changes", [(pair.heuristic, [5 * 64, 5 * 128]), (exact.heuristic, [5 * 64, 11 * 64])])
def test_tiles_grow_where_they_no_longer_run_at_once(monkeypatch, heuristic, changes):
    monkeypatch.setattr(launch, "sm_count", lambda device: 132)
    configs = [heuristic(m, CUDA) for m in range(1, 2049)]
    assert [m for m in range(1, 2048) if configs[m] != configs[m - 1]] == changes


def test_where_the_winner_does_not_run_the_runner_up_does(on, monkeypatch):
    monkeypatch.delattr(launch.TensorDescriptor, "round_f32_to_tf32")  # as before Triton 3.7
    ranked = (("persistent", FAKE["config"]), ("pair", FAKE["config"] | {"BLOCK_M": 64}))
    found = on("NVIDIA H200", (9, 0), {"H200": ((8192, ranked),)})(4096, CUDA)
    assert (found.stage, found.config.BLOCK_M, found.why) == ("pair", 64, "tuned at M = 8192")


def test_without_tma(on):
    chosen = on("NVIDIA A100", (8, 0), {})
    assert [chosen(m, CUDA).stage for m in (1, 2048)] == ["fused", "fused"]


def test_without_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert api.chosen.__wrapped__(5, torch.device("cpu")) == ("fused", None, "no GPU")
    with pytest.raises(UnsupportedError, match="there is no NVIDIA GPU here"):
        api.chosen.__wrapped__(5, "cuda")
    assert {stage.unsupported("cuda") for stage in IMPLEMENTATIONS.values()} == {"there is no NVIDIA GPU here"}


def test_what_the_interpreter_does_not_run_says_so():
    assert "Triton's interpreter does not run it" in IMPLEMENTATIONS["persistent"].unsupported("cpu")
    assert IMPLEMENTATIONS["tma"].unsupported("cpu") == ""


def test_what_is_written_is_what_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr(tables, "DATA", tmp_path)
    second = {"stage": "fused", "config": FAKE["config"], "median_us": 16.0}
    entries = [{"M": m, **FAKE, "median_us": 9.2, "runner_up": other} for m, other in ((586, None), (131, second))]
    tuning.write({"gpu": "H200", "classes": entries, "rejected": []})
    first = ("tma", FAKE["config"])
    assert tuned.known.__wrapped__() == {"H200": ((131, (first, ("fused", FAKE["config"]))), (586, (first,)))}
    assert json.loads((tmp_path / "tuned" / "H200.json").read_text())["classes"][0]["median_us"] == 9.2


def test_of_two_that_tie_the_first_candidate_wins(monkeypatch):
    monkeypatch.setattr(launch, "sm_count", lambda device: 132)
    proposed = tuning.candidates(1024, CUDA)
    stages = ["fused", "tma", "wide", "pair", "persistent"]
    assert proposed == sorted(proposed, key=lambda found: (stages.index(found[0]), found[1].BLOCK_M))
    assert ("pair", pair.heuristic(1024, CUDA)) in proposed
    one, two = (next(found for found in proposed if found[0] == stage) for stage in ("tma", "pair"))

    def admitted(*found):
        return [{"stage": stage, "config": asdict(config), "median_us": us} for (stage, config), us in found]

    assert tuning.ranked(admitted((two, 27.0), (one, 27.4)), proposed) == admitted((one, 27.4), (two, 27.0))
    assert tuning.ranked(admitted((one, 27.0), (two, 27.4)), proposed) == admitted((one, 27.0), (two, 27.4))
    apart = admitted((two, 27.0), (one, 28.0))
    assert tuning.ranked(apart, proposed) == apart and tuning.ranked(apart[:1], proposed) == apart[:1]


def test_shapes_to_tune_follow_the_multiprocessors(monkeypatch):
    sizes = {}
    for count in (132, 148):
        monkeypatch.setattr(tuning.launch, "sm_count", lambda device: count)
        sizes[count] = [M for _, M in tuning.shapes(CUDA)]
    assert sizes[132] == [80, 128, 131, 160, 256, 320, 512, 586, 640, 1024, 1408, 2048, 2164, 4096, 6184, 8192]
    assert sizes[148] == [96, 128, 131, 192, 256, 384, 512, 576, 586, 768, 1024, 1152, 1536, 2048, 2164, 4096, 6184, 8192]


def test_every_candidate_is_a_stage_with_a_configuration():
    device = CUDA if torch.cuda.is_available() else torch.device("cpu")
    for batch_size, seq_len in tuning.shapes(device):
        found = tuning.candidates(batch_size * seq_len, device)
        assert len(set(found)) == len(found) > 2 and all(
            stage in IMPLEMENTATIONS and isinstance(config, Config) for stage, config in found
        )


CONFIG = Config(BLOCK_M=16, BLOCK_K=128, num_warps=4, num_stages=2)


def test_a_right_configuration_is_admitted(monkeypatch):
    monkeypatch.setattr(tuning, "ROUNDS", 2)
    assert tuning.rejection("fused", CONFIG, (1, 9)) == ""


calls = []


def unsteady(*inputs, config=None):
    calls.append(config)
    out = reference(*inputs)
    out.value_states[0, 0, 0, 0] += 1e-6 * len(calls)
    return out


def sometimes_wrong(*inputs, config=None):
    calls.append(config)
    out = reference(*inputs)
    if len(calls) > 6:
        out.key_states[0, 0, 0, 0] += 1.0
    return out


def raises(*inputs, config=None):
    raise RuntimeError("out of resource: shared memory")


@pytest.mark.parametrize(
    "function, reason",
    [(unsteady, "two calls on the same inputs differ"), (sometimes_wrong, "wrong: 1 of"), (raises, "out of resource")],
)
def test_what_is_not_right_every_time_is_rejected_with_the_reason(monkeypatch, function, reason):
    calls.clear()
    monkeypatch.setattr(tuning, "ROUNDS", 5)
    monkeypatch.setitem(api.IMPLEMENTATIONS, "odd", Stage("odd", function))
    assert reason in tuning.rejection("odd", CONFIG, (1, 9))


@pytest.mark.skipif(torch.cuda.is_available(), reason="without a GPU")
def test_tuning_needs_a_gpu():
    with pytest.raises(UnsupportedError, match="tuning needs an NVIDIA GPU"):
        tuning.tune()
    assert hardware.device() == "cpu"
