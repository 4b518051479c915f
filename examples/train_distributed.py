"""Train a GPT on token files, on one or several GPUs, started in any of four ways:

    python train_distributed.py --train_data_path train.bin --valid_data_path val.bin --batch_size 8 --total_steps 10000
    torchrun --nproc_per_node=4 train_distributed.py --distributed --train_data_path train.bin ...
    python -m torch.distributed.launch --nproc_per_node=4 --master_port=29500 train_distributed.py --distributed ...
    python train_distributed.py --distributed --world_size 4 --train_data_path train.bin ...

Every flag of `drumline train` works here: --help lists them. Run it again with the same --run_dir to resume.
"""

import argparse

from drumline.cli.app import main

# Launchers set environment variables; only the number of ranks to start is a flag.
parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
parser.add_argument("--distributed", action="store_true")
parser.add_argument("--world_size", "--world-size", "--nproc", type=int)
parser.add_argument("--local_rank", "--local-rank", type=int)

if __name__ == "__main__":
    args, flags = parser.parse_known_args()
    if args.world_size is not None or not args.distributed:  # ignored under torchrun and srun, which start the ranks
        flags += ["--nproc", str(1 if args.world_size is None else args.world_size)]
    main(["train", *flags])
