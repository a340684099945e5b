"""What is advised: a gain by hand, the line that gives it, memory, and what cannot be asked."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import nn

from lightning_odc import advise, cli
from lightning_odc.advice import WORTH
from lightning_odc.data.gain import planned_gain
from tests.support.refusals import assert_refused

UNEVEN = np.random.default_rng(0).lognormal(6, 1, 600).astype(int) + 1
SMALL = {"hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 6}
ODC = 'import lightning_odc\nTrainer(accelerator="gpu", precision="bf16-mixed", devices=8, strategy="odc")'


def test_the_line_gives_the_gain_that_is_promised() -> None:
    advice = advise(UNEVEN // 4 + 1, model="7b")
    assert advice.helps
    assert advice.fits
    assert advice.line == ODC
    said = str(advice)
    assert said.startswith("Balancing would help: ranks wait ")
    assert f"wait {advice.gain.idle:.0%} of the time for each other today" in said
    assert f"speed up by {advice.gain.factor:.2f}, counted in FLOPs" in said
    assert "times as fast" not in said
    assert '    import lightning_odc\n    Trainer(accelerator="gpu"' in said
    assert "has not run on a GPU" in said
    assert "for parameters, gradients and Adam; the model is sharded" in said
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
    advice = advise(changed.pop("lengths", UNEVEN), model="1.5b", device="H200", **changed)
    assert not advice.helps
    assert advice.line == "# Nothing is gained: keep your strategy."
    assert str(advice).startswith("Balancing would not help: ranks wait ")
    assert str(advice).splitlines()[1] == "Keep your strategy."
    assert "Trainer" not in str(advice)


def test_a_gain_that_plans_do_not_reach_is_none() -> None:
    advice = advise(UNEVEN, model="7b")
    object.__setattr__(advice.gain, "factor", WORTH - 0.01)
    assert not advice.helps


def test_memory_is_that_of_the_formulas() -> None:
    """As in `fitting.py`: 20 bytes for a trained parameter if the model is whole, 4 for a frozen one; else shards."""
    advice = advise(UNEVEN, model="7b", devices=8)
    parameters = int(advice.model.split()[1].replace(",", ""))
    assert 6.5e9 < parameters < 7.7e9
    assert not advice.is_whole
    assert advice.states == parameters * 16 / 8
    assert advice.window == parameters * 6 / 8
    assert advice.fits
    large = advise(UNEVEN, model="70b", devices=4)
    assert not large.fits
    assert str(large).startswith("This would not fit: take more devices.")
    small = advise(UNEVEN, model="1.5b", devices=8, device="H200")
    assert small.is_whole
    assert small.states == int(small.model.split()[1].replace(",", "")) * 20
    assert "the model is whole on each device, as under DDP" in str(small)
    module = nn.Linear(300, 384)
    module.weight.requires_grad_(False)
    lora = advise(UNEVEN, model=module, devices=2, device="cpu")
    assert "model            Linear, 115,584 parameters" in str(lora)
    assert lora.states == 115_584 * 4 + 384 * 16
    assert lora.window == 384 * 8 / 2
    assert lora.activations == (0, 0)
    assert "largest microbatch" not in str(lora)


def test_whether_a_batch_fits_depends_on_its_length_and_on_checkpointing() -> None:
    """On an A100: short samples fit, longer ones with gradient checkpointing, and the longest not at all."""
    starts = []
    for longest in (1024, 12_000, 64_000):
        advice = advise([longest, 512] * 64, model="1.5b", device="A100")
        plain, checkpointed = advice.activations
        assert advice.largest == longest
        assert 0 < checkpointed < plain
        starts.append(str(advice).partition(":")[0])
    assert starts == [
        "Balancing would help",
        "This would fit with gradient checkpointing only",
        "This would not fit",
    ]
    assert advise([1024, 512] * 64, model="1.5b", device="A100", padded=2).largest == 2048


def test_a_million_lengths_are_planned_in_part() -> None:
    lengths = np.random.default_rng(0).lognormal(9, 0.75, 1_000_000).astype(np.int64).clip(1, 2**16)
    assert "1,000,000 samples" in str(advise(lengths, model="1.5b"))


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
    ({"lengths": [5, 7]}, "8 devices with 4 samples each takes more than 2 lengths"),
    (
        {"lengths": "longaling"},
        "There is no file 'longaling' of lengths. Write a file of texts, .* or longalign. Did you mean longalign",
    ),
    ({"lengths": "bad.txt"}, "bad.txt, line 3: '12 x' is not a length"),
    ({"lengths": "zero.txt"}, "zero.txt, line 2: '0' is not a length"),
    ({"lengths": "blank.txt"}, "blank.txt, line 2: '' is not a length"),
    (
        {"model": "7bb"},
        "There is no model '7bb'. Write 1.5b, 7b, 70b, a folder or file .* Did you mean 7b",
    ),
    ({"model": "list.json"}, "list.json cannot be used: list.json has no names and sizes"),
    ({"model": "broken.json"}, "broken.json cannot be used: broken.json is not JSON"),
    ({"lengths": "empty.txt"}, "empty.txt is empty. Write a file of texts"),
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
        "empty.txt": "",
        "broken.json": "{",
        "good.txt": "12\n4096\n" * 40,
    }.items():
        Path(name).write_text(content)


def test_what_cannot_work_is_refused_with_what_to_write(files: None) -> None:
    assert_refused(lambda given: advise(**{"lengths": UNEVEN, "model": "7b"} | given), WRONG)


def test_the_command_says_the_same(files: None, capsys: pytest.CaptureFixture[str]) -> None:
    line = ["advise", "--data", "good.txt", "--model", "7b"]
    assert cli.main(line) == 0
    assert capsys.readouterr().out == f"{advise('good.txt', model='7b')}\n"
    assert cli.main([*line, "--quiet"]) == 0
    assert capsys.readouterr().out == f"{ODC}\n"
    assert cli.main([*line, "--quiet", "--devices", "1"]) == 0
    assert capsys.readouterr().out == "# Nothing is gained: keep your strategy.\n"
    for wrong, message in (
        ("--data bad.txt --model 7b", "advise: bad.txt, line 3: '12 x' is not a length."),
        ("--data empty.txt --model 7b", "advise: empty.txt is empty."),
        ("--data good.txt --model 7bb", "advise: There is no model '7bb'."),
        ("--data good.txt --model list.json", "advise: The model list.json cannot be used"),
        (
            "--data good.txt --model 7b --devices 32",
            "advise: A step of 32 devices with 4 samples each takes more",
        ),
    ):
        assert cli.main(["advise", *wrong.split()]) == cli.BAD_USAGE
        out, err = capsys.readouterr()
        assert out == ""
        assert message in err
        assert err.count("\n") == 1
        assert_plain(err)
    for wrong, message in (
        ("--data good.txt", "required: --model"),
        (
            "--data good.txt --model 7b --devices 0",
            "argument --devices: '0' is not a whole number of at least 1",
        ),
        ("--data good.txt --model 7b --device H2000", "argument --device: invalid choice: 'H2000'"),
    ):
        with pytest.raises(SystemExit, match="2"):
            cli.main(["advise", *wrong.split()])
        err = capsys.readouterr().err
        assert message in err
        assert_plain(err)


def assert_plain(text: str) -> None:
    """No Errno and no words of Python."""
    for word in ("Errno", "advise(", "=[", "__", "Traceback", "cost=", "transformer("):
        assert word not in text


CHAT = "{% for message in messages %}{{ message['role'] }} {{ message['content'] }} {% endfor %}"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a tokenizer of words, and a configuration."""
    transformers = pytest.importorskip("transformers")
    tokenizers = pytest.importorskip("tokenizers")
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"<unk>": 0}, unk_token="<unk>"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    made = transformers.PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>", chat_template=CHAT)
    monkeypatch.chdir(tmp_path)
    made.save_pretrained("small")
    Path("small/config.json").write_text(json.dumps(SMALL))
    return tmp_path


def test_lengths_come_from_texts_and_a_tokenizer_in_a_folder(folder: Path, capsys: Any) -> None:
    """Conversations by the template, with a role in front of each message; other samples by all of their texts."""
    talk = [{"role": "user", "content": "one two"}, {"role": "assistant", "content": "three"}]
    cases: dict[str, tuple[str, list[int], str]] = {
        "talks.jsonl": (
            json.dumps({"messages": talk}) + "\n",
            [5],
            "4 conversations by the chat template of",
        ),
        "rows.jsonl": (json.dumps({"instruction": "a b", "output": "c"}) + "\n\n", [3], "4 texts of"),
        "lines.txt": ("a b c d\n", [4], "4 texts of"),
    }
    for name, (line, lengths, said) in cases.items():
        Path(name).write_text(4 * line)
        command = f"advise --data {name} --tokenizer small --model small --devices 2 --minibatch-size 2"
        assert cli.main(command.split()) == 0
        out, err = capsys.readouterr()
        written = Path(f"{Path(name).stem}.lengths.txt")
        assert f"The lengths are in {written}" in err
        assert [*map(int, written.read_text().split())] == 4 * lengths
        assert f"lengths          {said} {name}" in out
        again = ["--data", str(written), "--model", "small", "--devices", "2", "--minibatch-size", "2"]
        assert cli.main(["advise", *again]) == 0
        assert capsys.readouterr().out.partition("tokens\n")[2] == out.partition("tokens\n")[2]
    Path("whole.json").write_text(json.dumps([{"text": "a b"}] * 4))
    assert (
        advise("whole.json", tokenizer="small", model="small", devices=2, minibatch_size=2).values.tolist()
        == [2] * 4
    )


def test_texts_that_cannot_be_counted_are_refused(folder: Path, capsys: Any) -> None:
    for content, told in (
        ('{"text": "a"}\n{"text"\n', "data.jsonl, line 2 is not JSON"),
        ('{"number": 5}\n', "data.jsonl, sample 1: there is no text in it"),
        ("\n", "data.jsonl has no samples"),
    ):
        Path("data.jsonl").write_text(content)
        command = "advise --data data.jsonl --tokenizer small --model small"
        assert cli.main(command.split()) == cli.BAD_USAGE
        assert told in capsys.readouterr().err
    command = "advise --data data.jsonl --model small"
    assert cli.main(command.split()) == cli.BAD_USAGE
    assert "Texts need a tokenizer" in capsys.readouterr().err


@pytest.mark.slow
def test_names_that_the_hub_does_not_give_are_an_error_in_one_line(folder: Path) -> None:
    Path("data.txt").write_text("a\n" * 32)
    for names, told in (
        (
            "--tokenizer small --model me/none",
            "advise: The model me/none cannot be used: there is no such folder",
        ),
        (
            "--tokenizer me/none --model small",
            "advise: The tokenizer me/none cannot be used: there is no such folder",
        ),
    ):
        command = f"{sys.executable} -m lightning_odc advise --data data.txt {names}"
        offline = {**os.environ, "HF_HUB_OFFLINE": "1"}
        done = subprocess.run(command.split(), env=offline, capture_output=True, text=True, timeout=120)
        assert done.returncode == cli.BAD_USAGE
        assert told in done.stderr
        assert "Traceback" not in done.stderr


def test_transformers_is_imported_when_it_is_asked_for(
    files: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    for module in ("advice", "texts"):
        monkeypatch.delitem(sys.modules, f"lightning_odc.{module}")
    assert cli.main(["advise", "--data", "good.txt", "--model", "7b"]) == 0
    assert cli.main(["advise", "--data", "good.txt", "--model", "me/mine"]) == cli.BAD_USAGE
    assert capsys.readouterr().err.endswith("transformers is missing: pip install transformers\n")
