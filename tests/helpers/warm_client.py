"""What stands for Python where a program is named by its path: `python -IS warm_client.py SOCKET [words of Python]`.

It asks the process that forks for one that does what Python would, lends it its streams and its place, passes signals
on to it, and ends as it does. When it is killed, so is the other. It imports next to nothing, or it would not be quick.
"""

import json
import os
import signal
import socket
import sys

NAMESPACES = ("net", "uts", "mnt")
PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)


def main() -> None:
    place, *words = sys.argv[1:]
    if words[:2] == ["-m", "drumline.launch.remote_agent"]:  # quick itself, and parent to what it starts
        os.execv(sys.executable, [sys.executable, *words])
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, PASSED_ON)
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.connect(place)
    what = {"words": words, "cwd": os.getcwd(), "env": dict(os.environ), "host": None, "cold": False, "session": True}
    namespaces = [os.open(f"/proc/self/ns/{name}", os.O_RDONLY) for name in NAMESPACES]
    socket.send_fds(connection, [json.dumps(what).encode()], [0, 1, 2, *namespaces])
    pid = int(json.loads(connection.recv(4096))["started"])
    for signum in PASSED_ON:
        signal.signal(signum, lambda signum, _: os.kill(pid, signum))
    signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
    ended = os.waitstatus_to_exitcode(json.loads(connection.recv(4096))["status"])
    if ended < 0:
        signal.signal(-ended, signal.SIG_DFL)
        os.kill(os.getpid(), -ended)
    os._exit(ended)


if __name__ == "__main__":
    main()
