"""Models without a class in transformers: exported with a modelling file of their own, which computes the same."""

import ast
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.pretrained import tensors_in

from drumline.cli.app import run_command
from drumline.generate.loading import load_run
from drumline.generate.sample import SampleConfig, generate
from drumline.huggingface import modeling_drumline

Train = Callable[..., int]


@pytest.fixture
def trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, bool]:
    """Flags for models with code of their own, of which transformers keeps a copy: here, in the test's own folder."""
    from transformers import dynamic_module_utils

    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.syspath_prepend(str(tmp_path / "modules"))
    return {"trust_remote_code": True, "local_files_only": True}


def test_the_modern_recipe_generates_the_same_text_in_transformers_with_its_cache(
    train: Train, trusted: dict[str, bool], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train("--n_layers", "3", "--n_heads", "2", "--lr", "0.1", "--total_steps", "20", "--run_dir", "run") == 0
    assert run_command(["export", "run", "-o", "mine"]) == 0
    said = capsys.readouterr().out
    assert "wrote mine: DrumlineForCausalLM" in said
    assert float(said.rsplit("largest difference ", 1)[1]) < 1e-4
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model: Any = AutoModelForCausalLM.from_pretrained("mine", **trusted)
    tokenizer: Any = AutoTokenizer.from_pretrained("mine", padding_side="left", **trusted)
    assert type(model).__module__.startswith("transformers_modules") and model.smear is not None

    def ids(*texts: str, **how: Any) -> list[list[int]]:
        """Greedily generated, with the prompts."""
        prompts = tokenizer(list(texts), return_tensors="pt", padding=True)
        return model.generate(**prompts, max_new_tokens=9, do_sample=False, **how).tolist()  # type: ignore[no-any-return]

    one, other = ids("the drum"), ids("a")
    assert ids("the drum", use_cache=False) == one
    assert ids("the drum", num_beams=3) == ids("the drum", num_beams=3, use_cache=False)
    padded = ids("the drum", "a")
    assert [padded[0][-len(one[0]) :], padded[1][-len(other[0]) :]] == [*one, *other]
    with pytest.raises(ValueError, match="needs a cache that grows"):
        ids("the drum", cache_implementation="static")
    run = load_run(Path("run"))
    assert run.tokenizer is not None
    prompt = run.tokenizer.encode("the drum")
    settings = SampleConfig(temperature=0.0, max_tokens=9)
    assert [[*prompt, *generate(run.model, prompt, settings, end_of_text=None)]] == one
    model.save_pretrained("saved")
    assert (tmp_path / "saved/modeling_drumline.py").exists()


def test_the_file_beside_the_weights_needs_no_drumline() -> None:
    source = ast.parse(Path(modeling_drumline.__file__).read_text(encoding="utf-8"))
    modules = [node.module for node in ast.walk(source) if isinstance(node, ast.ImportFrom)]
    modules += [name.name for node in ast.walk(source) if isinstance(node, ast.Import) for name in node.names]
    assert {str(name).split(".")[0] for name in modules} == {"__future__", "typing", "torch", "transformers"}


@pytest.mark.parametrize(
    "flags",
    [
        "--positions learned --norm layernorm --activation gelu --no-qk_norm --bias --norm_weights",
        "--activation swiglu --n_heads 4 --n_kv_heads 2 --tie_embeddings --rope_theta 500 --head_dim 6",
    ],
)
def test_every_option_is_computed_and_comes_back(
    flags: str, train: Train, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train("--n_layers", "2", *flags.split(), "--run_dir", "run") == 0
    assert run_command(["export", "run", "-o", "mine", "--dtype", "bfloat16"]) == 0
    assert "DrumlineForCausalLM" in capsys.readouterr().out
    assert run_command(["import", "mine", "-o", "back"]) == 0
    assert run_command(["export", "back", "-o", "again"]) == 0
    first, second = tensors_in(tmp_path / "mine"), tensors_in(tmp_path / "again")
    assert first.keys() == second.keys()
    assert all(torch.equal(tensor, second[name]) for name, tensor in first.items())
