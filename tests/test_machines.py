"""Figures of machines agree with their published sources, and look-up by name is forgiving."""

import math
import shutil
from pathlib import Path

import pytest

from aiscale import machines, published
from aiscale.config import ConfigError
from aiscale.machines.catalogue import read_catalogue

PUBLISHED = {
    "V100-SXM2-32GB": "v100-sxm2-32gb",
    "A100-SXM4-40GB": "a100-sxm4-40gb",
    "A100-SXM4-80GB": "a100-sxm4-80gb",
    "H100-SXM5-80GB": "h100-sxm5-80gb",
    "H100-PCIe-80GB": "h100-pcie-80gb",
    "H200-SXM-141GB": "h200-sxm-141gb",
    "MI210": "mi210",
    "MI250X (per GCD)": "mi250x-gcd",
    "MI300X": "mi300x",
    "PVC Max 1550 (per tile)": "max1550-tile",
    "TPU v4": "tpu-v4",
    "TPU v5p": "tpu-v5p",
    "Gaudi2": "gaudi2",
    "Gaudi3": "gaudi3",
}
COLUMNS = {
    "fp32": "fp32_vector_TFLOPs",
    "tf32": "tf32_tensor_TFLOPs",
    "fp16": "fp16_tensor_dense_TFLOPs",
    "bf16": "bf16_tensor_dense_TFLOPs",
    "fp8": "fp8_dense_TFLOPs",
}


ROWS = [row for row in published.table("hardware_accelerators") if row["device"] in PUBLISHED]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["device"])
def test_every_figure_equals_the_published_one(row):
    device = machines.find(PUBLISHED[row["device"]])
    for precision, column in COLUMNS.items():
        if isinstance(row[column], int | float):
            assert device.peak_flops(precision) == row[column] * 1e12
    assert device.memory_bytes == row["hbm_GB"] * 1e9
    assert device.memory_bytes_s == row["hbm_TB_s"] * 1e12
    if isinstance(row["intra_node_unidir_GB_s"], int | float):
        assert device.link_bytes_s == row["intra_node_unidir_GB_s"] * 1e9


def test_unverified_figures_are_not_used():
    remembered = {row["device"] for row in published.table("hardware_accelerators")} - {
        row["device"] for row in published.verified(published.table("hardware_accelerators"))
    }
    assert "MI100" in remembered
    assert not remembered & set(PUBLISHED)


def test_every_figure_names_its_source():
    for device in machines.ACCELERATORS.values():
        assert device.tflops and device.memory_gb > 0
        for figure in ("tflops", "memory", "link"):
            assert device.verification in device.source(figure)
    for machine in machines.MACHINES.values():
        assert machine.node.source and machine.network.source
        assert machines.ACCELERATORS[machine.node.accelerator.name] is machine.node.accelerator


@pytest.mark.parametrize("folder", ["accelerators", "systems"])
def test_every_file_is_in_the_catalogue(folder):
    files = {file.stem for file in (Path(machines.__file__).parent / folder).glob("*.toml")}
    assert files == set(machines.ACCELERATORS if folder == "accelerators" else machines.MACHINES)


def test_what_no_source_tells_is_none():
    assert machines.find("ipu-bow").memory_bytes_s is None
    assert machines.find_machine("dawn").node.bus_gb_s is None
    jade = machines.find_machine("jade2").network
    assert (jade.nics, jade.nic_gb_s, jade.injection_bytes_s, jade.topology, jade.taper) == (
        None,
        12.5,
        None,
        None,
        None,
    )


def test_figures_of_links_and_measurements_fit_together():
    """A pair has no more than a ring, a ring no more than all links, and no ring measures more than its links carry."""
    for machine in machines.MACHINES.values():
        node = machine.node
        ring = node.ring_gb_s or math.inf
        assert (node.pair_gb_s or 0) <= ring, machine.name
        if node.ring_gb_s and node.accelerator.link_gb_s:
            assert ring <= node.accelerator.link_gb_s, machine.name
        if node.bus_gb_s:
            assert 0.5 * ring < max(gb_s for _, gb_s in node.bus_gb_s) < ring, machine.name


def test_peaks_are_dense_and_none_if_a_device_lacks_the_unit():
    assert machines.find("h100-pcie-80gb").peak_flops("bf16") == 756e12
    assert machines.find("v100-sxm2-32gb").peak_flops("bf16") is None


@pytest.mark.parametrize(
    ("torch_name", "name"),
    [
        ("NVIDIA A100-SXM4-80GB", "a100-sxm4-80gb"),
        ("NVIDIA H100 80GB HBM3", "h100-sxm5-80gb"),
        ("NVIDIA H100 PCIe", "h100-pcie-80gb"),
        ("NVIDIA H200", "h200-sxm-141gb"),
        ("NVIDIA GH200 120GB", "gh200-96gb"),
        ("NVIDIA B200", "b200-sxm"),
        ("NVIDIA A100 80GB PCIe", "a100-pcie-80gb"),
        ("Tesla V100-SXM2-32GB", "v100-sxm2-32gb"),
        ("AMD Instinct MI250X", "mi250x-gcd"),
    ],
)
def test_torchs_device_names_are_understood(torch_name, name):
    assert machines.find_device(torch_name).name == name


def test_an_unknown_device_is_none_not_a_guess():
    for unknown in ("NVIDIA GeForce RTX 4090", "NVIDIA GB200", "NVIDIA GH200 144G HBM3e", "NVIDIA A100-PCIE-40GB"):
        assert machines.find_device(unknown) is None


@pytest.mark.parametrize(
    ("file", "old", "new", "message"),
    [
        ("accelerators/mi210.toml", "memory_gb =", "memory_gib =", "unknown key memory_gib: did you mean memory_gb?"),
        ("accelerators/mi210.toml", "memory_gb =", "#", "key memory_gb is missing"),
        ("accelerators/mi210.toml", "all =", "link =", "key sources.all is missing: every figure has a source"),
        ("accelerators/mi210.toml", "memory_gb =", "memory_gb", "is not TOML: "),
        (
            "systems/frontier.toml",
            "devices =",
            "gpus =",
            "unknown key node.gpus: it may be one of accelerator, devices,",
        ),
        ("systems/frontier.toml", "name =", "#", "key network.name is missing"),
        (
            "systems/frontier.toml",
            "nics = 4",
            "cards = 4",
            "unknown key network.cards: it may be one of name, nics,",
        ),
        (
            "systems/frontier.toml",
            "taper = 0.57",
            "taper = 1.75",
            "network.taper is 1.75: it must be above 0 and at most 1",
        ),
        (
            "systems/frontier.toml",
            '"dragonfly"',
            '"dragon"',
            "network.topology 'dragon' is not one of fat-tree, dragonfly,",
        ),
        (
            "systems/dawn.toml",
            '"secondary"',
            '"memory"',
            "verification 'memory' is not one of primary, secondary, measured",
        ),
        ("accelerators/mi210.toml", "bf16 =", "bfloat16 =", "tflops key 'bfloat16' is not one of fp32,"),
        ("accelerators/mi100.toml", "link =", "links =", "sources key 'links' is not one of all, tflops,"),
        (
            "systems/lumi-g.toml",
            '"frontier"',
            '"perlmutter"',
            "node.like: unknown system with a node of its own 'perlmutter'",
        ),
        (
            "systems/cosma8-mi300x.toml",
            "[8388608, 161.14], ",
            "[8388608, -161.14], ",
            "node.bus_gb_s must be [[bytes, GB/s], ...], positive, the smallest bytes first",
        ),
        ("accelerators/mi210.toml", '"rccl"', '"rcl"', "library 'rcl' is not one of nccl, rccl"),
        ("systems/frontier.toml", "mi250x-gcd", "mi250", "node.accelerator: unknown accelerator 'mi250': did you mean"),
    ],
)
def test_a_wrong_file_is_refused_in_one_line_that_names_it_and_the_key(tmp_path, file, old, new, message):
    shutil.copytree(Path(machines.__file__).parent, tmp_path, dirs_exist_ok=True)
    text = (tmp_path / file).read_text()
    assert old in text
    (tmp_path / file).write_text(text.replace(old, new))
    with pytest.raises(ConfigError) as refused:
        read_catalogue(tmp_path)
    assert str(refused.value).startswith(f"machines/{file}") and message in str(refused.value)
    assert "\n" not in str(refused.value)


def test_an_unknown_name_is_answered_with_the_nearest():
    with pytest.raises(ConfigError, match=r"^unknown accelerator 'A100 80GB': did you mean a100-sxm4-80gb\?$"):
        machines.find("A100 80GB")
    with pytest.raises(ConfigError, match=r"^unknown machine 'frontiere': did you mean frontier\?$"):
        machines.find_machine("frontiere")
    with pytest.raises(
        ConfigError, match=r"^no published table is called 'turing_table_5': did you mean turing_table5"
    ):
        published.table("turing_table_5")


def test_the_speedups_that_the_c_project_prints_follow_from_its_times():
    rows = published.table("gpt2_c_mpi_cuda")
    for row in rows:
        assert rows[0]["train_s"] / row["train_s"] == pytest.approx(row["speedup_train"], abs=0.06)


def test_published_numbers_are_numbers_and_carry_a_source():
    for name in published.names():
        try:
            rows = published.table(name)
        except ConfigError:
            assert published.facts(name)["source"]
        else:
            assert all(row["source"] and row["verification"] for row in rows)
    sizes = [row["bytes"] for row in published.table("stanage_a100_nccl_allreduce")]
    assert sizes[0] == 8 and all(b == 2 * a for a, b in zip(sizes, sizes[1:], strict=False))
