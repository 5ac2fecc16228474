"""`python -m hegmctl`: the same as the program hegmctl."""

from hegmctl.cli import main

if __name__ == "__main__":
    main()
