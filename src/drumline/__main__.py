"""python -m drumline, and torchrun -m drumline."""

from drumline.cli.app import main

if __name__ == "__main__":
    main()
