"""Glossary and cheat sheet are true: commands exist, numbers are `cost`'s, terms are in lessons."""

from __future__ import annotations

import html
import re
import shlex
from pathlib import Path

import pytest

from aiscale.cli import _parser
from aiscale.plan import cost, machines, published
from aiscale.plan.presets import model_of
from aiscale.train.options import options

ROOT = Path(__file__).parents[1]
SHEET = (ROOT / "workshop" / "cheat_sheet.html").read_text()
CODES = [
    html.unescape(re.sub(r"\s+", " ", code))
    for code in re.findall(r"<code.*?>(.*?)</code>", SHEET, re.S)
]
AISCALE = [
    shlex.split(code.partition("aiscale ")[2])
    for code in CODES
    if re.search(r"\baiscale [a-z]", code)
]
GPT2 = model_of("gpt2")
A100 = machines.find("a100-sxm4-80gb")
LINK = cost.AlphaBeta(latency_s=10e-6, bandwidth_bytes_s=25e9)
BYTES = {
    row["who_counts"]: sum(nbytes for key, nbytes in row.items() if key.endswith("_bytes"))
    for row in published.table("bytes_per_parameter")
}
FLOPS = cost.flops_per_token(GPT2, seq_len=1024)
#: What `data-n` names, by `cost`.
NUMBERS = {
    "gpt2 12Ldd": 12 * GPT2.n_layer * GPT2.d_model**2,
    "gpt2 parameters": cost.parameter_count(GPT2),
    "gpt2 GFLOPs a token": FLOPS / 1e9,
    "gpt2 6N GFLOPs": cost.six_n_flops_per_token(GPT2) / 1e9,
    "a100 bf16 TFLOP/s": A100.peak_flops("bf16") / 1e12,
    "gpt2 tokens/s": 0.4 * A100.peak_flops("bf16") / FLOPS,
    "fp32 bytes": BYTES["slide, fp32 AdamW"],
    "mixed bytes": BYTES["ZeRO paper"],
    "megatron bytes": BYTES["Megatron-Core, bf16"],
    **{
        f"zero{stage} GB": sum(cost.zero_state_bytes(7.5e9, stage, dp=64).values()) / 1e9
        for stage in range(4)
    },
    "checkpoint GB": 12 * cost.parameter_count(GPT2) / 1e9,
    "ring MB": cost.wire_bytes("all_reduce", 100, world=8),
    "ring steps": cost.collective_terms("all_reduce", 100, world=8)[0],
    "ring ms": LINK.seconds("all_reduce", 100e6, world=8) * 1e3,
    "activations GiB": cost.korthikanti_activation_bytes(GPT2, 1, 1024) / 2**30,
    "activations selective GiB": cost.korthikanti_activation_bytes(
        GPT2, 1, 1024, recompute="selective"
    )
    / 2**30,
    "activations full MiB": cost.korthikanti_activation_bytes(GPT2, 1, 1024, recompute="full")
    / 2**20,
    "bubble %": 100 * cost.bubble("1f1b", 8, 64),
    "bubble of the step %": 100 / (1 + 1 / cost.bubble("1f1b", 8, 64)),
    "bubble interleaved %": 100 * cost.bubble("interleaved", 8, 64, virtual_stages=2),
}


def test_numbers_on_the_sheet_are_those_of_cost():
    printed = dict(re.findall(r'data-n="(.*?)">(.*?)<', SHEET))
    assert printed.keys() == NUMBERS.keys()
    for name, text in printed.items():
        assert f"{NUMBERS[name]:,.{len(text.partition('.')[2])}f}" == text, name


@pytest.mark.parametrize(
    "words", [words for words in AISCALE if words[0] != "submit"], ids=" ".join
)
def test_aiscale_commands_parse_and_their_settings_exist(words):
    if words[0] == "train":
        parser = options(words[1])
        parser.add_argument("--nproc", type=int)  # of `aiscale train` itself
        parser.parse_args(words[2:])
        return
    args = _parser(words[0] if words[1:] else "").parse_args(words)  # "": imports no command
    if words[0] == "plan":
        assert args.run(args) == 0
