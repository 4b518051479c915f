"""Fine-tune any causal language model of Hugging Face on your own text, and save it for `from_pretrained`:

    python finetune_hugging_face.py gpt2 my_text.txt --epochs 3
    torchrun --nproc_per_node=2 finetune_hugging_face.py ./local-model my_text.txt --batch_size 4

Needs `pip install transformers`. The model may be a name on the Hub or a local folder.
"""

import argparse
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from drumline import Trainer


def windows(path: Path, tokenizer: AutoTokenizer, length: int) -> list[dict[str, Tensor]]:
    """The text in windows of `length` tokens; the model shifts the labels itself."""
    ids = torch.tensor(tokenizer(path.read_text(encoding="utf-8"))["input_ids"])
    whole = ids[: len(ids) // length * length].view(-1, length)
    return [{"input_ids": window, "labels": window, "attention_mask": torch.ones_like(window)} for window in whole]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Fine-tune a causal language model of Hugging Face")
    parser.add_argument("model", help="name or folder of the model")
    parser.add_argument("text", type=Path, help="file with text to train on")
    parser.add_argument("--epochs", type=float, default=1, help="epochs (default: 1)")
    parser.add_argument("--batch_size", type=int, default=2, help="sequences per rank (default: 2)")
    parser.add_argument("--length", type=int, default=128, help="tokens per sequence (default: 128)")
    parser.add_argument("--lr", type=float, default=5e-5, help="peak learning rate (default: 5e-5)")
    parser.add_argument("--out", default="finetuned", help="folder for the result (default: finetuned)")
    args = parser.parse_args()
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    model = AutoModelForCausalLM.from_pretrained(args.model)
    data = windows(args.text, tokenizer, args.length)
    held_out = max(1, len(data) // 10)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    trainer = Trainer(
        model,
        data[held_out:],
        optimizer,
        batch_size=args.batch_size,
        valid_dataset=data[:held_out],
        scheduler=torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=10),
        grad_clip=1.0,
    )
    trainer.fit(epochs=args.epochs)
    if trainer.rank == 0:
        model.save_pretrained(args.out)
        tokenizer.save_pretrained(args.out)
