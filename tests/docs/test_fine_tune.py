"""The recipe of ``examples/fine_tune_llm.py``, with a tiny model and a few chats in place of the names of the hub."""

from __future__ import annotations

import csv
import json
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.docs.blocks import ROOT, output_of, programs

pytest.importorskip("transformers")
pytest.importorskip("datasets")
pytest.importorskip("peft")

from peft import PeftModel
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
FILE = "fine_tune_llm.py"
BEGIN = "<|im_start|>"
END = "<|im_end|>"
TEMPLATE = (
    "{% for message in messages %}"
    "<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
#: Sends SIGKILL to its own process, rank 1, after an optimizer step that no checkpoint has.
KILLED = """
import os, signal, sys
import fine_tune_llm

def kill(self, *_):
    if self.global_step == 12 and self.global_rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)

fine_tune_llm.FineTune.on_train_batch_end = kill
if __name__ == "__main__":
    fine_tune_llm.main()
"""


def chat(number: int) -> dict[str, Any]:
    """Two questions and two answers, longer for a larger number."""
    counted = [str(n) for n in range(1, number + 1)]
    turns = [f"Count to {number}", " ".join(counted), "Backwards", " ".join(reversed(counted))]
    roles = ("user", "assistant") * 2
    return {"messages": [{"role": role, "content": text} for role, text in zip(roles, turns, strict=True)]}


TRAIN = [chat(number) for number in range(1, 97)]
TEST = [chat(number) for number in range(5, 90, 7)]


def new_tokenizer() -> PreTrainedTokenizerFast:
    """A token is a byte, or begins or ends a turn."""
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    inner.train_from_iterator([], trainers.BpeTrainer(special_tokens=[BEGIN, END], initial_alphabet=alphabet))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token=END, pad_token=END)
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def write_recipe(folder: Path) -> None:
    """The program, a model with random weights, and a data set."""
    tokenizer = new_tokenizer()
    tokenizer.save_pretrained(folder / "model")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
    )
    LlamaForCausalLM(config).save_pretrained(folder / "model")
    (folder / "data").mkdir()
    for name, chats in {"train": TRAIN, "test": TEST}.items():
        lines = [json.dumps(row) for row in chats]
        (folder / "data" / f"{name}.jsonl").write_text("\n".join(lines))
    text = (ROOT / "examples" / FILE).read_text()
    for name in ("model", "data"):
        line = f"{name.upper()} = {str(folder / name)!r}"
        text, count = re.subn(rf"^{name.upper()} = .*", line, text, flags=re.M)
        assert count == 1
    (folder / FILE).write_text(text)


def train(folder: Path, file: str = FILE, succeeds: bool = True) -> str:
    """Run the program where it stands; its output."""
    environment = {"PYTHONPATH": str(ROOT), "HF_HOME": str(folder / "cache"), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, file],
        cwd=folder,
        env=os.environ | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=400,
    )
    assert (done.returncode == 0) == succeeds, done.stdout[-4000:]
    return done.stdout


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("recipe")
    write_recipe(folder)
    return folder


@pytest.fixture(scope="module")
def output(folder: Path) -> str:
    return train(folder)


def weights(model: Any) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def loaded(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder)


def rows_of(log: Path) -> list[dict[str, str]]:
    with (log / "metrics.csv").open() as file:
        return list(csv.DictReader(file))


def evaluations(output: str) -> dict[int, float]:
    """By step, the loss that the program prints."""
    found = re.findall(r"^step (\d+): eval_loss ([\d.]+)$", output, re.M)
    return {int(step): float(loss) for step, loss in found}


def without_figures(line: str) -> str:
    return re.sub(r"\d+([.]\d+)?( s\b|%)|eval_loss [\d.]+", "_", line)


def test_only_tokens_that_the_assistant_says_are_labels(folder: Path) -> None:
    tokenize = runpy.run_path(str(folder / FILE))["tokenize"]
    tokenizer = new_tokenizer()
    found = tokenize(TRAIN[2], tokenizer)
    ids = found["input_ids"]
    labels = found["labels"]
    assert tokenizer.decode(ids) == tokenizer.apply_chat_template(TRAIN[2]["messages"], tokenize=False)
    assert found["attention_mask"] == [1] * len(ids)
    assert len(labels) == len(ids)
    said = [token for token, label in zip(ids, labels, strict=True) if label != -100]
    assert said == [label for label in labels if label != -100]
    assert tokenizer.decode(said) == f"1 2 3{END}\n3 2 1{END}\n"
    assert tokenize({"messages": TRAIN[2]["messages"][:1]}, tokenizer)["input_ids"] == []
    tokenizer.chat_template = TEMPLATE.replace("message.content", "message.content if loop.last else ''")
    with pytest.raises(ValueError, match="changes earlier turns"):
        tokenize(TRAIN[2], tokenizer)


def test_it_prints_what_the_page_shows(output: str) -> None:
    [program] = [one for one in programs() if one.file == FILE]
    shown = output_of(program)
    assert len(shown) > 8
    lines = [without_figures(line) for line in output.splitlines()]
    assert not [line for line in shown if without_figures(line) not in lines]
    losses = evaluations(output)
    assert losses == pytest.approx(evaluations("\n".join(shown)), abs=0.02)
    assert [*losses] == [0, 5, 10, 15, 20]
    assert losses[20] < losses[0]


def test_the_written_directory_holds_the_trained_weights(folder: Path, output: str) -> None:
    module = runpy.run_path(str(folder / FILE))["FineTune"]()
    assert isinstance(module.model, PeftModel)
    assert module.model.is_gradient_checkpointing
    before = weights(loaded(folder / "model"))
    state = torch.load(folder / "steps" / "last.ckpt", weights_only=True)
    assert state["global_step"] == 20
    trained = {name for name, value in module.named_parameters() if value.requires_grad}
    assert state["state_dict"].keys() == trained
    module.load_state_dict(state["state_dict"], strict=False)
    expected = weights(module.model.merge_and_unload())
    found = weights(loaded(folder / "fine-tuned"))
    assert found.keys() == expected.keys() == before.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name
    moved = [name for name, value in found.items() if not torch.equal(value, before[name])]
    assert len(moved) == 14  # seven linear layers in each of two blocks


def test_the_loss_that_is_evaluated_is_that_of_one_process(folder: Path, output: str) -> None:
    """The mean over all answers' tokens: the number of test chats is odd, and no rank runs one twice."""
    tokenize = runpy.run_path(str(folder / FILE))["tokenize"]
    tokenizer = AutoTokenizer.from_pretrained(folder / "fine-tuned")
    model = loaded(folder / "fine-tuned")
    total = 0.0
    count = 0
    for row in TEST:
        tokens = tokenize(row, tokenizer)
        labels = torch.tensor([tokens["labels"]])
        with torch.no_grad():
            loss = model(input_ids=torch.tensor([tokens["input_ids"]]), labels=labels).loss
        answers = int((labels != -100).sum())
        total += float(loss) * answers
        count += answers
    logged = [row["eval_loss"] for row in rows_of(folder / "logs" / "lightning_logs" / "version_0")]
    last = float([loss for loss in logged if loss][-1])
    assert last == pytest.approx(total / count, rel=1e-3)  # under bf16-mixed
    assert evaluations(output)[20] == pytest.approx(last, abs=5e-4)


def test_a_killed_run_continues_from_its_last_checkpoint(folder: Path, output: str, tmp_path: Path) -> None:
    write_recipe(tmp_path)
    (tmp_path / "killed.py").write_text(KILLED)
    killed = train(tmp_path, "killed.py", succeeds=False)
    assert "SIGKILL" in killed
    assert [*evaluations(killed)] == [0, 5, 10]
    assert not (tmp_path / "fine-tuned").exists()
    losses = evaluations(train(tmp_path))
    assert [*losses] == [15, 20]
    steps = [
        int(row["step"]) for row in rows_of(tmp_path / "logs" / "lightning_logs" / "version_1") if row["loss"]
    ]
    assert steps == [*range(10, 20)]
    begin = weights(loaded(folder / "model"))
    straight = weights(loaded(folder / "fine-tuned"))
    found = weights(loaded(tmp_path / "fine-tuned"))
    for name, value in straight.items():
        moved = (value - begin[name]).norm()
        assert (value - found[name]).norm() <= 0.1 * moved, name
