"""Train a small GPT on WikiText-2, with a tokenizer trained on it:

    torchrun --nproc_per_node=2 ddp_gpt_wikitext2.py --epochs 5 --batch_size 32 --vocab_size 5000

Without network access, `--dataset builtin` trains on the source code of Python's standard library; a file, a folder or
another dataset works too. Run again, it resumes if it was stopped.
"""

import argparse

from drumline import TrainConfig, pretrain
from drumline.config.model import ModelSettings
from drumline.config.settings import BatchConfig, DataConfig, RunConfig

BLOCK_SIZE = 128


def main() -> None:
    parser = argparse.ArgumentParser(description="A small GPT on WikiText-2")
    parser.add_argument("--epochs", type=int, default=3, help="epochs (default: 3)")
    parser.add_argument("--batch_size", type=int, default=8, help="sequences per rank (default: 8)")
    parser.add_argument("--vocab_size", type=int, default=5000, help="vocabulary size (default: 5000)")
    parser.add_argument("--dataset", default="wikitext-2", help="training text (default: wikitext-2)")
    parser.add_argument("--run_dir", help="run folder (default: runs/tiny, or the next free number)")
    args = parser.parse_args()
    pretrain(
        TrainConfig(
            model=ModelSettings(preset="tiny", context=BLOCK_SIZE, dropout=0.1),
            data=DataConfig(train_data_path=args.dataset, vocab_size=args.vocab_size),
            batch=BatchConfig(batch_size=args.batch_size, epochs=args.epochs),
            run=RunConfig(run_dir=args.run_dir),
        )
    )


if __name__ == "__main__":
    main()
