"""``python -m nvfp4prep``: the same as the ``nvfp4prep`` command."""

from nvfp4prep.cli import main

if __name__ == "__main__":
    main()
