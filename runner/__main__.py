"""`python -m runner`."""

import os

try:
    from runner.cli import main

    if __name__ == "__main__":
        main()
except KeyboardInterrupt:  # while Python was still importing
    os._exit(130)
