"""torchrun_snapshot.py on two hosts. On each of them, with its own --node_rank (0 and 1):

    torchrun --nnodes=2 --nproc_per_node=2 --node_rank=0 --master_addr=HOST_0 --master_port=29500 multinode.py 50 10

Rank 0 of all ranks, not of each host, keeps the run, so the hosts need no common disk.
"""

import os
import socket

from torchrun_snapshot import main

from drumline.parallel.place import find_place

if __name__ == "__main__":
    place = find_place(os.environ)
    print(f"rank {place.rank} of {place.size} is local rank {place.local_rank} on {socket.gethostname()}")
    main("runs/multinode")
