"""`python -m pyclient` is the command `pyclient`."""

from pyclient.cli import main

if __name__ == "__main__":
    main()
