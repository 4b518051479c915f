"""moto's S3 server as a process of its own: what others understand by S3, beside the few lines of `object_store`.

with MotoServer() as server:
    server.client().create_bucket(Bucket="bucket")
    subprocess.run([...], env={**os.environ, **server.environ})
"""

from __future__ import annotations

import subprocess
import sys
from typing import Any

KEY, SECRET = "AKIAOFMOTO", "a-secret-key-that-moto-does-not-check"
_PROGRAM = """
import sys
from moto.server import ThreadedMotoServer
server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
server.start()
print(server.get_host_and_port()[1], flush=True)
sys.stdin.read()
"""


class MotoServer:
    """Ends with the process that started it: when its standard input is closed."""

    def __init__(self) -> None:
        words = [sys.executable, "-c", _PROGRAM]
        self._process = subprocess.Popen(
            words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        assert self._process.stdout is not None
        self.address = f"http://127.0.0.1:{int(self._process.stdout.readline())}"

    @property
    def environ(self) -> dict[str, str]:
        """What a client needs to find it."""
        return {
            "AWS_ENDPOINT_URL": self.address,
            "AWS_ACCESS_KEY_ID": KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_REGION": "us-east-1",
        }

    def client(self) -> Any:
        """Amazon's own client, to look at the objects."""
        import boto3

        return boto3.client(
            "s3",
            endpoint_url=self.address,
            aws_access_key_id=KEY,
            aws_secret_access_key=SECRET,
            region_name="us-east-1",
        )

    def __enter__(self) -> MotoServer:
        return self

    def __exit__(self, *error: object) -> None:
        self._process.communicate()
