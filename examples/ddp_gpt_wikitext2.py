"""Train a small GPT on WikiText-2, with a vocabulary learned from it:

    torchrun --nproc_per_node=2 ddp_gpt_wikitext2.py --epochs 5 --batch_size 32 --vocab_size 5000

Without a network, `--dataset builtin` trains on the source of Python's standard library; a file, a folder or another
data set's name works too. Started again, the run goes on where it was.
"""

import argparse

from drumline import TrainConfig, pretrain
from drumline.config.model import ModelSettings
from drumline.config.settings import BatchConfig, DataConfig, RunConfig

BLOCK_SIZE = 128


def main() -> None:
    parser = argparse.ArgumentParser(description="A small GPT on WikiText-2")
    parser.add_argument("--epochs", type=int, default=3, help="passes over the text (default: 3)")
    parser.add_argument("--batch_size", type=int, default=8, help="sequences on each rank (default: 8)")
    parser.add_argument("--vocab_size", type=int, default=5000, help="tokens in the vocabulary (default: 5000)")
    parser.add_argument("--dataset", default="wikitext-2", help="where the text comes from (default: wikitext-2)")
    parser.add_argument("--run_dir", default="runs/ddp_gpt_wikitext2", help="where the run is kept")
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
