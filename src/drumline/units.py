"""Human-readable numbers."""


def duration(seconds: float) -> str:
    """1h12m, 3m05s, 41s"""
    whole = round(seconds)
    if whole >= 3600:
        return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
    return f"{whole // 60}m{whole % 60:02d}s" if whole >= 60 else f"{whole}s"


def count(number: float) -> str:
    """182.4k, 3.1M"""
    for size, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.1f}{letter}"
    return f"{number:.0f}"


def counted(number: float, noun: str) -> str:
    """1 rank, 1,024 ranks, 0.5 epochs, 2 batches"""
    return f"{f'{number:,}'.removesuffix('.0')} {noun}{'' if number == 1 else 'es' if noun[-3:] == 'tch' else 's'}"
