"""``python -m upriver`` is the ``upriver`` command."""

from upriver.cli import main

if __name__ == "__main__":
    main()
