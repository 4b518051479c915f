"""Whether transformers computes the same from exported files: logits for real text, compared with drumline's own."""

from __future__ import annotations

import importlib.util
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from drumline.checkpoint import weights
from drumline.data import open_tokens
from drumline.errors import CheckpointError, DrumlineError
from drumline.files import origin
from drumline.generate import FoundRun

_TOKENS = 256
TOLERANCE = 1e-4
"""Of the largest logit: products that are summed in another order differ by less, anything else by more."""


def can_compare() -> bool:
    return importlib.util.find_spec("transformers") is not None


def own_logits(run: FoundRun, ids: Tensor, *, dtype: torch.dtype, vocab_size: int) -> Tensor:
    """drumline's: float32 (1, T, V), with weights as they are in the files."""
    model = run.model().eval()
    with torch.no_grad():
        for tensor in weights(model).values():
            tensor.copy_(tensor.to(dtype))
        logits: Tensor = model(ids)[0]
    return logits[..., :vocab_size].clone()


def largest_difference(folder: Path, ids: Tensor, own: Tensor, *, has_code: bool) -> float:
    """Of the logits that transformers computes; an error if it is more than rounding explains."""
    with _quiet() as transformers, torch.no_grad():
        try:
            theirs: Tensor = _loaded(transformers, folder, has_code=has_code)(ids).logits.float()
        except DrumlineError:
            raise
        except Exception as error:  # whatever it is, others would meet it too
            raise CheckpointError(
                f"transformers {transformers.__version__} cannot use the exported model: {error}",
                fix="nothing was written; try another version of transformers",
            ) from error
    difference = (theirs - own).abs().max().item() if theirs.shape == own.shape else float("inf")
    if not difference <= TOLERANCE * max(1.0, own.abs().max().item()):
        raise CheckpointError(
            f"transformers {transformers.__version__} computes other logits from the exported files than drumline: "
            f"they differ by up to {difference:.3g}, of at most {own.abs().max().item():.3g}",
            fix="nothing was written; try another version of transformers, and report this",
        )
    return difference


def text_ids(run: FoundRun, *, context: int) -> tuple[Tensor, str]:
    """Real text, int64 (1, T), and what it is: the run's held-out text, or else some English."""
    length = min(context, _TOKENS)
    with suppress(DrumlineError, OSError, TypeError, KeyError):
        held_out = open_tokens(Path(origin(run.folder)["train"]).parent, split="valid")
        return torch.from_numpy(held_out.read(0, min(length, len(held_out)))).long()[None], "held-out tokens"
    if run.tokenizer is not None:
        text = (Path(sysconfig.get_path("stdlib")) / "this.py").read_text(encoding="utf-8") + str(__doc__)
        return torch.tensor([run.tokenizer.encode(text)[:length]]), "tokens of text"
    return torch.arange(length)[None] % run.vocab_size, "tokens"


def _loaded(transformers: Any, folder: Path, *, has_code: bool) -> Any:
    if has_code:  # the same file as beside the weights, without a copy of it in a cache of transformers
        from drumline.huggingface.modeling_drumline import DrumlineForCausalLM
    kind: Any = DrumlineForCausalLM if has_code else transformers.AutoModelForCausalLM
    model, about = kind.from_pretrained(folder, dtype=torch.float32, output_loading_info=True, local_files_only=True)
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if about.get(kind):
            raise CheckpointError(
                f"transformers {transformers.__version__} finds {kind.replace('_', ' ')} in the exported files: "
                f"{', '.join(map(str, sorted(about[kind])[:3]))}",
                fix="nothing was written; try another version of transformers",
            )
    return model.eval()


@contextmanager
def _quiet() -> Iterator[Any]:
    """transformers, without its progress bars and advice."""
    import transformers

    logging: Any = transformers.utils.logging
    level = logging.get_verbosity()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield transformers
    finally:
        logging.set_verbosity(level)
        logging.enable_progress_bar()
