"""The kernels' tests where there is no GPU: through Triton's interpreter."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers.interpreted import HAS_TRITON, INTERPRETED


@pytest.mark.long
@pytest.mark.skipif(not HAS_TRITON or INTERPRETED or torch.cuda.is_available(), reason="no Triton, or no need")
def test_the_kernels_equal_their_references_in_tritons_interpreter() -> None:
    # In a process of its own, and only what may be skipped here: all else has run here.
    names = ("test_ops.py", "test_fp8.py", "test_document_attention.py", "../decoding/test_kernels_of_steps.py")
    files = [str(Path(__file__).with_name("test_ops.py").parent / name) for name in names]
    command = [sys.executable, "-m", "pytest", "-p", "no:xdist", "-p", "no:cacheprovider", "-q", "-m", "skipif", *files]
    done = subprocess.run(
        command, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout
