"""What is advised: a gain by hand, the line that gives it, memory, and what cannot be asked."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import nn

from lightning_odc import advise, cli
from lightning_odc.advice import WORTH, Advice
from lightning_odc.data.gain import planned_gain
from tests.support.refusals import assert_refused

UNEVEN = np.random.default_rng(0).lognormal(7, 1, 600).astype(int) + 1
SMALL = {"hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 6}
ODC = 'import lightning_odc\nTrainer(accelerator="gpu", precision="bf16-mixed", devices=8, strategy="odc")'


def test_the_line_gives_the_gain_that_is_promised() -> None:
    advice = advise(UNEVEN, model="7b")
    assert advice.helps
    assert advice.fits
    assert advice.line == ODC
    said = str(advice)
    assert said.startswith("This would help: ranks would wait ")
    assert f"instead of {advice.gain.idle:.0%}." in said
    assert f"shorter by a factor of {advice.gain.factor:.2f}, counted in FLOPs" in said
    assert "times as fast" not in said
    assert '    import lightning_odc\n    Trainer(accelerator="gpu"' in said
    assert "has not run on a GPU" in said
    assert "kept whole there, as under DDP. A larger one is sharded." in said
    processors = advise(UNEVEN, model=SMALL, device="cpu", devices=2)
    assert processors.line.endswith('Trainer(accelerator="cpu", devices=2, strategy="odc")')
    assert "GPU" not in str(processors)


def test_the_gain_is_that_of_the_lines_at_the_start_of_a_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pairs as they come, 8 beside 2 and 1 beside 7 thousand; the level plan is 9 and 9."""
    asked = []

    def record(*args: Any) -> Any:
        asked.append(args)
        return planned_gain(*args)

    monkeypatch.setattr("lightning_odc.advice.planned_gain", record)
    advice = advise([8000, 2000, 1000, 7000], model=SMALL, devices=2, minibatch_size=2, device="cpu")
    ((order, together, batches, planner),) = asked
    assert sorted(order) == [1000, 2000, 7000, 8000]
    assert together == 1
    assert batches == 2
    assert planner.num_ranks == 2
    assert planner.policy == "lb_mini"
    assert advice.gain.idle > 0.2 > advice.gain.balanced_idle


def test_padding_is_counted_where_batches_are_padded() -> None:
    packed = advise([1, 9] * 32, model=SMALL, devices=2)
    padded = advise([1, 9] * 32, model=SMALL, devices=2, padded=2)
    assert packed.gain.padding == 0
    assert "padding" not in str(packed)
    assert padded.gain.padding > 0.1 > padded.gain.balanced_padding
    assert padded.helps
    assert f"padding          {padded.gain.padding:4.0%} of the computed tokens" in str(padded)


@pytest.mark.parametrize("changed", [{"devices": 1}, {"minibatch_size": 1}, {"lengths": np.full(600, 2048)}])
def test_where_nothing_is_gained_that_comes_first(changed: dict[str, Any]) -> None:
    advice = advise(changed.pop("lengths", UNEVEN), model="1.5b", **changed)
    assert not advice.helps
    assert advice.line == "# Nothing is gained: keep your strategy."
    assert str(advice).startswith("This would not help: a step would be ")
    assert "Trainer" not in str(advice)


def test_a_gain_that_plans_do_not_reach_is_none() -> None:
    gain = advise(UNEVEN, model="7b").gain
    nothing = {"lengths": "", "model": "", "device": "cpu", "devices": 2, "minibatch_size": 4}
    object.__setattr__(gain, "factor", WORTH - 0.01)
    advice = Advice(**nothing, gain=gain, states=0, window=0, memory=0)
    assert not advice.helps


def test_memory_is_that_of_the_formulas() -> None:
    """16 bytes for a parameter that is trained, 4 for a frozen one; published in bf16, or as fp32 on processors."""
    advice = advise(UNEVEN, model="7b", devices=8)
    parameters = int(advice.model.split()[1].replace(",", ""))
    assert 6.5e9 < parameters < 7.7e9
    assert advice.states == parameters * 16 / 8
    assert advice.window == parameters * 6 / 8
    large = advise(UNEVEN, model="70b", devices=4)
    assert not large.fits
    assert str(large).startswith("This would not fit: take more devices")
    module = nn.Linear(300, 384)
    module.weight.requires_grad_(False)
    lora = advise(UNEVEN, model=module, devices=2, device="cpu")
    assert "model            Linear, 115,584 parameters" in str(lora)
    expected = (115_584 * 4 + 384 * 12) / 2
    assert lora.states == expected
    assert "memory per rank  233kB for parameters" in str(lora)
    expected = (115_584 * 4 + 384 * 4) / 2
    assert lora.window == expected


def test_a_million_lengths_are_planned_in_part() -> None:
    drawn = np.random.default_rng(0).lognormal(9, 0.75, 1_000_000)
    lengths = drawn.astype(np.int64).clip(1, 2**16)
    found = str(advise(lengths, model="1.5b"))
    assert "1,000,000 samples" in found


def test_lengths_and_configurations_come_from_files(tmp_path: Path) -> None:
    lengths = tmp_path / "lengths.txt"
    lengths.write_text("\n".join(map(str, UNEVEN)) + "\n")
    config = tmp_path / "config.json"
    config.write_text(json.dumps(SMALL))
    by_file = advise(str(lengths), model=config, devices=2)
    by_value = advise(UNEVEN, model=SMALL, devices=2)
    assert by_file.gain == by_value.gain
    assert by_file.states == by_value.states
    assert by_file.lengths == "600 samples of lengths.txt"
    known = advise("longalign", model=SMALL)
    assert known.lengths == "4,096 samples like LongAlign's"
    assert known.gain.longest <= 65_536


WRONG = [
    ({"lengths": []}, "at least one sample"),
    ({"lengths": [5, 0]}, "sample 1 has length 0"),
    ({"lengths": [5, 7]}, "8 devices with 4 samples each takes more than the 2 lengths"),
    (
        {"lengths": "longaling"},
        "'longaling' are not a file. Write a file with a length in every line, or longalign",
    ),
    ({"lengths": "bad.txt"}, "bad.txt, line 3: '12 x' is not a length"),
    ({"lengths": "zero.txt"}, "zero.txt, line 2: '0' is not a length"),
    ({"lengths": "blank.txt"}, "blank.txt, line 2: '' is not a length"),
    (
        {"model": "7c"},
        "The model 7c cannot be used: .*No such file.* Write 1.5b, 7b, 70b, or the path of the config",
    ),
    ({"model": "list.json"}, "list.json cannot be used"),
    ({"model": "broken.json"}, "broken.json cannot be used"),
    ({"model": {"hidden_size": 5}}, "lacks num_hidden_layers"),
    ({"model": {**SMALL, "is_encoder_decoder": True}}, "has experts or an encoder"),
    ({"devices": 0}, r"advise\(devices=0\) cannot work. Write devices=8"),
    ({"device": "B1000"}, 'Write device="A100", "H100", "H200" or "cpu"'),
]


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name, content in {
        "bad.txt": "12\n7\n12 x\n",
        "zero.txt": "12\n0\n",
        "blank.txt": "12\n\n7\n",
        "list.json": "[1]",
        "broken.json": "{",
        "good.txt": "12\n4096\n" * 40,
    }.items():
        Path(name).write_text(content)


def test_what_cannot_work_is_refused_with_what_to_write(files: None) -> None:
    assert_refused(lambda given: advise(**{"lengths": UNEVEN, "model": "7b"} | given), WRONG)


def test_the_command_says_the_same(files: None, capsys: pytest.CaptureFixture[str]) -> None:
    line = ["advise", "--lengths", "good.txt", "--model", "7b"]
    assert cli.main(line) == 0
    assert capsys.readouterr().out == f"{advise('good.txt', model='7b')}\n"
    assert cli.main([*line, "--quiet"]) == 0
    assert capsys.readouterr().out == f"{ODC}\n"
    assert cli.main([*line, "--quiet", "--devices", "1"]) == 0
    assert capsys.readouterr().out == "# Nothing is gained: keep your strategy.\n"
    for wrong, message in (
        ("--lengths bad.txt --model 7b", "advise: bad.txt, line 3: '12 x' is not a length."),
        ("--lengths good.txt --model 7c", "advise: The model 7c cannot be used"),
        ("--lengths good.txt --model 7b --devices 0", "advise(devices=0) cannot work"),
    ):
        found = cli.main(["advise", *wrong.split()])
        assert found == cli.BAD_USAGE
        out, err = capsys.readouterr()
        assert out == ""
        assert message in err
        assert err.count("\n") == 1
    with pytest.raises(SystemExit, match="2"):
        cli.main(["advise", "--lengths", "good.txt"])
    assert "required: --model" in capsys.readouterr().err
