"""The smallest run: what most tests train."""

_SMALL = (
    "--n_layers 1 --n_heads 2 --d_model 16 --d_ff 32 --context 16 --batch_size 4 --vocab_size 300 --total_steps 6 "
    "--log_every 1 --eval_windows 4 --device cpu"
).split()


def small(*flags: str) -> list[str]:
    """Flags of a model so small that a step takes no time, and more flags, which come before those."""
    given = {*flags, *(["--total_steps"] if {"--epochs", "--minutes"} & {*flags} else [])}
    pairs = zip(_SMALL[::2], _SMALL[1::2], strict=True)
    return [word for name, value in pairs if name not in given for word in (name, value)] + list(flags)
