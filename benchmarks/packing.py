"""--packing best_fit against the stream, each with and without --document_mask, for the same number of tokens.

    python benchmarks/packing.py                    # functions of Python's standard library: short documents
    python benchmarks/packing.py --source FILE      # other text, as `drumline prepare` reads it
    python benchmarks/packing.py --index 10000000   # no training: the time and memory to pack so many documents

Every run takes the same number of tokens that count, to a step: with padding, that may be a few more steps. Each model
is judged in three ways on the same held-out text, in bits per byte: all of it in windows that follow each other
(stream), the same with the document mask, and each document on its own, from its beginning. One thread each, two runs
at a time.
"""

import argparse
import ast
import json
import math
import os
import resource
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import textwrap
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields
from pathlib import Path

import numpy as np
import torch
from header import header

from drumline.data import TokenFile, open_tokens
from drumline.generate.loading import load_run
from drumline.model import token_objective
from drumline.packing import PackedTokens, open_index
from drumline.parallel import Place, World
from drumline.train import Precision, evaluate

CONTEXT = 256
SHAPE = f"--preset modern-tiny --n_layers 3 --d_model 128 --n_heads 4 --d_ff 512 --context {CONTEXT} --batch_size 8"
WAYS = {
    "stream": "",
    "stream, mask": "--document_mask",
    "best_fit": "--packing best_fit",
    "best_fit, mask": "--packing best_fit --document_mask",
}


def functions(path: Path, *, most_bytes: int) -> None:
    """Every top-level function and method of Python's standard library as a document."""
    written = 0
    with path.open("w") as out:
        for file in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
            source = file.read_text(encoding="utf-8", errors="replace")
            lines = source.splitlines()
            for node in ast.walk(ast.parse(source)):
                if isinstance(node, ast.FunctionDef) and written < most_bytes:
                    text = textwrap.dedent("\n".join(lines[node.lineno - 1 : node.end_lineno]))
                    written += out.write(json.dumps({"text": text}) + "\n")


def drumline(*words: str) -> None:
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "drumline", *words], capture_output=True, text=True, check=False, env=environ
    )
    if done.returncode:
        raise SystemExit(done.stderr + done.stdout)


def by_document(tokens: TokenFile) -> PackedTokens:
    index = open_index(tokens, context=CONTEXT)
    return PackedTokens(
        **{each.name: getattr(tokens, each.name) for each in fields(TokenFile)}, source=tokens, index=index
    )


def judged(run: Path, valid: TokenFile) -> list[float]:
    """Bits per byte as a stream, with the mask, and by document."""
    loaded, device = load_run(run), torch.device("cpu")
    found = []
    for tokens, masks in ((valid, False), (valid, True), (by_document(valid), True)):
        loss = evaluate(
            loaded.model,
            token_objective,
            tokens,
            context=CONTEXT,
            batch_size=16,
            precision=Precision.of(device, torch.float32),
            world=World(Place(), device),
            document_mask=masks,
        ).loss
        assert tokens.text_bytes is not None
        found.append(loss / math.log(2) * len(tokens) / tokens.text_bytes)
    return found


def train(folder: Path, flags: str, *, seed: int, steps: int) -> list[float]:
    run = Path(tempfile.mkdtemp(dir=folder)) / "run"
    fixed = f"--train_data_path {folder / 'text'} --run_dir {run} --device cpu --total_steps {steps} --seed {seed}"
    rest = "--eval_every 1000000 --eval_windows 8 --save_every 1000000"
    drumline("train", *fixed.split(), *SHAPE.split(), *rest.split(), *flags.split())
    return judged(run, open_tokens(folder / "text", split="valid"))


def compare(folder: Path, *, steps: int, seeds: list[int]) -> None:
    about = open_index(open_tokens(folder / "text"), context=CONTEXT).about
    print(f"{about.documents:,} documents, {about.tokens:,} tokens; {about.line()}")
    share = about.tokens / (about.windows * CONTEXT)
    by_document(open_tokens(folder / "text", split="valid"))
    runs = [(way, seed) for seed in seeds for way in WAYS]

    def one(run: tuple[str, int]) -> list[float]:
        way, seed = run
        own_steps = round(steps / share) if "best_fit" in way else steps
        found = train(folder, WAYS[way], seed=seed, steps=own_steps)
        print(f"  {way}, seed {seed}: {own_steps} steps, {' '.join(f'{each:.4f}' for each in found)}", flush=True)
        return found

    torch.set_num_threads(1)
    with ThreadPoolExecutor(2) as pool:
        found = dict(zip(runs, pool.map(one, runs), strict=True))
    print(f"{'':<16}{'stream':>10}{'masked':>10}{'document':>10}   bits per byte, mean of {len(seeds)} seeds")
    for way in WAYS:
        means = [statistics.fmean(column) for column in zip(*(found[way, seed] for seed in seeds), strict=True)]
        print(f"{way:<16}" + "".join(f"{each:>10.4f}" for each in means))


def pack(documents: int) -> None:
    """Lengths as of web pages: log-normal, with a median of 400 tokens."""
    lengths = np.random.default_rng(0).lognormal(6.0, 1.1, documents).astype(np.int64) + 1
    ends = np.cumsum(lengths).astype("<u8")
    with tempfile.TemporaryDirectory() as name:
        np.save(Path(name, "ends.npy"), ends)
        total = int(ends[-1])
        del lengths, ends
        mapped = np.load(Path(name, "ends.npy"), mmap_mode="r")
        nothing = np.broadcast_to(np.uint16(0), (total,))
        tokens = TokenFile(Path(name, "train.bin"), nothing, end_of_text=0, sha256="0" * 64, document_ends=mapped)
        for context in (1024, 4096):
            before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            began, cpu = time.perf_counter(), time.process_time()
            about = open_index(tokens, context=context).about
            wall, used = time.perf_counter() - began, time.process_time() - cpu
            after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            size = Path(name, f"train.packed-{context}.bin").stat().st_size
            print(
                f"{documents:,} documents, context {context}: {wall:.1f} s ({used:.1f} s of CPU), at most "
                f"{after / 1024:.0f} MB of memory with all maps ({before / 1024:.0f} MB before), "
                f"index of {size / 1e6:.0f} MB, {about.windows:,} windows; {about.line()}",
                flush=True,
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", help="default: functions of the standard library")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seeds", default="0,1")
    parser.add_argument("--megabytes", type=float, default=6.0, help="of functions")
    parser.add_argument("--index", type=int)
    arguments = parser.parse_args()
    header()
    if arguments.index:
        pack(arguments.index)
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        source = arguments.source or str(folder / "functions.jsonl")
        if not arguments.source:
            functions(folder / "functions.jsonl", most_bytes=int(arguments.megabytes * 1e6))
        drumline("prepare", source, "--out", str(folder / "text"), "--vocab_size", "2048", "--valid_fraction", "0.05")
        compare(folder, steps=arguments.steps, seeds=[int(each) for each in arguments.seeds.split(",")])


if __name__ == "__main__":
    main()
