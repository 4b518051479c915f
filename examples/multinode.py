"""torchrun_snapshot.py on two hosts. Run this on each, with --node_rank 0 and 1:

    torchrun --nnodes=2 --nproc_per_node=2 --node_rank=0 --master_addr=HOST_0 --master_port=29500 multinode.py 50 10

Only the host of rank 0 needs the run folder, so the hosts need no shared disk.
"""

import os
import socket

from torchrun_snapshot import main

from drumline.parallel.place import find_place

if __name__ == "__main__":
    place = find_place(os.environ)
    print(f"rank {place.rank} of {place.size} is local rank {place.local_rank} on {socket.gethostname()}")
    main()
