"""python -m drumline, and torchrun -m drumline."""

from drumline.cli import main

if __name__ == "__main__":
    main()
