"""What may be asked: lengths, models and devices from whatever there is; and what is refused, in one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import Trainer
from torch import nn
from torch.utils.data import DataLoader

from lightning_odc import advise, cli
from lightning_odc.advisor.configs import PRESETS
from lightning_odc.advisor.inputs import Model, Place, find_model, inspect_loader, parse_inputs, read_lengths
from lightning_odc.advisor.options import AdviseOptions
from lightning_odc.console import OptionError
from tests.support.refusals import assert_one_line, assert_refused

LENGTHS = [7, 4096, 80, 650] * 20
A100 = Place("A100", 8, 1, 80e9)


def model_of(given: Any) -> Model:
    return find_model(given, A100)


def test_files_of_lengths(tmp_path: Path) -> None:
    for name, content in (
        ("a.txt", "7\n4096\n80\n"),
        ("b.txt", "7, 4096, 80"),
        ("a.json", "[7, 4096, 80]"),
        ("b.json", json.dumps([[1] * n for n in (7, 4096, 80)])),
        ("a.jsonl", '{"length": 7}\n{"num_tokens": 4096}\n\n{"n_tokens": 80}\n'),
        ("b.jsonl", "\n".join(json.dumps({"input_ids": [1] * n}) for n in (7, 4096, 80))),
        ("c.jsonl", "\n".join(json.dumps({"text": "x" * (4 * n - 3)}) for n in (7, 4096, 80))),
    ):
        (tmp_path / name).write_text(content)
        found = read_lengths(tmp_path / name)
        assert found.lengths.tolist() == [7, 4096, 80]
        assert found.source.startswith(f"3 lengths from {name}")
        assert ("4 bytes of text taken for a token" in found.source) == (name == "c.jsonl")
    np.save(tmp_path / "a.npy", np.array(LENGTHS))
    for given in (tmp_path / "a.npy", LENGTHS):
        assert read_lengths(given).lengths.tolist() == LENGTHS
    assert read_lengths(np.array([[7, 3], [9, 0]])).lengths.tolist() == [7, 9], (
        "the first number counts tokens"
    )
    found = read_lengths("longalign", max_length=1024)
    assert found.lengths.max() <= 1024 < read_lengths("longalign").lengths.max()
    assert found.source.startswith("longalign")


def test_presets_have_as_many_parameters_as_their_names_say() -> None:
    for name, billions in (
        ("1.5b", 1.5),
        ("7B", 7.6),
        ("14b", 14.8),
        ("32b", 32.8),
        ("8b", 8.0),
        ("70b", 70.6),
    ):
        model = model_of(name)
        assert model.name == name.lower()
        assert model.parameters / 1e9 == pytest.approx(billions, rel=0.2), "1.5b ties its embeddings"


def test_configurations_from_files_objects_and_modules(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(dict(PRESETS["1.5b"])))
    expected = model_of("1.5b").parameters
    for given in (tmp_path, str(tmp_path / "config.json"), dict(PRESETS["1.5b"])):
        assert model_of(given).parameters == expected
    module = nn.Linear(1024, 1024)
    module.bias.requires_grad_(False)
    found = model_of(module)
    assert found.name == "Linear, a model without a Hugging Face config"
    assert (found.parameters, found.trained) == (1_049_600, 1024**2)


def test_a_loader_says_how_long_its_samples_are_and_how_it_pads() -> None:
    samples = [torch.zeros(length) for length in LENGTHS]
    pad = lambda batch: torch.nn.utils.rnn.pad_sequence(batch, batch_first=True)  # noqa: E731
    loader = inspect_loader(DataLoader(samples, batch_size=4, collate_fn=pad), batches=2)
    assert loader.lengths.tolist() == LENGTHS
    assert (loader.together, loader.minibatch_size, loader.collation.kind) == (4, 8, "padded")
    assert loader.source == "80 of the loader's 80 samples; the collate_fn pads to the longest sample"


def test_a_trainer_says_on_what_it_trains() -> None:
    trainer = Trainer(accelerator="cpu", devices=2, strategy="odc", accumulate_grad_batches=3, logger=False)
    loader = DataLoader([torch.zeros(length) for length in LENGTHS], batch_size=2, collate_fn=list)
    inputs = parse_inputs(AdviseOptions(loader, "1.5b"), trainer)
    assert (inputs.place.devices, inputs.place.nodes, inputs.place.device) == (2, 1, "cpu")
    assert (inputs.samples.together, inputs.minibatch_size) == (2, 6)
    named = parse_inputs(
        AdviseOptions(loader, "1.5b", "h200", devices=16, nodes=2, minibatch_size=3), trainer
    )
    assert named.place == Place("H200", 16, 2, 141e9)
    assert named.minibatch_size == 3


WRONG = [
    (
        "--lengths nothing --model 7b",
        "'nothing' is neither one of stdlib, equal, longalign, swesmith, aime, nor a file",
    ),
    ("--lengths longaling --model 7b", ".jsonl): did you mean longalign?"),
    ("--lengths few.txt --model 7b", "8 devices x 4 samples is more than the 2 lengths there are"),
    ("--lengths longalign --model 7c", "'7c' is unknown: write 1.5b, 7b, 14b, 32b, 8b, 70b, a type"),
    ("--lengths longalign --model bert.json", "no dense decoder-only transformer"),
    ("--lengths longalign --model list.json", "not a configuration: it holds a list, not an object"),
    ("--lengths longalign --model 7b --device B1000", "unknown: choose from A100, H100, H200, MI300X, cpu"),
    ("--lengths longalign --model 7b --devices 0", "--devices 0: use 1 or more"),
    ("--lengths longalign --model 7b --devices 6 --nodes 4", "write a multiple of 4"),
    ("--lengths longalign --model 7b --max-tokens 100", "max_tokens"),
    ("--lengths longalign --model 7b --lenghts 3", "did you mean --lengths?"),
    ("--lengths longalign", "required: --model"),
]


def test_bad_input_is_one_line_that_lists_what_is_accepted(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for name, content in {
        "few.txt": "12 14",
        "bert.json": '{"model_type": "t5", "is_encoder_decoder": true, "d_model": 64}',
        "list.json": "[1]",
    }.items():
        Path(name).write_text(content)
    assert_one_line(capsys, cli.main, [(f"advise {line}", message) for line, message in WRONG])


def test_in_python_the_same_is_a_value_error_that_names_arguments() -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"devices": True}, "^devices=True: use 8 or None"),
        ({"nodes": 2.5}, "^nodes=2.5: use 8 or None"),
        ({"minibatch_size": "4"}, "^minibatch_size=4: use 8 or None"),
        *(({"lengths": lengths}, "") for lengths in ([], [0, 3], [2.5], [[[1]]], ["a"], None)),
    ]
    assert_refused(lambda wrong: advise(**{"lengths": LENGTHS, "model": "7b", **wrong}), cases, OptionError)
    with pytest.raises(ValueError, match=r'known. Pass length_fn=lambda sample: len\(sample\["a"\]\)$'):
        parse_inputs(AdviseOptions(DataLoader([{"a": "text"}] * 8, batch_size=2), "1.5b"))  # type: ignore[arg-type]
