"""Figures of machines agree with their published sources, and look-up by name is forgiving."""

import re
import shutil
from pathlib import Path

import pytest

from aiscale.errors import ConfigError
from aiscale.plan import machines, published
from aiscale.plan.machines.catalogue import read_catalogue


@pytest.mark.parametrize(
    ("name", "figures"),
    [
        # fp32 products run in the matrix units, at twice the vectors'
        ("mi250x-gcd", {"fp32": 47.9, "bf16": 191.5}),
        ("mi210", {"fp32": 45.3}),
        ("mi100", {"fp32": 46.1, "bf16": 92.3}),
        ("mi300x", {"bf16": 1307}),  # not the rounded 1300
        ("max1550-tile", {"bf16": 298.2, "fp32": None}),  # the peak, not what products reach
        ("h100-pcie-80gb", {"bf16": 756}),  # dense
        ("v100-sxm2-32gb", {"bf16": None, "fp16": 125}),  # no such unit
    ],
)
def test_peaks_are_those_of_dense_matrix_products(name, figures):
    device = machines.find(name)
    assert {
        p: flops and flops / 1e12 for p in figures if (flops := device.peak_flops(p)) or True
    } == figures


def test_memory_is_what_torch_reports_a_little_less_than_the_names_gib():
    assert machines.find("v100-sxm2-16gb").memory_bytes / 2**30 == pytest.approx(15.78, abs=0.01)
    assert machines.find("mi250x-gcd").memory_bytes / 2**20 == pytest.approx(65520, rel=1e-4)
    for name, device in machines.ACCELERATORS.items():
        if named := re.search(r"-(\d+)gb$", name):
            nominal_gb = int(named[1])
            assert nominal_gb * 1e9 < device.memory_bytes < nominal_gb * 2**30, name


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
    for unknown in (
        "NVIDIA GH200",
        "NVIDIA GeForce RTX 4090",
        "NVIDIA GB10",
        "NVIDIA GH200 144G HBM3e",
        "NVIDIA A100-PCIE-40GB",
    ):
        assert machines.find_device(unknown) is None


@pytest.mark.parametrize(
    ("file", "old", "new", "message"),
    [
        (
            "accelerators/mi210.toml",
            "memory_gb =",
            "memory_gib =",
            "unknown key memory_gib: did you mean memory_gb?",
        ),
        ("accelerators/mi210.toml", "memory_gb =", "#", "key memory_gb is missing"),
        ("accelerators/mi210.toml", "memory_gb =", "memory_gb", "is not TOML: "),
        ("systems/frontier.toml", "host_source =", "#", "key node.host_source is missing: every"),
        (
            "systems/frontier.toml",
            '"dragonfly"',
            '"dragon"',
            "network.topology is 'dragon': it must be one of fat-tree, dragonfly,",
        ),
    ],
)
def test_a_wrong_file_is_refused_in_one_line_that_names_it_and_the_key(
    tmp_path, file, old, new, message
):
    shutil.copytree(Path(machines.__file__).parent, tmp_path, dirs_exist_ok=True)
    text = (tmp_path / file).read_text()
    assert old in text
    (tmp_path / file).write_text(text.replace(old, new))
    with pytest.raises(ConfigError) as refused:
        read_catalogue(tmp_path)
    assert str(refused.value).startswith(f"machines/{file}") and message in str(refused.value)
    assert "\n" not in str(refused.value)


MINE = """
site = "here"
[node]
like = "dgx-a100"
[node.accelerator]
memory_gb = 24
tflops = {bf16 = 100}
sources = {all = "our own measurement"}
[network]
name = "Ethernet"
nics = 2
nic_gb_s = 1.25
source = "the invoice"
"""


def test_a_file_of_ones_own_is_a_machine_as_strictly_read_as_the_others(tmp_path):
    file = tmp_path / "mine.toml"
    file.write_text(MINE)
    mine = machines.find_machine(str(file))
    assert (mine.name, mine.node.accelerator.memory_gb, mine.network.injection_bytes_s) == (
        "mine",
        24,
        2.5e9,
    )
    assert mine.node.bus_gb_s == machines.find_machine("dgx-a100").node.bus_gb_s
    file.write_text(MINE.replace("nics", "nic"))
    with pytest.raises(
        ConfigError, match=r"mine.toml: unknown key network.nic: did you mean network.nics\?$"
    ):
        machines.find_machine(str(file))
    with pytest.raises(ConfigError, match=r"^none.toml: No such file or directory$"):
        machines.find_machine("none.toml")


def test_an_unknown_name_is_answered_with_the_nearest():
    with pytest.raises(
        ConfigError, match=r"^unknown accelerator 'A100 80GB': did you mean a100-sxm4-80gb\?$"
    ):
        machines.find("A100 80GB")
    with pytest.raises(
        ConfigError, match=r"^unknown machine 'frontiere': did you mean frontier\?$"
    ):
        machines.find_machine("frontiere")
    with pytest.raises(
        ConfigError,
        match=r"^no published table is called 'turing_table_5': did you mean turing_table5",
    ):
        published.table("turing_table_5")
