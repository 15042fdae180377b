"""The built-in checkpoints: the same bytes every time, loadable like any other, and lively."""

import os
import subprocess
import sys
from hashlib import sha256
from pathlib import Path

from transformers import AutoModelForCausalLM, AutoTokenizer

from serve_app.generation.tool_calls.round_trip import found_parser
from serve_app.tokenization.tokenizer import PromptTokenizer
from tests.serve_app.tool_templates.families import SEARCH


def _digests(directory: Path) -> dict[str, str]:
    return {path.name: sha256(path.read_bytes()).hexdigest() for path in sorted(directory.iterdir())}


def test_two_builds_in_different_processes_have_equal_bytes(demo_model_path: Path, tmp_path: Path) -> None:
    """Two concurrent builders in one directory both get one whole checkpoint, equal to an earlier build's bytes."""
    script = (
        "import sys; from pathlib import Path; from serve_app.checkpoints.demo_model import ensure_demo_model;"
        "print(ensure_demo_model('demo', Path(sys.argv[1])))"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", script, str(tmp_path)]
    builders = [
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment | {"PYTHONHASHSEED": seed})
        for seed in "12"
    ]
    (built,) = {Path(builder.communicate()[0].strip()) for builder in builders}
    assert built.name == demo_model_path.name
    assert _digests(built) == _digests(demo_model_path)
    assert list(tmp_path.iterdir()) == [built], "no temporary file remains"


def test_transformers_loads_it_whole_and_greedy_output_varies(demo_model_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(demo_model_path)
    model, report = AutoModelForCausalLM.from_pretrained(demo_model_path, output_loading_info=True)
    assert not any(report.values())
    assert model.config.max_position_embeddings == 32768
    distinct = set()
    for question in ("Hello", "Count: 1 2 3 4 5 6 7", "a" * 200):
        chat = [{"role": "user", "content": question}]
        inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True, return_tensors="pt")
        output = model.generate(**inputs, max_new_tokens=40, min_new_tokens=40, do_sample=False)
        answer = tuple(output[0, inputs["input_ids"].shape[1] :].tolist())
        assert len(set(answer)) > 20
        distinct.add(answer)
    assert len(distinct) == 3


def test_the_chat_template_is_chatml_with_tools(demo_model_path: Path) -> None:
    """Turns end with the eos; tools come before everything else, and calls have the format of Hermes models."""
    tokenizer = PromptTokenizer(demo_model_path)
    assert tokenizer._tokenizer("<|im_end|>").input_ids == [tokenizer._tokenizer.eos_token_id]
    plain = tokenizer.template.render([{"role": "system", "content": "S"}, {"role": "user", "content": "U"}])
    assert plain.text == "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nU<|im_end|>\n<|im_start|>assistant\n"
    assert found_parser(tokenizer) == "hermes"
    call = {"type": "function", "function": {"name": "search", "arguments": {"q": 1}}}
    messages = [{"role": "user", "content": "U"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
    rendered = tokenizer.template.render(messages, [SEARCH], add_generation_prompt=False)
    assert rendered.system_text.count('"name": "search"') == 1
    assert rendered.system_text.endswith("<|im_start|>user\n")
    calls = '<tool_call>{"name": "search", "arguments": {"q": 1}}</tool_call><|im_end|>\n'
    assert rendered.text == f"{rendered.system_text}U<|im_end|>\n<|im_start|>assistant\n{calls}"
