"""``python -m gateway`` is the command ``interlingua``."""

from gateway.cli import main

main()
